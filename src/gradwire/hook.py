"""Step 8: Hook, an exchange at work on one model: step count, per-parameter state, statistics."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.futures import Future

from gradwire import checkpoint, kernels
from gradwire.bucket import Bucket, Memory, Segment
from gradwire.comm import Levels, gather_texts
from gradwire.errors import CLOSED, ExchangeError, RegisterError
from gradwire.exchanges import Exchange, exchange
from gradwire.feedback import Residuals
from gradwire.jobs import chunks_of, job_of, jobs_of
from gradwire.runner import Job, Runner
from gradwire.stats import Meter, Stats
from gradwire.stream import done
from gradwire.verify import Verification, verify

if TYPE_CHECKING:
    from gradwire.policies.pilot import Pilot


class Hook:
    """What `gradwire.register` returns. Averages buckets over the ranks of one group.

    `switch`, `verify`, `state_dict(merged=True)` and `close` are for all ranks together, between steps.
    """

    def __init__(
        self,
        exchange: Exchange,
        runner: Runner,
        *,
        rank: int,
        size: int,
        device: torch.device,
        chunk_bytes: int | None = None,
        params: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        asked: str | None = None,
        traced: bool = False,
    ) -> None:
        """`asked` is what the user asked for, where that is not the exchange. `traced`: for DDP's compiled reducer."""
        self.exchange = exchange
        self.rank, self.size, self.device = rank, size, device
        self.runner = runner
        self.layouts: dict[int, tuple[Segment, ...]] = {}
        self.after_mean: Callable[[Bucket], None] | None = None
        """Called with every bucket once it is averaged, before DDP gets it, in a thread of the engine: see `optim`."""
        self.before_mean: Callable[[Bucket, bool], None] | None = None
        """Called with every bucket as it comes, in the thread that runs backward, and whether it opens a step."""
        self.pilot: Pilot | None = None
        """Who chooses the exchange, under the spec `auto`."""
        self._chunk_bytes = chunk_bytes
        self._params = params
        self._traced = traced
        self._residuals = Residuals()
        self._memory: Memory = {}
        self._meter = Meter()
        self._close = weakref.finalize(self, runner.close)
        self._close.atexit = False  # the runner has its own way to go
        self._enter(exchange, asked or str(exchange))

    # -- averaging ---------------------------------------------------------------------------------------------

    def begin(self, bucket: Bucket, first: bool | None = None) -> bool:
        """Count a bucket. True if it opens a step, which `first` can say where indices do not show it."""
        first = self._meter.begin(bucket.index, first)
        if first:
            self.layouts.clear()
        self.layouts[bucket.index] = bucket.segments
        if self.before_mean is not None:
            self.before_mean(bucket, first)
        return first

    def opens_step(self, bucket: Bucket) -> bool:
        """What `begin` will say. Before it, the exchange can still be changed for the whole step."""
        return self._meter.opens_step(bucket.index)

    def mean(
        self, bucket: Bucket, scale: Callable[[], float] | None = None, *, step: int | None = None
    ) -> Future[Tensor]:
        """Average a bucket in place, beside whatever the caller does next; the future's value is `bucket.flat`.

        All ranks must call this for the same buckets in the same order. `scale` gives a last factor, the same on all
        ranks, when the exchange is done. `step` is how many steps the bucket has seen, if not as many as the hook.
        """
        if self.size == 1 or self.exchange.lanes == 0 or bucket.flat.numel() == 0:
            self._check_open()
            self._finish(bucket)
            return done(bucket.flat)
        step = max(self.steps - 1, 0) if step is None else step
        bucket = dataclasses.replace(bucket, step=step, memory=self._memory)
        after = None if self.after_mean is None else lambda: self._finish(bucket)
        jobs = jobs_of(bucket, self._chunks(bucket), self.exchange, self._residuals, scale)
        return self.runner.submit(jobs, bucket.flat, self._meter.add, after)

    def _finish(self, bucket: Bucket) -> None:
        if self.after_mean is not None:
            self.after_mean(bucket)

    def try_out(self, bucket: Bucket) -> None:
        """Average a bucket in place and wait for it, leaving feedback and statistics alone. A warm-up is over."""
        bucket = dataclasses.replace(bucket, step=max(self.steps, getattr(self.exchange, "warmup", 0)))
        jobs = [job_of(self.exchange, chunk) for chunk in self._chunks(bucket)]
        self.runner.submit(jobs, bucket.flat, lambda *_: None).wait()

    def run(self, job: Job) -> None:
        """Run a job of one's own on the hook's lanes and wait for it. All ranks together, between steps."""
        self._check_open()
        self.runner.run(job)

    def _chunks(self, bucket: Bucket) -> list[Bucket]:
        return chunks_of(bucket, self.exchange, self.size, self._chunk_bytes)

    # -- what users call ---------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Averages per step since registration or the last `switch`. Costs nothing, synchronises nothing."""
        return self._meter.stats(str(self.exchange), "" if self.pilot is None else self.pilot.reason)

    def reset_stats(self) -> None:
        """Start averaging anew, for instance after the first steps."""
        self._meter.reset()

    @property
    def steps(self) -> int:
        """Steps averaged since registration."""
        return self._meter.total_steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._meter.total_steps = count

    def verify(self) -> Verification:
        """Check the promises on the model as it is; raises VerifyError where one is broken.

        The hook has run on every rank; all ranks hold the same parameters, bit for bit; and on gradients of the
        model's own shapes and scales the average is within the exchange's bound of the exact mean.
        """
        return verify(self, list(self._params()))

    def switch(self, spec: str | Exchange, **options: object) -> None:
        """Go on with another exchange from the next step. What feedback still owes is paid, not lost. Ends `auto`."""
        self.go_on_with(exchange(spec, **options))
        self.pilot = None

    def go_on_with(self, new: Exchange, *, agreed: bool = False) -> None:
        """The part of `switch` that `auto` uses too. `agreed`: all ranks have gone on with it before, and do now."""
        self._check_open()
        if agreed:
            self._open(new)
        else:
            self._enter(new, str(new))
        self.exchange = new
        self._meter.reset()

    def state_dict(self, *, merged: bool = False) -> dict[str, Any]:
        """Tensors, numbers and text only; `torch.load` takes it with its defaults.

        By default this rank's own state: save it on every rank, and resuming on as many ranks is exact. With `merged`
        (all ranks together) the state of all ranks, which one file can hold and any number of ranks can load.
        """
        residuals = self._residuals.by_name()
        if merged and self.size > 1 and residuals:
            self.run(lambda comm: checkpoint.merge_(residuals, comm))
        rank = checkpoint.MERGED if merged else self.rank
        return checkpoint.pack(str(self.exchange), self.steps, rank, self.size, residuals, self._memory)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint: this rank's own state, a merged one, or the list of all ranks' states.

        Only the sum of the residuals over the ranks matters, so on another number of ranks each starts from
        sum / ranks. Refused states leave the hook as it was.
        """
        states: list[Any] = list(state) if isinstance(state, list | tuple) else [state]
        step, residuals = checkpoint.unpack(states, self.rank, self.size)
        checkpoint.check_shapes(residuals, self._params())
        memory = checkpoint.copy_of(states[0]["memory"], self.device)
        checkpoint.check_names(memory, self._params())
        if (check_memory := getattr(self.exchange, "check_memory", None)) is not None:
            check_memory(memory, list(self._params()))
        if self.pilot is None:
            checkpoint.tell_if_other(states[0], str(self.exchange))
        self._residuals.load({name: value.to(self.device) for name, value in residuals.items()})
        self._memory = memory
        self.steps = step

    def scale_state(self, factor: float) -> None:
        """Multiply what feedback keeps, when the gradients' unit changes: new loss scale / old, say."""
        self._residuals.scale_(factor)

    def close(self) -> None:
        """End threads and connections. The model cannot train on afterwards: DDP cannot lose its hook."""
        self._close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._close.alive

    # -- machinery ---------------------------------------------------------------------------------------------

    def _enter(self, new: Exchange, asked: str) -> None:
        """Make sure that all ranks mean the same exchange, and make its lanes."""
        if self._traced and not getattr(new, "traceable", True):
            raise RegisterError(
                f"{new} keeps state between steps, which DDP's compiled reducer has no place for; set "
                "torch._dynamo.config.optimize_ddp = 'ddp_optimizer' before building the model, or use another hook"
            )
        check, warm_up = getattr(new, "check", None), getattr(new, "warm_up", None)
        if check is not None:
            check(list(self._params()))
        levels = self._levels(new)
        if self.size == 1:
            return
        kernels.load()
        if warm_up is not None:
            warm_up(self.device)
        self.runner.open(1)
        self.agree("hook", asked)
        if getattr(new, "same_kernels", False):
            self.agree("kernels (numba installed, or not)", "numba" if kernels.load() else "torch")
        self.agree("chunk_bytes", str(self._chunk_bytes or "default"))
        if levels is not None:
            self.agree("ranks of a node", str(levels.node))
        self._open(new)

    def _open(self, new: Exchange) -> None:
        """Lanes for an exchange that all ranks mean."""
        if self.size > 1:
            self.runner.open(new.lanes)
            self.runner.split(self._levels(new))

    def _levels(self, of: Exchange) -> Levels | None:
        split = getattr(of, "levels", None)
        return None if split is None else cast(Levels, split(self.size))

    def gather(self, values: Tensor) -> Tensor:
        """(n,) on each rank -> (size, n). All ranks together, between steps."""
        if self.size == 1:
            return values[None]
        got: list[Tensor] = []
        self.run(lambda comm: got.append(comm.all_gather(values).clone()))
        return got[0]

    def agree(self, what: str, text: str) -> None:
        """Raise RegisterError unless all ranks say the same text. All ranks together."""
        said: list[str] = []
        self.runner.run(lambda comm: said.extend(gather_texts(comm, text, self.device)))
        if len(set(said)) > 1:
            told = ", ".join(f"rank {rank} {other!r}" for rank, other in enumerate(said))
            raise RegisterError(f"all ranks must ask for the same {what}, got {told}")

    def _check_open(self) -> None:
        if self.closed:
            raise ExchangeError(CLOSED)

    def __repr__(self) -> str:
        return f"<gradwire.Hook {self.exchange} rank={self.rank} size={self.size} steps={self.steps}>"
