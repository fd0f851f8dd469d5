"""Checkpoints of local training: what `LocalSGD.state_dict` holds, and how it is taken back.

Everything is kept by parameter name. Global values and what the outer step remembers are the same on all ranks, so any
number of ranks can load them; what feedback keeps follows the rule of `Hook.load_state_dict`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradwire.engine.verify import fingerprint
from gradwire.errors import StateError
from gradwire.optim.fragments import Fragment, Journey

if TYPE_CHECKING:
    from gradwire.optim.local_sgd import LocalSGD

VERSION = 1


def pack(rounds: LocalSGD, merged: bool) -> dict[str, Any]:
    """The state. What was under way has arrived here, and is due when it was."""
    return {
        "version": VERSION,
        "schedule": str(rounds),
        "steps": rounds.steps,
        "last": rounds.last,
        "departed": list(rounds.departed),
        "values": _by_name(rounds.fragments, rounds.globals),
        "outer": {key: _by_name(rounds.fragments, flats) for key, flats in rounds.outer_state().items()},
        "under_way": [_pack_journey(journey) for journey in rounds.journeys],
        "exchange": rounds.hook.state_dict(merged=merged),
    }


def load(rounds: LocalSGD, states: Sequence[Mapping[str, Any]]) -> None:
    """Take a state back. One that is refused leaves everything as it was."""
    _check_form(states)
    own = [state for state in states if _is_own(state, rounds)]
    state = (own or states)[0]
    same = state["schedule"] == str(rounds)
    _check_model(rounds, state)
    if state["under_way"] and not same:
        raise StateError(
            f"the checkpoint is of {state['schedule']} with averages under way, this is {rounds}; use the same "
            "settings, or call sync() before state_dict()"
        )
    _load_hook(rounds, states, int(state["last"]) if same else -1)
    _fill(rounds.fragments, rounds.globals, state["values"])
    for key, flats in rounds.outer_state().items():
        _fill(rounds.fragments, flats, state["outer"][key])
    rounds.steps = int(state["steps"])
    rounds.departed = list(state["departed"]) if same else [-1] * len(rounds.fragments)
    if not own:
        _start_from_globals(rounds)
    _load_journeys(rounds, state["under_way"], bool(own))


def fingerprint_of(flats: Sequence[Tensor]) -> str:
    """A short text that differs where a bit does."""
    return hashlib.sha256(repr([int(fingerprint(flat)) for flat in flats]).encode()).hexdigest()[:16]


def _pack_journey(journey: Journey) -> dict[str, Any]:
    fragment = journey.fragment
    started = {name: value.clone() for name, value in zip(fragment.names, journey.started, strict=False)}
    return {"due": journey.due, "mean": fragment.by_name(journey.mean), "started": started}


def _load_journeys(rounds: LocalSGD, under_way: Sequence[Mapping[str, Any]], own: bool) -> None:
    """On a rank that starts from the global values, a journey has started from them too."""
    rounds.journeys = []
    for packed in under_way:
        fragment = next(part for part in rounds.fragments if set(part.names) == set(packed["mean"]))
        mean = fragment.copy_(fragment.flat(), [packed["mean"][name] for name in fragment.names])
        values = [packed["started"][name] for name in fragment.names] if own else fragment.params
        started = [
            value.detach().to(like.device, copy=True) for value, like in zip(values, fragment.params, strict=True)
        ]
        rounds.journeys.append(Journey(fragment, int(packed["due"]), mean, None, started))


def _load_hook(rounds: LocalSGD, states: Sequence[Mapping[str, Any]], last: int) -> None:
    """The hook counts a round when the fragments' numbers stop rising: let it see again the one that departed last."""
    seen = last >= 0
    rounds.hook.load_state_dict([{**state["exchange"], "step": state["exchange"]["step"] - seen} for state in states])
    if seen:
        rounds.hook.begin(rounds.fragments[last].bucket(rounds.globals[last]))
        rounds.hook.reset_stats()
    rounds.last = last


def _start_from_globals(rounds: LocalSGD) -> None:
    for fragment, values in zip(rounds.fragments, rounds.globals, strict=True):
        fragment.write(values)
    rounds.departed = [rounds.steps] * len(rounds.fragments)


def _is_own(state: Mapping[str, Any], rounds: LocalSGD) -> bool:
    return (state["exchange"]["rank"], state["exchange"]["size"]) == (rounds.hook.rank, rounds.hook.size)


def _by_name(fragments: Sequence[Fragment], flats: Sequence[Tensor]) -> dict[str, Tensor]:
    pairs = zip(fragments, flats, strict=True)
    return {name: value for fragment, flat in pairs for name, value in fragment.by_name(flat).items()}


def _fill(fragments: Sequence[Fragment], flats: Sequence[Tensor], values: Mapping[str, Tensor]) -> None:
    for fragment, flat in zip(fragments, flats, strict=True):
        fragment.copy_(flat, [values[name] for name in fragment.names])


def _check_form(states: Sequence[Mapping[str, Any]]) -> None:
    if not states:
        raise StateError("no state given: pass what state_dict() returned, or a list of such")
    for state in states:
        if state.get("version") != VERSION or "under_way" not in state:
            raise StateError(
                f"not a state of local training, version {VERSION}: it holds {', '.join(state) or 'nothing'}"
            )


def _check_model(rounds: LocalSGD, state: Mapping[str, Any]) -> None:
    shapes = {name: tuple(value.shape) for name, value in state["values"].items()}
    here = {name: tuple(value.shape) for name, value in rounds.named_globals()}
    wrong = sorted(name for name in shapes.keys() | here.keys() if shapes.get(name) != here.get(name))
    if wrong:
        told = ", ".join(f"{name} ({shapes.get(name, 'none')}, here {here.get(name, 'none')})" for name in wrong[:5])
        raise StateError(f"the checkpoint is of another model; shapes by parameter: {told}")
    missing = rounds.outer_state().keys() - state["outer"].keys()
    if missing:
        raise StateError(f"the checkpoint has no {', '.join(sorted(missing))}: it is of {state['schedule']}")
