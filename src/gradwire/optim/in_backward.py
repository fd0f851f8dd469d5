"""Step in backward: each parameter is stepped as soon as its bucket is averaged, while the backward pass continues.

1. DDP passes a bucket. The thread that runs backward only records it.
2. The exchange averages it. In the engine's thread the optimizer then steps the bucket's parameters, with their `grad`
   set to their part of the bucket. A parameter that this rank did not use has to wait: other ranks may have used it.
3. At the end of backward DDP has set the gradients of those that other ranks used, and they are stepped.
4. `optimizer.step()` then has nothing left to do. It checks that the gradients were not changed since.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire._torch import version
from gradwire._torch.ddp import comm_hook_of, skips_unused_buckets
from gradwire._torch.optim import NO_BACKWARD, at_the_very_end, backward_id, has_optimizers_in_backward, replace_step
from gradwire.engine.hook import Hook
from gradwire.engine.observers import Observer
from gradwire.errors import RegisterError
from gradwire.exchanges.bucket import Bucket
from gradwire.optim.parts import STEPS_IN_BACKWARD, Parts, check_optimizer


def step_in_backward(
    model: DistributedDataParallel, optimizer: Optimizer, *, set_to_none: bool = False
) -> StepInBackward:
    """Step `optimizer` during the backward passes of `model` from now on.

    The training loop stays as it is: `zero_grad()`, forward, backward, `optimizer.step()`, `scheduler.step()`. When
    backward returns, the parameters are those that `optimizer.step()` would have computed, bit for bit. The state is in
    `optimizer`, and its settings are read in every step. `optimizer.step()` does not step again.

    Args:
        model: A DDP model with a gradwire hook.
        optimizer: Steps parameters of the model, and none of another.
        set_to_none: Free a gradient as soon as its bucket is full; after backward every `grad` is None. This saves up
            to half the memory of the gradients, but nothing with `gradient_as_bucket_view`, where they are the
            buckets' memory.

    Returns:
        An object whose `close()` goes back to stepping after backward.

    Raises:
        RegisterError: The optimizer cannot be stepped in parts. `optimizer.step()` raises it too, if gradients were
            changed after backward (clipped, unscaled), because the parameters were stepped already.

    Examples:
        >>> hook = gradwire.register(model, "bf16")
        >>> gradwire.optim.step_in_backward(model, optimizer, set_to_none=True)
    """
    hook = _hook_of(model)
    check_optimizer(optimizer)
    _check_alone(model, hook)
    return StepInBackward(model, hook, optimizer, set_to_none)


class StepInBackward(Observer):
    """What `step_in_backward` returns; `close` goes back to stepping after backward.

    Examples:
        >>> stepping = gradwire.optim.step_in_backward(model, optimizer)
        >>> stepping.close()
    """

    def __init__(
        self, model: DistributedDataParallel, hook: Hook, optimizer: Optimizer, set_to_none: bool = False
    ) -> None:
        self.hook, self.optimizer, self.set_to_none = hook, optimizer, set_to_none
        self.steps = 0
        """The number of steps made in backward."""
        self._parts = Parts(optimizer)
        frozen = {param for param in model.module.parameters() if not param.requires_grad}
        self._averaged = {param for _, param in hook._params()} | frozen
        self._check_members()
        self._skips_buckets = skips_unused_buckets(model)
        self._task = NO_BACKWARD
        self._stepped: set[Tensor] = set()
        self._used: set[Tensor] = set()
        self._seen: list[tuple[Tensor, Tensor, int]] = []
        self._unread = False
        self._watches_use = bool(model.find_unused_parameters or model.static_graph)
        self._handles = [
            param.register_post_accumulate_grad_hook(self._used.add)
            for param in (self._averaged if self._watches_use else ())
            if param.requires_grad
        ]
        hook.observers.append(self)
        if hook.watch is not None:
            hook.watch.optimizer = optimizer
        self._restore = replace_step(optimizer, self._finish, STEPS_IN_BACKWARD)

    def close(self) -> None:
        """Step after backward again from the next step on. Call it between steps."""
        if self not in self.hook.observers:
            return
        self.hook.observers.remove(self)
        for handle in self._handles:
            handle.remove()
        self._restore()

    # -- in the thread that runs backward ------------------------------------------------------------------------

    def before_mean(self, bucket: Bucket, first: bool) -> None:
        """A bucket has arrived: record it."""
        task, self._task = self._task, backward_id()
        if not self._in_backward:
            return
        if self._skips_buckets:  # DDP leaves out buckets that no rank used, also the first or the last
            first = task != self._task
        if first:
            self._begin()
        if self.set_to_none:  # views of the bucket, which holds them now: DDP would replace None by new tensors
            for param, grad in self._pairs(bucket):
                param.grad = grad
        if first if self._skips_buckets else bucket.is_last:
            at_the_very_end(self._end)

    @property
    def _in_backward(self) -> bool:
        """False if DDP's Join takes part in other ranks' backward passes."""
        return self._task != NO_BACKWARD

    def _begin(self) -> None:
        if self._unread:
            raise RegisterError(
                "a second backward pass began before optimizer.step() was called, and the first has stepped the "
                "parameters already; to accumulate gradients run all passes but the last under model.no_sync()"
            )
        self._stepped.clear()
        self._parts.refresh()
        self._check_members()

    def _end(self) -> None:
        """DDP has set all gradients: step what is left, and record the gradients' versions."""
        rest = [param for param in self._parts.params if param.grad is not None and param not in self._stepped]
        if rest:
            self._parts.step(rest)
        if self.set_to_none:
            for param in self._parts.params:
                param.grad = None
        self._seen = [(p, p.grad, version(p.grad)) for p in self._parts.params if p.grad is not None]
        self._used.clear()
        self._unread = True
        self.steps += 1

    # -- in a thread of the engine -------------------------------------------------------------------------------

    def after_mean(self, bucket: Bucket) -> None:
        """A bucket is averaged: step its parameters."""
        if not self._in_backward:
            return
        pairs = self._pairs(bucket)
        local = [] if self.set_to_none else [param.grad for param, _ in pairs]
        try:
            for param, grad in pairs:
                param.grad = grad
            if pairs:
                self._parts.step(param for param, _ in pairs)
        finally:
            for (param, _), own in zip(pairs, local, strict=False):
                param.grad = own
        self._stepped.update(param for param, _ in pairs)

    def _pairs(self, bucket: Bucket) -> list[tuple[Tensor, Tensor]]:
        """The bucket's parameters that the optimizer has and this rank used, with their parts of the bucket."""
        grads = [bucket.flat] if bucket.flat.is_sparse else bucket.grads
        return [
            (param, grad)
            for param, grad in zip(bucket.params, grads, strict=True)
            if param in self._parts and (not self._watches_use or param in self._used)
        ]

    # -- optimizer.step() ----------------------------------------------------------------------------------------

    def _finish(self, optimizer: Any, closure: object = None) -> None:
        """Replaces `optimizer.step()`."""
        if closure is not None:
            raise RegisterError("a closure would run backward a second time; step after backward to use one")
        if getattr(optimizer, "found_inf", None) is not None:
            raise RegisterError(
                "a GradScaler must see all gradients before any parameter is stepped; train in bfloat16, which needs "
                "no scaler, or step after backward"
            )
        if not self._unread:  # no bucket was averaged: all passes were under no_sync, or the reducer is compiled
            self._parts.refresh()
            self._parts.step(param for param in self._parts.params if param.grad is not None)
            return
        seen, self._seen, self._unread = self._seen, [], False
        if any(param.grad is not grad or version(grad) != before for param, grad, before in seen):
            raise RegisterError(
                "gradients were changed between backward() and optimizer.step(), but the parameters were stepped with "
                "the old ones; to clip gradients, step after backward: close() what step_in_backward returned"
            )

    # -- refusals ------------------------------------------------------------------------------------------------

    def _check_members(self) -> None:
        others = sum(param not in self._averaged for param in self._parts.params)
        if others:
            raise RegisterError(
                f"{others} parameters of the optimizer are in no bucket of this model (other modules', or ignored "
                "by DDP), so backward would not step them; give them their own optimizer"
            )


def _hook_of(model: object) -> Hook:
    if not isinstance(model, DistributedDataParallel):
        raise RegisterError(f"the model must be a DistributedDataParallel, got {type(model).__name__}")
    _, state = comm_hook_of(model) or (None, None)
    hook = getattr(state, "hook", None)  # the state may be the user's
    if not isinstance(hook, Hook):
        raise RegisterError("this model carries no gradwire hook; call gradwire.register(model, 'exact') first")
    return hook


def _check_alone(model: DistributedDataParallel, hook: Hook) -> None:
    if any(isinstance(observer, StepInBackward) for observer in hook.observers):
        raise RegisterError("this model is stepped in backward already; call close() of the first one")
    if any(has_optimizers_in_backward(param) for param in model.module.parameters()):
        raise RegisterError(
            "parameters of this model have optimizers from torch's _apply_optimizer_in_backward; use one of the two"
        )


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return backward_id() != NO_BACKWARD
