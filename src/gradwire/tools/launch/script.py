"""Script: a user's program. It is checked before anything starts, and run in this process as Python itself would."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import TracebackType

from gradwire.errors import SpecError
from gradwire.tools.launch.inside import note_failure
from gradwire.tools.launch.plan import RunPlan
from gradwire.tools.launch.startup.sitecustomize import patch_imported
from gradwire.tools.launch.supervise import RunFailed

OURS = (__file__, "<frozen runpy>", runpy.__file__)


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
            _check_module(name)
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
            runpy.run_path(os.path.abspath(self.name), run_name="__main__")  # Python gives an absolute __file__ too


def run_under(plan: RunPlan, script: Script) -> None:
    """Run a script in this process, and processes below it, under a plan. RunFailed with the script's own traceback."""
    os.environ.update(plan.environment())
    patch_imported()
    try:
        plan.begin()
        script.run()
    except SystemExit as stop:
        _check_exit(stop)
    except KeyboardInterrupt:
        raise RunFailed("", 130) from None
    except BaseException as error:
        trimmed = error.with_traceback(_own_frames(error.__traceback__))
        note_failure(plan, trimmed)
        raise RunFailed("".join(traceback.format_exception(trimmed)).rstrip()) from error


def _check_exit(stop: SystemExit) -> None:
    """`sys.exit()` with nothing or 0 is a success, a number is kept, and a text is an error to print."""
    if isinstance(stop.code, int | None):
        if stop.code:
            raise RunFailed("", int(stop.code))
        return
    print(stop.code, file=sys.stderr)
    raise RunFailed("", 1)


def _own_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that led to the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename in OURS:
        frames = frames.tb_next
    return frames


def _set_first_path(folder: str) -> None:
    """What Python does before it runs a script, unless PYTHONSAFEPATH says otherwise."""
    if "PYTHONSAFEPATH" in os.environ:
        return
    if sys.flags.safe_path:  # ranks start this way, so that the working directory hides no module from gradwire
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def _check_module(name: str) -> None:
    """SpecError if `python -m name` would find nothing to run. Imports nothing: that is for the ranks to do."""
    parts = name.split(".")
    folders: Sequence[str] | None = None
    for count, part in enumerate(parts, start=1):
        sought = ".".join(parts[:count])
        if count > 1 and folders is None:
            raise SpecError(f"-m {name}: there is no module {sought!r}, as {sought[: -len(part) - 1]!r} is no package")
        spec = _find(sought, folders) if part else None
        if spec is None:
            raise SpecError(
                f"-m {name}: there is no module {sought!r} in {os.getcwd()}, nor is it installed; give the name of a "
                "module that trains with DDP or fully_shard"
            )
        folders = spec.submodule_search_locations
    if folders is not None and _find(f"{name}.__main__", folders) is None:
        raise SpecError(f"-m {name}: this is a package without __main__.py; name a module in it")


def _find(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    """By the finders of this process; without `folders` in the working directory first, as for `python -m`."""
    here = None
    if folders is None and "PYTHONSAFEPATH" not in os.environ:
        here = PathFinder.find_spec(name, [os.getcwd()])
    found = (finder.find_spec(name, folders) for finder in sys.meta_path)
    return here or next(filter(None, found), None)
