"""RunPlan: what to do with every DDP model that a script builds. Notes: what the processes of a run tell each other."""

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
"""The environment variable that holds the plan."""
PARENT = "GRADWIRE_PARENT"
"""The environment variable that holds the id of the process that a rank must not outlive."""
ORDER = "order.json"
"""The note that says what function the ranks of `run_ranks` call."""
STARTUP = Path(__file__).parent / "startup"
_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class Notes:
    """Small JSON files in a folder that all processes of a run share."""

    folder: str
    """It exists as long as the run."""

    def new_note(self, kind: str) -> str:
        """A name for a note that no other process uses."""
        return f"{kind}-{os.getpid()}-{next(_serial)}"

    def write(self, name: str, content: Any) -> None:
        """Write or replace a note. Readers see the old one or the new one, never a part; the run may be over."""
        path = Path(self.folder, f"{name}.json")
        with suppress(FileNotFoundError):
            path.with_suffix(".new").write_text(json.dumps(content))
            path.with_suffix(".new").replace(path)

    def read(self, kind: str) -> list[Any]:
        """All notes of a kind, in the order of their names."""
        return [json.loads(path.read_text()) for path in sorted(Path(self.folder).glob(f"{kind}-*.json"))]


@dataclass(frozen=True, slots=True)
class RunPlan(Notes):
    """Travels to all processes of a script as an environment variable."""

    verb: str
    """The verb of the command line, to begin messages with."""
    target: str
    """`module:function`, called as `function(model, plan)` with every DistributedDataParallel after it is built."""
    job: Mapping[str, Any]
    """What the target needs to know, as JSON."""
    start: str = ""
    """`module:function`, called as `function(plan)` before the script begins, and before the target. In a process that
    the script starts by itself, it is called when that process builds a model. Empty: nothing is called."""

    @classmethod
    def current(cls) -> RunPlan | None:
        """The plan that this process runs under."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))

    def environment(self) -> dict[str, str]:
        """The variables under which a process, and all processes below it, follow the plan."""
        paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: json.dumps(asdict(self)), "PYTHONPATH": os.pathsep.join(paths)}

    def begin(self) -> None:
        """Call `start`, if there is one. It may be called several times in one process."""
        if self.start:
            load(self.start)(self)

    def follow(self, model: Any) -> None:
        """Call the target with a model."""
        self.begin()
        load(self.target)(model, self)


def load(target: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@contextmanager
def new_plan(verb: str, target: str, job: Mapping[str, Any], start: str = "") -> Iterator[RunPlan]:
    """A plan with a folder that is removed at the end."""
    with new_folder(verb) as folder:
        yield RunPlan(folder, verb, target, job, start)


def new_folder(name: str) -> tempfile.TemporaryDirectory[str]:
    """A folder for notes. A process that ends late may still write into it while it is being removed."""
    return tempfile.TemporaryDirectory(prefix=f"gradwire-{name}-", ignore_cleanup_errors=True)
