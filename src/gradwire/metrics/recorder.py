"""record(): watches a hook, and hands a record to every sink each so many steps.

A record is made when the backward pass of its step has ended on the rank that writes; other ranks do nothing. It needs
no collective, so that nothing can make the ranks wait for each other.
"""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gradwire._torch.optim import NO_BACKWARD, at_the_very_end, backward_id
from gradwire.engine.drift import check_interval
from gradwire.engine.hook import NO_STEPS, Hook
from gradwire.engine.observers import GradNorm, Observer
from gradwire.engine.sharded import ShardedHook
from gradwire.engine.stats import Stats
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges.bucket import Bucket
from gradwire.metrics.sinks import Record, Sink

METRICS: Mapping[str, str] = {
    "step_s": "seconds per step, from the end of one backward pass to the end of the next",
    "wait_s": "seconds per step that the optimizer had to wait for communication",
    "sent_bytes": "bytes that the rank sent per step, payload only",
    "received_bytes": "bytes that it received per step",
    "buckets": "buckets per step",
    "encode_s": "seconds per step from the start of a chunk to its first collective, summed over the chunks",
    "wire_s": "seconds per step in collectives, summed over the chunks",
    "decode_s": "seconds per step after the first collective that are not wire, summed over the chunks",
    "peak_bytes": "the most memory that the hook has held at once, besides residuals",
    "grad_norm": "the norm of the averaged gradients of this step (DDP only)",
    "residual_norm": "the norm of what error feedback keeps on this rank",
    "error": "the error of the averaged gradients relative to the exact mean, with register(..., watch=...)",
    "cosine": "the cosine of the angle between both",
    "update_error": "the same error in units of the optimizer's update, with register(..., optimizer=...)",
}
"""What records can have, by name. Times and bytes are means over the steps since the record before."""
NOT_BACKWARD = (
    "this hook averages outside of a backward pass, as local training does. metrics.record follows backward passes, so "
    "nothing is recorded; use hook.stats()"
)
MOVED = ("sent_bytes", "received_bytes", "buckets")
TIMED = ("wait_s", "encode_s", "wire_s", "decode_s")


