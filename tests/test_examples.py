"""Every example runs, as its own first lines say."""

import io
import json
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from gradwire.testing import spawn_ranks

from .kit import notebook
from .kit.versions import sharded_models

ROOT = Path(__file__).parent.parent
OTHERS = {"accelerate_ddp.py", "lightning_ddp.py", "trainer_ddp.py"}
"""Examples that need other packages."""
CUSTOM = sorted((ROOT / "examples").glob("custom_*.py"))
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path not in CUSTOM]


def _needs(path):
    return [sharded_models] if path.name in ("fsdp2.py", "hsdp.py") else []


OURS = [pytest.param(path, marks=_needs(path), id=path.name) for path in EXAMPLES if path.name not in OTHERS]
UNDER_TORCHRUN = [
    pytest.param(
        path, marks=[pytest.mark.integrations] if path.name in OTHERS else [pytest.mark.thorough, *_needs(path)]
    )
    for path in EXAMPLES
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
    """On forked ranks, in the environment that torchrun gives them: three processes of torchrun load torch anew.

    15 steps are enough to see that replicas stay identical; their own number runs in `make test-all`, under torchrun.
    """
    size, words = command_of(example)
    words += [] if "--steps" in words else ["--steps", "15"]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.chdir(ROOT)
    printed, *others = spawn_ranks(int(size), run_as_main, words, timeout_s=500)
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


@pytest.mark.usefixtures("one_thread")
def test_the_notebook_runs_and_its_outputs_are_stored():
    path = ROOT / "examples" / "encoding.ipynb"
    stored, again = json.loads(path.read_text()), notebook.run(path)
    code = [cell for cell in again["cells"] if cell["cell_type"] == "code"]
    printed = "".join(line for cell in code for output in cell["outputs"] for line in output.get("text", ()))
    assert printed.count("the same bits on all ranks") == 6
    *_, without, with_feedback = re.findall(r"over 40 steps (\S+)", printed)
    assert float(with_feedback) < float(without) / 5
    kinds = [[output["output_type"] for output in cell.get("outputs", ())] for cell in again["cells"]]
    assert kinds == [[output["output_type"] for output in cell.get("outputs", ())] for cell in stored["cells"]]
    (plot,) = [output for cell in code for output in cell["outputs"] if "data" in output]
    assert ElementTree.fromstring("".join(plot["data"]["image/svg+xml"])).findall("{*}circle")


def output_of(*arguments: str) -> str:
    run = [sys.executable, *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.thorough
def test_a_job_that_restarts_reaches_the_parameters_of_an_undisturbed_one(tmp_path, monkeypatch):
    """torchrun starts all ranks again, and they continue from their checkpoints, bit for bit."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    job = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    words = (*job, "examples/elastic_restart.py", "--folder")
    calm = output_of(*words, str(tmp_path / "calm"))
    restarted = output_of(*words, str(tmp_path / "restarted"), "--fail-at", "17")
    assert "steps 0 to 40" in calm
    assert "steps 15 to 40" in restarted
    assert re.search("parameters (.+)", calm)[1] == re.search("parameters (.+)", restarted)[1]
