"""Hosts on one machine: network namespaces on a bridge, each with its sending rate limited by `tc tbf`. Needs root.

    [gw0: veth 10.77.x.1]--\\
    [gw1: veth 10.77.x.2]----( bridge, in a namespace of its own )
    [gw2: veth 10.77.x.3]--/

Nothing touches the machine's own network: the bridge lives in a namespace too, and traffic stays inside.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gradwire.testing.links import Links

INTERFACE = "veth"
BURST = {"100mbit": "64kb", "1gbit": "256kb", "10gbit": "4mb"}
"""tbf's bucket: at least what one timer tick lets through, little enough not to matter in a step."""

CONTROL = "cubic"
"""Congestion control: Linux's default, whatever this machine has. bbr, for one, nearly stops for 0.2 s every 10 s, to
measure the latency, and makes the steps on a slow link a matter of luck."""


def bits_per_s(rate: str) -> float:
    """`"100mbit"` -> 1e8."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    for unit, factor in units.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate is a number with kbit, mbit or gbit, got {rate!r}")


def check_usable() -> None:
    """Say what is missing before anything is made."""
    if os.geteuid() != 0:
        raise SystemExit("shaped networks need root: network namespaces and tc")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} not found: apt-get install iproute2")


@contextmanager
def hosts(count: int, rate: str | None, inside: str | None = None) -> Iterator[list[str]]:
    """Namespaces of `count` hosts that send at `rate` each (None: unshaped). Removed again whatever happens.

    `inside` is the rate between the processes of one host. The loopback interface carries both directions of it.
    """
    check_usable()
    tag = f"gw{os.getpid()}"
    switch, names = f"{tag}-sw", [f"{tag}-{i}" for i in range(count)]
    previous = signal.signal(signal.SIGTERM, _exit)
    try:
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add name bridge type bridge")
        _run(f"ip -n {switch} link set bridge up")
        for index, name in enumerate(names):
            _add_host(switch, name, index, rate)
            _limit(name, "lo", inside)
        yield names
    finally:
        for name in (*names, switch):
            with suppress(subprocess.CalledProcessError):
                _run(f"ip netns delete {name}", quiet=True)
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def links(count: int) -> Iterator[Links]:
    """Hosts whose links can be cut, for `gradwire.testing.faults`."""
    with hosts(count, None) as names:
        switch, address = f"{names[0].rpartition('-')[0]}-sw", "10.77.0.254"
        _run(f"ip -n {switch} link set lo up")
        _run(f"ip -n {switch} addr add {address}/24 dev bridge")
        yield Links(tuple(names), INTERFACE, switch, address)


def on_host(name: str, rank: int) -> list[str]:
    """What a command begins with to run in a namespace, on one core."""
    return ["ip", "netns", "exec", name, "taskset", "-c", str(rank % (os.cpu_count() or 1))]


def _add_host(switch: str, name: str, index: int, rate: str | None) -> None:
    _run(f"ip netns add {name}")
    _run(f"ip -n {switch} link add port{index} type veth peer name {INTERFACE} netns {name}")
    _run(f"ip -n {switch} link set port{index} master bridge up")
    _run(f"ip -n {name} addr add 10.77.0.{index + 1}/24 dev {INTERFACE}")
    _run(f"ip -n {name} link set {INTERFACE} up")
    _run(f"ip -n {name} link set lo up")
    _run(f"ip -n {name} route change 10.77.0.0/24 dev {INTERFACE} src 10.77.0.{index + 1} congctl {CONTROL}")
    _limit(name, INTERFACE, rate)


def _limit(name: str, interface: str, rate: str | None) -> None:
    if rate is not None:
        burst = BURST.get(rate, f"{max(int(bits_per_s(rate) / 8 / 250), 65536)}b")
        _run(f"tc -n {name} qdisc add dev {interface} root tbf rate {rate} burst {burst} latency 200ms")


def _run(command: str, quiet: bool = False) -> None:
    subprocess.run(command.split(), check=True, stderr=subprocess.DEVNULL if quiet else sys.stderr)


def _exit(signum: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + signum)
