"""Post-local SGD: torch's model averagers, and the optimizer that steps locally and then averages parameters.

The arguments and the counting are those of torch's classes, and each works with torch's classes or with ours. The
differences: parameters keep their types, strides and storages; all parameters that require a gradient are averaged,
whichever ranks have a gradient for them; any exchange can be used; and `state_dict()` holds counters and residuals.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError, SpecError, StateError
from gradwire.exchanges import Exchange
from gradwire.exchanges import exchange as exchange_of
from gradwire.models.ddp import make_hook
from gradwire.optim.fragments import Named, by_type, check_parameters, digest, own_group, wait_for, whole

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]]
"""`model.parameters()`, or `optimizer.param_groups`."""


class _Averager(ModelAverager):
    """Counts the calls and averages over groups, each of which has a key and an engine that is made when needed."""

    def __init__(self, warmup_steps: int, process_group: dist.ProcessGroup | None, exchange: str | Exchange) -> None:
        super().__init__(own_group(process_group))
        self.warmup_steps = whole("warmup_steps", warmup_steps, 0)
        self.exchange = exchange_of(exchange)
        self._named: Named = []
        self._agreed: dict[str, str] = {}
        self._hooks: dict[str, Hook] = {}
        self._loaded: dict[str, list[Mapping[str, Any]]] = {}

    def average_parameters(self, params: Params) -> None:
        """Call it after every optimizer step, on all ranks. It counts, and averages in place when it is time."""
        chosen = self._group_now() if self.step >= self.warmup_steps else None
        if chosen is not None:
            self._average(params, *chosen)
        self.step += 1

    def _group_now(self) -> tuple[str, dist.ProcessGroup] | None:
        """The key and the group to average over at this step, if any."""
        raise NotImplementedError

    def _average(self, params: Params, key: str, group: dist.ProcessGroup) -> None:
        self._named = _named(params)
        device = check_parameters(self._named)
        hook = self._hook(key, group, device)
        in_flight = []
        for fragment in by_type(self._named):
            flat = fragment.read()
            hook.begin(fragment.bucket(flat))
            in_flight.append((fragment, flat, hook.mean(fragment.bucket(flat))))
        for fragment, flat, future in in_flight:
            wait_for(future, f"averaging parameters at step {self.step}")
            fragment.write(flat)

    def _hook(self, key: str, group: dist.ProcessGroup, device: torch.device) -> Hook:
        if key not in self._hooks:
            self._hooks[key] = make_hook(self.exchange, group, device, params=lambda: self._named)
            if key in self._loaded:
                self._hooks[key].load_state_dict(self._loaded.pop(key))
        hook, model = self._hooks[key], digest(self._named)
        if self._agreed.get(key) != model and hook.size > 1:
            hook.agree("parameters", model)
        self._agreed[key] = model
        return hook

    def state_dict(self) -> dict[str, Any]:
        """The number of calls, and the exchange's state on this rank. Save it on every rank."""
        states = {key: [hook.state_dict()] for key, hook in self._hooks.items()}
        return {"step": self.step, "exchange": {**states, **self._loaded}}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from this rank's own state, or on another number of ranks from the list of all ranks' states."""
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states or any(not {"step", "exchange"} <= given.keys() for given in states):
            raise StateError("not a state of an averager: pass what state_dict() returned, or a list of such")
        keys = states[0]["exchange"].keys()
        self._loaded = {key: [part for given in states for part in given["exchange"][key]] for key in keys}
        for key in self._hooks.keys() & keys:
            self._hooks[key].load_state_dict(self._loaded.pop(key))
        self.step = int(states[0]["step"])

    def close(self) -> None:
        """End threads and connections."""
        for hook in self._hooks.values():
            hook.close()


class PeriodicModelAverager(_Averager):
    """Averages parameters every `period` steps, from step `warmup_steps` on, over all ranks of the group.

    Args:
        period: The number of steps between two averages.
        warmup_steps: The number of first steps without averages.
        process_group: The ranks that average; None is the world.
        exchange: How parameters travel. They are rounded themselves: use 16 bits or more.

    Examples:
        >>> averager = PeriodicModelAverager(4, warmup_steps=100)
        >>> averager.average_parameters(model.parameters())  # after every step
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        exchange: str | Exchange = "exact",
    ) -> None:
        super().__init__(warmup_steps, process_group, exchange)
        self.period = whole("period", period, 1)
        _warn_of_one(period)

    def _group_now(self) -> tuple[str, dist.ProcessGroup] | None:
        now = (self.step - self.warmup_steps) % self.period == 0
        return ("all", self.process_group) if now else None


