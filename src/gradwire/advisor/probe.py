"""probe(): measures what lies between the ranks, collective by collective, and how fast this machine encodes.

Every size is timed several times. The rank that came last waited for nobody, so the shortest time of all ranks is the
collective's own; of the repeats the median counts. A line is fitted over the sizes: see `fit.py`.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from gradwire import kernels
from gradwire.advisor.fit import Fit, fit
from gradwire.advisor.link import HOPS
from gradwire.codecs import CODECS, Codec
from gradwire.comm import Comm, GroupComm, gather_texts
from gradwire.errors import SpecError
from gradwire.hook import Hook
from gradwire.lanes import Lanes
from gradwire.runner import Job

SENT_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
REPEATS = 5
LONG_S = 0.1
"""When a collective takes longer than this, no larger ones are tried."""
VALUES = 1 << 20
PAIR_TIMEOUT = timedelta(seconds=60)
Report = Callable[[float, str], None]


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
    """By collective."""
    speeds: Mapping[str, Speed]
    """By codec, on this rank."""
    hosts: tuple[str, ...]
    """By rank."""
    pairs: Mapping[str, Fit] = field(default_factory=dict)
    """`"0-1"`: an all-gather between these two alone. Measured where ranks sit on several hosts."""

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """For `predict`: latency, on another number of ranks in proportion to the hops, and sending."""
        found, hops = self.fits[collective], HOPS[collective]
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
    fits = {}
    for index, collective in enumerate(HOPS):
        report(index / 5, f"timing {collective}")
        fits[collective] = measure(hook.run, collective, hook.size)
    hosts: list[str] = []
    hook.run(lambda comm: hosts.extend(gather_texts(comm, socket.gethostname(), hook.device)))
    report(3 / 5, "timing codecs")
    speeds = {name: codec_speed(codec()) for name, codec in CODECS.items()}
    report(4 / 5, "timing pairs of ranks")
    wanted = len(set(hosts)) > 1 if pairs is None else pairs
    found = _measure_pairs(hook) if wanted else {}
    return Probe(size=hook.size, fits=fits, speeds=speeds, hosts=tuple(hosts), pairs=found)


# -- collectives -------------------------------------------------------------------------------------------------------


def measure(run: Callable[[Job], None], collective: str, size: int) -> Fit:
    """Time a collective over sizes; the same on all ranks. `run` runs a job on the lanes and waits for it."""
    sent, times = [], []
    for wanted in SENT_BYTES:
        moved, taken = _median_time(run, collective, size, wanted)
        sent.append(moved)
        times.append(taken)
        if taken > LONG_S and len(sent) > 2:
            break
    return fit(sent, times)


def _median_time(run: Callable[[Job], None], collective: str, size: int, sent_bytes: int) -> tuple[float, float]:
    """Bytes sent and seconds."""
    tensor, taken, moved = _message(collective, size, sent_bytes), [], 0.0

    def job(comm: Comm) -> None:
        nonlocal moved
        getattr(comm, collective + ("_" if collective == "all_reduce" else ""))(tensor)
        traffic = cast(GroupComm, comm).traffic
        moved = traffic.sent_bytes
        taken.append(traffic.wire_s)

    for _ in range(REPEATS + 1):
        run(job)
    everybody: list[Tensor] = []
    mine = torch.tensor(taken[1:], dtype=torch.float64)  # the first touched new memory
    run(lambda comm: everybody.append(comm.all_gather(mine).clone()))
    return moved, statistics.median(everybody[0].amin(0).tolist())


def _message(collective: str, size: int, sent_bytes: int) -> Tensor:
    """A tensor of which each rank sends about so much."""
    if collective == "all_reduce":
        return torch.zeros(max(1, sent_bytes * size // (8 * (size - 1))))
    row = torch.zeros(max(1, sent_bytes // (size - 1)), dtype=torch.uint8)
    return row if collective == "all_gather" else row.repeat(size, 1)


def _measure_pairs(hook: Hook) -> dict[str, Fit]:
    """Each pair on a lane of its own. Pairs without a rank in common may run at the same time."""
    store, mine = c10d._get_process_group_store(dist.group.WORLD), torch.zeros(hook.size, hook.size, 3)  # type: ignore[arg-type]
    names: list[str] = []
    hook.run(lambda comm: names.extend(gather_texts(comm, str(time.time_ns()), hook.device)))
    for a, b in itertools.combinations(range(hook.size), 2):
        if hook.rank in (a, b):
            lanes = Lanes(store, (a, b).index(hook.rank), 2, PAIR_TIMEOUT, f"pair/{a}-{b}/{names[0]}")
            lanes.open(1, 0)
            found = measure(_in_turn(lanes), "all_gather", 2)
            lanes.close()
            mine[a, b] = torch.tensor([found.alpha_s, found.bytes_per_s, found.r_squared]) / 2  # two ranks say so
    hook.run(lambda comm: _sum_(comm, mine))
    pairs = itertools.combinations(range(hook.size), 2)
    return {f"{a}-{b}": Fit(*mine[a, b].tolist()) for a, b in pairs}


def _in_turn(lanes: Lanes) -> Callable[[Job], None]:
    tickets = itertools.count()

    def run(job: Job) -> None:
        ticket = next(tickets)
        comm = lanes.comm(ticket)
        job(comm)
        lanes.finish(ticket, comm)

    return run


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
