"""The error tree: everything gradwire raises on purpose.

    GradwireError
    ├── SpecError      (ValueError)    a hook, codec or option that does not exist, or a value it cannot take
    ├── RegisterError  (RuntimeError)  this model cannot carry this hook, and what to do instead
    ├── ExchangeError  (RuntimeError)  averaging failed on this rank or on another one
    ├── VerifyError    (RuntimeError)  Hook.verify() found that a promise does not hold
    └── StateError     (ValueError)    a checkpoint that does not belong to this hook

Each message says what was wrong, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

CLOSED = (
    "this hook is closed; to go on training build DDP anew and register again, and call what needs the other ranks "
    "(verify, switch) before closing"
)


class GradwireError(Exception):
    """Base of every error that gradwire raises on purpose."""


class SpecError(GradwireError, ValueError):
    """A spec names something that does not exist, or gives an option a value it cannot take."""


class RegisterError(GradwireError, RuntimeError):
    """The model cannot carry the hook."""


class ExchangeError(GradwireError, RuntimeError):
    """Averaging failed on this rank or on another one."""


class VerifyError(GradwireError, RuntimeError):
    """`Hook.verify()` found a promise that does not hold."""


class StateError(GradwireError, ValueError):
    """A checkpoint does not belong to this hook."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The text for a name that does not exist: the nearest one, and all there are."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1)  # every name is lower-case
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Available: {', '.join(names) or 'none'}"
