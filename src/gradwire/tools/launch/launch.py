"""From a function or a script to processes: `run_ranks` calls a function on local ranks, `follow` runs a script."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire._torch import TCPStore
from gradwire.errors import SpecError
from gradwire.tools.launch.forked import ForkServer
from gradwire.tools.launch.plan import ORDER, PARENT, Notes, RunPlan, new_folder
from gradwire.tools.launch.script import Script, run_under
from gradwire.tools.launch.supervise import RANK, Command, RunFailed, supervise

RANKS_PER_CORE = 4
MIN_LIMIT = 8
"""This many ranks may share even the smallest machine."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "2000000000"}
"""For measuring ranks: glibc's own thresholds depend on what was freed before, and change a step by 10% either way."""
LOCALHOST = "127.0.0.1"
ECHO_LATER_S = 60
"""An error that only says that another rank is gone is dated later by this much: torchrun shows the earliest one, and
counts in whole seconds."""
MEANT_FOR_TORCHRUN = (
    "environment variable RANK expected",
    *(f"KeyError: '{name}'" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
)
"""How scripts fail that look for the variables torchrun sets."""
MODULE = "gradwire.tools.launch.rank"

Report = Callable[[float, str], None]
"""Called with the part that is done, from 0 to 1, and what is being done."""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(nproc: int) -> int:
    """The number of threads that each of `nproc` ranks computes with."""
    return max(1, cores() // nproc)


def check_nproc(nproc: int) -> None:
    """SpecError for a number of local ranks that makes no sense on this machine."""
    limit = max(MIN_LIMIT, RANKS_PER_CORE * cores())
    if not 1 <= nproc <= limit:
        raise SpecError(
            f"the number of ranks must be between 1 and {limit} on a machine with {cores()} cores, got {nproc}"
        )


# -- functions ---------------------------------------------------------------------------------------------------------


def run_ranks(
    target: str,
    nproc: int,
    job: Mapping[str, Any],
    *,
    report: Report = lambda part, doing: None,
    timeout_s: float = 60.0,
    prefixes: Sequence[Sequence[str]] = (),
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `target` ("module:function") as `function(rank, nproc, job, report)` in `nproc` processes of a gloo world.

    Args:
        target: The function to call.
        nproc: The number of ranks.
        job: Passed on to the function, as JSON.
        report: Called at every tick with what rank 0 has reported last.
        timeout_s: How long a collective may take.
        prefixes: Go before the command lines of the ranks, such as `ip netns exec host0`.
        env: More environment variables for the ranks.

    Returns:
        The results of the ranks in their order. They must be JSON.

    Raises:
        RunFailed: A rank failed; the text holds its traceback, or the end of its output. No process is left behind.
        SpecError: There are more ranks than make sense on this machine.
    """
    check_nproc(nproc)
    with new_folder("ranks") as folder:
        order = {"target": target, "size": nproc, "timeout_s": timeout_s, "job": job}
        Path(folder, ORDER).write_text(json.dumps(order))
        notes, everywhere = Notes(folder), {**os.environ, **_shared(nproc), **(env or {})}
        starting = (0.0, f"starting {nproc} processes")

        def pass_on() -> bool:
            report(*(notes.read("report") or [starting])[0])
            return False

        before = prefixes or [()] * nproc
        supervise([_calling(rank, folder, before[rank], everywhere) for rank in range(nproc)], notes, pass_on)
        pass_on()
        return [_result_of(rank, folder) for rank in range(nproc)]


def _shared(nproc: int) -> dict[str, str]:
    """The ranks share the cores, find the modules that this process finds, and end with this process."""
    return {
        "OMP_NUM_THREADS": str(threads_each(nproc)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        PARENT: str(os.getpid()),
        **KEEP_MEMORY,
    }


def _calling(rank: int, folder: str, prefix: Sequence[str], env: Mapping[str, str]) -> Command:
    words = [*prefix, sys.executable, "-P", "-m", MODULE, "--call", folder, str(rank)]
    return Command(f"{RANK}{rank}", words, env, Path(folder, f"rank{rank}.log"))


def _result_of(rank: int, folder: str) -> Any:
    try:
        return json.loads(Path(folder, f"result-{rank}.json").read_text())
    except FileNotFoundError:
        raise RunFailed(f"{RANK}{rank} ended without a result") from None


# -- scripts -----------------------------------------------------------------------------------------------------------


def follow(
    plan: RunPlan,
    script: Script,
    nproc: int | None,
    torchrun: Sequence[str],
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Run a script under a plan: in this process if a launcher has made it a rank, else in new processes.

    See `launch` for the arguments and the errors.
    """
    if not is_rank(nproc, torchrun):
        launch(script, plan, nproc=nproc, torchrun=torchrun, enough=enough)
        return
    try:
        run_under(plan, script)
    except RunFailed as failed:
        raise _for_torchrun(plan, failed) from None


def is_rank(nproc: int | None, torchrun: Sequence[str]) -> bool:
    """Whether a launcher has started this process as a rank, and the caller wants no other ranks."""
    return "RANK" in os.environ and nproc is None and not torchrun


def _for_torchrun(plan: RunPlan, failed: RunFailed) -> RunFailed:
    """torchrun shows the traceback of the rank that failed first if it finds it in a file: then once is enough."""
    path, notes = os.environ.get("TORCHELASTIC_ERROR_FILE"), plan.read("failed")
    if not path or not notes:
        return failed
    text, when = notes[0]["traceback"], notes[0]["time_s"] + (ECHO_LATER_S if notes[0]["echo"] else 0)
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(when))}}
    Path(path).write_text(json.dumps({"message": message}))
    return RunFailed("", failed.exit_code)


