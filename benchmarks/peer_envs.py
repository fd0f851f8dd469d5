"""Environments of their own for other packages, so that this one stays as it is.

A package goes into `.benchmarks/peers/<name>` without its dependencies. Those that it declares follow one by one, if
this environment does not have them. torch is always the one of this environment: a peer that needs another one fails.
What failed once is not tried again, unless it comes from elsewhere (`--source`) or the folder is deleted.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / ".benchmarks" / "peers"
NEVER = ("torch", "triton", "nvidia-")
"""What is never installed, as the names begin."""
LIMIT_S = 300


class InstallError(Exception):
    """A peer could not be installed."""


def installed(name: str, source: str) -> Path:
    """The folder that has a peer, for PYTHONPATH; installs it first if need be.

    `source` is one or more requirements, or `git:` and the address of a repository whose root is importable.
    """
    folder, failed = FOLDER / name, FOLDER / f"{name}.failed"
    if failed.exists():
        tried, _, reason = failed.read_text().partition("\n")
        if tried == source:
            raise InstallError(reason)
    if not folder.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        try:
            clone(source.removeprefix("git:"), folder) if source.startswith("git:") else install(source, folder)
        except InstallError as error:
            failed.write_text(f"{source}\n{error}")
            raise
    return folder


def clone(address: str, folder: Path) -> None:
    """A repository that has no package."""
    run(["git", "clone", "--quiet", "--depth", "1", address, str(folder)])


def install(source: str, folder: Path) -> None:
    """A package, and what it needs beyond this environment, which the new one finds through a .pth file."""
    environment = folder.with_name(f"{folder.name}.env")
    venv.create(environment, with_pip=False, clear=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    wanted = source.split()
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "--quiet", "--disable-pip-version-check"]
    while wanted:
        run([*pip, "install", "--no-deps", "--ignore-installed", "--no-build-isolation", *wanted])
        wanted = sorted(missing(packages))
    folder.symlink_to(packages)


def missing(folder: Path) -> Iterator[str]:
    """What the packages in a folder need and neither the folder nor this environment has."""
    there = list(distributions(path=[str(folder)]))
    have = {canonicalize_name(each.name): each for each in [*distributions(), *there]}
    for each in there:
        for text in each.requires or ():
            need = Requirement(text)
            known = have.get(canonicalize_name(need.name))
            if need.name.startswith(NEVER) or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if known is None or (known not in there and not need.specifier.contains(known.version, prereleases=True)):
                yield f"{need.name}{need.specifier}"


def version(folder: Path, name: str) -> str:
    """The version of a peer, or the commit of a clone."""
    if (folder / ".git").exists():
        return run(["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]).strip()
    found: list[Distribution] = [
        each for each in distributions(path=[str(folder)]) if canonicalize_name(each.name) == canonicalize_name(name)
    ]
    return found[0].version if found else "?"


def run(command: list[str]) -> str:
    """The output of a command; its last words as an InstallError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"takes more than {LIMIT_S} s to install") from None
    if done.returncode:
        lines = [
            line.strip() for line in done.stderr.splitlines() if "rror:" in line or "ERROR" in line
        ] or done.stderr.splitlines()
        raise InstallError((lines or ["no message"])[-1][:160])
    return done.stdout
