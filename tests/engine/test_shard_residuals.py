"""The residuals of a sharded model: by name, in float32 or 8 bits, in pieces that may change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire import StateError
from gradwire.engine.shard_residuals import ShardResiduals
from gradwire.exchanges.bucket import Segment, cut
from gradwire.exchanges.sharded import Shard

SIZE = 2


def shards() -> list[Shard]:
    shapes = {"a": (101, 50), "b": (7,)}
    made = []
    for name, (rows, *rest) in shapes.items():
        padded = torch.Size([-(-rows // SIZE), *rest])
        made.append(Shard(name, torch.empty(rows, *rest), torch.Size([rows, *rest]), padded, 0))
    return made


def chunks(step: int) -> list[tuple[Segment, ...]]:
    row = [shard.segment for shard in shards()]
    numel = sum(segment.numel for segment in row)
    return [cut(row, begin, min(begin + step, numel)) for begin in range(0, numel, step)]


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {shard.name: torch.randn(shard.whole.numel(), generator=generator) for shard in shards()}


def put(store: ShardResiduals, new: dict[str, Tensor], step: int, packed: bool) -> None:
    """A step that keeps `new`, in chunks of `step` columns."""
    rows = torch.cat([shard.to_rows(new[shard.name], SIZE) for shard in shards()], 1)
    store.prepare(chunks(step), packed)
    at = 0
    for chunk in chunks(step):
        numel = sum(segment.numel for segment in chunk)
        assert store.take(chunk).shape == (SIZE, numel)
        store.put(chunk, rows[:, at : at + numel])
        at += numel


def close(got: dict[str, Tensor], wanted: dict[str, Tensor], off: float) -> bool:
    return all(float((got[name] - wanted[name]).norm() / wanted[name].norm()) <= off for name in wanted)


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_put_comes_back_by_name_whatever_the_chunks(packed: bool) -> None:
    store = ShardResiduals(SIZE, shards(), torch.device("cpu"))
    assert store.copies() == {}
    for number, step in enumerate((256, 256, 700, 5000)):
        put(store, values(number), step, packed)
        assert close(store.copies(), values(number), 0.02 if packed else 0.0)
    taken = torch.cat([store.take(chunk) for chunk in chunks(5000)], 1)
    put(store, values(9), 256, not packed)
    assert taken.shape == (SIZE, 51 * 50 + 4)
    assert close(store.copies(), values(9), 0.0 if packed else 0.02)


def test_eight_bits_take_a_quarter_of_the_memory() -> None:
    plain, packed = (ShardResiduals(SIZE, shards(), torch.device("cpu")) for _ in range(2))
    put(plain, values(0), 2560, False)
    for _ in range(2):
        put(packed, values(0), 2560, True)
    assert plain.nbytes == 4 * SIZE * (51 * 50 + 4)
    assert packed.nbytes < 0.33 * plain.nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_a_loaded_state_is_taken_exactly(packed: bool) -> None:
    store, other = (ShardResiduals(SIZE, shards(), torch.device("cpu")) for _ in range(2))
    put(store, values(1), 256, packed)
    other.load(store.copies())
    for each in (store, other):
        each.prepare(chunks(256), packed)
    for chunk in chunks(256):
        assert torch.equal(store.take(chunk), other.take(chunk))


def test_scaling_and_dropping() -> None:
    store = ShardResiduals(SIZE, shards(), torch.device("cpu"))
    put(store, values(1), 256, False)
    store.scale_(0.5)
    assert close(store.copies(), {name: value / 2 for name, value in values(1).items()}, 1e-6)
    with pytest.raises(StateError, match="above 0"):
        store.scale_(0.0)
    store.drop(["a"])
    assert "a" not in store
    assert "b" in store
