"""Link: the speed of a network link, as text such as `100mbit,latency=5ms`; and its emulation, which needs no root.

The cost of a collective on a link, for every rank:

    latency_s * hops + sent bytes / bytes per second of the link

The hops are those of gloo's algorithms: all-gather passes a ring once and all-reduce twice, and all-to-all sends to one
rank after the other.
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
"""The part of the bits on the wire that is payload, for TCP in Ethernet frames of 1500 bytes."""
HOPS: Mapping[str, Callable[[int], int]] = {
    "all_reduce": lambda size: 2 * (size - 1),
    "all_gather": lambda size: size - 1,
    "all_to_all": lambda size: size - 1,
}
"""The number of consecutive messages of a collective, from the number of ranks."""
EXAMPLE = "write for instance 100mbit or 1gbit,latency=5ms"
TIME_EXAMPLE = "write for instance 50us, 5ms or 2s"


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of one rank to the others, in each direction."""

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
        """The inverse of `str`: a rate in kbit, mbit or gbit, and optionally `latency=` in us, ms or s."""
        if not isinstance(text, str):
            raise SpecError(f"a link is text, got {type(text).__name__}; {EXAMPLE}")
        rate, *options = (part.strip() for part in text.split(","))
        latency_s = 0.0
        for at, option in enumerate(options):
            key, _, value = option.partition("=")
            if key.strip() != "latency" or at > 0:
                raise SpecError(f"link {text!r}: after the rate comes at most latency=, got {option!r}; {EXAMPLE}")
            latency_s = seconds(value, f"link {text!r}: latency", EXAMPLE)
        return cls(_number(rate, RATES, f"link {text!r}: the rate", EXAMPLE), latency_s)

    def cost_s(self, collective: str, size: int, sent_bytes: float) -> tuple[float, float]:
        """Seconds of waiting for hops, while other collectives may send, and of sending, while no other can."""
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
    """The value in the largest unit in which it is at least 1."""
    fitting = [unit for unit, factor in units.items() if value >= factor]
    unit = max(fitting, key=units.__getitem__, default=next(iter(units)))
    return f"{(_exactly(value) / _exactly(units[unit])).normalize():f}{unit}"


def _exactly(value: float) -> Decimal:
    """Units are powers of ten, so decimals convert to text and back without loss."""
    return Decimal(repr(value))


class EmulatedLink:
    """The emulated link of one rank. All lanes and threads of the rank share it, and wait for each other's bytes.

    Collectives run for real, over whatever connects the ranks; then each is held until its bytes would have left.

    Examples:
        >>> with gradwire.advisor.emulate("100mbit,latency=5ms") as link:
        ...     hook = gradwire.register(model, "int8")
    """

    def __init__(
        self, link: Link, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.link = link
        self.busy_until = -math.inf
        """When the last byte so far leaves, by the clock."""
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()

    def hold(self, collective: str, size: int, sent_bytes: float, taken_s: float) -> float:
        """Sleep until a collective that was issued `taken_s` ago would be over. Returns the seconds slept."""
        now = self._clock()
        latency_s, sending_s = self.link.cost_s(collective, size, sent_bytes)
        with self._lock:
            self.busy_until = max(self.busy_until, now - taken_s) + sending_s
            over = self.busy_until + latency_s
        if over > now:
            self._sleep(over - now)
        return self._clock() - now


@contextmanager
def emulate(link: EmulatedLink | Link | str) -> Iterator[EmulatedLink]:
    """Hooks that are registered inside average at the speed of `link`, and share it, for as long as they exist.

    This works for CPU models, in the thread that registers. DDP without a hook is not slowed down: use the hook `exact`
    in its place.

    Args:
        link: The link, such as `"100mbit,latency=5ms"`.

    Returns:
        A context manager; its value is the `EmulatedLink`.

    Raises:
        SpecError: If the text is not a link.

    Examples:
        >>> with gradwire.advisor.emulate("100mbit,latency=5ms"):
        ...     hook = gradwire.register(model, "int8")
    """
    link = Link.parse(link) if isinstance(link, str) else link
    emulated = link if isinstance(link, EmulatedLink) else EmulatedLink(link)
    token = slow_link.set(emulated.hold)
    try:
        yield emulated
    finally:
        slow_link.reset(token)
