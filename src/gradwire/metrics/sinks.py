"""Sink: where records go. Those to files are here, and need no other package; see `trackers.py` for the others."""

import abc
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gradwire.errors import SpecError


@dataclass(frozen=True, slots=True)
class Record:
    """What a hook has done in the steps since the record before."""

    step: int
    """The number of the last of these steps."""
    time_s: float
    """When it ended, in seconds since 1970."""
    hook: str
    """The spec of the hook in that step."""
    reason: str
    """Under `auto`: why it is this hook. Empty otherwise."""
    values: Mapping[str, float]
    """Numbers by name: see `gradwire.metrics.METRICS`. Those that are not known are left out."""

    def as_dict(self) -> dict[str, str | int | float]:
        """A plain mapping of everything."""
        texts = {"hook": self.hook, "reason": self.reason}
        return {"step": self.step, "time_s": self.time_s, **texts, **self.values}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`. KeyError, TypeError or ValueError if it is not a record."""
        values = {name: math.nan if plain[name] is None else float(plain[name]) for name in plain if name not in _OWN}
        return cls(int(plain["step"]), float(plain["time_s"]), str(plain["hook"]), str(plain["reason"]), values)

    def __str__(self) -> str:
        """One line for a log."""
        parts = [text.format(self.values[name] * unit) for name, (unit, text) in _TEXTS.items() if name in self.values]
        return f"step {self.step}: {self.hook}, {', '.join(parts)}" + (f" ({self.reason})" if self.reason else "")


_OWN = ("step", "time_s", "hook", "reason")
_TEXTS: Mapping[str, tuple[float, str]] = {
    "step_s": (1e3, "{:.1f} ms per step"),
    "wait_s": (1e3, "{:.1f} ms waiting"),
    "sent_bytes": (1e-6, "{:.2f} MB sent"),
    "grad_norm": (1, "gradient norm {:.3g}"),
    "error": (1, "error {:.2g}"),
}
"""What a line shows of a record: a factor, and how the number is written."""


class Sink(abc.ABC):
    """Takes the records of a run. A sink of your own needs only `write`; all calls are made on one rank.

    If a sink raises an error in `write`, a warning is issued and it gets no more records: training goes on.

    Examples:
        >>> class Printed(gradwire.metrics.Sink):
        ...     def write(self, record):
        ...         print(record)
    """

    def open(self) -> None:  # noqa: B027 - it may stay as it is
        """Recording begins. Called once, in the thread that calls `record`."""

    @abc.abstractmethod
    def write(self, record: Record) -> None:
        """Take a record. Called when a backward pass has ended, while the training waits."""

    def close(self) -> None:  # noqa: B027 - likewise
        """No record follows."""


START = b'{"step": '
"""Every line of a JSONL file begins with these bytes."""


class Terminal(Sink):
    """Prints each record as a line, to stderr.

    Args:
        label: How the line begins.

    Examples:
        >>> gradwire.metrics.record(hook, gradwire.metrics.Terminal())
    """

    def __init__(self, label: str = "gradwire") -> None:
        self.label = label

    def write(self, record: Record) -> None:
        """One line."""
        print(f"{self.label}: {record}", file=sys.stderr, flush=True)


class JSONL(Sink):
    """Appends each record to a file, as one line of JSON. `gradwire watch FILE` shows such a file while it grows.

    Numbers that are not finite become null.

    Args:
        path: The file. Folders that do not exist are made.

    Examples:
        >>> gradwire.metrics.record(hook, gradwire.metrics.JSONL("run.jsonl"), every=10)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def open(self) -> None:
        """Make sure that the file can be written. An incomplete last line, of a process that died, gets an end."""
        _prepare(self.path)
        with self.path.open("ab+") as file:
            file.seek(0)
            content = file.read()
            if not content.startswith(START[: len(content)]):
                raise SpecError(f"{str(self.path)!r} exists and has no metrics, so nothing is added to it")
            if content and not content.endswith(b"\n"):
                file.write(b"\n")

    def write(self, record: Record) -> None:
        """One line, in one piece."""
        plain = {key: None if _is_odd(value) else value for key, value in record.as_dict().items()}
        with self.path.open("ab", buffering=0) as file:
            file.write(json.dumps(plain).encode() + b"\n")


class Prometheus(Sink):
    """Replaces a text file with the values of the last record, for the textfile collector of Prometheus' node exporter.

    Args:
        path: The file; the collector reads names that end in `.prom`.
        labels: Labels of every value, such as `run="a"`.

    Raises:
        SpecError: For the name of a label that Prometheus would refuse.

    Examples:
        >>> gradwire.metrics.record(hook, gradwire.metrics.Prometheus("gradwire.prom", run="a"))
    """

    def __init__(self, path: str | os.PathLike[str], **labels: str) -> None:
        self.path, self.labels = Path(path), labels
        for name in labels:
            if not re.fullmatch(r"(?!__)[A-Za-z_]\w*", name, re.ASCII):
                raise SpecError(f"the label {name!r} of Prometheus must be letters, digits and _, as in run='a'")

    def open(self) -> None:
        """Make sure that the file can be written."""
        _prepare(self.path)

    def write(self, record: Record) -> None:
        """Readers see the old file or the new one, never a part."""
        numbers = {"step": record.step, "time_s": record.time_s, **record.values}
        info = {**self.labels, "hook": record.hook, "reason": record.reason}
        samples = [(_full(name), self.labels, value) for name, value in numbers.items()]
        text = "".join(_sample(*sample) for sample in (*samples, ("gradwire_info", info, 1)))
        new = self.path.with_name(f"{self.path.name}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(self.path)


def _prepare(path: Path) -> None:
    """Raise SpecError unless the file can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise SpecError(f"metrics cannot be written to {str(path)!r}: {error.strerror}; name another file") from error


def _is_odd(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _full(name: str) -> str:
    """Prometheus spells units in full."""
    return f"gradwire_{name[:-2]}_seconds" if name.endswith("_s") else f"gradwire_{name}"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """The lines of one value in Prometheus' text format."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inside = ",".join(f'{key}="{text.translate(escapes)}"' for key, text in labels.items())
    number = repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return f"# TYPE {name} gauge\n{name}{{{inside}}} {number}\n"