class HierarchicalModelAverager(_Averager):
    """Averages parameters over groups of several sizes, larger groups more rarely: `{period: group size}`.

    At a step that several periods divide, the longest one applies. A group has consecutive ranks. All ranks of
    `process_group` must make the averager together, as it makes process groups.

    Args:
        period_group_size_dict: By period, the number of consecutive ranks that average, as in `{4: 8, 16: 64}`.
        warmup_steps: The number of first steps without averages.
        process_group: All ranks that take part; None is the world.
        exchange: How parameters travel. They are rounded themselves: use 16 bits or more.

    Examples:
        >>> averager = HierarchicalModelAverager({4: 2, 16: 4}, warmup_steps=100)
        >>> averager.average_parameters(model.parameters())  # after every step
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        exchange: str | Exchange = "exact",
    ) -> None:
        super().__init__(warmup_steps, process_group, exchange)
        levels = dict(period_group_size_dict or {})
        _check_levels(levels, self.process_group.size())
        self._periods = list(levels)
        _warn_of_one(self._periods[-1])
        self.period_process_group_dict = OrderedDict(
            (period, _neighbours(self.process_group, size)) for period, size in levels.items()
        )

    def _find_process_group(self) -> dist.ProcessGroup | None:
        """The group to average over at this step, if any."""
        chosen = self._group_now()
        return None if chosen is None else chosen[1]

    def _group_now(self) -> tuple[str, dist.ProcessGroup] | None:
        for period in reversed(self._periods):
            if self.step % period == 0:
                return str(period), self.period_process_group_dict[period]
        return None


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps `optim`, then lets `averager` average its parameters. The averager may be ours or torch's.

    Args:
        optim: The optimizer of each rank.
        averager: What averages after its steps.

    Examples:
        >>> optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), PeriodicModelAverager(4))
    """

    optim: torch.optim.Optimizer
    averager: ModelAverager

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer) or not hasattr(averager, "average_parameters"):
            kinds = f"{type(optim).__name__} and {type(averager).__name__}"
            raise RegisterError(f"PostLocalSGDOptimizer takes an optimizer and a model averager, got {kinds}")
        # As unpickling does: an Optimizer with its own hooks, but with the groups and state of the local one.
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
        """Step the local optimizer, then call the averager."""
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
        """The local optimizer's state, with the averager's count as "step" and its other state as "averager"."""
        state_dict = getattr(self.averager, "state_dict", None)  # torch's averagers have none
        more = {} if state_dict is None else {"averager": state_dict()}
        return {**self.optim.state_dict(), "step": self.averager.step, **more}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's returned."""
        self.optim.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        load = getattr(self.averager, "load_state_dict", None)
        if load is not None and "averager" in state_dict:
            load(state_dict["averager"])
        if "step" not in state_dict:
            warnings.warn("the state has no count of an averager ('step'); it starts from 0", stacklevel=2)
        self.averager.step = int(state_dict.get("step", 0))

    def __repr__(self) -> str:
        return repr(self.optim)


def _named(params: Params) -> Named:
    """Parameters by their position, without those that require no gradient, as they never change."""
    flat: list[Tensor] = []
    for item in params:
        if not isinstance(item, Tensor | Mapping):
            raise TypeError(f"average_parameters() takes parameters or parameter groups, got {type(item).__name__}")
        flat.extend([item] if isinstance(item, Tensor) else item["params"])
    return [(str(place), param) for place, param in enumerate(flat) if param.requires_grad]


def _neighbours(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """This rank's group if `group` is divided into groups of `size` consecutive ranks."""
    if size == group.size():
        return group
    ranks, first = dist.get_process_group_ranks(group), group.rank() // size * size
    neighbours = dist.new_group(ranks[first : first + size], use_local_synchronization=True)
    assert isinstance(neighbours, dist.ProcessGroup)
    return neighbours


def _check_levels(levels: Mapping[int, int], size: int) -> None:
    if not levels:
        raise SpecError("period_group_size_dict must hold at least one period: group size")
    periods, sizes = list(levels), list(levels.values())
    for number in (*periods, *sizes):
        whole("every number in period_group_size_dict", number, 1)
    if periods != sorted(periods) or sizes != sorted(sizes):
        raise SpecError(f"period_group_size_dict must be sorted by period, with groups that grow, got {dict(levels)}")
    if sizes[-1] != size:
        raise SpecError(f"the last group size must be that of the process group ({size}), got {sizes[-1]}")
    if any(size % part for part in sizes):
        raise SpecError(f"group sizes must divide the process group's {size} ranks, got {sizes}")


def _warn_of_one(period: int) -> None:
    if period == 1:
        message = "a period of 1 averages parameters at every step: averaging gradients with DDP costs no more"
        warnings.warn(message, stacklevel=3)
