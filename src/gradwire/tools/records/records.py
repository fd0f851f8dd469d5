"""What a measured run is asked for (Settings) and what comes out of it: a Record a hook, and in files a Run a cell."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import SpecError
from gradwire.tools.workload import WorkloadSettings
from gradwire.version import __version__

PLAIN = "plain"
"""DDP without any hook: the baseline, always a row."""
SCHEMA = 1
"""Of `Run`: raised whenever an older reader would misunderstand a newer file, or the other way round."""
NO_LINK = "none"
"""The link as it is: nothing is emulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure. Every hook trains the same model from the same seed on the same batches."""

    nproc: int = 2
    """Ranks, one process each. How many make sense is for the machine that starts them to say: `ranks.check_nproc`."""
    steps: int = 80
    """Training steps a hook gets."""
    round_steps: int = 5
    """Steps before the next hook has its turn: short, so that a noisy minute hits all hooks alike."""
    limit_s: float | None = None
    """After so many seconds of training no new round begins, for all hooks alike. None: train to the end."""
    seed: int = 0
    """Of the weights, and with rank and step of the batches."""
    bucket_mb: float | None = None
    """DDP's `bucket_cap_mb`. None: DDP's default, which hooks may change (`gradwire.models.buckets`)."""
    timeout_s: float = 60.0
    """How long a collective may take before the run is given up."""
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
    """One hook, measured."""

    hook: str
    """The spec, or PLAIN."""
    steps: int
    """Training steps done."""
    step_s: tuple[float, ...]
    """Forward, backward, exchange and optimizer, a value for each timed step; the slowest rank counts."""
    sent_bytes: float
    """Payload per step and rank."""
    sent_is_counted: bool
    """Counted by the hook; if not, computed for a ring all-reduce."""
    gradient_error: float
    """|averaged - exact| / |exact| of the whole gradient (2-norms), exact being the float64 mean on the same batch."""
    loss: float
    """On held-out text after the last step, in nats per byte; the mean over the ranks."""
    averages: bool
    """Whether the hook averages at all; without, every rank trains for itself."""
    identical: bool
    """All ranks hold the same parameters at the end, bit for bit."""
    verified: str
    """What `Hook.verify()` says, or the promise it found broken; empty for PLAIN."""
    kept_promises: bool
    """Whether `Hook.verify()` passed."""
    params: int
    """Parameters of the model."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """The inverse of `as_dict`."""
        return cls(**{**values, "step_s": tuple(values["step_s"])})

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "step_s": list(self.step_s)}

    @property
    def median_s(self) -> float:
        """The step time to quote."""
        return statistics.median(self.step_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Its spread: half of all steps took between these two."""
        if len(self.step_s) < 2:
            return self.step_s[0], self.step_s[0]
        low, _, high = statistics.quantiles(self.step_s, n=4, method="inclusive")
        return low, high

    def wire_s(self, bits_per_s: float) -> float:
        """The least time that the sent bytes need on a link of this speed. Computed, not measured."""
        return self.sent_bytes * 8 / bits_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Where the time of a step goes, mean over the ranks. `compute_s + wait_s` is the median step; the exchange's own
    work (encode, wire, decode) overlaps with both, and with itself, as several chunks are under way at a time."""

    compute_s: float
    """Forward, backward and optimizer, with the exchange beside them."""
    encode_s: float
    wire_s: float
    decode_s: float
    wait_s: float
    """Nothing left to do but wait for the exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a run was made. Numbers from different origins do not compare."""

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
    """A place in the grid of runs; a file holds one Run for each."""

    repeat: int
    ranks: int
    link: str
    """NO_LINK, or as `advisor.link` writes it."""
    hook: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A line of a records file: one cell, measured, with all that is needed to read it alone."""

    cell: Cell
    repeats: int
    """How many runs this cell was to get; their seeds follow each other."""
    link_bits_per_s: float | None
    """None: not limited."""
    settings: Settings
    """With this run's own seed."""
    origin: Origin
    began: str
    """UTC, ISO 8601."""
    split: Split | None
    """None where no hook counts: under PLAIN."""
    losses: tuple[float, ...]
    """Training loss of every step, mean over the ranks."""
    record: Record

    @property
    def shared(self) -> Settings:
        """What runs must have in common to compare."""
        return replace(self.settings, nproc=1, seed=self.settings.seed - self.cell.repeat)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """The inverse of `as_dict`. KeyError or TypeError if something is missing or too much."""
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
        """Plain values, for JSON, with the schema's version and the spread of the step time."""
        low_s, high_s = self.record.quartiles_s
        summary = {"median_s": self.record.median_s, "spread_s": [low_s, high_s]}
        return {
            "schema": SCHEMA,
            **asdict(self),
            "losses": list(self.losses),
            "record": self.record.as_dict(),
            "step": summary,
        }


def _processor() -> str:
    """The name of the processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise SpecError(message)
