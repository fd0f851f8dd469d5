"""Programs that are forked from the server with torch loaded, in the place of new interpreters.

An interpreter spends three seconds of processor time on importing torch and Numba; a fork takes milliseconds. A forked
program ends as an interpreter does: with its exit handlers, its destructors and its own exit code.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from gradwire.tools.cli import main
from gradwire.tools.launch import forked, rank
from gradwire.tools.launch.launch import MODULE
from gradwire.tools.launch.plan import PARENT
from gradwire.tools.launch.supervise import Command

_start, _exit = Command.start, os._exit


class Forked(forked.Forked):
    """The same from the server of the tests, whose processes take other files."""

    def __init__(
        self, run: Callable[[], object], words: Sequence[str], env: Mapping[str, str], files: Sequence[int]
    ) -> None:
        """Call `run` with these words as sys.argv; `files` take its output and its errors."""
        with ExitStack() as stack:
            pipes = [stack.enter_context(Connection(os.dup(file))) for file in files]  # which send files along
            target, args = become, (run, list(words), dict(env), *pipes)
            self._process = get_context("forkserver").Process(target=target, args=args)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def start(command: Command) -> object:
    """In the place of `Command.start`: ranks are forked. Other commands, such as torchrun, start as always."""
    words = list(command.words)
    if MODULE not in words or "--torchrun" in words:
        return _start(command)
    words = [rank.__file__, *words[words.index(MODULE) + 1 :]]
    if command.log is None:
        return Forked(run_rank, words, command.env, (1, 2))
    with command.log.open("wb") as log:
        return Forked(run_rank, words, command.env, (log.fileno(), log.fileno()))


def run_programs(*programs: Sequence[str], env: Mapping[str, str] | None = None) -> list[tuple[int, str, str]]:
    """Run scripts, each with its words, at the same time: their exit codes, what they print, and their errors."""
    pipes = [(os.pipe(), os.pipe()) for _ in programs]
    running = []
    try:
        for words, ((_, out), (_, err)) in zip(programs, pipes, strict=True):
            running.append(Forked(run_script, words, {**os.environ, **(env or {})}, (out, err)))
            os.close(out)
            os.close(err)
        texts = [tuple(_read(source) for source, _ in pair) for pair in pipes]
        return [(each.wait(), out, err) for each, (out, err) in zip(running, texts, strict=True)]
    finally:
        for each in running:
            each.kill()


def _read(file: int) -> str:
    with open(file) as source:
        return source.read()


# -- in the forked process ---------------------------------------------------------------------------------------------


def become(run: Callable[[], object], words: list[str], env: dict[str, str], out: Connection, err: Connection) -> None:
    """Make this process look like a new interpreter. Ranks that it starts are forked from the same server."""
    os.setsid()
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running  # type: ignore[attr-defined]  # it runs
    gc.freeze()  # at its end an interpreter looks at everything twice, which takes a second
    os._exit = end  # type: ignore[assignment]  # by which multiprocessing would leave out all exit handlers
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    sys.stdout, sys.stderr = (open(file, "w", buffering=1, closefd=False) for file in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.environ[PARENT] = str(os.getppid())
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    sys.argv = words
    sys.path.insert(0, "")  # a script's own folder takes its place
    try:
        code = run()
    except Exception as error:
        sys.last_value = error  # as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.exit(code)


def end(code: int) -> NoReturn:
    """Leave the loop of the server that this process was forked from, up to the end of the interpreter."""
    os._exit = _exit
    raise SystemExit(code)


def run_rank() -> int:
    """`python -m gradwire.tools.launch.rank`."""
    return rank.main()


def run_gradwire() -> int:
    """`gradwire`, whose ranks are forked too."""
    Command.start = start  # type: ignore[assignment,method-assign]
    return main(sys.argv[1:])


def run_script() -> None:
    """`python script`."""
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
