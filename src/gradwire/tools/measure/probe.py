"""probe(): measures what lies between the ranks, collective by collective, and how fast this machine encodes.

Collectives are timed in rows, as a single one may find a link with some burst to spare, or bytes that came before it
asked. A line is fitted over the bytes of whole rows: see `fit.py`. Another one is fitted to the processor time that a
rank spends on a collective, in all of its threads: that is what it takes from the backward pass.
"""

from __future__ import annotations

import functools
import itertools
import socket
import time
from collections.abc import Callable, Mapping, Sequence
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
from gradwire.engine.gloo import LONG_GATHER, SHORT_SUM, way
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import GroupComm, Lanes
from gradwire.engine.runner import LaneRunner, Runner
from gradwire.errors import SpecError
from gradwire.exchanges.base import Comm
from gradwire.tools.launch.link import HOPS
from gradwire.tools.measure.fit import Fit, fit
from gradwire.tools.measure.load import Load

REPEATS = 3
LONG_S, LOADED_S = 0.3, 0.1
"""A row that takes longer than this is not repeated, and no larger ones are tried; and for how long it is repeated
under load."""
VALUES = 1 << 20
PAIR_TIMEOUT = timedelta(seconds=60)
Report = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """Collectives, one after the other."""

    message_bytes: int
    """That each rank sends in one."""
    count: int
    in_turn: bool = False
    """Each waits for the end of the one before, which tells the latency; otherwise they are handed in like chunks."""


ROWS = (Row(1 << 10, 16, True), Row(1 << 13, 16, True), Row(1 << 18, 4), Row(3 << 18, 5), Row(3 << 18, 11))
SHORT_ROWS = (Row(1 << 10, 16, True), Row(1 << 13, 16, True), Row(1 << 16, 8), Row(1 << 18, 4))
LONG_ROWS = (Row(3 << 17, 4, True), Row(3 << 18, 4, True), Row(1 << 20, 4), Row(1 << 22, 2))
GATHER_ROWS = (*ROWS[:3], Row(3 << 17, 5), Row(3 << 17, 11))
LARGE_ROWS = (Row(1 << 19, 4, True), Row(1 << 20, 4), Row(1 << 21, 3))
BETWEEN_TWO = {"all_reduce": LONG_ROWS, SHORT_SUM: SHORT_ROWS, "all_gather": GATHER_ROWS, LONG_GATHER: LARGE_ROWS}
"""Between two ranks some go two ways (`gloo.way`): a line through both would be right for neither."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of a codec on one core."""

    encode_ns: float
    """A value."""
    decode_ns: float
    """A value, added to a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found; the same on all ranks but for `speeds`."""

    size: int
    fits: Mapping[str, Fit]
    """By collective, and between two ranks by `gloo.way`."""
    toll: Mapping[str, Fit]
    """Of the same: processor time that is gone for a rank that computes meanwhile, on average over the ranks."""
    speeds: Mapping[str, Speed]
    """By codec, on this rank."""
    hosts: tuple[str, ...]
    """By rank."""
    pairs: Mapping[str, Fit] = field(default_factory=dict)
    """`"0-1"`: an all-gather between these two alone. Measured where ranks sit on several hosts."""

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """For `predict`: latency, on another number of ranks in proportion to the hops, and sending."""
        found = self.fits.get(way(collective, size, sent_bytes)) or self.fits[collective]
        hops = HOPS[collective]
        return found.alpha_s * hops(size) / hops(self.size), sent_bytes / found.bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def probe(hook: Hook, *, pairs: bool | None = None, report: Report = lambda part, doing: None) -> Probe:
    """Measure over the lanes of a hook: all ranks together, between steps. Takes a few seconds.

    `pairs`: each pair of ranks by itself as well; by default where the ranks sit on several hosts. That needs the
    default process group, with the same ranks.
    """
    if hook.size == 1:
        raise SpecError("probe: there is nothing to measure between 1 rank; start at least 2")
    fits, toll, load = {}, {}, _load().calibrate()
    for index, collective in enumerate({**HOPS, **BETWEEN_TWO} if hook.size == 2 else HOPS):
        report(index / 7, f"timing {collective}")
        fits[collective], toll[collective] = measure(hook.runner, load, collective, hook.size)
    hosts: list[str] = []
    hook.run(lambda comm: hosts.extend(gather_texts(comm, socket.gethostname(), hook.device)))
    report(5 / 7, "timing codecs")
    speeds = {name: codec_speed(codec()) for name, codec in CODECS.items()}
    report(6 / 7, "timing pairs of ranks")
    wanted = len(set(hosts)) > 1 if pairs is None else pairs
    found = _measure_pairs(hook) if wanted else {}
    return Probe(size=hook.size, fits=fits, toll=toll, speeds=speeds, hosts=tuple(hosts), pairs=found)


