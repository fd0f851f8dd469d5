"""probe(): measures the connection between the ranks, collective by collective, and the speed of the codecs.

Collectives are timed in rows, because a single one may profit from a burst that the link allows, or from bytes that
arrived early. A line is fitted over the bytes of whole rows: see `fit.py`. Another line is fitted to the CPU time that
a rank spends on a collective in all of its threads, which it takes from the backward pass.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire import kernels
from gradwire._torch.distributed import store_of
from gradwire.codecs import CODECS, Codec
from gradwire.engine.agreement import gather_texts
from gradwire.engine.events import now, seconds
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import GroupComm, Lanes
from gradwire.engine.links import SHORT_SUM, way
from gradwire.engine.runner import LaneRunner, Runner
from gradwire.errors import SpecError
from gradwire.exchanges import Exact
from gradwire.exchanges.base import Comm
from gradwire.models.ddp import make_hook
from gradwire.tools.launch.launch import Report, run_ranks
from gradwire.tools.launch.link import HOPS, Link, emulate
from gradwire.tools.measure.fit import Fit, fit
from gradwire.tools.measure.load import Load

CPU = torch.device("cpu")
REPEATS = 3
LONG_S, LOADED_S = 0.3, 0.1
"""A row that takes longer than LONG_S is not repeated, and no larger row is tried. Under load a row is repeated for
LOADED_S."""
VALUES = 1 << 20
NO_TIME = Fit(0.0, math.inf, 1.0)
PAIR_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of equal collectives."""

    message_bytes: int
    """The bytes that each rank sends in one collective."""
    count: int
    in_turn: bool = False
    """Each waits for the end of the one before, which shows the latency; otherwise all are submitted at once, as
    chunks are."""


