"""Lightning: a callback for Trainer and for Fabric, of the package `lightning` or `pytorch_lightning`."""

import importlib
import sys
from typing import Any

from torch import nn

from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange
from gradwire.integrations.common import attach, gathered, metrics, require

__all__ = ["Gradwire"]

MINIMUM = "2.4"
PACKAGES = ("lightning", "pytorch_lightning")


def _callback() -> Any:
    """The class of callbacks, of the package that is in use. `object` if there is none: see `Gradwire.__init__`."""
    for package in sorted(PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module("lightning.pytorch" if package == "lightning" else package).Callback
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
    return object


Callback: Any = _callback()


class Gradwire(Callback):
    """Averages the gradients of a Trainer's or Fabric's model through a hook.

    Args:
        spec: The hook, as for `gradwire.register`.
        merge_state: How checkpoints hold the state of the hook. By default that of each rank, and resuming on the same
            number of ranks is exact; hooks with error feedback keep as much as the model per rank. If True, the sum
            over the ranks.
        options: Those of `gradwire.register`, such as `check_every`, and of the spec.

    Raises:
        ImportError: If Lightning is not installed, or too old.
        RegisterError: When training begins: with one process, with a strategy other than DDP or FSDP2, or if the model
            has a hook already.

    Examples:
        >>> trainer = Trainer(strategy="ddp", devices=2, callbacks=[gradwire.integrations.lightning.Gradwire("int8")])

        >>> callback = gradwire.integrations.lightning.Gradwire("int8")
        >>> fabric = Fabric(strategy="ddp", devices=2, callbacks=[callback])
        >>> fabric.launch()
        >>> model, optimizer = fabric.setup(model, optimizer)
        >>> fabric.save("last.ckpt", {"model": model, "optimizer": optimizer, "gradwire": callback})
    """

    def __init__(self, spec: str | Exchange, *, merge_state: bool = False, **options: Any) -> None:
        require(MINIMUM, *PACKAGES)
        self.spec, self.options, self.merge_state = spec, options, merge_state
        self.hook: Hook | None = None
        """The hook, once training has begun."""
        self._loaded: Any = None

    # -- Trainer -----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the hook: the strategy has wrapped the model by now."""
        if getattr(trainer.strategy, "_ddp_comm_hook", None) is not None:  # which does nothing on the CPU
            raise RegisterError("DDPStrategy(ddp_comm_hook=...) is set: use either that or the callback Gradwire")
        if self.hook is not None:  # of an earlier fit(), whose DDP model is gone
            self.hook.close()
        self._register("Lightning", trainer.strategy.model, trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log what the hook does, as often as the trainer logs."""
        if self.hook is not None and trainer.loggers:
            pl_module.log_dict(metrics(self.hook), on_step=True, on_epoch=False, rank_zero_only=True)

    # -- Fabric ------------------------------------------------------------------------------------------------

    def on_after_setup(self, fabric: Any, module: nn.Module) -> None:
        """Register the hook: Fabric calls this at the end of `setup()`."""
        if self.hook is not None:
            raise RegisterError("one Gradwire callback serves one model; call gradwire.register for the others")
        self._register("Fabric", getattr(module, "_forward_module", module), ())

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0, which writes the checkpoint. All ranks together."""
        if self.hook is None:
            return {} if self._loaded is None else {"states": self._loaded}
        states = [self.hook.state_dict(merged=True)] if self.merge_state else gathered(self.hook)
        return {"states": states} if states else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, now or once the hook is registered."""
        self._loaded = state_dict.get("states")
        self._continue()

    def _register(self, framework: str, model: Any, optimizers: Any) -> None:
        self.hook = attach(framework, model, self.spec, optimizers, self.options)
        self._continue()

    def _continue(self) -> None:
        if self.hook is not None and self._loaded:
            states, self._loaded = self._loaded, None
            self.hook.load_state_dict(states)
