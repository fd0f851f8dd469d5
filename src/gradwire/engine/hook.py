"""Hook: an exchange at work on one model. It cuts buckets into jobs, and keeps the state of each parameter."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire import kernels
from gradwire.engine import checkpoint
from gradwire.engine.agreement import agree, agree_on_each
from gradwire.engine.fingerprint import fingerprint
from gradwire.engine.observers import GradNorm, Observer, norm_of
from gradwire.engine.residuals import Residuals
from gradwire.engine.runner import Job, Runner
from gradwire.engine.stats import Stats
from gradwire.engine.stream import done
from gradwire.engine.verify import Verification, verify
from gradwire.engine.watch import Watch, Watched
from gradwire.errors import CLOSED, ExchangeError, RegisterError, SpecError
from gradwire.exchanges import Exact, Exchange, exchange
from gradwire.exchanges.base import Comm, Levels
from gradwire.exchanges.bucket import Bucket, Memory, Segment, Steps
from gradwire.exchanges.feedback import fed_back, withheld
from gradwire.exchanges.whiten import SecondMoments
from gradwire.version import __version__

Scale = Callable[[], float] | None
"""Gives a last factor for the mean, when the exchange is done."""
NO_STEPS = "{what} needs to see the steps, which DDP's compiled reducer hides; leave it out"


class Pilot(Protocol):
    """Chooses the exchange of a hook while the model trains: see `gradwire.auto`."""

    reason: str
    """Why the hook uses its exchange, in a sentence."""

    def on_step(self) -> None:
        """A step begins. The exchange may be changed now."""

    def on_bucket(self, bucket: Bucket) -> None:
        """A bucket of local gradients has arrived."""


class Hook:
    """Averages buckets over the ranks of one group: what `gradwire.register` returns.

    Call `switch`, `verify`, `state_dict(merged=True)` and `close` on all ranks together, between steps.

    Examples:
        >>> hook = gradwire.register(model, "int8")
        >>> ...  # train
        >>> hook.stats().wait_s, hook.verify()
    """

    can_pack_residuals: ClassVar[bool] = False
    """Whether residuals can be kept in 8 bits."""

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
        requested: str | None = None,
        traced: bool = False,
        unused: bool = False,
        moments: SecondMoments | None = None,
        agreed: bool = False,
    ) -> None:
        """`requested` is the user's spec, if it is not that of the exchange. `traced`: for DDP's compiled reducer.

        `unused`: the caller discards the mean of tensors whose gradients are zero on all ranks. `moments`: those of the
        optimizer, for exchanges that use them. `agreed`: it is known that all ranks request the same.
        """
        self.exchange = exchange
        self.moments = moments
        self.rank, self.size, self.device = rank, size, device
        self.runner = runner
        self.layouts: dict[int, tuple[Segment, ...]] = {}
        self.observers: list[Observer] = []
        """Called with every bucket, before and after it is averaged, in this order."""
        self.pilot: Pilot | None = None
        """Chooses the exchange, if the spec is `auto`."""
        self.watch: Watch | None = None
        """Compares some steps with the exact mean, if `register` was called with `watch`."""
        self._chunk_bytes = chunk_bytes
        self._params = params
        self.replicated = params
        """What must be the same on all ranks, for `verify`: all parameters, those without a gradient too."""
        self.checkpointed: Callable[[], Iterable[tuple[str, Tensor]]] | None = None
        """What a checkpoint may hold state of, if its shapes are not those of `replicated`."""
        self.traced = traced
        self._unused = unused
        self._residuals = Residuals()
        self._memory: Memory = {}
        self._norm: GradNorm | None = None
        self._steps = Steps()
        self._close = weakref.finalize(self, runner.close)
        self._close.atexit = False  # the runner closes itself at exit
        self._enter(exchange, requested or str(exchange), agreed=agreed)

    # -- averaging ---------------------------------------------------------------------------------------------

    def begin(self, bucket: Bucket, first: bool | None = None) -> bool:
        """Count a bucket; True if it opens a step. The caller may know better, and says so with `first`."""
        if self.device.type != "cpu":
            self.runner.check()
        first = self._steps.add(bucket.index, first)
        self.runner.meter.begin(first)
        if first:
            self.layouts.clear()
            if self.watch is not None:
                self.watch.begin(self.steps, str(self.exchange))
        self.layouts[bucket.index] = bucket.segments
        for observer in self.observers:
            observer.before_mean(bucket, first)
        return first

    def opens_step(self, bucket: Bucket) -> bool:
        """What `begin` will return. Until then the exchange can still be changed for the whole step."""
        return self._steps.begins_with(bucket.index)

    def mean(self, bucket: Bucket, scale: Scale = None, *, step: int | None = None) -> Future[Tensor]:
        """Average a bucket in place, beside whatever the caller does next; the future's value is `bucket.flat`.

        All ranks must call this for the same buckets in the same order. `scale` gives a last factor, the same on all
        ranks, when the exchange is done. `step` is the number of steps before this one, if it is not the hook's.
        """
        if self.size == 1 or self.exchange.lanes == 0 or bucket.flat.numel() == 0:
            self._check_open()
            self._finish(bucket)
            return done(bucket.flat)
        step = max(self.steps - 1, 0) if step is None else step
        moment_of = self.moments.for_bucket(step) if self.moments and self.exchange.reads_optimizer else None
        bucket = dataclasses.replace(bucket, step=step, memory=self._memory, moment_of=moment_of)
        after = (lambda: self._finish(bucket)) if self.observers else None
        jobs = self._jobs(bucket, scale)
        if self.watch is not None and self.watch.due and scale is None and not bucket.flat.is_sparse:
            jobs, after, sample = self.watch.add(bucket, jobs, after)
            self.runner.adopt([sample])
        return self.runner.submit(jobs, bucket.flat, after, what=f"step {step + 1}, bucket {bucket.index}")

    def _jobs(self, bucket: Bucket, scale: Scale) -> list[Job]:
        """What averages a bucket: one job per chunk, each with its part of the residual."""
        exchange, residuals = self.exchange, self._residuals
        if bucket.flat.is_sparse:
            return [_job(Exact(), bucket, None, scale)]
        chunks = self.chunks(bucket)
        sizes = [chunk.flat.numel() for chunk in chunks]
        if exchange.takes_residual:
            parts = residuals.of(bucket).split(sizes)
            return [_job(exchange, *pair, scale, self._unused) for pair in zip(chunks, parts, strict=True)]
        if residuals.by_param and (pending := residuals.pending(bucket)) is not None:  # from before a switch
            parts = pending[0].split(sizes)
            return [
                _applying_job(exchange, chunk, part, pending[1], scale, self._unused)
                for chunk, part in zip(chunks, parts, strict=True)
            ]
        return [_job(exchange, chunk, None, scale) for chunk in chunks]

    def _finish(self, bucket: Bucket) -> None:
        for observer in self.observers:
            observer.after_mean(bucket)

    def try_out(self, bucket: Bucket, residual: Tensor | None = None) -> None:
        """Average a bucket in place and wait for it, as after the warm-up. It leaves state and statistics alone.

        What the exchange keeps goes to `residual` and to the bucket's own `memory`, if there are any.
        """
        bucket = dataclasses.replace(bucket, step=max(bucket.step, self.steps, self.exchange.warmup))
        chunks = self.chunks(bucket)
        parts = [None] * len(chunks) if residual is None else residual.split([chunk.flat.numel() for chunk in chunks])
        jobs = [_job(self.exchange, *pair) for pair in zip(chunks, parts, strict=True)]
        self.runner.submit(jobs, bucket.flat, counted=False).wait()

    def run(self, job: Job) -> None:
        """Run a job on the hook's lanes and wait for it. All ranks together, between steps."""
        self._check_open()
        self.runner.run(job)

    def chunks(self, bucket: Bucket) -> list[Bucket]:
        """Equal parts near the wanted size, cut at whole blocks of every rank's share, or between tensors."""
        flat, unit = bucket.flat, self.size * self.exchange.align
        wanted = self._chunk_bytes or self.exchange.chunk_bytes(self.size)
        if self._chunk_bytes is None and not self.runner.overlaps:
            return [bucket]  # one stream runs chunks one after the other, so that cutting only costs launches
        parts = max(1, round(flat.numel() * flat.element_size() / wanted))
        if unit == 0:
            return bucket.chunks(-(-flat.numel() // parts), whole=True)
        return bucket.chunks(-(-flat.numel() // (parts * unit)) * unit)

    # -- what users call ---------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Averages per step since registration or the last `switch`. It never waits for an accelerator."""
        reason = "" if self.pilot is None else self.pilot.reason
        return self.runner.meter.stats(str(self.exchange), reason, kernels.in_use(self.device))

    def reset_stats(self) -> None:
        """Start the statistics again, for instance after the first steps."""
        self.runner.meter.reset()

    def watched(self) -> tuple[Watched, ...]:
        """With `register(..., watch=...)`: how the watched steps since the last `switch` compare with the exact mean.

        Call it between steps. Steps whose gradients were not finite are left out.
        """
        if self.watch is None:
            return ()
        self.watch.finish(str(self.exchange))
        return tuple(self.watch.records)

    def grad_norm(self) -> Tensor:
        """The norm of all averaged gradients of the last step, as `torch.nn.utils.get_total_norm` computes it.

        Call it between `backward()` and anything that changes the gradients. The first call reads all gradients. From
        then on the engine adds up the norm of each bucket as soon as it is averaged, beside the backward pass, so that
        clipping needs no pass of its own. It does not wait for an accelerator.

        Returns:
            One number, on the device of the model; the same on all ranks that average with the same kernels. With a
            `GradScaler` it is multiplied by the loss scale, as the gradients are. With `noop` it is that of this rank.

        Raises:
            RegisterError: Under DDP's compiled reducer, before the first step, or if the first call comes when the
                gradients are gone already.

        Examples:
            >>> loss.backward()
            >>> torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, hook.grad_norm())
        """
        if self.traced:
            raise RegisterError(NO_STEPS.format(what="grad_norm"))
        if self._norm is not None:
            return self._norm.total()
        self._norm = GradNorm()
        self.observers.append(self._norm)
        params = [segment.param for segments in self.layouts.values() for segment in segments]
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            raise RegisterError(
                "there are no gradients to read the norm of: no step was averaged yet, or step_in_backward has freed "
                "them; hook.grad_norm() works from the next step on"
            )
        return norm_of(grads)

    def residual_norm(self) -> Tensor | None:
        """The norm of what error feedback keeps on this rank; None if it keeps nothing. Between steps."""
        return self._residuals.norm()

    @property
    def steps(self) -> int:
        """Steps averaged since registration."""
        return self._steps.count

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps.count = count

    @property
    def fired(self) -> int:
        """Steps averaged by this process since registration, or since a checkpoint was loaded."""
        return self._steps.seen

    def verify(self) -> Verification:
        """Check the hook on the model as it is. All ranks together, between steps; training goes on as if without it.

        The hook must have run on every rank since registration, or since a checkpoint was loaded, and all ranks must
        hold the same parameters, frozen ones too. Then it averages gradients of the model's own shapes and scales, for
        three steps with a state of their own, the last with an inf. The results must be the same bits on all ranks,
        equal those of the exchange's reference and be within its bound. Of a large bucket only whole tensors of
        together 4 million values divided by the number of ranks are compared.

        Returns:
            What was checked and measured; `str()` of it is one line for a log.

        Raises:
            VerifyError: On all ranks, if any of this does not hold on any rank.
        """
        return verify(self, list(self.replicated()))

    def switch(self, spec: str | Exchange, **options: object) -> None:
        """Use another hook from the next step on. All ranks together, between steps. It ends `auto`.

        Args:
            spec: The new hook, as for `gradwire.register`.
            options: Options of the spec as keywords.

        Raises:
            SpecError: If the spec is not valid.
            RegisterError: If the ranks do not request the same hook.

        What error feedback has kept so far is applied in the next step, not lost.
        """
        self.use(exchange(spec, **options))
        self.pilot = None

    def use(self, new: Exchange, *, agreed: bool = False) -> None:
        """The part of `switch` that `auto` uses too. `agreed`: all ranks have used it before, and do so now."""
        self._check_open()
        if agreed:
            self._open(new)
        else:
            self._enter(new, str(new))
        if self.watch is not None and str(new) != str(self.exchange):
            self.watch.reset()
        self.exchange = new
        self.runner.meter.reset()

    def state_dict(self, *, merged: bool = False) -> dict[str, Any]:
        """The state for a checkpoint: tensors, numbers and text only, which `torch.load` accepts with its defaults.

        Args:
            merged: If False, the state of this rank: save it on every rank, and resuming on the same number of ranks is
                exact. If True, the state of all ranks (call it on all of them together), which one file can hold and
                any number of ranks can load.
        """
        residuals = self._residuals.copies()
        if merged and self.size > 1:
            residuals = checkpoint.merged(residuals, self.replicated(), self.sum_over_ranks)
        rank = checkpoint.MERGED if merged else self.rank
        return checkpoint.pack(str(self.exchange), self.steps, rank, self.size, residuals, self._memory)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint.

        Args:
            state: This rank's own state, a merged one, or the list of all ranks' states. Only the sum of the residuals
                over the ranks matters, so on another number of ranks each starts from sum / ranks.

        Raises:
            StateError: If the state is damaged or belongs to another model. The hook then stays as it was.
        """
        states: list[Any] = list(state) if isinstance(state, list | tuple) else [state]
        step, residuals = checkpoint.unpack(states, self.rank, self.size)
        # All parameters: one may have been frozen since, or be unfrozen later.
        params = list((self.checkpointed or self.replicated)())
        checkpoint.check_residuals(residuals, params)
        memory = checkpoint.copy_of(states[0]["memory"], self.device)
        checkpoint.check_names(memory, params)
        self.exchange.check_memory(memory, params)
        if self.pilot is None:
            checkpoint.warn_if_other(states[0], str(self.exchange))
        self._residuals.load({name: value.to(self.device) for name, value in residuals.items()})
        self.runner.adopt(tensor for kept in memory.values() for tensor in kept.values())
        self._memory = memory
        self._steps = Steps(step)

    def kept_of(self, names: Iterable[str]) -> tuple[dict[str, Tensor], Memory]:
        """Copies of the residuals and of the exchange's memory of some parameters, none of them in a job under way."""
        kept, names = self._residuals.by_param, list(names)
        memory = {name: self._memory[name] for name in names if name in self._memory}
        return {name: kept[name].clone() for name in names if name in kept}, checkpoint.copy_of(memory, None)

    def scale_state(self, factor: float) -> None:
        """Multiply all residuals, when the unit of the gradients changes: by new loss scale / old loss scale, say."""
        self._residuals.scale_(factor)

    def close(self) -> None:
        """End threads and connections. The model cannot train on afterwards, as DDP cannot remove a hook."""
        for observer in list(self.observers):
            observer.on_close()
        self._close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._close.alive

    # -- machinery ---------------------------------------------------------------------------------------------

    def _enter(self, new: Exchange, requested: str, *, agreed: bool = False) -> None:
        """Make sure that all ranks request the same exchange, and make its lanes."""
        if self.traced and not new.traceable:
            raise RegisterError(
                f"{new} keeps state between steps, which DDP's compiled reducer has no place for; set "
                "torch._dynamo.config.optimize_ddp = 'ddp_optimizer' before building the model, or use another hook"
            )
        if new.packs_residual and not self.can_pack_residuals:
            raise SpecError(f"{new}: residual=int8 is for the gradients of models with fully_shard; leave it out here")
        if new.reads_optimizer and self.moments is None:
            raise RegisterError(
                f"{new} divides gradients by the optimizer's second moment; call gradwire.register(model, ..., "
                "optimizer=optimizer)"
            )
        new.check(list(self._params()))
        levels = new.levels(self.size)
        if self.size == 1:
            return
        kernels.load()
        new.warm_up(self.device)
        if not agreed:
            self._agree_on(new, requested, levels)
        self._open(new)

    def _agree_on(self, new: Exchange, requested: str, levels: Levels | None) -> None:
        self.runner.open(1)
        self.agree("version", f"gradwire {__version__}, torch {torch.__version__}")
        self.agree("hook", requested)
        if new.reads_optimizer and self.moments is not None:
            states = [f"{name} {int(fingerprint(moment))}" for name, moment in self.moments.present()]
            self.agree("optimizer state", "; ".join(states))
        if new.same_kernels:
            self.agree("kernels (numba installed, or not)", "numba" if kernels.load() else "torch")
        self.agree("chunk_bytes", str(self._chunk_bytes or "default"))
        self.agree("find_unused_parameters", str(self._unused))
        if levels is not None:
            self.agree("ranks of a node", str(levels.node))

    def _open(self, new: Exchange) -> None:
        """Make the lanes of an exchange that all ranks use."""
        if self.size > 1:
            self.runner.open(new.lanes + self._unused)
            self.runner.split(new.levels(self.size))

    def gather(self, values: Tensor) -> Tensor:
        """(n,) on each rank -> (size, n). All ranks together, between steps."""
        if self.size == 1:
            return values[None]
        got: list[Tensor] = []
        self.run(lambda comm: got.append(comm.all_gather(values).clone()))
        return got[0]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum over the ranks, on the CPU. All ranks together, between steps."""
        total = values.to(self.device)

        def add_up(comm: Comm) -> None:
            comm.all_reduce_(total)

        self.run(add_up)
        return total.to("cpu")

    def agree(self, what: str, text: str) -> None:
        """Raise RegisterError unless all ranks pass the same text. All ranks together."""
        agree(self.runner.run, what, text, self.device)

    def agree_on_model(self, params: Iterable[tuple[str, Tensor]]) -> None:
        """Raise RegisterError unless all ranks have the same parameters in the same order. All ranks together."""
        if self.size > 1:
            texts = [f"{name} {tuple(param.shape)} {param.dtype}" for name, param in params]
            agree_on_each(self.runner.run, "parameter", texts, self.device)

    def _check_open(self) -> None:
        if self.closed:
            raise ExchangeError(CLOSED)

    def __repr__(self) -> str:
        return f"<gradwire.Hook {self.exchange} rank={self.rank} size={self.size} steps={self.steps}>"


def _job(
    exchange: Exchange, bucket: Bucket, residual: Tensor | None = None, scale: Scale = None, unused: bool = False
) -> Job:
    """What averages one chunk."""

    def run(comm: Comm) -> None:
        with nullcontext() if residual is None or not unused else withheld(bucket, comm, residual):
            exchange.mean_(bucket, comm, residual)
        if scale is not None:
            bucket.flat.mul_(scale())

    return run


def _applying_job(
    exchange: Exchange, bucket: Bucket, residual: Tensor, applied: list[Tensor], scale: Scale, unused: bool
) -> Job:
    """For an exchange that keeps no residual: apply a pending one. It stays pending if the mean is not finite."""

    def run(comm: Comm) -> None:
        held = withheld(bucket, comm, residual) if unused else nullcontext()
        with held, fed_back(bucket.flat, residual) as work:
            exchange.mean_(dataclasses.replace(bucket, flat=work), comm)
            residual.zero_()
        applied.append(torch.isfinite(bucket.flat).all() & ~residual.any())
        if scale is not None:
            bucket.flat.mul_(scale())

    return run
