"""What local training keeps between steps, and its checkpoints.

Everything is kept by parameter name. Global values and the state of the outer step are the same on all ranks, so any
number of ranks can load them; residuals follow the rule of `Hook.load_state_dict`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.futures import Future

from gradwire.engine.checkpoint import VERSION, check_version
from gradwire.engine.fingerprint import check_seal, fingerprint, sealed
from gradwire.engine.hook import Hook
from gradwire.errors import StateError
from gradwire.optim.fragments import Fragment, wait_for

State = Mapping[str, Any]
KEYS = {"schedule", "steps", "last_sent", "sent_at", "values", "outer", "transfers", "exchange"}
"""What a state holds, besides its version and checksum."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One fragment whose average is not applied yet."""

    fragment: Fragment
    arrives_at: int
    """The step at whose end the average is applied."""
    mean: Tensor
    """The mean of the deltas, once `future` is complete."""
    future: Future[Tensor] | None
    at_start: list[Tensor]
    """The parameters when the transfer began; empty if the average is applied in the same step."""
    postponed: bool = False
    """Whether its average has failed, and is made again beside the next steps."""


class Rounds:
    """The fragments of a model, their global values, and the transfers in flight."""

    hook: Hook

    def __init__(self, fragments: list[Fragment], sync_every: int, delay: int) -> None:
        self.sync_every, self.delay, self.steps = sync_every, delay, 0
        self.fragments = fragments
        self.globals = [fragment.read() for fragment in fragments]
        """The values that all ranks agree on, a flat tensor per fragment."""
        self.loaded = False
        self.last_sent = -1
        """The index of the fragment that was sent last."""
        self.sent_at = [0] * len(fragments)
        """The step at which each fragment was sent last."""
        self.transfers: list[Transfer] = []

    def named_globals(self) -> list[tuple[str, Tensor]]:
        """The global values by parameter name. They are the same on all ranks at any time."""
        pairs = zip(self.fragments, self.globals, strict=True)
        return [pair for fragment, values in pairs for pair in zip(fragment.names, fragment.views(values), strict=True)]

    def outer_state(self) -> dict[str, list[Tensor]]:
        """The state of the outer step by name, a flat tensor per fragment."""
        return {}

    def __str__(self) -> str:
        schedule = f"sync_every={self.sync_every}, fragments={len(self.fragments)}, delay={self.delay}"
        return f"{type(self).__name__}({schedule})"

    def _submit(self, transfer: Transfer) -> None:
        """Start to average."""
        transfer.future = self.hook.mean(transfer.fragment.bucket(transfer.mean))

    def _settle(self, transfer: Transfer, *, may_postpone: bool = False) -> bool:
        """Wait until the mean can be applied; False if there is none any more, or not yet, which may be allowed."""
        self._wait(transfer)
        return True

    def _wait(self, transfer: Transfer) -> None:
        if transfer.future is not None:
            wait_for(transfer.future, f"averaging parameters at step {self.steps}")
            transfer.future = None

    def _fingerprint(self) -> str:
        """A short text that differs if any bit of the global values does."""
        return hashlib.sha256(repr([int(fingerprint(flat)) for flat in self.globals]).encode()).hexdigest()[:16]

    def _check_same(self) -> None:
        if self.hook.size > 1:
            self.hook.agree("step of a checkpoint", str(self.steps))
            self.hook.agree("global values", self._fingerprint())

    # -- checkpoints -------------------------------------------------------------------------------------------

    def _pack(self, merged: bool) -> dict[str, Any]:
        """The state. Transfers in flight are complete in it, and are applied at their step."""
        for transfer in self.transfers:
            self._wait(transfer)
        return self._packed(self.transfers, self.hook.state_dict(merged=merged))

    def _packed(self, transfers: Sequence[Transfer], exchange: State) -> dict[str, Any]:
        state = {
            "version": VERSION,
            "schedule": str(self),
            "steps": self.steps,
            "last_sent": self.last_sent,
            "sent_at": list(self.sent_at),
            "values": self._by_name(self.globals),
            "outer": {key: self._by_name(flats) for key, flats in self.outer_state().items()},
            "transfers": [_pack_transfer(transfer) for transfer in transfers],
            "exchange": exchange,
        }
        return sealed(state)

    def _load(self, states: Sequence[State]) -> None:
        """Load a state. A state that is refused changes nothing."""
        _check_form(states)
        own = [state for state in states if self._is_own(state)]
        state = (own or states)[0]
        same = state["schedule"] == str(self)
        self._check_model(state)
        if state["transfers"] and not same:
            raise StateError(
                f"the checkpoint is of {state['schedule']} with averages in flight, this is {self}; use the same "
                "settings, or call sync() before state_dict()"
            )
        self._load_hook(states, int(state["last_sent"]) if same else -1)
        self._fill(self.globals, state["values"])
        for key, flats in self.outer_state().items():
            self._fill(flats, state["outer"][key])
        self.steps = int(state["steps"])
        self.sent_at = list(state["sent_at"]) if same else [-1] * len(self.fragments)
        if not own:
            self._start_from_globals()
        self.transfers = [self._load_transfer(packed, bool(own)) for packed in state["transfers"]]

    def _load_transfer(self, packed: State, own: bool) -> Transfer:
        """On a rank that starts from the global values, the transfer has started from them too."""
        fragment = next(part for part in self.fragments if set(part.names) == set(packed["mean"]))
        mean = fragment.copy_(fragment.flat(), [packed["mean"][name] for name in fragment.names])
        values = [packed["at_start"][name] for name in fragment.names] if own else fragment.params
        pairs = zip(values, fragment.params, strict=True)
        at_start = [value.detach().to(like.device, copy=True) for value, like in pairs]
        return Transfer(fragment, int(packed["arrives_at"]), mean, None, at_start)

    def _load_hook(self, states: Sequence[State], last_sent: int) -> None:
        """The hook counts a round when the index of the fragments stops rising, so it must see the last one again."""
        seen = last_sent >= 0
        parts = [state["exchange"] for state in states]
        self.hook.load_state_dict([sealed({**part, "step": part["step"] - seen}) for part in parts])
        if seen:
            self.hook.begin(self.fragments[last_sent].bucket(self.globals[last_sent]))
            self.hook.reset_stats()
        self.last_sent = last_sent

    def _start_from_globals(self) -> None:
        for fragment, values in zip(self.fragments, self.globals, strict=True):
            fragment.write(values)
        self.sent_at = [self.steps] * len(self.fragments)

    def _is_own(self, state: State) -> bool:
        return (state["exchange"]["rank"], state["exchange"]["size"]) == (self.hook.rank, self.hook.size)

    def _by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        pairs = zip(self.fragments, flats, strict=True)
        return {name: value for fragment, flat in pairs for name, value in fragment.by_name(flat).items()}

    def _fill(self, flats: Sequence[Tensor], values: Mapping[str, Tensor]) -> None:
        for fragment, flat in zip(self.fragments, flats, strict=True):
            fragment.copy_(flat, [values[name] for name in fragment.names])

    def _check_model(self, state: State) -> None:
        shapes = {name: tuple(value.shape) for name, value in state["values"].items()}
        here = {name: tuple(value.shape) for name, value in self.named_globals()}
        wrong = sorted(name for name in shapes.keys() | here.keys() if shapes.get(name) != here.get(name))
        if wrong:
            pairs = (f"{name} ({shapes.get(name, 'none')}, here {here.get(name, 'none')})" for name in wrong[:5])
            raise StateError(f"the checkpoint is of another model; shapes by parameter: {', '.join(pairs)}")
        missing = self.outer_state().keys() - state["outer"].keys()
        if missing:
            raise StateError(f"the checkpoint has no {', '.join(sorted(missing))}: it is of {state['schedule']}")


def _pack_transfer(transfer: Transfer) -> dict[str, Any]:
    fragment = transfer.fragment
    at_start = {name: value.clone() for name, value in zip(fragment.names, transfer.at_start, strict=False)}
    return {"arrives_at": transfer.arrives_at, "mean": fragment.by_name(transfer.mean), "at_start": at_start}


def _check_form(states: Sequence[State]) -> None:
    if not states:
        raise StateError("no state given: pass what state_dict() returned, or a list of such")
    for state in states:
        if not isinstance(state, Mapping):
            raise StateError(f"a state is what state_dict() returned, or a list of such; got {state!r}")
        check_version("local training", state, KEYS)
        check_seal(state)
