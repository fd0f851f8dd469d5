"""Build the wheel and the sdist, check them, and install them into empty environments: `make package`.

The tools (build, twine) live in .package/tools. Every environment sees torch, numpy and what these require through a
.pth file, and nothing else of .venv: so `pip install gradwire-*.whl` alone must be enough. Extras of users are
installed for real; for those of developers pip only resolves what they would install. At the end it prints how long
`import gradwire` takes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".package"
TOOLS = CACHE / "tools"
BASE = CACHE / "torch"
DIST = ROOT / "dist"
FOR_USERS = ("", "fast", "cli", "metrics")
FOR_DEVELOPERS = ("dev", "docs")
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""An environment in which the sources of this tree are not found."""
LIMITS_MS = {"without torch": 30, "above torch": 150}


def main() -> None:
    """Stop with an error at the first thing that is wrong."""
    wheel, sdist = build()
    compare_with_repository(wheel)
    link_torch()
    for extra in FOR_USERS:
        smoke(wheel, extra)
    smoke(sdist, "")
    for extra in FOR_DEVELOPERS:
        pip(environment("resolve"), "--dry-run", f"{wheel}[{extra}]")
        print(f"{wheel.name}[{extra}]: resolved")
    print_import_times(environment("none-whl"))


def build() -> tuple[Path, Path]:
    """The wheel and the sdist, both accepted by twine."""
    if not (TOOLS / "twine").exists():
        pip(Path(sys.executable), "--target", str(TOOLS), "build", "twine")
    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # what an earlier build has left there would be packed again
    environ = {**CLEAN, "PYTHONPATH": str(TOOLS)}
    run(sys.executable, "-m", "build", "--no-isolation", str(ROOT), env=environ, quiet=True)
    wheel, sdist = next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist), env=environ)
    return wheel, sdist


def compare_with_repository(wheel: Path) -> None:
    """The wheel has every file of src/gradwire that git knows, and no other."""
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {line.removeprefix("src/") for line in listed.splitlines()}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == known, f"missing: {sorted(known - packed)}; not in the repository: {sorted(packed - known)}"


def link_torch() -> None:
    """Links to torch, numpy and what they require, in a folder of their own."""
    shutil.rmtree(BASE, ignore_errors=True)
    BASE.mkdir(parents=True)
    home, todo, seen = Path(sysconfig.get_path("purelib")), ["torch", "numpy"], set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        found = metadata.distribution(name)
        todo += [match[0] for line in found.requires or () if (match := required(line))]
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if (home / top).exists() and not (BASE / top).exists():
                (BASE / top).symlink_to(home / top)


def required(line: str) -> re.Match[str] | None:
    """The name in a line of requirements, if it is needed here without any extra."""
    match = re.match(r"[\w.-]+", line)
    try:
        installed = match and "extra ==" not in line and metadata.version(match[0])
    except metadata.PackageNotFoundError:
        installed = None
    return match if installed else None


def environment(name: str) -> Path:
    """The Python of a new environment that has torch."""
    folder = CACHE / "environments" / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "torch.pth").write_text(f"{BASE}\n")
    return python


def smoke(package: Path, extra: str) -> None:
    """Install it, with an extra or without, and use it."""
    name = f"{extra or 'none'}-{package.suffix[1:]}"
    shutil.rmtree(CACHE / "environments" / name, ignore_errors=True)
    python = environment(name)
    pip(python, f"{package}[{extra}]" if extra else str(package))
    script = Path(__file__).with_name("package_smoke.py")
    run(str(python), "-I", str(script), extra, cwd=CACHE)
    print(f"{package.name}{f'[{extra}]' if extra else ''}: installed and used")


def pip(python: Path, *what: str) -> None:
    """Install quietly."""
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def run(*command: str, env: dict[str, str] = CLEAN, cwd: Path | None = None, quiet: bool = False) -> None:
    """Run a command; its output is shown if it fails, or if it is not quiet."""
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=quiet, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed\n{done.stdout or ''}{done.stderr or ''}")


def print_import_times(python: Path) -> None:
    """Best of five, in ms of CPU time: `import gradwire` by itself, and `gradwire.register` after torch is there."""
    torch = "import torch, torch.distributed.fsdp, torch.nn.parallel; "
    for name, before, code in (
        ("without torch", "", "import gradwire"),
        ("above torch", torch, "from gradwire import register"),
    ):
        timed = f"import time; {before}t = time.process_time(); {code}; print(1e3 * (time.process_time() - t))"
        command = [str(python), "-c", timed]
        runs = [float(subprocess.run(command, env=CLEAN, capture_output=True, check=True).stdout) for _ in range(5)]
        print(f"import {name}: {min(runs):.0f} ms (goal: at most {LIMITS_MS[name]} ms)")


if __name__ == "__main__":
    main()
