"""Plan: what to do with every DDP model a script builds, and the notes that its processes leave for each other."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "GRADWIRE_PLAN"
PARENT = "GRADWIRE_PARENT"
"""The process that a rank must not outlive."""
STARTUP = Path(__file__).parent / "startup"
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Plan:
    """Travels to all processes below as an environment variable."""

    verb: str
    """Of the command line, to begin messages with."""
    target: str
    """`module:function`, called as `function(model, plan)` with every DistributedDataParallel once it is built."""
    job: Mapping[str, Any]
    """What the target needs to know, as JSON."""
    folder: str
    """Where the notes are. It exists as long as the run."""

    @classmethod
    def current(cls) -> Plan | None:
        """The plan that this process runs under."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def environment(self) -> dict[str, str]:
        """Variables under which a process, and all below it, follow the plan."""
        paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}

    def follow(self, model: Any) -> None:
        """Call the target."""
        module, _, name = self.target.partition(":")
        function: Callable[[Any, Plan], None] = getattr(importlib.import_module(module), name)
        function(model, self)

    def new_note(self, kind: str) -> str:
        """A name for a note that no other process has."""
        return f"{kind}-{os.getpid()}-{next(_serial)}"

    def write(self, note: str, content: Any) -> None:
        """Write or replace a note. Readers see the old one or the new one, whole; nobody may be left to read it."""
        path = Path(self.folder, f"{note}.json")
        with suppress(FileNotFoundError):
            path.with_suffix(".new").write_text(json.dumps(content))
            path.with_suffix(".new").replace(path)

    def notes(self, kind: str) -> list[Any]:
        """All notes of a kind, in the order of their names."""
        return [json.loads(path.read_text()) for path in sorted(Path(self.folder).glob(f"{kind}-*.json"))]


@contextmanager
def new_plan(verb: str, target: str, job: Mapping[str, Any]) -> Iterator[Plan]:
    """A plan with a folder that goes away at the end."""
    with tempfile.TemporaryDirectory(prefix=f"gradwire-{verb}-", ignore_cleanup_errors=True) as folder:
        yield Plan(verb, target, job, folder)
