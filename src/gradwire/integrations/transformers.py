"""transformers.Trainer: a callback."""

import importlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange
from gradwire.integrations.common import attach, load, metrics, require, save

__all__ = ["Gradwire"]

MINIMUM = "5.0"


def _callback() -> Any:
    """The class of callbacks; `object` if there is none: see `Gradwire.__init__`."""
    try:
        return importlib.import_module("transformers").TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        return object


TrainerCallback: Any = _callback()


class Gradwire(TrainerCallback):
    """Averages the gradients of a Trainer's model through a hook.

    Each rank writes the state of the hook into the checkpoint folder, and `train(resume_from_checkpoint=...)` continues
    from it. What the hook does is logged with the loss.

    Args:
        spec: The hook, as for `gradwire.register`.
        options: Those of `gradwire.register`, such as `check_every`, and of the spec.

    Raises:
        ImportError: If Transformers is not installed, or too old.
        RegisterError: When training begins: with one process, with DeepSpeed or FSDP1, or if the model has a hook
            already.

    Examples:
        >>> trainer = Trainer(model, settings, train_dataset=data, callbacks=[
        ...     gradwire.integrations.transformers.Gradwire("int8")
        ... ])
        >>> trainer.train()
    """

    def __init__(self, spec: str | Exchange, **options: Any) -> None:
        require(MINIMUM, "transformers")
        self.spec, self.options = spec, options
        self.hook: Hook | None = None
        """The hook, once training has begun."""
        self._model: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register the hook: the Trainer has wrapped the model by now."""
        trainer, checkpoint = _training(sys._getframe())
        if trainer.model_wrapped is not self._model:  # a second train() goes on with the same model
            if self.hook is not None:
                self.hook.close()
            self.hook = attach("Trainer", trainer.model_wrapped, self.spec, [trainer.optimizer], self.options)
            self._model = trainer.model_wrapped
        if checkpoint is not None:
            load(_made(self.hook), checkpoint)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop(callbacks.index(self)))  # so that those that report see what on_log adds

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add what the hook does to the training's own logs."""
        if self.hook is not None and logs is not None and "loss" in logs:
            added = metrics(self.hook)
            logs.update(added)
            state.log_history[-1].update(added)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of this rank beside what the Trainer has written."""
        if not args.save_only_model and not state.is_hyper_param_search:  # such checkpoints are not resumed
            save(_made(self.hook), Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _made(hook: Hook | None) -> Hook:
    assert hook is not None
    return hook


def _training(frame: FrameType | None) -> tuple[Any, str | None]:
    """The Trainer that trains, and the checkpoint that it resumes from. It passes neither of them to callbacks."""
    trainer_class = importlib.import_module("transformers").Trainer
    while frame is not None:
        names = frame.f_locals
        if "resume_from_checkpoint" in names and isinstance(names.get("self"), trainer_class):
            return names["self"], names["resume_from_checkpoint"]
        frame = frame.f_back
    raise RegisterError("Gradwire is a callback of transformers.Trainer: pass it as Trainer(..., callbacks=[...])")
