"""Run the tests on another version of torch: `make compat TORCH=2.15.0`, or several versions one after another.

Each version has an environment of its own in .compat/<version>, which is made when it is first needed. torch comes with
its GPU packages, several GB. The sources are those of this tree. The last lines are one summary per version, such as
`2.9.1: 3700 passed, 0 failed, 43 skipped`, for the table in docs/compatibility.md. Skipped are tests of what that
version of torch does not have.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".compat"
MARKED = "not thorough and not browser and not integrations and not triton and not device"
NOT_FOR_TESTS = ("mypy", "pre-commit", "ruff")
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def main() -> None:
    """Exit with 1 if a test failed on any of the versions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION", help="of torch, as in 2.15.0")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders, all by default")
    parser.add_argument("--workers", type=int, default=6, help="tests that run at a time, 6 by default")
    arguments = parser.parse_args()
    summaries = []
    for version in arguments.versions:
        summaries.append(run_tests(version, environment(version), arguments.tests, arguments.workers))
    print(*summaries, sep="\n")
    sys.exit(not all(" passed, 0 failed" in line and " error" not in line for line in summaries))


def environment(version: str) -> Path:
    """The Python of an environment with this torch, with the pinned requirements of the tests and with this tree."""
    folder = ENVIRONMENTS / version
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if not has_torch(python, version):
        pip(python, f"torch=={version}")
    pip(python, *requirements())
    pip(python, "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    return python


def has_torch(python: Path, version: str) -> bool:
    """Whether the environment is complete as far as torch goes."""
    code = "import importlib.metadata as m; print(m.version('torch').split('+')[0])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def requirements() -> list[str]:
    """The lines of requirements.txt that tests need."""
    lines = [line.strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    return [line for line in lines if line and line[0] != "#" and line.split("==")[0] not in NOT_FOR_TESTS]


def pip(python: Path, *what: str) -> None:
    """Install quietly; an error ends the script."""
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what], check=True)


def run_tests(version: str, python: Path, tests: list[str], workers: int) -> str:
    """Run pytest, with its output on the screen and in .compat/<version>.txt, and return the summary."""
    parallel = ["-n", str(workers), "--dist", "worksteal"]  # as in `make test`
    command = [str(python), "-m", "pytest", "-q", "-rs", *parallel, "-p", "no:cacheprovider", "-m", MARKED, *tests]
    path = ENVIRONMENTS / f"{version}.txt"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with path.open("w") as file, subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        for line in running.stdout:
            text = line.decode(errors="replace")
            print(text, end="", flush=True)
            file.write(text)
    return summary(version, path.read_text())


def summary(version: str, output: str) -> str:
    """`2.9.1: 3700 passed, 0 failed, 43 skipped`, from the last line with results that pytest printed."""
    lines = [line for line in output.splitlines() if COUNTED.search(line) and " in " in line]
    if not lines:
        return f"{version}: no result"
    counts = {what.removesuffix("s"): int(number) for number, what in COUNTED.findall(lines[-1])}
    others = "".join(f", {counts[what]} {what}" for what in ("error", "skipped") if what in counts)
    return f"{version}: {counts.get('passed', 0)} passed, {counts.get('failed', 0)} failed{others}"


if __name__ == "__main__":
    main()
