"""Links: the network of a trial, in which the link of one rank can be cut, slowed down and mended. Needs root.

Every rank is a process in a network namespace of its own, on a bridge in one more: see `benchmarks/netns.py`, which
makes them. The store of the trial listens on the bridge, so that it is in reach of every rank whose link is up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from dataclasses import dataclass

from gradwire._torch import TCPStore

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Links:
    """Namespaces with a link each."""

    hosts: tuple[str, ...]
    """The namespaces of the ranks."""
    interface: str
    """What the link is called in each of them."""
    switch: str
    """The namespace of the bridge, where the other end of the link of rank 1 is called `port1`."""
    address: str
    """The address of the bridge."""

    def serve(self) -> TCPStore:
        """A store that listens on the bridge. Threads have namespaces of their own, so one of them makes it."""
        made: list[TCPStore] = []

        def main() -> None:
            _enter(self.switch)
            made.append(TCPStore(self.address, 0, is_master=True, wait_for_workers=False))

        thread = threading.Thread(target=main)
        thread.start()
        thread.join()
        return made[0]

    def enter(self, rank: int) -> None:
        """Move this process, which must not have threads yet, behind the link of a rank."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        _enter(self.hosts[rank])

    def cut(self, rank: int) -> None:
        """Drop everything that the rank sends or is sent. No connection closes."""
        _run(f"ip -n {self.switch} link set port{rank} down")

    def slow(self, rank: int, rate: str) -> None:
        """Let the rank send at most so much, such as `1mbit`."""
        _run(f"tc -n {self.hosts[rank]} qdisc add dev {self.interface} root tbf rate {rate} burst 16kb latency 200ms")

    def mend(self, rank: int) -> None:
        """Undo `cut` and `slow`."""
        _run(f"ip -n {self.switch} link set port{rank} up")
        subprocess.run(
            f"tc -n {self.hosts[rank]} qdisc del dev {self.interface} root".split(),
            stderr=subprocess.DEVNULL,
            check=False,  # it was not slow
        )


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(f"/var/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(place, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns({namespace}): {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(place)


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