@functools.cache
def _load() -> Load:
    return Load()


# -- collectives -------------------------------------------------------------------------------------------------------


def measure(runner: Runner, load: Load, collective: str, size: int) -> tuple[Fit, Fit]:
    """Time of a collective over sizes, and what it takes from a rank's processor; the same on all ranks."""
    times, busy = {}, {}
    for row in BETWEEN_TWO.get(collective, ROWS) if size == 2 else ROWS:
        jobs = [_Job(collective, size, row.message_bytes) for _ in range(row.count)]
        runner.run(jobs[0])  # touches new memory, and all ranks begin together
        time_s, busy_s = _row_s(runner, load, jobs, in_turn=row.in_turn)
        sent_bytes = jobs[0].sent_bytes
        if row.in_turn:
            times[sent_bytes] = time_s / row.count
        else:
            times[sent_bytes * row.count] = time_s
            busy[sent_bytes] = busy_s / row.count
        if time_s > LONG_S and len(busy) > 1:
            break
    return fit(list(times), list(times.values())), fit(list(busy), list(busy.values()))


def _row_s(runner: Runner, load: Load, jobs: Sequence[_Job], *, in_turn: bool) -> tuple[float, float]:
    """Seconds, the median of some repeats; and processor seconds, under load if they are more there than without.

    Both on average over the ranks.
    """

    def act() -> None:
        for part in [[job] for job in jobs] if in_turn else [jobs]:
            runner.submit(part, torch.empty(0), lambda *_: None).wait()

    first = _averages(runner, [_clocked(act)])
    if first[0, 0] > LONG_S:  # on such a link times differ little, and the processor has time
        return first[0, 0].item(), first[0, 1].item()
    others = _averages(runner, [_clocked(act) for _ in range(REPEATS - 1)])
    time_s, busy_s = torch.cat([first, others]).median(0).values.tolist()
    if in_turn:
        return time_s, busy_s
    repeats = min(max(round(LOADED_S / time_s), 1), 2 * REPEATS)
    ((loaded_s,),) = _averages(runner, [(load.taken_by(act, repeats) / repeats,)]).tolist()
    return time_s, max(busy_s, loaded_s)


def _averages(runner: Runner, values: Sequence[Sequence[float]]) -> Tensor:
    """Over the ranks, the same on all."""
    mine, everybody = torch.tensor(values, dtype=torch.float64), list[Tensor]()
    runner.run(lambda comm: everybody.append(comm.all_gather(mine.view(-1)).clone()))
    return everybody[0].mean(0).view(mine.shape)


def _clocked(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and processor seconds of all threads of this process."""
    began, busy = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - began, time.process_time() - busy


class _Job:
    """A collective on a tensor of its own, of which each rank sends about so much."""

    def __init__(self, collective: str, size: int, sent_bytes: int) -> None:
        collective = collective.removeprefix("small_").removeprefix("large_")
        self._name = collective + ("_" if collective == "all_reduce" else "")
        self._tensor = _message(collective, size, sent_bytes)
        self.sent_bytes = 0.0

    def __call__(self, comm: Comm) -> None:
        getattr(comm, self._name)(self._tensor)
        self.sent_bytes = cast(GroupComm, comm).traffic.sent_bytes


def _message(collective: str, size: int, sent_bytes: int) -> Tensor:
    """A tensor of which each rank sends about so much."""
    if collective == "all_reduce":
        return torch.zeros(max(1, sent_bytes * size // (8 * (size - 1))))
    row = torch.zeros(max(1, sent_bytes // (size - 1)), dtype=torch.uint8)
    return row if collective == "all_gather" else row.repeat(size, 1)


def _measure_pairs(hook: Hook) -> dict[str, Fit]:
    """Each pair on a lane of its own. Pairs without a rank in common may run at the same time."""
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
            mine[a, b] = torch.tensor([found.alpha_s, found.bytes_per_s, found.r_squared]) / 2  # two ranks say so
    hook.run(lambda comm: _sum_(comm, mine))
    pairs = itertools.combinations(range(hook.size), 2)
    return {f"{a}-{b}": Fit(*mine[a, b].tolist()) for a, b in pairs}


def _sum_(comm: Comm, values: Tensor) -> None:
    comm.all_reduce_(values)


# -- codecs ------------------------------------------------------------------------------------------------------------


def codec_speed(codec: Codec, numel: int = VALUES) -> Speed:
    """The best of several runs, as anything slower was somebody else's work."""
    kernels.load()
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    total, wire = torch.zeros(numel), codec.encode(values)
    encode_s = _best_s(lambda: codec.encode(values, out=wire))
    decode_s = _best_s(lambda: codec.decode_(total, wire, alpha=0.5, add=True))
    return Speed(encode_s * 1e9 / numel, decode_s * 1e9 / numel)


def _best_s(act: Callable[[], object]) -> float:
    act()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times)
