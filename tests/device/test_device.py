"""The device itself: what it runs when, whose memory it reuses, what it counts, and how errors surface."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from torch import Tensor

from gradwire.testing import device

from ..kit.ranks import Ranks
from ..kit.trial import raised
from .kit import following, on_device

fresh = itertools.count(1)
"""New values each time: memory that is used again may hold the old ones."""


def is_right(*, wait: bool = True, record: bool = True, wait_back: bool = True) -> bool:
    """A product on a side stream, while the memory of its input is freed and used again."""
    main, side, value = torch.accelerator.current_stream(), torch.Stream(device="testdev"), float(next(fresh))
    torch.accelerator.synchronize()
    values = torch.full((4,), value, device="testdev")
    if wait:
        side.wait_stream(main)
    if record:
        values.record_stream(side)
    with side:
        product = values * 10
    del values
    torch.zeros(4, device="testdev")
    main.synchronize()
    if wait_back:
        main.wait_stream(side)
    else:
        product.record_stream(main)
    return product.cpu().tolist() == [10 * value] * 4  # type: ignore[no-any-return]


@on_device(1)
def test_ordered_work_is_right_under_every_schedule(ranks: Ranks) -> None:
    for schedule in device.SCHEDULES:
        for seed in range(8 if schedule == "shuffled" else 1):
            with following(schedule, seed):
                assert is_right(), schedule


@on_device(1)
def test_every_missing_order_shows_under_some_schedule(ranks: Ranks) -> None:
    for missing, caught in (
        ("wait", {"eager_sides"}),
        ("record", {"lazy", "lazy_sides"}),
        ("wait_back", {"lazy", "lazy_sides"}),
    ):
        wrong = set()
        for schedule in device.SCHEDULES:
            with following(schedule):
                if not is_right(**{missing: False}):
                    wrong.add(schedule)
        assert caught <= wrong, (missing, wrong)
        assert "eager" not in wrong, "without delays every order is that of the program"


@on_device(1)
def test_freed_memory_is_overwritten_in_the_order_of_its_stream(ranks: Ranks) -> None:
    values = torch.ones(1000, device="testdev")
    alias = torch.empty(0, device="testdev").set_(values.untyped_storage(), 0, (1000,))
    assert alias.sum().item() == 1000
    address, before = values.data_ptr(), device.counters().poisoned
    del values, alias
    again = torch.empty(1000, device="testdev")
    assert again.data_ptr() == address
    assert again.isnan().all().item()
    assert device.counters().poisoned > before


@on_device(1)
def test_freed_memory_stays_as_it_is_until_its_stream_allocates(ranks: Ranks) -> None:
    """FSDP2 frees gradients of a side stream that the optimizer has yet to read, and allocates after the optimizer."""
    side, read = torch.Stream(device="testdev"), []
    for allocates in (False, True):
        with side:
            values = torch.ones(4, device="testdev")
        side.synchronize()
        product = values * 2
        del values
        with side:
            if allocates:
                torch.empty(500, device="testdev")
        side.synchronize()
        read.append(product.tolist())
    assert read[0] == [2] * 4
    assert all(map(math.isnan, read[1]))


@on_device(1)
def test_memory_with_recorded_uses_is_not_reused_before_they_end(ranks: Ranks) -> None:
    side, values = torch.Stream(device="testdev"), torch.ones(1000, device="testdev")
    address = values.data_ptr()
    values.record_stream(side)
    with side:
        values.mul_(2)
    del values
    assert torch.empty(1000, device="testdev").data_ptr() != address
    side.synchronize()
    assert address in {torch.empty(1000, device="testdev").data_ptr() for _ in range(3)}


@on_device(1)
def test_host_synchronisations_are_counted_with_their_reasons(ranks: Ranks) -> None:
    values = torch.arange(6.0, device="testdev")
    device.reset_counters()
    doubled = values * 2
    doubled.add_(1)
    view = doubled.view(2, 3).t()
    assert (device.counters().launches, device.counters().host_syncs) == (2, 0)
    view.cpu()
    doubled[0].item()
    doubled.nonzero()
    assert torch.equal(doubled, doubled)
    torch.accelerator.current_stream().synchronize()
    torch.accelerator.synchronize()
    reasons = device.counters().reasons
    assert set(reasons) == {
        "copy to the host", "item", "aten::nonzero", "aten::equal", "stream.synchronize", "synchronize",
    }  # fmt: skip
    assert sum(reasons.values()) == device.counters().host_syncs == 6


@on_device(1)
def test_a_copy_that_does_not_block_is_there_after_synchronising(ranks: Ranks) -> None:
    host, values = torch.zeros(4), torch.ones(4, device="testdev")
    host.copy_(values, non_blocking=True)
    assert host.tolist() == [0.0] * 4
    torch.accelerator.synchronize()
    assert host.tolist() == [1.0] * 4


@on_device(1)
def test_elapsed_time_is_simulated_and_the_same_under_every_schedule(ranks: Ranks) -> None:
    device.set_costs(launch_us=7.0, bytes_per_us=1000.0)
    values = torch.ones(1000, device="testdev")
    for schedule in device.SCHEDULES:
        with following(schedule):
            begin, middle, end = (torch.Event(device="testdev", enable_timing=True) for _ in range(3))
            begin.record()
            values.mul_(2)  # 7 us, and 8 us for 4000 bytes in and out
            middle.record()
            torch.accelerator.synchronize()
            device.advance_host(100.0)
            end.record()
            torch.accelerator.synchronize()
            assert begin.elapsed_time(middle) == pytest.approx(0.015, abs=1e-4)
            assert middle.elapsed_time(end) == pytest.approx(0.1)
    device.set_costs()


@on_device(1)
def test_elapsed_time_of_events_that_are_not_done_is_refused(ranks: Ranks) -> None:
    begin, end = (torch.Event(device="testdev", enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    assert not end.query()
    assert "completed" in raised(RuntimeError, lambda: begin.elapsed_time(end))


@on_device(1)
def test_streams_overlap_on_the_simulated_clock(ranks: Ranks) -> None:
    """Two streams with 10 us each take 10 us; one that waits for the other takes 20."""
    device.set_costs(launch_us=10.0, bytes_per_us=1e12)
    main, side = torch.accelerator.current_stream(), torch.Stream(device="testdev")
    values, others = torch.ones(4, device="testdev"), torch.ones(4, device="testdev")
    for ordered, wanted in ((False, 10.0), (True, 20.0)):
        side.wait_stream(main)
        torch.accelerator.synchronize()
        before = device.host_us()
        values.mul_(2)
        if ordered:
            side.wait_stream(main)
        with side:
            others.mul_(2)
        torch.accelerator.synchronize()
        assert device.host_us() - before == pytest.approx(wanted)
    device.set_costs()


@on_device(1)
def test_a_python_function_is_one_launch_on_its_stream(ranks: Ranks) -> None:
    def add(out: Tensor, values: Tensor) -> None:
        assert out.device.type == values.device.type == "cpu"
        seen.append(threading.get_ident())
        out.add_(values)

    for schedule in device.SCHEDULES:
        with following(schedule):
            seen: list[int] = []
            out, values = torch.ones(4, device="testdev"), torch.ones(4, device="testdev") * 2
            torch.accelerator.synchronize()
            device.reset_counters()
            device.enqueue(add, out, values)
            assert device.counters().launches == 1
            assert seen == [] or schedule in ("eager", "lazy_sides", "shuffled")
            assert out.cpu().tolist() == [3.0] * 4
            assert len(seen) == 1


@on_device(1)
def test_functions_and_operators_of_many_threads_do_not_deadlock(ranks: Ranks) -> None:
    """A thread that waits for its turn holds no GIL, so that the thread whose turn it is can run Python."""
    for schedule in device.SCHEDULES:
        with following(schedule):
            values = [torch.zeros(8, device="testdev") for _ in range(4)]

            def work(mine: Tensor) -> None:
                for _ in range(20):
                    device.enqueue(lambda tensor: tensor.add_(1), mine)
                    mine.mul_(1)
                    torch.accelerator.current_stream().synchronize()

            threads = [threading.Thread(target=work, args=(mine,)) for mine in values]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), schedule
            assert [float(mine.sum()) for mine in values] == [160.0] * 4


@on_device(1)
def test_an_error_surfaces_at_the_next_synchronisation(ranks: Ranks) -> None:
    def broken(tensor: Tensor) -> None:
        raise ValueError("the kernel is broken")

    for schedule in device.SCHEDULES:
        with following(schedule):
            values = torch.ones(4, device="testdev")
            device.enqueue(broken, values)
            later = values + 1
            text = raised(RuntimeError, later.cpu)
            assert "broken failed: ValueError: the kernel is broken" in text, text
            assert (torch.ones(4, device="testdev") + 1).cpu().tolist() == [2.0] * 4, "the device works on"


@on_device(1)
def test_random_numbers_do_not_depend_on_the_schedule(ranks: Ranks) -> None:
    drawn = []
    for schedule in device.SCHEDULES:
        with following(schedule):
            generator = torch.Generator("testdev").manual_seed(5)
            values = torch.randn(4, generator=generator, device="testdev")
            generator.manual_seed(6)
            drawn.append([*values.tolist(), *torch.rand(2, generator=generator, device="testdev").tolist()])
    assert all(each == drawn[0] for each in drawn)
    assert drawn[0][:4] == torch.randn(4, generator=torch.Generator().manual_seed(5)).tolist()


@on_device(1)
def test_a_stream_can_pretend_to_be_captured(ranks: Ranks) -> None:
    module = torch.get_device_module("testdev")
    assert not module.is_current_stream_capturing()
    with device.capturing():
        assert module.is_current_stream_capturing()
    assert not module.is_current_stream_capturing()
