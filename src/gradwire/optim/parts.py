"""Stepping an ordinary optimizer a few parameters at a time, and testing whether that gives the same result."""

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire._torch.optim import drop_step_hooks, is_wrapped_by_scheduler
from gradwire.errors import RegisterError

TRIAL_STEPS = 3
TRIAL_GROUPS = 16
STEPS_IN_BACKWARD = "_steps_in_backward"
"""The attribute that marks a step() that `step_in_backward` has replaced."""


class Parts:
    """Steps some parameters of an optimizer, with its present settings and with its own state.

    Several threads may step different parameters at the same time.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.refresh()

    def refresh(self) -> None:
        """Read the parameter groups again."""
        self._group_of = {
            param: number for number, group in enumerate(self.optimizer.param_groups) for param in group["params"]
        }

    @property
    def params(self) -> Iterable[Tensor]:
        """All parameters of the optimizer."""
        return self._group_of.keys()

    def __contains__(self, param: object) -> bool:
        return param in self._group_of

    def step(self, params: Iterable[Tensor]) -> None:
        """Do what `optimizer.step()` would do to `params`, with their present `grad`."""
        chosen: dict[int, list[Tensor]] = {}
        for param in params:
            chosen.setdefault(self._group_of[param], []).append(param)
        groups = self.optimizer.param_groups
        _step(_with_groups(self.optimizer, [{**groups[i], "params": chosen[i]} for i in sorted(chosen)]))


def _with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer with the same state and other parameter groups."""
    part: Optimizer = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))
    vars(part).pop("step", None)
    part.param_groups = groups
    drop_step_hooks(part)
    return part


def _step(optimizer: Optimizer) -> None:
    """The step of the class, without the hooks that torch runs around a whole step."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


# -- can it be stepped in parts? -------------------------------------------------------------------------------------


def check_optimizer(optimizer: object) -> Optimizer:
    """Return the optimizer; raise RegisterError with the reason if it cannot be stepped in parts."""
    if not isinstance(optimizer, Optimizer):
        raise RegisterError(f"the optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    name = type(optimizer).__name__
    if any(kind.__module__.startswith("torch.distributed") for kind in type(optimizer).__mro__):
        raise RegisterError(
            f"{name} communicates with other ranks in its step, which is not possible during backward; use a local "
            "optimizer, or step after backward"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise RegisterError(f"{name} needs a closure, to run backward from inside its step; step it after backward")
    step = vars(optimizer).get("step")
    if step is not None and (hasattr(step, STEPS_IN_BACKWARD) or not is_wrapped_by_scheduler(step)):
        raise RegisterError(
            f"step() of this {name} was replaced (by torch.compile, a wrapper, or another way of stepping in "
            "backward), and stepping in parts would not call it; use an optimizer with the step() of its class"
        )
    _try_out(optimizer)
    return optimizer


def _try_out(optimizer: Optimizer) -> None:
    """Step copies of some parameters together and one by one, which must give the same result."""
    name = type(optimizer).__name__
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        try:
            together, one_by_one = _trial(optimizer, whole=True), _trial(optimizer, whole=False)
        except Exception as error:
            raise RegisterError(f"{name} cannot be stepped in parts; its trial failed with: {error}") from error
        drew = not torch.equal(before, torch.random.get_rng_state())
    if drew:
        raise RegisterError(f"{name} draws random numbers, so its result would depend on the order of the parameters")
    if not all(torch.equal(a, b) for a, b in zip(together, one_by_one, strict=True)):
        raise RegisterError(
            f"{name} cannot be stepped in parts: its step on a parameter depends on the other parameters, or on "
            "counters outside of its state; step it after backward"
        )


def _trial(optimizer: Optimizer, *, whole: bool) -> list[Tensor]:
    """Copies of the smallest parameters after some steps with random gradients."""
    trial = _with_groups(optimizer, _trial_groups(optimizer))
    originals = [param for group in trial.param_groups for param in group["params"]]
    copies = [copy.deepcopy(param) for param in originals]
    copy_of = dict(zip(originals, copies, strict=True))
    trial.state = defaultdict(dict)
    trial.state.update({copy_of[p]: copy.deepcopy(optimizer.state[p]) for p in originals if p in optimizer.state})
    for group in trial.param_groups:
        group["params"] = [copy_of[param] for param in group["params"]]
    parts = Parts(trial)
    for step in range(TRIAL_STEPS):
        for number, param in enumerate(copies):
            seeded = torch.Generator().manual_seed(1000 * step + number)
            param.grad = torch.randn(param.shape, generator=seeded, dtype=param.dtype).to(param.device)
        for param in [] if whole else reversed(copies):
            parts.step([param])
        if whole:
            _step(trial)
    return copies


def _trial_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The two smallest parameters of each group, for at most `TRIAL_GROUPS` groups."""
    groups = [
        {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": smallest}
        for group in optimizer.param_groups
        if (smallest := sorted((p for p in group["params"] if p.numel()), key=Tensor.numel)[:2])
    ]
    return sorted(groups, key=lambda group: int(group["params"][0].numel()))[:TRIAL_GROUPS]
