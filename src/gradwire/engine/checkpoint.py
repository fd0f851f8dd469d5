"""Checkpoints: what the state of a hook looks like in a file, and which hook may load it.

A state is a plain mapping of numbers, text and tensors. Residuals are kept by parameter name. Only their sum over the
ranks matters, so a state loads on another number of ranks by the rule: each new rank starts from sum / new size.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.engine.fingerprint import CHECKSUM, DAMAGED, check_seal, sealed
from gradwire.errors import StateError
from gradwire.exchanges.bucket import Memory, numel_of

log = logging.getLogger("gradwire")

Summer = Callable[[Tensor], Tensor]
"""Sums a tensor on the CPU over the ranks. All ranks together."""

VERSION = 2
"""Version 1 had no checksum. It can be loaded for ever: see tests/golden."""
MERGED = -1
"""The `rank` of a state that holds the sum over all ranks."""


def pack(
    hook: str, step: int, rank: int, size: int, residuals: dict[str, Tensor], memory: Memory | None = None
) -> dict[str, Any]:
    """The state of one rank, or of all (`rank` is MERGED). `memory` is the same on all ranks."""
    state = {"version": VERSION, "hook": hook, "step": step, "rank": rank, "size": size, "residuals": residuals}
    return sealed({**state, "memory": copy_of(memory or {}, None)})


def copy_of(memory: Mapping[str, Mapping[str, Tensor]], device: torch.device | None) -> Memory:
    """A copy, on a device."""
    return {
        name: {key: value.detach().clone().to(device or value.device) for key, value in kept.items()}
        for name, kept in memory.items()
    }


def merged(residuals: Mapping[str, Tensor], params: Iterable[tuple[str, Tensor]], sum_: Summer) -> dict[str, Tensor]:
    """The sum over the ranks, by name. All ranks together, whichever of them keep residuals.

    If the parameters are not known, all ranks must keep residuals of the same names.
    """
    numels = {name: numel_of(param) for name, param in params} or {n: kept.numel() for n, kept in residuals.items()}
    if not numels:
        return {}
    flags = sum_(torch.tensor([float(name in residuals) for name in sorted(numels)])).tolist()
    names = [name for name, ranks in zip(sorted(numels), flags, strict=True) if ranks]
    if not names:
        return {}
    values = [residuals[name] if name in residuals else torch.zeros(numels[name]) for name in names]
    totals = sum_(torch.cat([value.to("cpu") for value in values])).split([value.numel() for value in values])
    return dict(zip(names, totals, strict=True))


def unpack(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> tuple[int, dict[str, Tensor]]:
    """The step and the residuals that `rank` of `size` starts from."""
    _check_form(states)
    step = int(states[0]["step"])
    for state in states:
        if (state["rank"], state["size"]) == (rank, size):
            return step, dict(state["residuals"])
    kept = [state["residuals"] for state in states]
    if not any(kept):
        return step, {}
    _check_whole(states, rank, size)
    names = sorted({name for own in kept for name in own})
    return step, {name: sum(own[name] for own in kept if name in own) / size for name in names}


def check_names(memory: Mapping[str, Any], params: Iterable[tuple[str, Tensor]]) -> None:
    """Raise StateError for the memory of another model."""
    known = {name for name, _ in params}
    wrong = [name for name in memory if known and name not in known]
    if wrong:
        raise StateError(
            f"the checkpoint is of another model; it holds state of {', '.join(wrong)}, which this model does not have"
        )


def check_residuals(residuals: Mapping[str, Tensor], params: Iterable[tuple[str, Tensor]]) -> None:
    """Raise StateError for the residuals of another model, with the names and sizes that differ, or for inf or NaN."""
    numels = {name: numel_of(param) for name, param in params}
    wrong = [name for name, value in residuals.items() if numels and numels.get(name) != value.numel()]
    if wrong:
        listed = ", ".join(f"{name} ({residuals[name].numel()}, here {numels.get(name, 'none')})" for name in wrong)
        raise StateError(f"the checkpoint is of another model; values by parameter: {listed}")
    bad = [name for name, value in residuals.items() if not bool(torch.isfinite(value).all())]
    if bad:
        raise StateError(f"{DAMAGED}: there is inf or NaN in the residuals of {', '.join(bad)}")


def warn_if_other(state: Mapping[str, Any], hook: str) -> None:
    """Warn if the state of another hook is loaded: its residuals are applied, its memory is not used."""
    if (state["residuals"] or state["memory"]) and state.get("hook") != hook:
        log.warning(
            "the checkpoint is of %r, this hook is %r: its residuals are applied, the rest of its state is not used",
            state.get("hook"),
            hook,
        )


def _check_form(states: Sequence[Mapping[str, Any]]) -> None:
    if not states:
        raise StateError("no state given: pass what Hook.state_dict() returned, or a list of such")
    for state in states:
        if not isinstance(state, Mapping):
            raise StateError(f"a state is what Hook.state_dict() returned, or a list of such; got {state!r}")
        check_version("gradwire.Hook", state, {"step", "rank", "size", "residuals", "memory"})
        _check_values(state)
        check_seal(state)


def check_version(what: str, state: Mapping[str, Any], keys: set[str]) -> None:
    """Raise StateError unless the state has these keys and a version that can be read."""
    version = state.get("version")
    version = version if type(version) is int else repr(version)
    missing = ({*keys, CHECKSUM} if version == VERSION else keys) - state.keys()
    if missing or version not in (1, VERSION):
        raise StateError(
            f"not a state of {what} version 1 to {VERSION} (missing: {', '.join(sorted(missing)) or 'nothing'}; "
            f"version: {version})"
        )


def _check_values(state: Mapping[str, Any]) -> None:
    """Raise StateError for values that no hook has saved: a damaged file."""
    for key, least in (("step", 0), ("rank", MERGED), ("size", 1)):
        if not isinstance(state[key], int) or isinstance(state[key], bool) or state[key] < least:
            raise StateError(f"{DAMAGED}: {key} is a whole number of at least {least}, not {state[key]!r}")
    memory = state["memory"]
    kept = [state["residuals"], *(memory.values() if isinstance(memory, Mapping) else [memory])]
    if not all(map(_is_tensors, kept)):
        raise StateError(f"{DAMAGED}: its residuals and memory are not tensors by the names of parameters")


def _is_tensors(kept: Any) -> bool:
    return isinstance(kept, Mapping) and all(isinstance(value, Tensor) for value in kept.values())


def _check_whole(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> None:
    """A sum needs all its parts: one merged state, or every rank's."""
    first = states[0]
    merged = len(states) == 1 and first["rank"] == MERGED
    if not merged and sorted(state["rank"] for state in states) != list(range(first["size"])):
        raise StateError(
            f"state of rank {first['rank']} of {first['size']} given to rank {rank} of {size}: load each "
            "rank's own state, the list of all ranks' states, or one made with state_dict(merged=True)"
        )
