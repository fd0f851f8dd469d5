"""register() for models with `fully_shard` (FSDP2): what FSDP2 calls instead of its own collectives.

FSDP2 calls a collective with one message: the gradients of a unit cut into a row per rank, or the row of parameters
that this rank owns. On the CPU its own collectives block. Here a gather returns work, which FSDP2 waits for when it
needs the parameters, so that a gather that it prefetches hides behind the backward pass; and the result of a
reduce-scatter is waited for at the end of the backward pass, unless FSDP2 reads it earlier.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from gradwire._torch.fsdp import Unit, Waited, factor_of, is_premultiplied, local_values, whole_size
from gradwire._torch.optim import NO_BACKWARD, at_end_of_backward, backward_id
from gradwire.engine.lanes import slow_link
from gradwire.engine.sharded import ShardedHook, describe
from gradwire.exchanges import Exchange
from gradwire.exchanges.bucket import Bucket, Segment
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.sharded import Shard, check_gathers, check_scatters
from gradwire.exchanges.whiten import SecondMoments
from gradwire.models.ddp import backend_name, make_hook, make_runner
from gradwire.models.sharded_checks import check_gather_types, check_units, replica_group, units_of


def attach_sharded(
    model: nn.Module,
    exchange: Exchange,
    gather: Exchange,
    replicas: Exchange | None = None,
    *,
    mesh: Any = None,
    chunk_bytes: int | None = None,
    requested: str | None = None,
    optimizer: Optimizer | None = None,
) -> ShardedHook:
    """Give a model with `fully_shard` a hook. See `gradwire.register`."""
    check_scatters(exchange)
    check_gathers(gather)
    units = units_of(model)
    check_units(units)
    check_gather_types(units, gather)
    across = replica_group(units, mesh, replicas)
    group, device = units[0].shard_group, units[0].device
    shards = [shard for unit in units for shard in shards_of(unit)]
    hook = ShardedHook(
        exchange,
        make_runner(group, device),
        gather=gather,
        gather_runner=make_runner(group, device),
        shards=shards,
        rank=group.rank(),
        size=group.size(),
        device=device,
        chunk_bytes=chunk_bytes,
        params=_named_parameters(units),
        requested=requested or describe(exchange, gather, replicas),
    )
    hook.hold = slow_link.get()
    hook.plain_passes = 2 if hook.size > 1 and backend_name(group, device) == "gloo" else 1
    try:
        if replicas is not None and across is not None:
            params, moments = _local_parameters(units), None
            if optimizer is not None:
                moments = SecondMoments(optimizer, {shard.name: shard.param for shard in shards})
            hook.replicas = make_hook(replicas, across, device, chunk_bytes, params, moments=moments)
            hook.replicas.replicated = _replicated(units)
            hook.replicas.checkpointed = _local_parameters(units, frozen=True)
        install(hook, units)
    except BaseException:
        hook.close()
        raise
    return hook


def shards_of(unit: Unit) -> list[Shard]:
    """How the parameters of a unit are cut."""
    return [
        Shard(name, param.sharded_param, whole_size(param), param.padded_sharded_param_size, param.fsdp_placement.dim)
        for name, param in zip(unit.names, unit.params, strict=True)
    ]


def install(hook: ShardedHook, units: Sequence[Unit]) -> None:
    """Let every unit use the hook instead of its own collectives."""
    backward = _Backward(hook)
    slots = []
    for index, unit in enumerate(units):
        slot = _Slot(hook, backward, index, unit)
        slots.append(slot)
        slot.place()

    def uninstall() -> None:
        for slot in slots:
            slot.remove()

    hook.uninstall = uninstall


MOST_PENDING = 2
"""How many reductions may be under way while the backward pass goes on. Each one keeps what it sends and receives."""


@dataclass(slots=True)
class _Pending:
    """A reduction that is under way."""

    future: Future[Tensor]
    then: Callable[[], Future[Tensor]] | None = None
    """Begins the average of its result across replicas."""


class _Backward:
    """Tells where a step begins: when a unit reduces again, in another backward pass. Waits where a pass ends."""

    def __init__(self, hook: ShardedHook) -> None:
        self._hook = weakref.ref(hook)
        self._seen: dict[int, int] = {}
        self._pending: list[_Pending] = []
        self._averages: list[Future[Tensor]] = []
        """Averages across replicas that are under way."""
        self._waits_at = NO_BACKWARD
        """The backward pass at whose end `finish` is called."""
        self._has_reduced = False
        """Since the last forward pass began."""

    def gathers(self) -> None:
        """A unit gathers. The first gather of the forward pass after a reduction opens a step of `auto`."""
        if self._has_reduced and backward_id() == NO_BACKWARD:
            self._has_reduced, hook = False, self._hook()
            if hook is not None and hook.pilot is not None:
                hook.pilot.on_step()

    def begin(self, index: int) -> None:
        """A unit is about to reduce."""
        now, before = backward_id(), self._seen.get(index)
        first = not self._seen or (before is not None and now not in (before, NO_BACKWARD))
        if first:
            self._seen.clear()
        self._seen[index] = now
        self._has_reduced = True
        if (hook := self._hook()) is not None:
            hook.begin_backward(index, first)

    def defer(self, future: Future[Tensor]) -> None:
        """Wait for a reduction at the end of the backward pass that this thread runs, or when there are too many."""
        self._finish_later()
        self._pending.append(_Pending(future))
        self._wait(MOST_PENDING)

    def defer_average(self, begin: Callable[[], Future[Tensor]]) -> None:
        """Average across replicas once the last reduction is over, and wait for it at the end of the backward pass.

        All ranks begin their averages in the same order: that of the reductions.
        """
        self._finish_later()
        if self._pending:
            self._pending[-1].then = begin
        else:
            self._averages.append(begin())

    def finish(self) -> None:
        """Wait for everything that is under way."""
        self._waits_at = NO_BACKWARD  # of a model with several roots, the next one may begin at the end of the pass
        self._wait(0)
        while self._averages:
            average, hook = self._averages.pop(0), self._hook()
            if hook is not None:
                hook.blocked("replicas", average.wait)

    def _finish_later(self) -> None:
        if self._waits_at != (now := backward_id()):
            self._waits_at = now
            at_end_of_backward(self.finish)

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            oldest, hook = self._pending.pop(0), self._hook()
            if hook is not None:
                hook.blocked("gradients", oldest.future.wait)
            if oldest.then is not None:
                self._averages.append(oldest.then())


class _Slot:
    """The collectives of one unit. FSDP2 calls `gather`, `scatter` and `average`."""

    def __init__(self, hook: ShardedHook, backward: _Backward, index: int, unit: Unit) -> None:
        self._hook, self._backward, self._index, self._unit = hook, backward, index, unit
        self._names: tuple[str, ...] = unit.names
        self._own_gather, self._own_scatter, _ = unit.comms
        self._partial: Tensor | None = None
        self._average = self.average  # one object, by which the unit's hook can be recognised
        self._row = tuple(hook.shards[name].segment for name in unit.names)
        self._undo: Callable[[], None] = lambda: None

    def place(self) -> None:
        """Replace the unit's own collectives."""
        module = self._unit.module
        module.set_custom_all_gather(Gather(self.gather, self._own_gather))
        module.set_custom_reduce_scatter(Scatter(self.scatter, self._own_scatter, self._result_type))
        if self._hook.replicas is not None:
            module.set_all_reduce_hook(self._average)
        self._undo = self._unit.before_reduction(self._before)

    def remove(self) -> None:
        """Give the unit its own collectives back."""
        if (module := self._unit.module) is None:
            return
        module.set_custom_all_gather(self._own_gather)
        module.set_custom_reduce_scatter(self._own_scatter)
        self._unit.drop_all_reduce_hook()
        self._undo()

    def _before(self) -> None:
        """The backward pass of the unit has ended.

        FSDP2 keeps the gradients of the unit before until now, and then cuts those of this one into rows. So nothing is
        held twice if those before are encoded by now.
        """
        self._hook.wait_encoded()
        if self._unit.reduces and (names := self._unit.with_gradient()):
            self._names = names
            self._backward.begin(self._index)

    # -- what FSDP2 calls --------------------------------------------------------------------------------------

    def gather(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Any:
        """Gather the unit's parameters. After forward they may be sharded over fewer ranks: that gather is exact."""
        self._backward.gathers()
        hook = self._hook
        if not isinstance(hook.gathers, Coded) or group is not self._unit.shard_group:
            plain = partial(self._own_gather, output_tensor, input_tensor, group, async_op=async_op)
            moved_bytes = input_tensor.nbytes * (group.size() - 1)
            plain = partial(hook.held, "all_gather", moved_bytes, plain)
            return hook.blocked("parameters", lambda: hook.plain_gather(plain, moved_bytes))
        future = hook.gather_rows(self._index, output_tensor.view(group.size(), -1), self._row)
        return Waited(lambda: hook.blocked("parameters", future.wait))

    def scatter(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
        """Reduce-scatter the unit's gradients."""
        hook, size = self._hook, group.size()
        alpha = factor_of(op, size)

        def plain() -> None:
            if is_premultiplied(op):  # gloo cannot do it, FSDP2 by itself would fail
                input_tensor.mul_(alpha)
            self._own_scatter(output_tensor, input_tensor, group, dist.ReduceOp.SUM if is_premultiplied(op) else op)

        rows = input_tensor.view(size, -1)
        run = partial(hook.scatter, self._index, rows, output_tensor, self._names, alpha, plain)
        late = self._is_late(output_tensor)
        if late and isinstance(hook.exchange, Coded):
            self._backward.defer(run())
            return
        if not late:
            self._backward.finish()  # FSDP2 may add to a result that is not there yet
        hook.blocked("gradients", lambda: run().wait())

    def _result_type(self, dtype: torch.dtype) -> torch.dtype:
        """The type of the result of a reduction in `dtype`. A codec adds up in float32 anyhow.

        A result in the type of the parameters needs no conversion, so that nobody reads it before the end of the
        backward pass.
        """
        wider = dtype == torch.bfloat16 and isinstance(self._hook.exchange, Coded)
        return torch.float32 if wider and self._unit.params[0].orig_dtype == torch.float32 else dtype

    def _is_late(self, reduced: Tensor) -> bool:
        """Whether the reduced gradients are first read at the end of the backward pass."""
        if self._hook.device.type != "cpu" or backward_id() == NO_BACKWARD:
            return False
        if self._hook.replicas is not None and not self._averages_at_once():
            return False
        return self._unit.uses_result_late(self._names, reduced.dtype, self._average)

    def _averages_at_once(self) -> bool:
        """Whether the average across replicas neither is put off nor needs work afterwards."""
        return self._unit.all_reduces and self._partial is None and not self._unit.divides_by_itself

    def average(self, reduced: Tensor) -> None:
        """Average the unit's shard across the replicas."""
        replicas = self._hook.replicas
        assert replicas is not None
        if not self._unit.all_reduces:  # set_requires_all_reduce(False): later, together with the next gradients
            self._partial = reduced.clone() if self._partial is None else self._partial.add_(reduced)
            reduced.zero_()
            return
        if self._partial is not None:
            reduced.add_(self._partial)
            self._partial = None
        bucket = Bucket(self._index, reduced, self._local_row(reduced), is_last=False)
        replicas.begin(bucket, first=replicas.steps < self._hook.steps)
        if self._is_late(reduced):
            self._backward.defer_average(partial(replicas.mean, bucket))
            return
        self._backward.finish()
        self._hook.blocked("replicas", lambda: replicas.mean(bucket).wait())
        if self._unit.divides_by_itself:  # the factor divides the sum over all ranks, as with a native 2-D mesh
            reduced.mul_(replicas.size)

    def _local_row(self, like: Tensor) -> tuple[Segment, ...]:
        shards = [self._hook.shards[name] for name in self._names]
        return tuple(Segment(shard.name, local_param(shard, like), 0, shard.padded.numel()) for shard in shards)


def local_param(shard: Shard, like: Tensor) -> Tensor:
    """A tensor with the shape and device of a padded shard, and no memory of its own."""
    return like.new_zeros(()).expand(shard.padded)


class Comm:
    """What FSDP2 asks of a collective: `allocate`, and a call. The memory is that of the one it replaces."""

    def __init__(self, run: Callable[..., Any], own: Any) -> None:
        self.run, self._own = run, own

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        memory: Tensor = self._own.allocate(size, dtype=dtype, device=device)
        return memory


class Gather(Comm):
    """Stands in for FSDP2's all-gather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather."""
        return self.run(output_tensor, input_tensor, group, async_op)


class Scatter(Comm):
    """Stands in for FSDP2's reduce-scatter. `result_type` gives the type of the result, by that of the gradients."""

    def __init__(
        self, run: Callable[..., Any], own: Any, result_type: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> None:
        super().__init__(run, own)
        self._result_type = result_type
        self._before = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients, and then for the result, which is smaller."""
        numel, before = math.prod(size), self._before
        self._before = numel
        return super().allocate(size, dtype=self._result_type(dtype) if numel < before else dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter, and wait for the result."""
        self._before = 0
        self.run(output_tensor, input_tensor, group, op)


def _named_parameters(units: Sequence[Unit]) -> Callable[[], list[tuple[str, Tensor]]]:
    """The sharded parameters that require a gradient now, by name."""

    def params() -> list[tuple[str, Tensor]]:
        pairs = (zip(unit.names, unit.params, strict=True) for unit in units if unit.group is not None)
        return [(name, p.sharded_param) for name, p in itertools.chain(*pairs) if p.sharded_param.requires_grad]

    return params


def _local_parameters(units: Sequence[Unit], frozen: bool = False) -> Callable[[], list[tuple[str, Tensor]]]:
    """The same as this rank's padded shards, which is what replicas average. `frozen`: those without a gradient too."""

    def params() -> list[tuple[str, Tensor]]:
        like = torch.empty(0, device=units[0].device)
        shards = [shard for unit in units if unit.group is not None for shard in shards_of(unit)]
        return [(shard.name, local_param(shard, like)) for shard in shards if frozen or shard.param.requires_grad]

    return params


def _replicated(units: Sequence[Unit]) -> Callable[[], list[tuple[str, Tensor]]]:
    """This rank's shards of all parameters, which all replicas must hold alike."""

    def params() -> list[tuple[str, Tensor]]:
        pairs = (zip(unit.names, unit.params, strict=True) for unit in units if unit.group is not None)
        return [(name, local_values(p.sharded_param)) for name, p in itertools.chain(*pairs)]

    return params
