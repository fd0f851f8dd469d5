"""One rank: `python -m gradwire.tools.launch.local_rank`, started by `ranks.py`, which says how the two talk."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any, TextIO

import torch.distributed as dist


def main() -> None:
    """Run the order that comes over stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starting process too, and that one ends us
    messages = _take_stdout()
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        _send(messages, "result", _run(order, messages))
        sys.stderr.flush()
        os._exit(0)  # all is said and done, and on a busy machine an interpreter takes seconds to end
    except BaseException as error:
        _send(messages, "failed", {"traceback": traceback.format_exc(), "echo": is_echo(error)})
        os._exit(1)  # the other ranks may never answer: do not wait for them in destructors


def _run(order: dict[str, Any], messages: TextIO) -> Any:
    def report(part: float, doing: str) -> None:
        if order["rank"] == 0:
            _send(messages, "report", {"part": part, "doing": doing})

    module, _, name = order["target"].partition(":")
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order['folder']}/store",
        rank=order["rank"],
        world_size=order["size"],
        timeout=timedelta(seconds=order["timeout_s"]),
    )
    result = function(order["rank"], order["size"], order["job"], report)
    dist.barrier()  # nobody takes its connections away while another still works
    dist.destroy_process_group()
    return result


def _take_stdout() -> TextIO:
    """Keep stdout for messages; whatever else is printed goes to stderr."""
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return messages


def _send(messages: TextIO, kind: str, content: Any) -> None:
    messages.write(json.dumps({"kind": kind, "content": content}) + "\n")
    messages.flush()


def _exit_with_parent() -> None:
    while os.read(0, 1024):  # not sys.stdin.read(): its lock would stop the interpreter from exiting
        pass
    os._exit(1)


def is_echo(error: BaseException) -> bool:
    """Whether this only says that another rank is gone. DDP turns errors of a hook into RuntimeError, text and all."""
    lost = ("another rank failed", "Connection closed", "Connection reset", "Broken pipe", "gloo", "Timed out")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in lost)


if __name__ == "__main__":
    main()
