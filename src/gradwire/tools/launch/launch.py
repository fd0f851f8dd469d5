"""launch(): a script under a plan, as it is, on ranks of our own, or on those that torchrun starts."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

from gradwire._torch import TCPStore
from gradwire.tools.launch.local import check_nproc, threads_each
from gradwire.tools.launch.plan import PARENT, Plan
from gradwire.tools.launch.script import Script, ScriptFailed
from gradwire.tools.launch.supervise import RANK, Command, supervise

LOCALHOST = "127.0.0.1"
MEANT_FOR_TORCHRUN = (
    "environment variable RANK expected",
    *(f"KeyError: '{name}'" for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
)
"""How scripts fail that look for what torchrun would have told them."""


def launch(
    script: Script,
    plan: Plan,
    *,
    nproc: int | None = None,
    torchrun: Sequence[str] = (),
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Run a script to its end, or until `enough()`. ScriptFailed if it fails; see `supervise`.

    With `nproc` so many ranks start, in the environment that torchrun would give them. With `torchrun`, options of it,
    torchrun starts them. With neither the script runs once, for those that start ranks by themselves. SpecError for
    more ranks than make sense on this machine.
    """
    if nproc is not None:
        check_nproc(nproc)
    env = {**os.environ, **plan.environment(), PARENT: str(os.getpid())}
    if torchrun:
        count = [] if nproc is None else [f"--nproc-per-node={nproc}"]
        words = [
            *_python(),
            "-m",
            "gradwire.tools.launch.torchrun",
            *count,
            *torchrun,
            "-m",
            "gradwire.tools.launch.rank",
        ]
        supervise([Command("torchrun", [*words, *script.words()], env)], plan, enough)
        return
    words = [*_python(), "-u", "-P", "-m", "gradwire.tools.launch.rank", *script.words()]  # -u as torchrun has it
    if nproc is None:
        with _hint_for_ranks():
            supervise([Command("the script", words, env)], plan, enough)
        return
    with _rendezvous(nproc) as shared:
        env = {"OMP_NUM_THREADS": str(threads_each(nproc)), **env, **shared}
        supervise([Command(f"{RANK}{rank}", words, {**env, **_numbers(rank)}) for rank in range(nproc)], plan, enough)


@contextlib.contextmanager
def _hint_for_ranks() -> Iterator[None]:
    """A script that was meant for torchrun fails where it looks for its rank: say what is missing."""
    try:
        yield
    except ScriptFailed as failed:
        if not any(sign in str(failed) for sign in MEANT_FOR_TORCHRUN):
            raise
        hint = "The script expects to be started as a rank: say how many with --nproc N"
        raise ScriptFailed(f"{failed}\n{hint}", failed.exit_code) from None


def _numbers(rank: int) -> dict[str, str]:
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))


@contextlib.contextmanager
def _rendezvous(nproc: int) -> Iterator[dict[str, str]]:
    """The environment that all ranks share. Their store lives here, so that no port has to be guessed."""
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
