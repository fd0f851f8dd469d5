"""torchrun with two agents, each in a network namespace of its own, as on two machines. Needs root and iproute2."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(TIMEOUT_S + 40, method="signal")]  # so that `finally` runs


def netns():
    """benchmarks/netns.py, which is not in a package."""
    spec = importlib.util.spec_from_file_location("netns", ROOT / "benchmarks" / "netns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def agent(namespace: str, node: int) -> subprocess.Popen[str]:
    """The command of docs/integrations.md, on one of two nodes."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    meet = ("--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", "29500")
    command = ("ip", "netns", "exec", namespace, *torchrun, *meet, "examples/first_hook.py", "--hook", "int8")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "veth"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)


def test_two_agents_in_two_namespaces() -> None:
    with netns().hosts(2, None) as names:
        agents = [agent(name, node) for node, name in enumerate(names)]
        try:
            printed = [each.communicate(timeout=TIMEOUT_S) for each in agents]
        finally:
            for each in agents:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()
    assert [each.returncode for each in agents] == [0, 0], printed
    assert sum("int8: 50 steps on every rank, replicas bit-identical" in out for out, _ in printed) == 1
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in left for name in names)
