"""Link: how fast a rank sends, as text such as `100mbit,latency=5ms`; and the emulated link, which needs no root.

What a collective costs on a link, for every rank alike:

    latency_s * hops + sent bytes / what the link carries a second

Hops are those of the algorithms that gloo uses: a ring goes round once for all-gather and twice for all-reduce, and
all-to-all sends to one neighbour after the other.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal

from gradwire.engine.lanes import slow_link
from gradwire.errors import SpecError

RATES: Mapping[str, float] = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES: Mapping[str, float] = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
PAYLOAD = 1448 / 1514
"""Of the bits on the wire this part is gradient: TCP in Ethernet frames of 1500 bytes."""
HOPS: Mapping[str, Callable[[int], int]] = {
    "all_reduce": lambda size: 2 * (size - 1),
    "all_gather": lambda size: size - 1,
    "all_to_all": lambda size: size - 1,
}
"""Messages, one after the other, that a collective between so many ranks takes."""
EXAMPLE = "write for instance 100mbit or 1gbit,latency=5ms"
TIME_EXAMPLE = "write for instance 50us, 5ms or 2s"


@dataclass(frozen=True, slots=True)
class Link:
    """What stands between one rank and the others, in each direction."""

    bits_per_s: float
    latency_s: float = 0.0
    """One way."""

    def __post_init__(self) -> None:
        if not 0 < self.bits_per_s < math.inf:
            raise SpecError(f"link: the rate must be above 0 and finite, got {self.bits_per_s!r} bit/s; {EXAMPLE}")
        if not 0 <= self.latency_s < math.inf:
            raise SpecError(f"link: the latency must be 0 or more and finite, got {self.latency_s!r} s; {EXAMPLE}")

    @classmethod
    def parse(cls, text: str) -> Link:
        """The inverse of `str`: a rate in kbit, mbit or gbit and perhaps `latency=` in us, ms or s."""
        rate, *options = (part.strip() for part in text.split(","))
        latency_s = 0.0
        for at, option in enumerate(options):
            key, _, value = option.partition("=")
            if key.strip() != "latency" or at > 0:
                raise SpecError(f"link {text!r}: after the rate comes at most latency=, got {option!r}; {EXAMPLE}")
            latency_s = seconds(value, f"link {text!r}: latency", EXAMPLE)
        return cls(_number(rate, RATES, f"link {text!r}: the rate", EXAMPLE), latency_s)

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """Waiting for the hops, during which others may send, and sending, during which nobody else can."""
        return self.latency_s * HOPS[collective](size), sent_bytes * 8 / (self.bits_per_s * PAYLOAD)

    def __str__(self) -> str:
        rate = _text(self.bits_per_s, RATES)
        return f"{rate},latency={_text(self.latency_s, TIMES)}" if self.latency_s else rate


def seconds(text: str, what: str = "a time", example: str = TIME_EXAMPLE) -> float:
    """`"5ms"` -> 0.005. `what` begins the error, `example` ends it."""
    return _number(text, TIMES, what, example)


def _number(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise SpecError(f"{what} must be a number with {', '.join(units)}, got {text!r}; {example}")
    return float(Decimal(match[1]) * _exactly(units[match[2]]))


def _text(value: float, units: Mapping[str, float]) -> str:
    """In the largest unit that leaves 1 or more."""
    fitting = [unit for unit, factor in units.items() if value >= factor]
    unit = max(fitting, key=units.__getitem__, default=next(iter(units)))
    return f"{(_exactly(value) / _exactly(units[unit])).normalize():f}{unit}"


def _exactly(value: float) -> Decimal:
    """Units are powers of ten, so in decimals nothing is lost on the way to text and back."""
    return Decimal(repr(value))


class EmulatedLink:
    """One rank's way out. All lanes and threads of the rank share it: what one sends, the others wait for.

    Collectives really run, over whatever connects the ranks; then each is held until its bytes would have left.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._busy_until = -math.inf
        self._lock = threading.Lock()

    def hold(self, collective: str, size: int, sent_bytes: float, taken_s: float) -> float:
        """Sleep until a collective that was issued `taken_s` ago would be over; how long that was."""
        now = time.perf_counter()
        latency_s, sending_s = self.link.cost_s(collective, size, sent_bytes)
        with self._lock:
            self._busy_until = max(self._busy_until, now - taken_s) + sending_s
            over = self._busy_until + latency_s
        if over > now:
            time.sleep(over - now)
        return time.perf_counter() - now


@contextmanager
def emulate(link: Link | str) -> Iterator[EmulatedLink]:
    """Hooks registered inside average at the speed of `link`, all of them together on one link, for as long as they
    live.

    For CPU models, in the thread that registers. DDP without a hook knows nothing of it: the hook `exact` stands for
    it.
    """
    emulated = EmulatedLink(Link.parse(link) if isinstance(link, str) else link)
    token = slow_link.set(emulated.hold)
    try:
        yield emulated
    finally:
        slow_link.reset(token)
