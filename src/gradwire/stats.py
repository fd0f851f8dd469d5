"""Step 8, the counting part: what a hook has done so far, without synchronising anything."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass

from gradwire.comm import Traffic


@dataclass(frozen=True, slots=True)
class Stats:
    """Averages per step since registration, the last `switch` or the last `reset_stats`.

    Times of chunks overlap with each other and with the backward pass, so `encode_s + wire_s + decode_s` is work done,
    not time lost. Time lost is `wait_s`. On an accelerator all times are those of the host that enqueues.
    """

    hook: str
    """The spec."""
    steps: int
    buckets: float
    sent_bytes: float
    """Sent by this rank per step, payload only."""
    received_bytes: float
    encode_s: float
    """From the start of a chunk to its first collective."""
    wire_s: float
    """From issuing a collective to its end, summed over the chunks."""
    decode_s: float
    """Everything after the first collective that is not wire: summing, encoding the mean, decoding."""
    wait_s: float
    """From the last bucket's arrival to the end of the last job: what the optimizer had to wait for."""
    reason: str = ""
    """Under `auto`: why it is this hook."""

    def as_dict(self) -> dict[str, str | int | float]:
        """A plain mapping, for logging."""
        return asdict(self)


class Meter:
    """Adds up what jobs report. Called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_index = -1
        self.total_steps = 0
        """Steps since registration."""
        self.reset()

    def reset(self) -> None:
        """Forget everything but the number of steps."""
        with self._lock:
            self._steps = self._buckets = 0
            self._sent = self._received = self._encode = self._wire = self._decode = self._waited = 0.0
            self._called = self._ended = 0.0

    def opens_step(self, index: int) -> bool:
        """Whether a bucket is the first of a step.

        A step begins when the index stops rising: the last bucket may never come (`skip_all_reduce_unused_params`).
        """
        return index <= self._last_index or self._last_index < 0

    def begin(self, index: int, first: bool | None = None) -> bool:
        """A bucket has arrived. True if it is the first of a step, which the caller may know better."""
        with self._lock:
            first = self.opens_step(index) if first is None else first
            self._last_index = index
            if first:
                self._close_step()
                self._steps += 1
                self.total_steps += 1
            self._buckets += 1
            self._called = time.perf_counter()
            return first

    def add(self, traffic: Traffic, began: float, ended: float) -> None:
        """A job has ended."""
        first = traffic.first_s if traffic.first_s is not None else ended
        with self._lock:
            self._sent += traffic.sent_bytes
            self._received += traffic.received_bytes
            self._wire += traffic.wire_s
            self._encode += first - began
            self._decode += max(ended - first - traffic.wire_s - traffic.queue_s, 0.0)
            self._ended = max(self._ended, ended)

    def stats(self, hook: str, reason: str = "") -> Stats:
        """Averages so far."""
        with self._lock:
            self._close_step()
            steps = max(self._steps, 1)
            sums = (self._sent, self._received, self._encode, self._wire, self._decode, self._waited)
            sent, received, encode, wire, decode, waited = (value / steps for value in sums)
            buckets = self._buckets / steps
            return Stats(hook, self._steps, buckets, sent, received, encode, wire, decode, waited, reason)

    def _close_step(self) -> None:
        self._waited += max(self._ended - self._called, 0.0) if self._called else 0.0
        self._called = self._ended = 0.0