ROWS = (Row(1 << 10, 16, True), Row(1 << 13, 16, True), Row(1 << 18, 4), Row(3 << 18, 5), Row(3 << 18, 11))
SHORT_ROWS = (Row(1 << 10, 16, True), Row(1 << 13, 16, True), Row(1 << 16, 8), Row(1 << 18, 4))
LONG_ROWS = (Row(3 << 17, 4, True), Row(3 << 18, 4, True), Row(1 << 20, 4), Row(1 << 22, 2))
BETWEEN_TWO = {"all_reduce": LONG_ROWS, SHORT_SUM: SHORT_ROWS}
"""Between two ranks sums have two algorithms (`links.way`), and one line would fit neither."""


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a codec on one core."""

    encode_ns: float
    """Per value."""
    decode_ns: float
    """Per value, added to a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result; the same on all ranks except for `speeds`."""

    size: int
    fits: Mapping[str, Fit]
    """By collective, and between two ranks by `links.way`."""
    cpu_cost: Mapping[str, Fit]
    """For the same keys: the CPU time that a rank loses that computes meanwhile, as a mean over the ranks."""
    speeds: Mapping[str, Speed]
    """By codec, on this rank."""
    hosts: tuple[str, ...]
    """By rank."""
    pairs: Mapping[str, Fit] = field(default_factory=dict)
    """`"0-1"`: an all-gather between these two ranks alone. Measured if the ranks are on several hosts."""

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """For `predict`: latency, which is proportional to the hops on another number of ranks, and sending."""
        found = self.fits.get(way(collective, size, sent_bytes)) or self.fits[collective]
        hops = HOPS[collective]
        return found.alpha_s * hops(size) / hops(self.size), sent_bytes / found.bytes_per_s

    @property
    def spread(self) -> float:
        """How far collectives lie from their lines, as a part of their time: the median of all of them."""
        return statistics.median(found.spread for found in self.fits.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def probe(hook: Hook, *, pairs: bool | None = None, report: Report = lambda part, doing: None) -> Probe:
    """Measure the connection between the ranks. All ranks call it together, between steps. It takes a few seconds.

    Args:
        hook: Measured over its lanes.
        pairs: Whether to measure each pair of ranks by itself as well, which needs the default process group with the
            same ranks. By default that is done if the ranks are on several hosts.
        report: Called with the part that is done and what is being done.

    Returns:
        A line of latency and bandwidth for each collective, and the speed of each codec.

    Examples:
        >>> result = gradwire.advisor.probe(hook)
        >>> result.fits["all_gather"].bytes_per_s
    """
    if hook.size == 1:
        raise SpecError("probe: there is nothing to measure between 1 rank; start at least 2")
    fits, cpu_cost, load = {}, {}, _load().calibrate() if hook.device.type == "cpu" else None
    for index, collective in enumerate({**HOPS, **BETWEEN_TWO} if hook.size == 2 else HOPS):
        report(index / 6, f"timing {collective}")
        fits[collective], cpu_cost[collective] = measure(hook.runner, load, collective, hook.size, hook.device)
    hosts: list[str] = []
    hook.run(lambda comm: hosts.extend(gather_texts(comm, socket.gethostname(), hook.device)))
    report(4 / 6, "timing codecs")
    speeds = {name: codec_speed(codec(), device=hook.device) for name, codec in CODECS.items()}
    report(5 / 6, "timing pairs of ranks")
    wanted = len(set(hosts)) > 1 if pairs is None else pairs
    found = _measure_pairs(hook) if wanted else {}
    return Probe(size=hook.size, fits=fits, cpu_cost=cpu_cost, speeds=speeds, hosts=tuple(hosts), pairs=found)


@functools.cache
def _load() -> Load:
    return Load()


# -- collectives -------------------------------------------------------------------------------------------------------


def measure(
    runner: Runner, load: Load | None, collective: str, size: int, device: torch.device = CPU
) -> tuple[Fit, Fit]:
    """The time of a collective over sizes, and its CPU time; the same on all ranks. Without a load: no CPU time."""
    times, busy, at_once = {}, {}, 0
    for row in BETWEEN_TWO.get(collective, ROWS) if size == 2 else ROWS:
        jobs = [_Job(collective, size, row.message_bytes, device) for _ in range(row.count)]
        runner.run(jobs[0])  # touches new memory, and all ranks begin together
        time_s, busy_s = _row_s(runner, load, jobs, device, in_turn=row.in_turn)
        sent_bytes = jobs[0].sent_bytes
        busy[sent_bytes] = busy_s / row.count  # of short messages too: from long ones alone they seem expensive
        if row.in_turn:
            times[sent_bytes] = time_s / row.count
        else:
            times[sent_bytes * row.count] = time_s
            at_once += 1
        if time_s > LONG_S and at_once > 1:
            break
    cpu_cost = NO_TIME if load is None else fit(list(busy), list(busy.values()))
    return fit(list(times), list(times.values())), cpu_cost


def _row_s(
    runner: Runner, load: Load | None, jobs: Sequence[_Job], device: torch.device, *, in_turn: bool
) -> tuple[float, float]:
    """Seconds, the median of some repeats; and CPU seconds, under load if that is more; both are means over ranks."""

    def act() -> None:
        for part in [[job] for job in jobs] if in_turn else [jobs]:
            runner.submit(part, torch.empty(0, device=device), lambda *_: None).wait()

    first = _averages(runner, [_clocked(act, device)], device)
    if first[0, 0] > LONG_S:  # on such a slow link times differ little, and the CPU is mostly idle
        return first[0, 0].item(), first[0, 1].item()
    others = _averages(runner, [_clocked(act, device) for _ in range(REPEATS - 1)], device)
    time_s, busy_s = torch.cat([first, others]).median(0).values.tolist()
    if in_turn or load is None:
        return time_s, busy_s
    repeats = min(max(round(LOADED_S / time_s), 1), 2 * REPEATS)
    ((loaded_s,),) = _averages(runner, [(load.taken_by(act, repeats) / repeats,)], device).tolist()
    return time_s, max(busy_s, loaded_s)


def _averages(runner: Runner, values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """The mean over the ranks, the same on all of them."""
    mine, everybody = torch.tensor(values, dtype=torch.float64, device=device), list[Tensor]()
    runner.run(lambda comm: everybody.append(comm.all_gather(mine.view(-1)).clone()))
    return everybody[0].mean(0).view(mine.shape).cpu()


def _clocked(act: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads of this process; none on an accelerator, which computes by itself."""
    began, busy = now(device), time.process_time()
    act()
    busy_s = time.process_time() - busy if device.type == "cpu" else 0.0
    return seconds(began, now(device)), busy_s


class _Job:
    """A collective on a tensor of its own, in which each rank sends about `sent_bytes`."""

    def __init__(self, collective: str, size: int, sent_bytes: int, device: torch.device) -> None:
        collective = collective.removeprefix("small_")
        self._name = collective + ("_" if collective == "all_reduce" else "")
        self._tensor = _message(collective, size, sent_bytes, device)
        self.sent_bytes = 0.0

    def __call__(self, comm: Comm) -> None:
        getattr(comm, self._name)(self._tensor)
        self.sent_bytes = cast(GroupComm, comm).traffic.sent_bytes


