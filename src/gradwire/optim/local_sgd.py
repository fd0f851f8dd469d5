"""LocalSGD and DiLoCo: every rank trains by itself, and the ranks average their changes once in many steps.

A round, for each fragment of the model (g: the global values, the same on all ranks; x: this rank's parameters):

1. Every rank takes `sync_every` optimizer steps from g.
2. The fragment is sent: the delta d = g - x goes through the exchange while training continues.
3. `delay` steps later its mean arrives on all ranks, and the outer step is g <- g - mean(d).
4. The parameters become the new g plus what this rank has changed since 2, so every inner step counts exactly once.

Without delay, all ranks hold the same bits after 4. Fragments are sent at different steps of the round, so the link is
used evenly. All of this is counted in steps, never in time: runs repeat exactly.

DiLoCo's outer step treats mean(d) as a gradient and has Nesterov momentum, so that rounds can be long: Douillard et
al., "DiLoCo" (2023) and, for fragments and delays, "Streaming DiLoCo" (2025).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire._torch.optim import has_step_hooks
from gradwire.errors import ExchangeError, RegisterError, SpecError
from gradwire.exchanges import Exchange
from gradwire.exchanges import exchange as exchange_of
from gradwire.exchanges.base import Comm
from gradwire.models.ddp import make_hook
from gradwire.optim.elastic import ElasticRounds, shrinking
from gradwire.optim.fragments import Fragment, Named, check_parameters, cut, digest, own_group, whole
from gradwire.optim.members import Shrink
from gradwire.optim.rounds import Transfer

_active: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LocalSGD]] = weakref.WeakKeyDictionary()


class LocalSGD(ElasticRounds):
    """A context manager around an ordinary training loop with a plain module. It counts `optimizer.step()` by itself.

    On entering, all ranks start from rank 0's parameters; on leaving, `sync()` makes them equal again. After an error
    the ranks are left as they are. All ranks must take the same number of steps.

    Args:
        model: The module, not wrapped in DDP.
        optimizer: Steps the module's parameters.
        sync_every: The number of steps between two averages of a parameter.
        exchange: Any spec of gradwire. It averages deltas, for which few bits are enough.
        fragments: The number of parts of the model that are sent one after the other within a round.
        delay: The number of steps that an exchange may take before its result is applied.
        process_group: The ranks; None is the world.
        on_failure: "raise", or "shrink" to train on with the ranks that are left: see `Shrink` and docs/elastic.md.

    Examples:
        with LocalSGD(model, optimizer, sync_every=10, exchange="bf16"):
            for x, y in batches:
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        exchange: str | Exchange = "exact",
        fragments: int = 1,
        delay: int = 0,
        process_group: dist.ProcessGroup | None = None,
        on_failure: str | Shrink = "raise",
    ) -> None:
        _check_model(model, optimizer)
        settings = shrinking(on_failure, process_group)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        device = check_parameters(named)
        _check_optimizer(named, optimizer)
        _check_schedule(sync_every, fragments, delay, len(named))
        super().__init__(cut(named, fragments), sync_every, delay)
        self._model, self._optimizer = model, optimizer
        self._counter: RemovableHandle | None = None
        if settings is not None:
            self._prepare(settings, exchange_of(exchange), device, digest(named))
        else:
            self.hook = make_hook(exchange_of(exchange), own_group(process_group), device, params=self.named_globals)
            self._agree(digest(named))
        _active[model] = weakref.ref(self)

    # -- the loop ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start counting. All ranks together."""
        if self.hook.closed or self._counter is not None:
            raise RegisterError(f"{type(self).__name__} can be entered once: make a new one, and load the old state")
        if self.members is not None:
            self._join()
        elif self.loaded:
            self._check_same()
        else:
            self._copy_from_rank_0()
        self._counter = self._optimizer.register_step_post_hook(lambda *_: self._count())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the ranks equal, unless there was an error; then stop counting."""
        try:
            if error is not None:
                self._give_up(error)
            else:
                self._end()
        finally:
            self.close()

    def _end(self) -> None:
        joins = self.members and self.members.joins
        self.sync()
        if self.members is None:
            return
        if self.members.joins != joins:
            raise ExchangeError(
                f"the other ranks went on without this one at the end; its state is of step {self.steps}"
            )
        self.members.leave(ended=self.steps)

    def sync(self) -> None:
        """Apply all averages in flight and average what changed since. All ranks then hold the same parameters.

        All ranks together, between steps. Fragments that were sent at this step are not sent again.
        """
        joins = self.members and self.members.joins
        if self._ready():
            self._apply(self.transfers)
        if self.members and self.members.joins != joins:
            return  # left out, and back: with the state of the others, who are somewhere else
        for fragment in self.fragments:
            if self.sent_at[fragment.index] != self.steps:
                self._send(fragment)
        self._apply(self.transfers)

    def close(self) -> None:
        """Stop counting, and end threads and connections. Averages in flight are dropped."""
        if self._counter is not None:
            self._counter.remove()
        self._leave()

    def _count(self) -> None:
        self.steps += 1
        due = [fragment for fragment in self.fragments if self.steps % self.sync_every == self._offset(fragment)]
        if due and not self._ready():
            return
        for fragment in due:
            self._send(fragment)
        self._apply([one for one in self.transfers if one.arrives_at <= self.steps], may_postpone=True)
        if self._admits:
            self._admit()

    def _next_send(self) -> int:
        """The next step at which a fragment is sent."""
        offsets = {self._offset(fragment) for fragment in self.fragments}
        return next(step for step in itertools.count(self.steps + 1) if step % self.sync_every in offsets)

    def _offset(self, fragment: Fragment) -> int:
        """The step within a round at which a fragment is sent; for the last fragment it is the end of the round."""
        return (fragment.index + 1) * self.sync_every // len(self.fragments) % self.sync_every

    @torch.no_grad()
    def _send(self, fragment: Fragment) -> None:
        """Steps 1 and 2. The delta starts from g rounded to the parameter's type, so rounding is not a change."""
        delta = fragment.flat()
        values = fragment.views(self.globals[fragment.index])
        for view, value, param in zip(fragment.views(delta), values, fragment.params, strict=True):
            view.copy_(value.to(param.dtype)).sub_(param)
        self.hook.begin(fragment.bucket(delta))
        at_start = [param.detach().clone() for param in fragment.params] if self.delay else []
        transfer = Transfer(fragment, self.steps + self.delay, delta, None, at_start)
        self._submit(transfer)
        self.transfers.append(transfer)
        self.last_sent, self.sent_at[fragment.index] = fragment.index, self.steps

    @torch.no_grad()
    def _apply(self, transfers: Sequence[Transfer], *, may_postpone: bool = False) -> None:
        """Steps 3 and 4, in the order in which the fragments were sent."""
        for transfer in list(transfers):
            if not self._settle(transfer, may_postpone=may_postpone):
                return
            fragment, values = transfer.fragment, self.globals[transfer.fragment.index]
            self._outer_step_(fragment, values, transfer.mean)
            for place, (param, view) in enumerate(zip(fragment.params, fragment.views(values), strict=True)):
                new = view.to(param.dtype)
                param.copy_(new + (param - transfer.at_start[place]) if transfer.at_start else new)
            self.transfers.remove(transfer)

    def _outer_step_(self, fragment: Fragment, values: Tensor, mean: Tensor) -> None:
        """Change the global values by the mean of the ranks' changes."""
        values.sub_(mean)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *, merged: bool = False) -> dict[str, Any]:
        """Tensors, numbers and text only. Call it between steps, also in the middle of a round.

        By default this rank's own state: save it on every rank, with the states of the model and the optimizer, and
        training continues exactly. With `merged` (all ranks together) the residuals are summed, so that any number of
        ranks can load the one state.
        """
        return self._pack(merged)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's own state, a merged one, or the list of all ranks' states. Call it before entering.

        With its own state, the model must hold what it held on this rank. Otherwise, or on another number of ranks,
        every rank starts from the global values, which are written into the model, and later changes are lost.
        """
        if self._counter is not None:
            raise RegisterError("load_state_dict() comes before entering the context")
        self._load([state] if isinstance(state, Mapping) else list(state))
        self.loaded = True

    # -- before the first step ---------------------------------------------------------------------------------

    def _agree(self, model: str) -> None:
        if self.hook.size == 1:
            return
        try:
            self.hook.agree("local training", str(self))
            self.hook.agree("model", model)
        except BaseException:
            self.hook.close()
            raise

    def _copy_from_rank_0(self) -> None:
        """As DDP does."""
        for fragment, values in zip(self.fragments, self.globals, strict=True):
            fragment.copy_(values, fragment.params)
            if self.hook.size > 1:
                self.hook.run(partial(_broadcast_, values))
                fragment.write(values)


class DiLoCo(LocalSGD):
    """`LocalSGD` with an outer Nesterov step: m <- momentum m + mean(d); g <- g - lr (mean(d) + momentum m).

    Good exchanges are "bf16", "int4:feedback=true" or "powersgd:rank=4".

    Args:
        outer_lr: lr above.
        outer_momentum: momentum above.
        delay: By default 1, so that communication and computation overlap for one step (0 if `sync_every` is 1).

    The other arguments are those of `LocalSGD`.

    Examples:
        >>> with DiLoCo(model, optimizer, sync_every=50, exchange="int4:feedback=true"):
        ...     train(model, optimizer)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        exchange: str | Exchange = "exact",
        fragments: int = 1,
        delay: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_failure: str | Shrink = "raise",
    ) -> None:
        if not (isinstance(outer_lr, int | float) and math.isfinite(outer_lr) and outer_lr > 0):
            raise SpecError(f"outer_lr must be a finite number above 0, got {outer_lr!r}")
        if not (isinstance(outer_momentum, int | float) and 0 <= outer_momentum < 1):
            raise SpecError(f"outer_momentum must be in [0, 1), got {outer_momentum!r}")
        self.outer_lr, self.outer_momentum = float(outer_lr), float(outer_momentum)
        super().__init__(
            model,
            optimizer,
            sync_every=sync_every,
            exchange=exchange,
            fragments=fragments,
            delay=int(sync_every != 1) if delay is None else delay,
            process_group=process_group,
            on_failure=on_failure,
        )
        self.momentum = [fragment.flat() for fragment in self.fragments]

    def outer_state(self) -> dict[str, list[Tensor]]:
        """The momentum."""
        return {"momentum": self.momentum}

    def _outer_step_(self, fragment: Fragment, values: Tensor, mean: Tensor) -> None:
        momentum = self.momentum[fragment.index].mul_(self.outer_momentum).add_(mean)
        values.add_(mean.add_(momentum, alpha=self.outer_momentum), alpha=-self.outer_lr)

    def __str__(self) -> str:
        return f"{super().__str__()[:-1]}, outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum})"


