"""The errors that gradwire raises on purpose.

    GradwireError
    ├── SpecError      (ValueError)    a hook, codec or option that does not exist, or a value it cannot take
    ├── RegisterError  (RuntimeError)  this model cannot carry this hook, and what to do instead
    ├── ExchangeError  (RuntimeError)  averaging failed on this rank or on another one
    ├── VerifyError    (RuntimeError)  Hook.verify() found that the hook does not do what it should
    └── StateError     (ValueError)    a checkpoint that is damaged or does not belong to this hook

Each message says what was wrong, what is allowed and what to do.
"""

import difflib
from collections.abc import Iterable

__all__ = ["ExchangeError", "GradwireError", "RegisterError", "SpecError", "StateError", "VerifyError"]

CLOSED = (
    "this hook is closed; to continue training build DDP and register again, and call what needs the other ranks "
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
    """`Hook.verify()` found that the hook does not do what it should."""


class StateError(GradwireError, ValueError):
    """A checkpoint is damaged, or does not belong to this hook."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name: the nearest name, and all names."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1)  # every name is lower-case
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Available: {', '.join(names) or 'none'}"
