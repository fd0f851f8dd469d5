"""Post-local SGD's optimizer: local steps, and averaging of parameters by an averager."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from gradwire.errors import RegisterError


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps `optim`, then lets `averager` average its parameters when it is time. Any averager, ours or torch's."""

    optim: torch.optim.Optimizer
    averager: ModelAverager

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer) or not hasattr(averager, "average_parameters"):
            told = f"{type(optim).__name__} and {type(averager).__name__}"
            raise RegisterError(f"PostLocalSGDOptimizer takes an optimizer and a model averager, got {told}")
        # What unpickling does: a full Optimizer with hooks of its own, but without groups or state of its own.
        self.__setstate__({"optim": optim, "averager": averager, "defaults": optim.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the local optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the local optimizer."""
        return self.optim.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the local optimizer, then the average if it is time."""
        loss = self.optim.step() if closure is None else self.optim.step(closure)
        self.averager.average_parameters(params=self.param_groups)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the local optimizer does."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the local optimizer."""
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's, with the averager's count as "step" and all it keeps as "averager"."""
        kept = getattr(self.averager, "state_dict", None)
        more = {} if kept is None else {"averager": kept()}
        return {**self.optim.state_dict(), "step": self.averager.step, **more}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` of this class or of torch's returned."""
        self.optim.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        load = getattr(self.averager, "load_state_dict", None)
        if load is not None and "averager" in state_dict:
            load(state_dict["averager"])
        if "step" not in state_dict:
            warnings.warn("the state has no count of an averager ('step'); it starts from 0", stacklevel=2)
        self.averager.step = int(state_dict.get("step", 0))

    def __repr__(self) -> str:
        return repr(self.optim)