def launch(
    script: Script,
    plan: RunPlan,
    *,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
    enough: Callable[[], bool] = lambda: False,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    server: ForkServer | None = None,
) -> None:
    """Run a script to its end, or until `enough()`.

    Args:
        script: What to run.
        plan: What to do with its DDP models.
        nproc: Start this many ranks, in the environment that torchrun would give them.
        torchrun: Options of torchrun, which then starts the ranks. With neither, the script runs once, as scripts do
            that start their ranks by themselves.
        enough: Called at every tick; True ends the run.
        env: More environment variables for the script.
        quiet: Do not show the output of the script; if it fails, the error has the end of it.
        server: With `nproc` and `quiet`: fork the ranks from this server instead of starting interpreters.

    Raises:
        RunFailed: The script failed; see `supervise`.
        SpecError: There are more ranks than make sense on this machine.
    """
    if nproc is not None:
        check_nproc(nproc)
    env = {**os.environ, **plan.environment(), **(env or {}), PARENT: str(os.getpid())}
    log = Path(plan.folder, "output.log") if quiet else None
    if torchrun:
        count = [] if nproc is None else [f"--nproc-per-node={nproc}"]
        words = [*_python(), "-m", MODULE, "--torchrun", *count, *torchrun, "-m", MODULE, *script.words()]
        supervise([Command("torchrun", words, env, log)], plan, enough)
        return
    words = [*_python(), "-u", "-P", "-m", MODULE, *script.words()]  # -u as torchrun has it
    if nproc is None:
        with _hint_for_ranks():
            supervise([Command("the script", words, env, log)], plan, enough)
        return
    with _rendezvous(nproc) as shared:
        env = {"OMP_NUM_THREADS": str(threads_each(nproc)), **env, **shared}
        logs = [Path(plan.folder, f"rank{rank}.log") if quiet else None for rank in range(nproc)]
        words = script.words() if server is not None else words
        named = [Command(f"{RANK}{at}", words, {**env, **_numbers(at)}, log, server) for at, log in enumerate(logs)]
        supervise(named, plan, enough)


@contextlib.contextmanager
def fork_server(nproc: int | None, modules: Sequence[str]) -> Iterator[ForkServer | None]:
    """A server for `launch` that has imported these modules; None without `nproc`, or where processes cannot fork."""
    if nproc is None or not hasattr(os, "fork"):
        yield None
        return
    words = [*_python(), "-u", "-P", "-m", MODULE, "--fork-server", *modules]
    env = {"OMP_NUM_THREADS": str(threads_each(nproc)), **os.environ, "PYTHONHASHSEED": "0", PARENT: str(os.getpid())}
    server = ForkServer(words, env)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def _hint_for_ranks() -> Iterator[None]:
    """A script that was meant for torchrun fails where it looks for its rank: say what is missing."""
    try:
        yield
    except RunFailed as failed:
        if not any(sign in str(failed) for sign in MEANT_FOR_TORCHRUN):
            raise
        hint = "The script expects to be started as a rank: say how many with --nproc N"
        raise RunFailed(f"{failed}\n{hint}", failed.exit_code) from None


def _numbers(rank: int) -> dict[str, str]:
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))


@contextlib.contextmanager
def _rendezvous(nproc: int) -> Iterator[dict[str, str]]:
    """The environment that all ranks share. Their store lives in this process, so that no port has to be guessed."""
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    yield {
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(nproc)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": LOCALHOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": f"gradwire-{os.getpid()}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
    del store


def _python() -> list[str]:
    """This interpreter with its own flags, such as -W."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *(flag for flag in flags if flag not in ("-P", "-u"))]
