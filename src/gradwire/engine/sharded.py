"""ShardedHook: the communication of a sharded model through exchanges. See `gradwire.models.fsdp` for FSDP2.

Gradients are reduce-scattered and parameters gathered, each in chunks of columns (a part of every row) that travel as a
pipeline. The two directions have engines of their own: a gather, which the model waits for, does not queue behind
gradients. Averages across replicas are those of an ordinary `Hook`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.futures import Future

from gradwire._torch.fsdp import local_values
from gradwire.engine import checkpoint, sharded_state
from gradwire.engine.agreement import agree
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import Hold, Traffic
from gradwire.engine.observers import norm_of
from gradwire.engine.residuals import Residuals
from gradwire.engine.runner import Job, Runner
from gradwire.engine.shard_jobs import Message, gather_job, scatter_job
from gradwire.engine.shard_residuals import ShardResiduals
from gradwire.engine.sharded_verify import verify_sharded
from gradwire.engine.stats import Stats
from gradwire.engine.stream import done
from gradwire.engine.verify import Verification
from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.bucket import Bucket, Segment, Steps, cut
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.feedback import finite
from gradwire.exchanges.sharded import Shard, check_gathers, check_scatters

Row = tuple[Segment, ...]
"""The segments of one row of a message."""


class ShardedHook(Hook):
    """Carries the gradients and parameters of one sharded model: what `gradwire.register` returns for FSDP2.

    `stats`, `switch`, `verify`, `state_dict` and `close` are those of `Hook`, and cover all three directions.
    """

    can_pack_residuals = True

    def __init__(
        self,
        exchange: Exchange,
        runner: Runner,
        *,
        gather: Exchange,
        gather_runner: Runner,
        shards: Sequence[Shard],
        replicas: Hook | None = None,
        **options: Any,
    ) -> None:
        """For `options` see `Hook`."""
        check_scatters(exchange)
        check_gathers(gather)
        self.gathers, self.gather_runner = gather, gather_runner
        self.replicas = replicas
        self.shards = {shard.name: shard for shard in shards}
        self.rows: dict[int, Row] = {}
        """The last row of gradients that each unit of the model has reduced, by the unit's number."""
        self.gathered: dict[int, Row] = {}
        """The same of gathered parameters."""
        self.plain_passes = 1
        """How often a plain reduce-scatter sends the gradients: gloo does it as an all-reduce, which is twice."""
        self.hold: Hold | None = None
        """What makes plain collectives take longer, on an emulated link."""
        self.uninstall: Callable[[], None] = lambda: None
        """Gives the model its own collectives back."""
        self._gathers_anew = True
        self._opens_step = False
        """Whether the next message to be reduced opens a step."""
        self._message: Message | None = None
        self._last: Future[Tensor] | None = None
        """The last message to be reduced through a codec, and its result."""
        self._blocked_s = {"gradients": 0.0, "parameters": 0.0, "replicas": 0.0}
        super().__init__(exchange, runner, **options)
        self._residuals = cast(Residuals, ShardResiduals(self.size, shards, self.device))
        self._enter_gather(gather)

    def held(self, collective: str, sent_bytes: float, run: Callable[[], Any]) -> Any:
        """Run a collective of torch, at the speed of the emulated link if there is one."""
        began = time.perf_counter()
        result = run()
        if self.hold is not None:
            self.hold(collective, self.size, sent_bytes, time.perf_counter() - began)
        return result

    # -- gradients ---------------------------------------------------------------------------------------------

    def begin_backward(self, index: int, first: bool) -> None:
        """The unit with this number is about to reduce its gradients; `first`: it is the first one of a step."""
        self._opens_step = self._steps.add(index, first)
        self.runner.meter.begin(first)
        self._gathers_anew |= first

    def scatter(
        self, index: int, rows: Tensor, out: Tensor, names: Sequence[str], alpha: float, plain: Callable[[], object]
    ) -> Future[Tensor]:
        """`out = alpha * (sum over the ranks of this rank's row)`, beside whatever the caller does next.

        Args:
            index: The number of the unit.
            rows: (size, n), the gradients of this rank, which may be changed. They are held until they are encoded.
            out: (n,), the value of the future.
            names: The parameters whose gradients lie in a row, in order.
            alpha: The factor of the sum.
            plain: Does the same without an exchange, for `exact`.
        """
        self._check_open()
        row = tuple(self.shards[name].segment for name in names)
        self.rows[index] = row
        for observer in self.observers:
            observer.before_mean(Bucket(index, rows, row, is_last=False), self._opens_step)
        self._opens_step = False
        if self.pilot is not None:
            self.pilot.on_bucket(Bucket(index, rows, row, is_last=False))
        pending = self._apply_pending(rows, row)
        future = self._scatter(Bucket(index, out, row, is_last=False, step=max(self.steps - 1, 0)), rows, alpha, plain)
        if pending:
            self._settle(future.wait(), pending)
        return future

    def _scatter(self, bucket: Bucket, rows: Tensor, alpha: float, plain: Callable[[], object]) -> Future[Tensor]:
        out, current = bucket.flat, self.exchange
        if isinstance(current, Coded):
            jobs = self.scatter_jobs(bucket, rows, alpha, self._store)
            self._last = self.runner.submit(jobs, out, what=f"step {self.steps}, gradients of unit {bucket.index}")
            return self._last
        if current.averages:
            moved_bytes = self.plain_passes * rows.nbytes * (self.size - 1) / self.size
            how = "all_reduce" if self.plain_passes == 2 else "all_to_all"
            self._metered(self.runner, partial(self.held, how, moved_bytes, plain), moved_bytes)
        else:
            out.copy_(rows[self.rank])
        return done(out)

    def wait_encoded(self) -> None:
        """Wait until the gradients that were given to `scatter` last are no longer needed."""
        message, self._message, began = self._message, None, time.perf_counter()
        if message is not None and self._last is not None:
            message.wait(self._last)
            self._blocked_s["gradients"] += time.perf_counter() - began

    def scatter_jobs(self, bucket: Bucket, rows: Tensor, alpha: float, store: ShardResiduals) -> list[Job]:
        """What reduce-scatters a message: one job per chunk of columns."""
        coded, chunks = cast(Coded, self.exchange), self.columns(bucket, rows.element_size(), self.exchange)
        if coded.takes_residual:
            store.prepare([chunk.segments for _, chunk in chunks], coded.packs_residual)
        kept = store if coded.takes_residual else None
        self._message = message = Message(rows, len(chunks))
        return [scatter_job(coded, message, where, chunk, alpha, kept) for where, chunk in chunks]

    def columns(self, bucket: Bucket, itemsize: int, wanted: Exchange) -> list[tuple[slice, Bucket]]:
        """Cut a message into chunks of columns near the wanted size, at whole blocks of the codec."""
        numel = bucket.flat.numel()
        total = numel * self.size * itemsize
        parts = max(1, round(total / (self._chunk_bytes or wanted.chunk_bytes(self.size))))
        step = max(-(-numel // (parts * wanted.align)) * wanted.align, 1)
        borders = [(begin, min(begin + step, numel)) for begin in range(0, numel, step)]
        return [
            (
                slice(begin, end),
                dataclasses.replace(bucket, flat=bucket.flat[begin:end], segments=cut(bucket.segments, begin, end)),
            )
            for begin, end in borders
        ]

    @property
    def _store(self) -> ShardResiduals:
        return cast(ShardResiduals, self._residuals)

    def _apply_pending(self, rows: Tensor, row: Row) -> list[str]:
        """After a switch to an exchange without feedback: add what an earlier one has kept. The names it was for."""
        pending = [segment.name for segment in row if segment.name in self._store]
        if self.exchange.takes_residual or not pending or not self.exchange.averages:
            return []
        self._store.prepare([row], packed=False)
        rows.add_(self._store.take(row))
        return pending

    def _settle(self, out: Tensor, names: list[str]) -> None:
        """The residual has been applied, unless the sum of any rank is not finite."""
        if self.gather(finite(out).to(torch.int32).reshape(1)).all():
            self._store.drop(names)

    # -- parameters --------------------------------------------------------------------------------------------

    def gather_rows(self, index: int, rows: Tensor, row: Row) -> Future[Tensor]:
        """Fill `rows`, (size, n), with the decoded row of every rank; `row` has its segments."""
        self._check_open()
        self.gathered[index] = row
        self._begin_gather()
        bucket = Bucket(index, rows[0], row, is_last=False)
        what = f"step {self.steps + 1}, parameters of unit {index}"
        return self.gather_runner.submit(self.gather_jobs(bucket, rows), rows, what=what)

    def gather_jobs(self, bucket: Bucket, rows: Tensor) -> list[Job]:
        """What gathers a message: one job per chunk of columns."""
        coded = cast(Coded, self.gathers)
        chunks = self.columns(bucket, rows.element_size(), coded)
        return [gather_job(coded, rows[:, where], chunk) for where, chunk in chunks]

    def plain_gather(self, plain: Callable[[], Any], moved_bytes: float) -> Any:
        """Gather as the model does by itself, and count it."""
        self._begin_gather()
        return self._metered(self.gather_runner, plain, moved_bytes)

    def _metered(self, runner: Runner, run: Callable[[], Any], sent_bytes: float) -> Any:
        """Run a collective of torch, and count what it moves."""
        began = time.perf_counter()
        try:
            result = run()
        except RuntimeError as error:
            what = "gathering parameters" if runner is self.gather_runner else "reducing gradients"
            raise runner.explained(error, f"{what}, step {self.steps}") from error
        ended = time.perf_counter()
        runner.meter.add(Traffic(sent_bytes, sent_bytes, ended - began, 0.0, began), began, ended)
        return result

    def _begin_gather(self) -> None:
        """The first gather after a backward pass has begun counts as the beginning of a step."""
        self.gather_runner.meter.begin(self._gathers_anew)
        self._gathers_anew = False

    def blocked(self, what: str, wait: Callable[[], Any]) -> Any:
        """Wait for something, and count the time."""
        began = time.perf_counter()
        try:
            return wait()
        finally:
            self._blocked_s[what] += time.perf_counter() - began

    # -- what users call ---------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Averages per step of all directions together. `wait_s` is the time in which the model has waited for them."""
        parts = self.stats_by_part().values()
        sums = {field: sum(getattr(part, field) for part in parts) for field in (*_PER_STEP, "peak_bytes")}
        first = next(iter(parts))
        reason = "" if self.pilot is None else self.pilot.reason
        return dataclasses.replace(first, hook=self.requested, reason=reason, **sums)

    def stats_by_part(self) -> dict[str, Stats]:
        """The same for `gradients` (the reduce-scatter), `parameters` (the gather) and `replicas`, if there are any."""
        own = self.runner.meter.stats(str(self.exchange))
        gathers = self.gather_runner.meter.stats(str(self.gathers))
        steps, counted = max(own.steps, 1), max(gathers.steps, 1)  # an evaluation gathers too, but takes no step
        per_step = {field: getattr(gathers, field) * counted / steps for field in _PER_STEP}
        parts = {"gradients": own, "parameters": dataclasses.replace(gathers, steps=own.steps, **per_step)}
        if self.replicas is not None:
            parts["replicas"] = self.replicas.stats()
        if self.device.type != "cpu":  # the host does not wait
            return parts
        return {name: dataclasses.replace(part, wait_s=self._blocked_s[name] / steps) for name, part in parts.items()}

    def reset_stats(self) -> None:
        """Start the statistics again."""
        self.runner.meter.reset()
        self.gather_runner.meter.reset()
        self._blocked_s = dict.fromkeys(self._blocked_s, 0.0)
        if self.replicas is not None:
            self.replicas.reset_stats()

    def grad_norm(self) -> Tensor:
        """The norm of all gradients, as `Hook.grad_norm`. All ranks together, between steps.

        Each rank reads its own shards, and the ranks exchange one number. Accumulated gradients count with all passes.
        """
        grads = [local_values(param.grad) for _, param in self._params() if param.grad is not None]
        return norm_of(self.gather(norm_of(grads).to(self.device).view(1)).unbind())

    @property
    def requested(self) -> str:
        """What `register` was asked for, in one line."""
        return describe(self.exchange, self.gathers, None if self.replicas is None else self.replicas.exchange)

    @property
    def residual_bytes(self) -> int:
        """The memory that error feedback uses on this rank."""
        return self._store.nbytes

    def verify(self) -> Verification:
        """Check the hook on the model as it is, as `Hook.verify` does. All ranks together, between steps.

        Messages such as the model's own go through the reduce-scatter and the gather, and the results must be those of
        their references, bit for bit. With replicas, their average is checked too, and that all replicas hold the same
        shards. What is `exact` is FSDP2's own collective, and is not tried.
        """
        checked = verify_sharded(self, self.requested)
        if self.replicas is None:
            return checked
        across = self.replicas.verify()
        return checked if checked.error is not None else dataclasses.replace(across, hook=checked.hook)

    def switch(  # type: ignore[override]  # it has more arguments, with which it is the same
        self,
        spec: str | Exchange | None = None,
        *,
        gather: str | Exchange | None = None,
        replicas: str | Exchange | None = None,
        **options: object,
    ) -> None:
        """Use other exchanges from the next step on. All ranks together, between steps.

        Args:
            spec: For the gradients, as for `gradwire.register`; None: as before.
            gather: The same for the parameters.
            replicas: The same for the average across replicas.
            options: Options of `spec` as keywords.

        Raises:
            SpecError: If a spec is not valid, or cannot do what it is for.
            RegisterError: If the ranks do not request the same, or if there are no replicas.
        """
        if spec is not None:
            new = exchange(spec, **options)
            check_scatters(new)
            self.use(new)
        if gather is not None:
            other = exchange(gather)
            self.use_gather(other)
        if replicas is not None:
            if self.replicas is None:
                raise RegisterError("this model has no replicas: register it with replicas=... and mesh=...")
            self.replicas.switch(replicas)
        self.pilot = None
        self.reset_stats()

    def use_gather(self, new: Exchange, *, agreed: bool = False) -> None:
        """The part of `switch` that concerns the parameters; `agreed` as for `use`."""
        check_gathers(new)
        if not agreed:
            self._enter_gather(new)
        self.gathers = new

    def state_dict(self, *, merged: bool = False) -> dict[str, Any]:
        """The state for a checkpoint, as `Hook.state_dict`: residuals by the names of whole parameters.

        A merged state loads on any mesh. This rank's own state resumes exactly on the same mesh.
        """
        return sharded_state.pack(self, self._store.copies(), merged)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a checkpoint, as `Hook.load_state_dict`."""
        states: list[Any] = list(state) if isinstance(state, list | tuple) else [state]
        step, residuals = sharded_state.unpack(self, states)
        checkpoint.check_residuals(residuals, [(name, shard.param) for name, shard in self.shards.items()])
        if self.pilot is None:
            checkpoint.warn_if_other(states[0], str(self.exchange))
        sharded_state.load_replicas(self, states)
        self._residuals.load({name: value.to(self.device) for name, value in residuals.items()})
        self._steps = Steps(step)

    def close(self) -> None:
        """End threads and connections, and give the model its own collectives back: it can train on without a hook."""
        if not self.closed:
            self.uninstall()
            self.gather_runner.close()
            if self.replicas is not None:
                self.replicas.close()
        super().close()

    # -- machinery ---------------------------------------------------------------------------------------------

    def sum_over_all(self, values: Tensor) -> Tensor:
        """The sum over the ranks of all replicas, on the CPU. All of them together, between steps."""
        total = values.to("cpu") if self.size == 1 else self.sum_over_ranks(values)
        return total if self.replicas is None or self.replicas.size == 1 else self.replicas.sum_over_ranks(total)

    def _enter_gather(self, new: Exchange) -> None:
        if self.size == 1:
            return
        new.warm_up(self.device)
        self.gather_runner.open(1)
        agree(self.gather_runner.run, "gather", str(new), self.device)


def describe(exchange: Exchange, gather: Exchange, replicas: Exchange | None) -> str:
    """What a sharded model was registered with, in one line."""
    return f"{exchange}, gather={gather}" + ("" if replicas is None else f", replicas={replicas}")


_PER_STEP = ("buckets", "sent_bytes", "received_bytes", "encode_s", "wire_s", "decode_s", "wait_s")
