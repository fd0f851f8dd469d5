"""`gradwire store`."""

import argparse
import re
import threading
import time

from gradwire._torch import TCPStore
from gradwire.tools.cli import main
from gradwire.tools.cli.store import run


def test_ranks_can_use_the_store(capsys):
    threading.Thread(target=run, args=(argparse.Namespace(port=0),), daemon=True).start()
    printed, until = "", time.monotonic() + 20
    while "Ctrl-C" not in printed and time.monotonic() < until:
        printed += capsys.readouterr().out
    store = TCPStore("127.0.0.1", int(re.search(r"port (\d+)", printed)[1]), wait_for_workers=False)
    assert store.add("ranks", 2) == 2


def test_a_port_that_cannot_be_had_is_an_error_of_one_line(capsys):
    taken = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for port, code, wanted in (
        (taken.port, 1, f"cannot host a store at port {taken.port}"),
        (99999, 2, "--port must be between 0 and 65535, got 99999"),
    ):
        assert main(["store", "--port", str(port)]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert wanted in line
