"""Local SGD: every rank trains by itself, and once in many steps the ranks average what they have moved.

A round, for each fragment of the model (g: the global values, the same on all ranks; x: this rank's parameters):

1. Every rank takes `every` optimizer steps from g.
2. The fragment departs: d = g - x goes through the exchange, beside the steps that follow.
3. `delay` steps later its mean arrives on all ranks: g <- g - mean(d), the outer step.
4. The parameters become the new g plus what this rank has moved since 2. Every inner step so counts exactly once.

Without delay 4 says that all ranks hold the same bits. Fragments take turns within the round, so the link is used
evenly. Departures and arrivals are counted in steps, never in time: runs repeat exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange
from gradwire.exchanges import exchange as exchange_of
from gradwire.exchanges.base import Comm
from gradwire.models.ddp import make_hook
from gradwire.optim import rounds_state
from gradwire.optim.fragments import Fragment, Journey, check_parameters, cut, digest, own_group, waited
from gradwire.optim.rounds_checks import check_held, check_model, check_schedule

_at_work: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LocalSGD]] = weakref.WeakKeyDictionary()


class LocalSGD:
    """A context manager over an ordinary training loop with a plain module: counts `optimizer.step()` by itself.

    `every` is the number of steps between two averages of a parameter, `exchange` any spec of gradwire: it carries
    deltas, so few bits go a long way. All ranks must take the same steps. On entering, all ranks start from rank 0's
    parameters; on leaving, `sync()` makes them alike again. After an error the ranks are left as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        exchange: str | Exchange = "exact",
        fragments: int = 1,
        delay: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_model(model, optimizer)
        _check_alone(model)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        device = check_parameters(named)
        check_held(named, optimizer)
        check_schedule(every, fragments, delay, len(named))
        self.every, self.delay, self.steps = every, delay, 0
        self.fragments = cut(named, fragments)
        self.globals = [fragment.read() for fragment in self.fragments]
        self.hook = make_hook(exchange_of(exchange), own_group(process_group), device, params=self.named_globals)
        self.last = -1
        """The fragment that departed last."""
        self.departed = [0] * fragments
        """The step of each fragment's last departure."""
        self.journeys: list[Journey] = []
        self.loaded = False
        self._optimizer = optimizer
        self._counter: RemovableHandle | None = None
        self._agree(digest(named))
        _at_work[model] = weakref.ref(self)

    # -- the loop ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start counting. All ranks together."""
        if self.hook.closed or self._counter is not None:
            raise RegisterError(f"{type(self).__name__} can be entered once: make a new one, and load the old state")
        if self.loaded:
            self._check_loaded()
        else:
            self._start_alike()
        self._counter = self._optimizer.register_step_post_hook(lambda *_: self._count())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the ranks alike, unless an error is passing; then stop counting."""
        try:
            if kind is None:
                self.sync()
        finally:
            self.close()

    def sync(self) -> None:
        """Let everything arrive and average what has moved since: all ranks then hold the same parameters.

        All ranks together, between steps. What has not moved since its last departure stays as it is.
        """
        self._arrive(self.journeys)
        for fragment in self.fragments:
            if self.departed[fragment.index] != self.steps:
                self._depart(fragment)
        self._arrive(self.journeys)

    def close(self) -> None:
        """Stop counting, end threads and connections. What is under way is dropped."""
        if self._counter is not None:
            self._counter.remove()
        self.journeys = []
        self.hook.close()

    def _count(self) -> None:
        self.steps += 1
        for fragment in self.fragments:
            if self.steps % self.every == self._offset(fragment):
                self._depart(fragment)
        self._arrive([journey for journey in self.journeys if journey.due <= self.steps])

    def _offset(self, fragment: Fragment) -> int:
        """The turn of a fragment within a round; the last one's is the round's end."""
        return (fragment.index + 1) * self.every // len(self.fragments) % self.every

    @torch.no_grad()
    def _depart(self, fragment: Fragment) -> None:
        """Steps 1 and 2. The delta starts from g as the parameter's own type holds it, so rounding is no movement."""
        delta = fragment.flat()
        values = fragment.views(self.globals[fragment.index])
        for view, value, param in zip(fragment.views(delta), values, fragment.params, strict=True):
            view.copy_(value.to(param.dtype)).sub_(param)
        bucket = fragment.bucket(delta)
        self.hook.begin(bucket)
        started = [param.detach().clone() for param in fragment.params] if self.delay else []
        self.journeys.append(Journey(fragment, self.steps + self.delay, delta, self.hook.mean(bucket), started))
        self.last, self.departed[fragment.index] = fragment.index, self.steps

    @torch.no_grad()
    def _arrive(self, journeys: Sequence[Journey]) -> None:
        """Steps 3 and 4, in the order of departure."""
        for journey in list(journeys):
            self._wait(journey)
            fragment, values = journey.fragment, self.globals[journey.fragment.index]
            self._outer_step_(fragment, values, journey.mean)
            for place, (param, view) in enumerate(zip(fragment.params, fragment.views(values), strict=True)):
                fresh = view.to(param.dtype)
                param.copy_(fresh + (param - journey.started[place]) if journey.started else fresh)
            self.journeys.remove(journey)

    def _outer_step_(self, fragment: Fragment, values: Tensor, mean: Tensor) -> None:
        """Move the global values by the mean of what the ranks have moved."""
        values.sub_(mean)

    def _wait(self, journey: Journey) -> None:
        if journey.future is not None:
            waited(journey.future, f"averaging parameters at step {self.steps}")
            journey.future = None

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, *, merged: bool = False) -> dict[str, Any]:
        """Tensors, numbers and text only. Call it between steps, also in the middle of a round.

        Save it on every rank, with the model's and the optimizer's own states: going on is then exact. With `merged`
        (all ranks together) what feedback keeps is summed, so that any number of ranks can load the one state.
        """
        for journey in self.journeys:
            self._wait(journey)
        return rounds_state.pack(self, merged)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from this rank's own state, or from a merged one or the list of all ranks' states. Before entering.

        Own state: the model must hold what it held on this rank. Otherwise, or on another number of ranks: every rank
        starts from the global values, which are written into the model, and what was moved since is lost.
        """
        if self._counter is not None:
            raise RegisterError("load_state_dict() comes before entering the context")
        rounds_state.load(self, [state] if isinstance(state, Mapping) else list(state))
        self.loaded = True

    def outer_state(self) -> dict[str, list[Tensor]]:
        """What the outer step remembers: a flat tensor a fragment, by name."""
        return {}

    # -- machinery ---------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{type(self).__name__}(every={self.every}, fragments={len(self.fragments)}, delay={self.delay})"

    def _agree(self, model: str) -> None:
        if self.hook.size == 1:
            return
        try:
            self.hook.agree("local training", str(self))
            self.hook.agree("model", model)
        except BaseException:
            self.hook.close()
            raise

    def _check_loaded(self) -> None:
        if self.hook.size > 1:
            self.hook.agree("step of a checkpoint", str(self.steps))
            self.hook.agree("global values", rounds_state.fingerprint_of(self.globals))

    def _start_alike(self) -> None:
        """Rank 0's parameters for everybody, as DDP does it."""
        for fragment, values in zip(self.fragments, self.globals, strict=True):
            fragment.copy_(values, fragment.params)
            if self.hook.size > 1:
                self.hook.run(partial(_from_rank_0_, values))
                fragment.write(values)

    def named_globals(self) -> list[tuple[str, Tensor]]:
        """The global values, for `hook.verify()`: they are the same on all ranks at any time."""
        pairs = zip(self.fragments, self.globals, strict=True)
        return [pair for fragment, values in pairs for pair in zip(fragment.names, fragment.views(values), strict=True)]


def _from_rank_0_(values: Tensor, comm: Comm) -> None:
    comm.all_reduce_(values if comm.rank == 0 else values.zero_())


def _check_alone(model: nn.Module) -> None:
    other = _at_work[model]() if model in _at_work else None
    if other is not None and not other.hook.closed:
        raise RegisterError(f"this model already trains under {other}; leave that context, or close() it, first")
