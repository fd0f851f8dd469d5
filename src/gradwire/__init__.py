"""gradwire: averages gradients across ranks with fewer bytes on the wire, through DDP's communication-hook slot."""

import importlib
from typing import TYPE_CHECKING

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
    "Watched",
    "__version__",
    "codec",
    "exchange",
    "hsdp",
    "log",
    "make_bucket",
    "register",
]

HOMES = {
    "Bucket": "exchanges",
    "Codec": "codecs",
    "Exchange": "exchanges",
    "ExchangeError": "errors",
    "GradwireError": "errors",
    "Hook": "engine.hook",
    "RegisterError": "errors",
    "SpecError": "errors",
    "StateError": "errors",
    "Stats": "engine.stats",
    "Verification": "engine.verify",
    "VerifyError": "errors",
    "Watched": "engine.watch",
    "codec": "codecs",
    "exchange": "exchanges",
    "hsdp": "models.register",
    "log": "engine.log",
    "make_bucket": "exchanges",
    "register": "models.register",
}
"""By public name, the module that has it: imported at the first use of the name, as torch takes seconds to load."""
SUBMODULES = (
    "advisor",
    "codecs",
    "ddp_comm_hooks",
    "errors",
    "exchanges",
    "integrations",
    "kernels",
    "metrics",
    "optim",
    "report",
    "testing",
)
"""Imported in the same way, as in `gradwire.optim.step_in_backward`."""

if TYPE_CHECKING:
    from gradwire import advisor as advisor
    from gradwire import codecs as codecs
    from gradwire import ddp_comm_hooks as ddp_comm_hooks
    from gradwire import errors as errors
    from gradwire import exchanges as exchanges
    from gradwire import integrations as integrations
    from gradwire import kernels as kernels
    from gradwire import metrics as metrics
    from gradwire import optim as optim
    from gradwire import report as report
    from gradwire import testing as testing
    from gradwire.codecs import Codec, codec
    from gradwire.engine.hook import Hook
    from gradwire.engine.log import log
    from gradwire.engine.stats import Stats
    from gradwire.engine.verify import Verification
    from gradwire.engine.watch import Watched
    from gradwire.errors import ExchangeError, GradwireError, RegisterError, SpecError, StateError, VerifyError
    from gradwire.exchanges import Bucket, Exchange, exchange, make_bucket
    from gradwire.models.register import hsdp, register
else:

    def __getattr__(name):
        """A public name or a submodule, imported now; the next time it is simply there."""
        if name in HOMES:
            globals()[name] = getattr(importlib.import_module(f"gradwire.{HOMES[name]}"), name)
            return globals()[name]
        if name in SUBMODULES:
            return importlib.import_module(f"gradwire.{name}")
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}")

    def __dir__():
        """All names, those that are not loaded yet too."""
        return sorted({*globals(), *HOMES, *SUBMODULES})
