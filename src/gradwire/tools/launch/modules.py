"""Is there a module to run? Found out without importing anything: that is for the ranks to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from gradwire.errors import SpecError


def check_module(name: str) -> None:
    """SpecError if `python -m name` would find nothing to run."""
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
                "module that trains with DDP"
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