def _message(collective: str, size: int, sent_bytes: int, device: torch.device = CPU) -> Tensor:
    """A tensor of which each rank sends about `sent_bytes`."""
    if collective == "all_reduce":
        return torch.zeros(max(1, sent_bytes * size // (8 * (size - 1))), device=device)
    row = torch.zeros(max(1, sent_bytes // (size - 1)), dtype=torch.uint8, device=device)
    return row if collective == "all_gather" else row.repeat(size, 1)


def _measure_pairs(hook: Hook) -> dict[str, Fit]:
    """Each pair has a lane of its own. Pairs without a rank in common may run at the same time."""
    store, mine = store_of(dist.group.WORLD), torch.zeros(hook.size, hook.size, 3)  # type: ignore[arg-type]
    names: list[str] = []
    hook.run(lambda comm: names.extend(gather_texts(comm, str(time.time_ns()), hook.device)))
    for a, b in itertools.combinations(range(hook.size), 2):
        if hook.rank in (a, b):
            lanes = Lanes(store, (a, b).index(hook.rank), 2, PAIR_TIMEOUT, f"pair/{a}-{b}/{names[0]}")
            runner = LaneRunner(lanes)
            runner.open(1)
            found, _ = measure(runner, _load(), "all_gather", 2)
            runner.close()
            # Both ranks of the pair add their half of its values.
            mine[a, b] = torch.tensor([found.alpha_s, found.bytes_per_s, found.r_squared]) / 2
    hook.run(lambda comm: _sum_(comm, mine))
    pairs = itertools.combinations(range(hook.size), 2)
    return {f"{a}-{b}": Fit(*mine[a, b].tolist()) for a, b in pairs}


def _sum_(comm: Comm, values: Tensor) -> None:
    comm.all_reduce_(values)


# -- codecs ------------------------------------------------------------------------------------------------------------


def codec_speed(codec: Codec, numel: int = VALUES, device: torch.device = CPU) -> Speed:
    """The best of several runs: other processes can only make a run slower."""
    kernels.load()
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    total, wire = torch.zeros(numel, device=device), codec.encode(values)
    encode_s = best_s(lambda: codec.encode(values, out=wire), device)
    decode_s = best_s(lambda: codec.decode_(total, wire, alpha=0.5, add=True), device)
    return Speed(encode_s * 1e9 / numel, decode_s * 1e9 / numel)


def best_s(act: Callable[[], object], device: torch.device) -> float:
    """The fewest seconds that `act` takes on a device in some runs after the first one."""
    act()
    spans = []
    for _ in range(REPEATS):
        began = now(device)
        act()
        spans.append((began, now(device)))
    return min(seconds(*span) for span in spans)


# -- ranks -------------------------------------------------------------------------------------------------------------


def probe_local(nproc: int, *, link: str | None = None, pairs: bool | None = None, report: Report) -> dict[str, Any]:
    """`Probe.as_dict()` of rank 0 of `nproc` local processes, on an emulated link if one is given."""
    if nproc == 1:
        raise SpecError("nproc must be at least 2, as one rank has nothing to exchange; got 1")
    job = {"link": None if link is None else str(Link.parse(link)), "pairs": pairs}
    found: dict[str, Any] = run_ranks("gradwire.tools.measure.probe:run", nproc, job, report=report)[0]
    return found


def probe_launched(*, link: str | None, pairs: bool | None, report: Report) -> dict[str, Any] | None:
    """The same between the ranks that torchrun has started, of which this is one; None on all but rank 0."""
    dist.init_process_group("gloo")
    try:
        found = run(dist.get_rank(), dist.get_world_size(), {"link": link, "pairs": pairs}, report)
        dist.barrier()
        return found if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def is_launched() -> bool:
    """Whether torchrun or a similar launcher has started this process."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(rank: int, size: int, job: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """Probe on one rank of the default process group."""
    with emulate(job["link"]) if job["link"] else nullcontext():
        hook = make_hook(Exact(), dist.group.WORLD, torch.device("cpu"))  # type: ignore[arg-type]
    found: Probe = probe(hook, pairs=job["pairs"], report=report)
    hook.close()
    return found.as_dict()
