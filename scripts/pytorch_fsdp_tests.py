"""Run PyTorch's own tests of FSDP2 on the CPU, with and without gradwire, and print which ones pass.

    python scripts/pytorch_fsdp_tests.py <checkout> [--files test_fully_shard_frozen.py ...] [--tools <folder>]

`<checkout>` is a clone of PyTorch at the version that is installed. Only its `test/distributed/_composable/fsdp` is
read, and nothing is copied. Their requirements (expecttest, hypothesis) can be in another folder, `--tools`.

The tests are made for GPUs. Here they get two ranks on gloo (or `--ranks`), and decorators that ask for GPUs let them
through. So many fail or are skipped with plain torch: those that need streams, NCCL or more ranks. What counts is that
one that passes with plain torch also passes when every model with `fully_shard` is given `gradwire.register(model,
"exact")` before its first forward pass. Where that refuses a model, as for a native 2-D mesh, the test runs as it is,
and is counted as refused.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path("test", "distributed", "_composable", "fsdp")
TIMEOUT_S = 300
RANKS = "GRADWIRE_FSDP_TESTS_RANKS"
"""The environment variable with the number of ranks that a test may have."""
RESULTS = "GRADWIRE_FSDP_TESTS"
"""The environment variable with the file that takes the results, a line of JSON each."""
REGISTERS = "GRADWIRE_FSDP_TESTS_REGISTER"
"""Set if models get a hook."""


def main() -> None:
    """Exit with 1 if a test fails with gradwire only."""
    args = parse_args()
    files = args.files or sorted(path.name for path in (args.checkout / FOLDER).glob("test_*.py"))
    rows, broken = [], list[str]()
    for name in files:
        plain, ours = (run(args, name, registers) for registers in (False, True))
        fine = ("passed", "refused")
        broken += [test for test, result in plain.items() if result == "passed" and ours.get(test) not in fine]
        rows.append((name, plain, ours))
        print(line(name, plain, ours), flush=True)
    print("\n" + table(rows))
    for test in broken:
        print(f"passes with plain torch only: {test}")
    sys.exit(bool(broken))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--files", nargs="+", help="names of files in the folder, all by default")
    parser.add_argument("--tools", type=Path, help="a folder with expecttest and hypothesis")
    parser.add_argument("--ranks", type=int, default=2, help="how many a test may have at most")
    parser.add_argument("--match", default="", help="pytest's -k")
    parser.add_argument("--work", type=Path, default=Path(".pytorch_fsdp_tests"), help="where results are kept")
    return parser.parse_args()


def run(args: argparse.Namespace, name: str, registers: bool) -> dict[str, str]:
    """What became of each test of a file: passed, failed, skipped or refused."""
    args.work.mkdir(parents=True, exist_ok=True)
    results = (args.work / f"{name}.{'ours' if registers else 'plain'}.jsonl").resolve()
    results.unlink(missing_ok=True)
    path = [str(Path(__file__).parent.resolve()), str(args.tools or ""), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, RESULTS: str(results), RANKS: str(args.ranks), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = ":".join(filter(None, path))
    if registers:
        env[REGISTERS] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        Path(__file__).stem,
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
    ]
    command += ["--rootdir", str(args.checkout), f"--timeout={TIMEOUT_S}", "-k", args.match, name]
    with results.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=args.checkout / FOLDER, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    return read(results)


def read(results: Path) -> dict[str, str]:
    """The last word on each test; a test with a refused model that passes is only `refused`."""
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    refused = {entry["test"] for entry in lines if "refused" in entry}
    found: dict[str, str] = {}
    for entry in lines:
        if "outcome" in entry and found.get(entry["test"]) != "failed":
            found[entry["test"]] = entry["outcome"]
    return {test: "refused" if result == "passed" and test in refused else result for test, result in found.items()}


def line(name: str, plain: dict[str, str], ours: dict[str, str]) -> str:
    """One file of the table."""
    passed = [test for test, result in plain.items() if result == "passed"]
    with_ours = Counter(ours.get(test, "failed") for test in passed)
    return f"| `{name}` | {len(plain)} | {len(passed)} | {with_ours['passed']} | {with_ours['refused']} |"


def table(rows: list[tuple[str, dict[str, str], dict[str, str]]]) -> str:
    """All files, and their sum."""
    plain = {f"{name} {test}": result for name, tests, _ in rows for test, result in tests.items()}
    ours = {f"{name} {test}": result for name, _, tests in rows for test, result in tests.items()}
    head = "| file | tests | pass with plain torch | of these with gradwire | refused by name |\n|---|---|---|---|---|"
    return "\n".join([head, *(line(*row) for row in rows), line("all", plain, ours)])


# -- inside pytest -----------------------------------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    """Before the tests are imported: let them run on the CPU, and give models a hook."""
    import torch
    from torch.testing._internal import common_distributed, common_fsdp

    def let_through(*unused: Any, **options: Any) -> Any:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = let_through
    common_distributed.MultiProcessTestCase._spawn_processes = _fork_processes  # type: ignore[method-assign]
    ranks = int(os.environ[RANKS])
    common_fsdp.DEVICE_COUNT = ranks
    common_fsdp.FSDPTestContinuous.world_size = ranks
    torch.multiprocessing.set_start_method = let_through  # they ask for "spawn", which would undo all this
    torch.accelerator.device_count = torch.cpu.device_count = lambda: ranks
    _drop_device_ids(torch.distributed, "barrier")
    _drop_device_ids(torch.nn.parallel.DistributedDataParallel, "__init__")
    if REGISTERS in os.environ:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        from gradwire._torch.fsdp import on_root

        on_root(FSDPState, _register)


def _drop_device_ids(owner: Any, name: str) -> None:
    """Gloo's barrier and DDP on the CPU do not take any."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def without(*args: Any, device_ids: Any = None, **options: Any) -> Any:
        return original(*args, **options)

    setattr(owner, name, without)


def _fork_processes(self: Any) -> None:
    """A forked process has the changes of this one."""
    import torch

    self._start_processes(torch.multiprocessing.get_context("fork").Process)


_hooks: list[Any] = []


def _register(model: Any) -> None:
    import gradwire

    try:
        _hooks.append(gradwire.register(model, "exact"))
    except (gradwire.RegisterError, gradwire.SpecError) as error:
        _write({"refused": str(error)})
    else:
        _write({"registered": type(model).__name__})


def pytest_runtest_logreport(report: Any) -> None:
    """A part of a test is over."""
    if report.when == "call" or report.outcome != "passed":
        _write({"outcome": report.outcome, "test": report.nodeid.split("::", 1)[-1]})


def _write(entry: dict[str, str]) -> None:
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split("::", 1)[-1].split(" ")[0]
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps({"test": test, **entry}) + "\n")


if __name__ == "__main__":
    main()
