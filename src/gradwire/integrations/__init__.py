"""One line for training frameworks: Lightning, Accelerate and `transformers.Trainer`.

    Trainer(callbacks=[gradwire.integrations.lightning.Gradwire("int8")])
    gradwire.integrations.accelerate.prepare(accelerator, model, optimizer, hook="int8")
    Trainer(..., callbacks=[gradwire.integrations.transformers.Gradwire("int8")])

Each registers the hook once the framework has wrapped the model, keeps the state of the hook in the framework's own
checkpoints, and reports what the hook does where the framework logs. No framework is imported before its module is.
"""

import importlib
from typing import TYPE_CHECKING

from gradwire.integrations.common import metrics

__all__ = ["metrics"]

SUBMODULES = ("accelerate", "lightning", "transformers")

if TYPE_CHECKING:
    from gradwire.integrations import accelerate as accelerate
    from gradwire.integrations import lightning as lightning
    from gradwire.integrations import transformers as transformers
else:

    def __getattr__(name):
        """An integration, imported now."""
        if name in SUBMODULES:
            return importlib.import_module(f"gradwire.integrations.{name}")
        raise AttributeError(f"module 'gradwire.integrations' has no attribute {name!r}")
