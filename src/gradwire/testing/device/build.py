"""Builds the test device's C++ once, and keeps it in the user's cache folder for all later processes.

The folder's name is a hash of the sources, the flags and the versions of torch and Python, so a change of any of them
builds anew. A lock on a file, which ends with its process, lets one process build while the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from gradwire.errors import GradwireError

log = logging.getLogger("gradwire")

SOURCES = Path(__file__).parent / "csrc"
MODULE = "gradwire_testdev"
FLAGS = ("-O1", "-DUSE_DISTRIBUTED", "-Wno-deprecated-declarations")
BUILT = "built"
"""An empty file beside a library that is complete."""


class NoCompilerError(GradwireError):
    """The test device has to be compiled, and there is no C++ compiler or no ninja."""


def module() -> ModuleType:
    """The compiled module, built first if there is none for these sources yet.

    Raises:
        NoCompilerError: If it must be built and the tools for that are missing.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    folder = cache_folder()
    with _locked(folder / "lock"):
        made = _import(folder / f"{MODULE}.so") if (folder / BUILT).exists() else _build(folder)
    sys.modules[MODULE] = made
    return made


def is_built() -> bool:
    """Whether the library of these sources is in the cache."""
    return (cache_folder() / BUILT).exists()


def ensure() -> None:
    """Build the library unless it is there. Without a compiler this fails in CI and says what is missing elsewhere."""
    problem = "" if is_built() else missing_tools()
    if problem and os.environ.get("CI"):
        raise SystemExit(f"{problem}. CI must run the tests on the test device")
    if problem:
        log.warning("%s; the tests on it will be skipped", problem)
    elif not is_built():
        in_new_process()


def in_new_process() -> None:
    """Build the library without loading it in this process, where the device would stay registered."""
    command = [sys.executable, "-c", f"from {__name__} import module; module()"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the test device could not be built:\n{done.stdout}{done.stderr}")


def cache_folder() -> Path:
    """Where the library of these sources is, or will be: below `$XDG_CACHE_HOME` or `~/.cache`."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "gradwire" / f"testdev-{_fingerprint()}"


def missing_tools() -> str:
    """What is missing to build the device, in a sentence; empty if nothing is."""
    compiler = os.environ.get("CXX", "c++")
    missing = [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]
    return f"the test device needs a C++ compiler and ninja; not found: {', '.join(missing)}" if missing else ""


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for text in (torch.__version__, sys.version, *FLAGS, os.environ.get("CXX", "")):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> ModuleType:
    """Build and import it."""
    if problem := missing_tools():
        raise NoCompilerError(f"{problem}; install them, for example with: apt-get install g++ ninja-build")
    from torch.utils import cpp_extension  # it imports setuptools

    log.warning("building the test device in %s, which takes about a minute", folder)
    (folder / "build" / "lock").unlink(missing_ok=True)  # of torch, left by a process that was killed
    (folder / "build").mkdir(exist_ok=True)
    sources = [str(SOURCES / "device.cpp")]
    made: ModuleType = cpp_extension.load(
        MODULE, sources, extra_cflags=list(FLAGS), build_directory=str(folder / "build")
    )
    os.replace(folder / "build" / f"{MODULE}.so", folder / f"{MODULE}.so")
    (folder / BUILT).touch()
    return made


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