def record(hook: Hook, *sinks: Sink, every: int = 50) -> "Recorder":
    """Write what a hook does to one or more sinks. Call it on all ranks; the first rank of the model writes.

    Args:
        hook: What `gradwire.register` has returned.
        sinks: Where to write, such as `gradwire.metrics.JSONL("run.jsonl")`.
        every: Write in every step whose number is a multiple of this.

    Returns:
        What writes: its `close()` ends it and closes the sinks, and so does `hook.close()`.

    Raises:
        SpecError: `every` is not a number of steps, or what is given is not a sink.
        RegisterError: DDP's compiled reducer hides the steps.

    Examples:
        >>> hook = gradwire.register(model, "int8", watch=100)
        >>> gradwire.metrics.record(hook, gradwire.metrics.TensorBoard("runs/int8"), every=10)
    """
    check_interval("every", every)
    if not isinstance(hook, Hook):
        raise SpecError(f"record takes the hook that gradwire.register has returned, got {type(hook).__name__}")
    if not sinks or not all(isinstance(sink, Sink) for sink in sinks):
        raise SpecError(f"record takes sinks such as gradwire.metrics.JSONL('run.jsonl') after the hook, got {sinks}")
    return Recorder(hook, sinks, every)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a record ended."""

    at_s: float
    steps: int
    stats: Stats


class Recorder(Observer):
    """Makes records of one hook: what `record` returns.

    Examples:
        >>> recorder = gradwire.metrics.record(hook, gradwire.metrics.Terminal())
        >>> recorder.close()
    """

    def __init__(self, hook: Hook, sinks: Sequence[Sink], every: int, least_s: float = 0.0) -> None:
        """`least_s`: leave out records that would follow another one in less time."""
        if hook.traced:
            raise RegisterError(NO_STEPS.format(what="metrics.record"))
        self._hook, self._every, self._least_s = hook, every, least_s
        self._sinks = list(sinks) if _is_first(hook) else []
        self._due = False
        self._last: _Mark | None = None
        self._watched = 0
        """The last step whose error was written."""
        self._norm = GradNorm()
        for sink in self._sinks:
            sink.open()
        if self._sinks:
            hook.observers.append(self)

    def close(self) -> None:
        """Write nothing more, and close the sinks."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._guarded(sink, sink.close)
        if self in self._hook.observers:
            self._hook.observers.remove(self)

    # -- called by the hook ------------------------------------------------------------------------------------

    def before_mean(self, bucket: Bucket, first: bool) -> None:
        """Decide with the first bucket whether this step is recorded. The first step of all begins the clock."""
        if first and backward_id() != NO_BACKWARD:
            self._due = self._is_due()
            if self._due or self._last is None:
                at_the_very_end(self._end)
        elif first and self._last is None:  # later, DDP's Join may take part in the steps of other ranks
            warnings.warn(NOT_BACKWARD, stacklevel=2)
        if self._due:
            self._norm.before_mean(bucket, first)

    def after_mean(self, bucket: Bucket) -> None:
        """The norm is computed in recorded steps only."""
        if self._due:
            self._norm.after_mean(bucket)

    def on_close(self) -> None:
        """Nothing follows."""
        self.close()

    def _is_due(self) -> bool:
        waited = self._last is None or time.perf_counter() - self._last.at_s >= self._least_s
        return waited and self._hook.steps % self._every == 0

    # -- a record ----------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """The backward pass has ended, and all buckets are averaged."""
        mark = _Mark(time.perf_counter(), self._hook.steps, self._hook.stats())
        if self._due:
            self._write(Record(mark.steps, time.time(), mark.stats.hook, mark.stats.reason, self._values(mark)))
        self._last, self._due = mark, False

    def _values(self, now: _Mark) -> dict[str, float]:
        values = _means(self._last, now)
        norms = {"grad_norm": self._norm.total(), "residual_norm": self._hook.residual_norm()}
        if isinstance(self._hook, ShardedHook):  # each rank has its own shards only
            del norms["grad_norm"]
        values.update({name: float(norm) for name, norm in norms.items() if norm is not None})
        return values | self._errors()

    def _errors(self) -> dict[str, float]:
        """Of the last step that was compared with the exact mean, once."""
        latest = next(reversed(self._hook.watched()), None)
        if latest is None or latest.step == self._watched:
            return {}
        self._watched = latest.step
        found = {"error": latest.error, "cosine": latest.cosine, "update_error": latest.update_error}
        return {name: value for name, value in found.items() if value is not None}

    def _write(self, record: Record) -> None:
        for sink in list(self._sinks):
            self._guarded(sink, partial(sink.write, record))

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        """A full disk or a lost server must not end the training."""
        try:
            call()
        except Exception as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
            name = type(sink).__name__
            warnings.warn(f"the metrics sink {name} failed and gets no more records: {error!r}", stacklevel=2)


def _is_first(hook: Hook) -> bool:
    """Whether this is the first rank of the model; with replicas, of the first of them."""
    replicas = hook.replicas if isinstance(hook, ShardedHook) else None
    return hook.rank == 0 and (replicas is None or replicas.rank == 0)


def _means(last: _Mark | None, now: _Mark) -> dict[str, float]:
    """Means per step since the last record, or since statistics began again."""
    values: dict[str, float] = {}
    before = None
    if last is not None and now.steps > last.steps:
        values["step_s"] = (now.at_s - last.at_s) / (now.steps - last.steps)
        before = last.stats if now.stats.steps - last.stats.steps == now.steps - last.steps else None
    for names, count in ((MOVED, "steps"), (TIMED, "timed_steps")):
        many, less = getattr(now.stats, count), 0 if before is None else getattr(before, count)
        for name in names if many > less else ():
            total = getattr(now.stats, name) * many - (getattr(before, name) * less if less else 0.0)
            values[name] = total / (many - less)
    return {**values, "peak_bytes": now.stats.peak_bytes}
