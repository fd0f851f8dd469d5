"""How a run is measured (Settings) and its results: one Record per hook, and in files one Run per cell."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import SpecError
from gradwire.tools.workload import WorkloadSettings
from gradwire.version import __version__

PLAIN = "plain"
"""DDP without any hook."""
SCHEMA = 1
"""Version of the format of `Run`. It is raised whenever older and newer versions would misread each other's files."""
NO_LINK = "none"
"""The real link: nothing is emulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure. Every hook trains the same model from the same seed on the same batches."""

    nproc: int = 2
    """Number of ranks, one process each. `launch.local.check_nproc` checks it against the machine."""
    steps: int = 80
    """Training steps under each hook."""
    round_steps: int = 5
    """Steps before the next hook takes its turn. Short turns expose all hooks to the same disturbances."""
    limit_s: float | None = None
    """No new round begins after this many seconds of training. None: train to the end."""
    seed: int = 0
    """Seed of the weights; together with rank and step also of the batches."""
    bucket_mb: float | None = None
    """DDP's `bucket_cap_mb`. None: DDP's default, which hooks may change (`gradwire.models.buckets`)."""
    timeout_s: float = 60.0
    """How long a collective may take before the run is aborted."""
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    """What is trained."""

    def __post_init__(self) -> None:
        _check(self.nproc >= 1, f"nproc must be at least 1, got {self.nproc}")
        _check(self.steps >= 1, f"steps must be at least 1, got {self.steps}")
        _check(self.round_steps >= 1, f"round_steps must be at least 1, got {self.round_steps}")
        _check(0 <= self.seed < 2**63, f"seed must be between 0 and 2^63 - 1, got {self.seed}")
        _check(self.limit_s is None or self.limit_s > 0, f"limit_s must be above 0 or None, got {self.limit_s}")
        _check(self.bucket_mb is None or self.bucket_mb > 0, f"bucket_mb must be above 0, got {self.bucket_mb}")
        _check(self.timeout_s > 0, f"timeout_s must be above 0, got {self.timeout_s}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The inverse of `dataclasses.asdict`."""
        return cls(**{**values, "workload": WorkloadSettings(**values["workload"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The measurements of one hook."""

    hook: str
    """The spec, or PLAIN."""
    steps: int
    """Training steps done."""
    step_s: tuple[float, ...]
    """Time of forward, backward, exchange and optimizer on the slowest rank, one value per timed step."""
    sent_bytes: float
    """Payload that a rank sends per step."""
    sent_is_counted: bool
    """Whether the hook counted the bytes. If not, they are computed for a ring all-reduce."""
    gradient_error: float
    """|averaged - exact| / |exact| of the whole gradient (2-norms); exact is the float64 mean on the same batch."""
    loss: float
    """On held-out text after the last step, in nats per byte; the mean over the ranks."""
    averages: bool
    """Whether the hook averages at all. If not, every rank trains on its own."""
    identical: bool
    """Whether all ranks hold bit-identical parameters at the end."""
    verified: str
    """The message of `Hook.verify()`, also if it failed; empty for PLAIN."""
    kept_promises: bool
    """Whether `Hook.verify()` passed."""
    params: int
    """Number of parameters of the model."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """The inverse of `as_dict`."""
        return cls(**{**values, "step_s": tuple(values["step_s"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "step_s": list(self.step_s)}

    @property
    def median_s(self) -> float:
        """Median step time."""
        return statistics.median(self.step_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile of the step time."""
        return quartiles(self.step_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Parts of the step time, mean over the ranks. `compute_s + wait_s` is the median step. The work of the exchange
    (encode, wire, decode) overlaps with both, and with itself, because several chunks are in flight at a time."""

    compute_s: float
    """Forward, backward and optimizer, while the exchange runs in the background."""
    encode_s: float
    wire_s: float
    decode_s: float
    wait_s: float
    """Time in which training only waits for the exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a run was measured. Runs of different origins are not comparable."""

    machine: str
    system: str
    cores: int
    python: str
    torch: str
    gradwire: str

    @classmethod
    def here(cls) -> Origin:
        """This machine and these versions."""
        return cls(
            machine=_processor(),
            system=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 1,
            python=platform.python_version(),
            torch=torch.__version__,
            gradwire=__version__,
        )


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One combination of repeat, ranks, link and hook; a file holds one Run for each."""

    repeat: int
    ranks: int
    link: str
    """NO_LINK, or the text of a `launch.link.Link`."""
    hook: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A line of a file of records: the results of one cell and how they were measured."""

    cell: Cell
    repeats: int
    """How often the measurement is repeated; the seeds of the repeats are consecutive."""
    link_bits_per_s: float | None
    """None: the link is not limited."""
    settings: Settings
    """With the seed of this run."""
    origin: Origin
    began: str
    """Start of the measurement, UTC, ISO 8601."""
    split: Split | None
    """None for PLAIN, where no hook measures the parts."""
    losses: tuple[float, ...]
    """Training loss of every step, mean over the ranks."""
    record: Record

    @property
    def shared(self) -> Settings:
        """The settings of the first repeat, without the number of ranks: equal for all runs of one file."""
        return replace(self.settings, nproc=1, seed=self.settings.seed - self.cell.repeat)

    @property
    def conditions(self) -> dict[str, Any]:
        """Everything that two runs must have in common to be comparable (see `differences`)."""
        return conditions(self.shared, self.origin)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """The inverse of `as_dict`. KeyError or TypeError if a value is missing or unknown."""
        return cls(
            cell=Cell(**values["cell"]),
            repeats=values["repeats"],
            link_bits_per_s=values["link_bits_per_s"],
            settings=Settings.from_dict(values["settings"]),
            origin=Origin(**values["origin"]),
            began=values["began"],
            split=None if values["split"] is None else Split(**values["split"]),
            losses=tuple(values["losses"]),
            record=Record.from_dict(values["record"]),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, with the version of the schema and the spread of the step time."""
        low_s, high_s = self.record.quartiles_s
        summary = {"median_s": self.record.median_s, "spread_s": [low_s, high_s]}
        return {
            "schema": SCHEMA,
            **asdict(self),
            "losses": list(self.losses),
            "record": self.record.as_dict(),
            "step": summary,
        }


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return low, high


def median_uncertainty(values: Sequence[float]) -> float:
    """The standard error of the median, relative to it; 0 for a single value.

    It is estimated from the quartiles, so that a few disturbed steps do not matter: for normal values half their
    distance is 0.67 standard deviations, and the median varies 1.25 times as much as the mean.
    """
    low, high = quartiles(values)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(values)) / statistics.median(values)


def conditions(settings: Settings, origin: Origin) -> dict[str, Any]:
    """Settings and origin by name, without the number of ranks: what `differences` compares."""
    values = asdict(replace(settings, nproc=1))
    return {**values.pop("workload"), **values, **asdict(origin)}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Why two runs are not comparable, such as `steps (40 and 9)`; empty if they are. Both are `conditions`."""
    return [f"{name} ({ours[name]} and {theirs[name]})" for name in ours if ours[name] != theirs[name]]


def _processor() -> str:
    """The name of the processor, if the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise SpecError(message)
