"""ZeRO's step inside the hook: bit for bit the training without overlap, on gloo, and each bug of torch's as a test."""

import inspect
from pathlib import Path

import pytest
import torch

from gradwire.ddp_comm_hooks import _zero, ddp_zero_hook
from gradwire.testing import RankFailed, spawn_ranks, thread_ranks

from . import zero_workers as workers

EVERYWHERE = ["optimizers", "sizes", "many_buckets", "bad_input", "bad_use", "one_fails"]
ON_TWO = [
    "hooks",
    "no_hook",
    "noop",
    "other_optimizers",
    "layouts",
    "half",
    "sparse",
    "accumulation",
    "schedule",
    "static_graph",
    "update_free",
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, [*ON_TWO, *EVERYWHERE]),
        pytest.param(4, ["sub_groups", *EVERYWHERE], marks=pytest.mark.thorough),
    ],
)
def test_ranks(size, names, tmp_path):
    """All checks, and at the end the last rank dies without holding up the others."""
    with pytest.raises(RankFailed) as caught:
        spawn_ranks(size, workers.run, names, str(tmp_path), timeout_s=180)
    assert str(caught.value) == f"rank {size - 1}: died with exit code {workers.EXIT_CODE}"
    for rank in range(size - 1):
        assert "another rank failed" in Path(tmp_path, f"{rank}.txt").read_text()


def test_same_names_and_parameters():
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torchs

    assert ddp_zero_hook.__all__ == torchs.__all__
    for name in torchs.__all__:
        ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (ddp_zero_hook, torchs))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def parts(*sizes):
    """One parameter of each size, with values that a sum of numbers would not keep: -0.0, and NaN with a message."""
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    for value in values:
        value[0] = -0.0
        value.view(torch.int32)[-1] = 0x7FC12345
    return values


def spread(rank, sizes_by_owner):
    """Spread parameters that only their owner knows; what this rank has then, and what it sent."""
    wanted = [parts(*sizes) for sizes in sizes_by_owner]
    own = [
        [value.clone() if owner == rank.rank else torch.full_like(value, 7.0) for value in values]
        for owner, values in enumerate(wanted)
    ]
    sent = []

    def job(comm):
        _zero.spread_(own, comm)
        sent.append(comm.traffic.sent_bytes)

    rank.hook("exact").run(job)
    bits = [torch.cat(side).view(torch.int32) for values in zip(own, wanted, strict=True) for side in values if side]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(bits[::2], bits[1::2], strict=True))
    return sent[0]


@pytest.mark.parametrize(
    ("sizes_by_owner", "sent_values"),
    [
        ([[60, 40], [50, 50]], 100),  # gathered: each value once
        ([[60, 40], []], 100),  # summed or gathered, the same on 2 ranks
        ([[90, 30], [50], [30, 30], [60]], 360),
        ([[100], [], [], []], 150),  # summed: 2 * 3 / 4
        ([[50], [], [50], []], 150),
        ([[], [], [], []], 0),
    ],
)
def test_spread_keeps_every_bit(sizes_by_owner, sent_values):
    sent = thread_ranks(len(sizes_by_owner), lambda rank: spread(rank, sizes_by_owner))
    assert sent == [4.0 * sent_values] * len(sizes_by_owner)


def test_whole_buckets_go_round():
    buckets = [parts(3, 4), parts(5), parts(6)]
    owners = _zero.whole(buckets, 2)
    assert [[owners[param] for param in params] for params in buckets] == [[0, 0], [1], [0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("numels", [[[50, 40, 70, 40]], [[1000], [1], [1, 1]], [[5] * 9, [100, 3, 3]], [[7]]])
def test_shared_out_is_even(numels, size):
    """Every parameter has an owner, and no rank has more than an even part and one parameter."""
    buckets = [parts(*sizes) for sizes in numels]
    owners = _zero.shared_out(buckets, size)
    flat = [param for params in buckets for param in params]
    assert len(owners) == len(flat)
    loads = [sum(param.numel() for param in flat if owners[param] == rank) for rank in range(size)]
    assert max(loads) <= sum(loads) / size + max(param.numel() for param in flat)
