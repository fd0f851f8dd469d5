"""Runs a script in this process as Python itself would, and tells how it ended."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gradwire.errors import GradwireError, SpecError
from gradwire.tools.launch.failures import note_failure
from gradwire.tools.launch.models import watch_models
from gradwire.tools.launch.modules import check_module
from gradwire.tools.launch.plan import Plan

OURS = (__file__, "<frozen runpy>", runpy.__file__)


class ScriptFailed(GradwireError, RuntimeError):
    """The script ended with an error, which `exit_code` passes on; without a text it has said everything itself."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Script:
    """A user's program: a file, or with `module` the name of a module, and its arguments."""

    name: str
    args: tuple[str, ...] = ()
    module: bool = False

    @classmethod
    def parse(cls, words: Sequence[str], *, module: bool = False) -> Script:
        """From the end of a command line. SpecError if there is nothing to run."""
        name, *args = words
        if module:
            check_module(name)
        elif not Path(name).exists():
            raise SpecError(f"script {name!r} does not exist; give the path of a Python file, or -m and a module")
        elif Path(name).is_dir() and not Path(name, "__main__.py").exists():
            raise SpecError(f"script {name!r} is a folder without __main__.py; give the path of a Python file in it")
        return cls(name, tuple(args), module)

    def words(self) -> list[str]:
        """The inverse of `parse`, as Python takes it."""
        return [*(["-m"] if self.module else []), self.name, *self.args]

    def run(self) -> None:
        """Run it as __main__, with its own sys.argv and sys.path[0]. Whatever it raises comes out."""
        sys.argv = [self.name, *self.args]
        _set_first_path(os.getcwd() if self.module else str(Path(self.name).resolve().parent))
        if self.module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.abspath(self.name), run_name="__main__")  # as __file__ is, when Python runs it


def run_under(plan: Plan, script: Script) -> None:
    """Run a script in this process, and below it, under a plan. ScriptFailed with its own traceback as the text."""
    os.environ.update(plan.environment())
    watch_models()
    try:
        script.run()
    except SystemExit as stop:
        _check_exit(stop)
    except KeyboardInterrupt:
        raise ScriptFailed("", 130) from None
    except BaseException as error:
        trimmed = error.with_traceback(_own_frames(error.__traceback__))
        note_failure(plan, trimmed)
        raise ScriptFailed("".join(traceback.format_exception(trimmed)).rstrip()) from error


def _check_exit(stop: SystemExit) -> None:
    """`sys.exit()` with nothing or 0 is a success, a number is kept, and a text is an error to print."""
    if isinstance(stop.code, int | None):
        if stop.code:
            raise ScriptFailed("", int(stop.code))
        return
    print(stop.code, file=sys.stderr)
    raise ScriptFailed("", 1)


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Without those that led to the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename in OURS:
        frames = frames.tb_next
    return frames


def _set_first_path(folder: str) -> None:
    """What Python does before it runs a script, unless it is asked not to."""
    if "PYTHONSAFEPATH" in os.environ:
        return
    if sys.flags.safe_path:  # how we start ranks, so that the working directory hides no module from us
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
