"""Metrics: what a hook does while the model trains, written where people look.

    gradwire.metrics.record(hook, gradwire.metrics.JSONL("run.jsonl"))

`record` takes any number of sinks. A sink of your own is a subclass of `Sink` with the method `write`.
"""

from gradwire._torch import all_threads
from gradwire.engine.observers import Observer
from gradwire.metrics.recorder import METRICS, Recorder, record
from gradwire.metrics.sinks import JSONL, Prometheus, Record, Sink, Terminal
from gradwire.metrics.trackers import MLflow, TensorBoard, WandB

__all__ = [
    "JSONL",
    "METRICS",
    "MLflow",
    "Observer",
    "Prometheus",
    "Record",
    "Recorder",
    "Sink",
    "TensorBoard",
    "Terminal",
    "WandB",
    "all_threads",
    "record",
]
