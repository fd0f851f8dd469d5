"""Every example runs, as its own first lines say."""

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch.distributed as dist

from gradwire.testing import spawn_ranks

from .kit.versions import sharded_models

ROOT = Path(__file__).parent.parent
OTHERS = {"accelerate_ddp.py", "lightning_ddp.py", "trainer_ddp.py"}
"""Examples that need other packages."""
CUSTOM = sorted((ROOT / "examples").glob("custom_*.py"))
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path not in CUSTOM]
OURS = [
    pytest.param(path, marks=sharded_models if path.name in ("fsdp2.py", "hsdp.py") else (), id=path.name)
    for path in EXAMPLES
    if path.name not in OTHERS
]
UNDER_TORCHRUN = [
    pytest.param(path, marks=pytest.mark.integrations if path.name in OTHERS else ())
    for path in EXAMPLES
    if path.name in OTHERS or path.name == "first_hook.py"
]


def command_of(example):
    """The number of ranks and the words of the example's own command line, which begin with its path."""
    text = example.read_text()
    assert text.count("\n") < 80
    size, words = re.search(r"^torchrun --nproc-per-node (\d) (.+)$", text, re.MULTILINE).groups()
    assert ROOT / words.split()[0] == example
    return size, words.split()


@pytest.mark.parametrize("example", UNDER_TORCHRUN, ids=lambda path: path.name)
def test_an_example_runs_under_torchrun(example):
    size, words = command_of(example)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size)
    assert "replicas bit-identical" in output_of(*launcher, *words)


@pytest.mark.parametrize("example", OURS)
def test_an_example_trains_and_its_replicas_stay_identical(example, monkeypatch):
    """On forked ranks, in the environment that torchrun gives them: three processes of torchrun load torch anew."""
    size, words = command_of(example)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.chdir(ROOT)
    printed, *others = spawn_ranks(int(size), run_as_main, words)
    assert "replicas bit-identical" in printed
    assert others == [""] * (int(size) - 1)


def run_as_main(rank, size, words):
    """Run a script that makes a world of its own; what it prints."""
    dist.barrier()  # no rank is still connecting to the world that ends here
    dist.destroy_process_group()
    sys.argv = words
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(words[0], run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("example", CUSTOM, ids=lambda path: path.name)
def test_a_codec_or_exchange_of_ones_own_keeps_every_contract(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert "keeps every contract" in capsys.readouterr().out


def output_of(*arguments: str) -> str:
    run = [sys.executable, *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout
