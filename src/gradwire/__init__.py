"""gradwire: averages gradients across ranks with fewer bytes on the wire, through DDP's communication-hook slot."""

import importlib
from typing import TYPE_CHECKING

from gradwire.bucket import Bucket, make_bucket
from gradwire.codecs import Codec, codec
from gradwire.ddp import register
from gradwire.errors import ExchangeError, GradwireError, RegisterError, SpecError, StateError, VerifyError
from gradwire.exchanges import Exchange, exchange
from gradwire.hook import Hook
from gradwire.stats import Stats
from gradwire.verify import Verification
from gradwire.version import __version__

__all__ = [
    "Bucket",
    "Codec",
    "Exchange",
    "ExchangeError",
    "GradwireError",
    "Hook",
    "RegisterError",
    "SpecError",
    "StateError",
    "Stats",
    "Verification",
    "VerifyError",
    "__version__",
    "codec",
    "exchange",
    "make_bucket",
    "register",
]

SUBMODULES = ("advisor", "ddp_comm_hooks", "optim", "report", "testing")
"""Loaded when they are first asked for, as in `gradwire.optim.step_in_backward`, so that `import gradwire` is cheap."""

if TYPE_CHECKING:
    from gradwire import advisor as advisor
    from gradwire import ddp_comm_hooks as ddp_comm_hooks
    from gradwire import optim as optim
    from gradwire import report as report
    from gradwire import testing as testing
else:

    def __getattr__(name):
        """A submodule, imported now."""
        if name in SUBMODULES:
            return importlib.import_module(f"gradwire.{name}")
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")

    def __dir__():
        """All names, of submodules that are not loaded yet too."""
        return sorted({*globals(), *SUBMODULES})
