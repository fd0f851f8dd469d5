"""Measured runs of the built-in workload: `measure(hooks, settings)` -> records -> `table(records)`."""

from gradwire.bench.measure import measure
from gradwire.bench.ranks import RankFailed
from gradwire.bench.records import PLAIN, Record, Settings
from gradwire.bench.table import table
from gradwire.bench.workload import GPT, Workload, WorkloadSettings

__all__ = ["GPT", "PLAIN", "RankFailed", "Record", "Settings", "Workload", "WorkloadSettings", "measure", "table"]