def _broadcast_(values: Tensor, comm: Comm) -> None:
    """From rank 0."""
    comm.all_reduce_(values if comm.rank == 0 else values.zero_())


def _check_model(model: object, optimizer: object) -> None:
    """A plain module that no other local training uses, and an optimizer whose steps can be counted."""
    if isinstance(model, DistributedDataParallel):
        raise RegisterError(
            "local training takes the plain module, whose gradients nobody averages; pass model.module if DDP is to "
            "average gradients within a sub-group as well"
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise RegisterError(f"local training takes a torch.nn.Module and a torch.optim.Optimizer, got {kinds}")
    if not has_step_hooks(optimizer):
        raise RegisterError(f"{type(optimizer).__name__} has no step hooks to count by; pass the optimizer inside it")
    other = _active[model]() if model in _active else None
    if other is not None and not other.hook.closed:
        raise RegisterError(f"this model already trains under {other}; leave that context, or close() it, first")


def _check_optimizer(named: Named, optimizer: torch.optim.Optimizer) -> None:
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not any(id(param) in stepped for _, param in named):
        raise RegisterError("the optimizer holds no parameter of the model, so the model would never change")


def _check_schedule(sync_every: int, fragments: int, delay: int, tensors: int) -> None:
    whole("sync_every", sync_every, 1)
    whole("fragments", fragments, 1)
    if fragments > min(sync_every, tensors):
        raise SpecError(
            f"fragments must be at most sync_every ({sync_every}) and the parameters ({tensors}), got {fragments}"
        )
    if not isinstance(delay, int) or not 0 <= delay < sync_every:
        raise SpecError(f"delay must be a whole number from 0 to sync_every - 1 ({sync_every - 1}), got {delay!r}")
