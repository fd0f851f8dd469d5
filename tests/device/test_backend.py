"""testccl: right results on every number of ranks, the refusals of NCCL, and calls that differ between ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.testing import device

from ..kit.ranks import Ranks
from ..kit.trial import raised
from .kit import following, on_device


def filled(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype).to("testdev")


@on_device(1, 2, 4)
def test_collectives_give_what_gloo_gives(ranks: Ranks) -> None:
    size, rank = ranks.size, ranks.rank
    for schedule in device.SCHEDULES:
        with following(schedule, seed=7):
            for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
                total, mean = filled(rank + 1, 2, dtype=dtype), filled(2, 4, dtype=dtype)
                dist.all_reduce(total)
                dist.all_reduce(mean, op=dist.ReduceOp.AVG)
                assert total.tolist() == [size * (size + 1) / 2, 2 * size]
                assert mean.tolist() == [2, 4]
            rows = torch.empty(size, 2, device="testdev")
            dist.all_gather_into_tensor(rows, filled(rank, -rank))
            assert rows.tolist() == [[k, -k] for k in range(size)]
            parts = [torch.empty(2, device="testdev") for _ in range(size)]
            dist.all_gather(parts, filled(rank, rank))
            assert [part.tolist() for part in parts] == [[k, k] for k in range(size)]
            sent, got = filled(*(10 * rank + k for k in range(size))), torch.empty(size, device="testdev")
            dist.all_to_all_single(got, sent)
            assert got.tolist() == [10 * k + rank for k in range(size)]
            dist.broadcast(sent, 0)
            assert sent.tolist() == [float(k) for k in range(size)]
            part = torch.empty(1, device="testdev")
            dist.reduce_scatter_tensor(part, filled(*range(size)))
            assert part.tolist() == [size * rank]
            flags = torch.tensor([rank == 0, False]).to("testdev")
            dist.all_reduce(flags)
            assert flags.tolist() == [True, False]
            dist.barrier()


@on_device(2)
def test_what_nccl_refuses_is_refused_at_once(ranks: Ranks) -> None:
    ones = torch.ones(4, device="testdev")
    refusals: dict[str, Callable[[], object]] = {
        "of an empty tensor": lambda: dist.all_reduce(torch.empty(0, device="testdev")),
        "of an empty tensor ": lambda: dist.all_gather_into_tensor(ones[:0], ones[:0]),
        "contiguous": lambda: dist.all_reduce(torch.ones(4, 4, device="testdev").t()[:2]),
        "a type that NCCL does not have": lambda: dist.all_reduce(ones.short()),
        "a type that NCCL does not have ": lambda: dist.broadcast(ones.to(torch.uint16), 0),
        "different types": lambda: dist.all_gather_into_tensor(torch.empty(8, device="testdev").half(), ones),
        "are not 2 times": lambda: dist.all_gather_into_tensor(torch.empty(6, device="testdev"), ones),
        "takes SUM": lambda: dist.all_reduce(ones.int(), op=dist.ReduceOp.BAND),
        "AVG of truth values": lambda: dist.all_reduce(ones.bool(), op=dist.ReduceOp.AVG),
        "cannot add up": lambda: dist.all_reduce(ones.to(torch.float8_e5m2)),
    }
    before = device.counters().collectives
    for text, call in refusals.items():
        assert text.strip() in raised(RuntimeError, call)
    assert device.counters().collectives == before
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 4


@on_device(2)
def test_tensors_of_two_devices_are_refused(ranks: Ranks) -> None:
    backend = ranks.group._get_backend(torch.device("testdev"))
    rows, own = torch.empty(8, device="testdev"), torch.ones(4)
    assert "got one on cpu" in raised(RuntimeError, lambda: backend._allgather_base(rows, own))


@on_device(2, 3)
def test_calls_that_differ_between_ranks_are_named_on_all_ranks(ranks: Ranks) -> None:
    odd = ranks.rank == ranks.size - 1
    values = torch.ones(8 * ranks.size, device="testdev")

    def other_size() -> object:
        return dist.all_reduce(values[: 4 if odd else 8])

    def other_kind() -> object:
        return dist.broadcast(values, 0) if odd else dist.all_reduce(values)

    def other_type() -> object:
        return dist.all_reduce(values.half() if odd else values)

    def other_root() -> object:
        return dist.broadcast(values, int(odd))

    for schedule in ("lazy", "eager", "eager_sides"):
        for call in (other_size, other_kind, other_type, other_root):
            with following(schedule):
                call()
                text = raised(RuntimeError, torch.accelerator.synchronize)
                assert "do not call the same collective" in text, text
                assert f"rank {ranks.rank} calls" in text
    dist.all_reduce(values.fill_(1))
    assert values[0].item() == ranks.size, "the group works on"


@on_device(2)
def test_two_groups_in_another_order_are_named(ranks: Ranks) -> None:
    other = ranks.new_group([0, 1])
    one, two = torch.ones(4, device="testdev"), torch.ones(4, device="testdev")
    calls = [(one, ranks.group), (two, other)]
    for tensor, group in calls if ranks.rank == 0 else reversed(calls):
        dist.all_reduce(tensor, group=group, async_op=True)
    text = raised(RuntimeError, torch.accelerator.synchronize)
    assert "in another order" in text, text


@on_device(2)
def test_a_collective_runs_on_its_own_stream_and_its_wait_blocks_no_host(ranks: Ranks) -> None:
    values = torch.ones(4, device="testdev")
    device.reset_counters()
    work = dist.all_reduce(values, async_op=True)
    assert not work.is_completed()
    doubled = values * 10  # before the wait: it need not see the sum
    work.wait()
    after = values * 10
    assert device.counters().host_syncs == 0
    assert after.tolist() == [20.0] * 4
    assert doubled.tolist() == [10.0] * 4, "on the lazy schedule the collective runs when it is needed"


@on_device(2)
def test_the_slowest_rank_decides_when_a_collective_ends(ranks: Ranks) -> None:
    device.set_costs(launch_us=1.0, collective_us=50.0, link_bytes_per_us=1e12, bytes_per_us=1e12)
    dist.barrier()
    torch.accelerator.synchronize()
    values = torch.ones(4, device="testdev")
    torch.accelerator.synchronize()
    ends = []
    for _ in range(2):
        if ranks.rank == 1:
            device.advance_host(1000.0)
        dist.all_reduce(values)
        torch.accelerator.synchronize()
        ends.append(device.host_us())
    ours, both = torch.tensor(ends), torch.tensor(ends)
    dist.all_reduce(both)
    assert torch.equal(ours * 2, both), "all ranks leave a collective at the same time"
    assert ends[1] - ends[0] >= 1050.0
    device.set_costs()


@on_device(2)
def test_groups_of_an_earlier_world_do_not_count(ranks: Ranks) -> None:
    """Torch gives their names to groups of the next world, with other members, and the old ones may live on."""
    ones = torch.ones(1, device="testdev")
    old = dist.new_group([0])
    if ranks.rank == 0:
        dist.all_reduce(ones, group=old)
    dist.destroy_process_group()
    store = dist.FileStore(str(ranks.folder / "store"), ranks.size)
    dist.init_process_group(device.GROUP, store=store, rank=ranks.rank, world_size=ranks.size)
    both = dist.new_group([0, 1])
    own = dist.new_group([1])  # where the old world had the group of rank 0
    assert both.group_name == ranks.group.group_name
    dist.all_reduce(ones, group=both)
    if ranks.rank == 0:
        ranks.group = both
        gc.collect()
    else:
        for _ in range(2):
            dist.all_reduce(ones, group=own)
    dist.all_reduce(ones, group=both)
    dist.all_reduce(ones)
    assert ones.item() == 8
