"""Sinks for TensorBoard, Weights & Biases and MLflow.

Each package is looked for when its sink is made, and imported where records are written. Names begin with `gradwire/`.
What is a text, the hook and the reason of `auto`, is written when it changes.
"""

import importlib.util
import os
from typing import Any

from gradwire.errors import GradwireError
from gradwire.metrics.sinks import Record, Sink


class _Tracker(Sink):
    """A sink of another package."""

    package = ""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise GradwireError(
                f"gradwire.metrics.{type(self).__name__} needs the package {self.package!r}, which is not installed: "
                f"pip install 'gradwire[metrics]'"
            )
        self._text = ""

    def _changed(self, record: Record) -> str:
        """The hook and the reason, if they are not those of the record before; else an empty text."""
        before, self._text = self._text, record.reason or record.hook
        return "" if self._text == before else self._text


class TensorBoard(_Tracker):
    """Writes to TensorBoard.

    Args:
        where: A folder for the event files, or a `SummaryWriter` of yours, which stays open.

    Raises:
        GradwireError: tensorboard is not installed.

    Examples:
        >>> gradwire.metrics.record(hook, gradwire.metrics.TensorBoard("runs/int8"))
    """

    package = "tensorboard"

    def __init__(self, where: Any) -> None:
        super().__init__()
        self._where, self._is_ours = where, isinstance(where, str | os.PathLike)

    def open(self) -> None:
        """Make the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(self._where)) if self._is_ours else self._where

    def write(self, record: Record) -> None:
        """Scalars, and a text if the hook has changed."""
        for name, value in record.values.items():
            self._writer.add_scalar(f"gradwire/{name}", value, record.step, record.time_s)
        if text := self._changed(record):
            self._writer.add_text("gradwire/hook", text, record.step, record.time_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the writer, if it is ours."""
        if self._is_ours:
            self._writer.close()


class WandB(_Tracker):
    """Writes to Weights & Biases: to the run that is active when recording begins, or to a run of its own.

    A run of yours keeps its step numbers: our values are logged with `commit=False`, and appear with your next `log`.
    The axis of all values is `gradwire/step`.

    Args:
        options: For `wandb.init`, if no run is active; for instance `project="p", mode="offline"`.

    Raises:
        GradwireError: wandb is not installed.

    Examples:
        >>> gradwire.metrics.record(hook, gradwire.metrics.WandB(project="p", mode="offline"))
    """

    package = "wandb"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options

    def open(self) -> None:
        """Find the run, or begin one."""
        import wandb

        self._is_ours = wandb.run is None
        self._run: Any = wandb.init(**self._options) if self._is_ours else wandb.run
        self._run.define_metric("gradwire/*", step_metric="gradwire/step")

    def write(self, record: Record) -> None:
        """All values; the hook goes to the summary of the run."""
        values: dict[str, float] = {"step": record.step, **record.values}
        self._run.log({f"gradwire/{name}": value for name, value in values.items()}, commit=self._is_ours)
        if text := self._changed(record):
            self._run.summary["gradwire/hook"] = text

    def close(self) -> None:
        """Finish the run, if it is ours."""
        if self._is_ours:
            self._run.finish()


class MLflow(_Tracker):
    """Writes to MLflow: to the run that is active when recording begins, or to a run of its own.

    Args:
        tracking_uri: Where runs are kept, such as `"file:./mlruns"`; by default MLflow's own setting.
        experiment: The name of the experiment of a new run, made if there is none; by default MLflow's own.

    Raises:
        GradwireError: mlflow is not installed.

    Examples:
        >>> gradwire.metrics.record(hook, gradwire.metrics.MLflow(experiment="e"))
    """

    package = "mlflow"

    def __init__(self, *, tracking_uri: str | None = None, experiment: str = "Default") -> None:
        super().__init__()
        self._tracking_uri, self._experiment = tracking_uri, experiment

    def open(self) -> None:
        """Find the run, or begin one."""
        import mlflow

        self._client: Any = mlflow.MlflowClient(self._tracking_uri)
        active = mlflow.active_run()
        self._is_ours = active is None or self._tracking_uri is not None
        self._run_id = self._new_run() if self._is_ours else active.info.run_id

    def _new_run(self) -> str:
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self._experiment)
        return str(self._client.create_run(experiment).info.run_id)

    def write(self, record: Record) -> None:
        """All values at once; the hook is a tag of the run."""
        from mlflow.entities import Metric, RunTag

        at = int(1e3 * record.time_s)
        values = [Metric(f"gradwire/{name}", value, at, record.step) for name, value in record.values.items()]
        text = self._changed(record)
        tags = [RunTag("gradwire.hook", text)] if text else []
        self._client.log_batch(self._run_id, metrics=values, tags=tags)

    def close(self) -> None:
        """End the run, if it is ours."""
        if self._is_ours:
            self._client.set_terminated(self._run_id)
