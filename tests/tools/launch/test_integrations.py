"""The verbs on unmodified scripts of other packages, which `make integrations` installs. A start takes 10 to 30 s."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDED = ("accelerate", "lightning", "transformers")
LIGHTNING = ("examples/lightning_ddp.py",)
ACCELERATE = ("examples/accelerate_ddp.py",)
TRAINER = ("examples/trainer_ddp.py",)
LAUNCH = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
"""Two processes, whatever the device: with --cpu Accelerate starts one."""

pytestmark = pytest.mark.integrations


@pytest.fixture(autouse=True, scope="module")
def installed():
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(f"not installed: {', '.join(missing)}; `make integrations` installs what these tests need")


def gradwire(*words):
    """What a verb and the script print."""
    command = (sys.executable, "-m", "gradwire", *words)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_json(printed):
    """A script may print before."""
    return json.loads(printed[("\n" + printed).rindex("\n{\n") :])


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((*LIGHTNING, "--steps", "9"), id="lightning-starts-its-ranks"),
        pytest.param((*LIGHTNING, "--steps", "9", "--strategy", "ddp_spawn"), id="lightning-spawns-them"),
        pytest.param(("--nproc", "2", *LIGHTNING, "--steps", "9"), id="lightning-in-ranks"),
        pytest.param(("--nproc", "2", *ACCELERATE, "--steps", "9"), id="accelerate-in-ranks"),
        pytest.param((*LAUNCH, *ACCELERATE, "--steps", "9"), id="accelerate-launch"),
        pytest.param(("--nproc", "2", *TRAINER, "--steps", "9"), id="trainer-in-ranks"),
    ],
)
def test_run(words):
    told = gradwire("run", "--hook", "bf16", "--json", *words).splitlines()[-1]
    models = json.loads(told)["models"]
    assert [(model["hook"], model["ranks"], model["total_steps"]) for model in models] == [("bf16", 2, 9)]


def test_headroom_of_trainer():
    found = last_json(gradwire("headroom", "--steps", "8", "--json", "--nproc", "2", *TRAINER, "--steps", "20"))
    assert (found["ranks"], found["with_communication"]["steps"]) == (2, 4)


def test_advise_for_lightning_which_starts_its_ranks():
    words = ("--steps", "8", "--hooks", "bf16", "--json", "--link", "10mbit", *LIGHTNING, "--steps", "2000")
    found = last_json(gradwire("advise", *words))
    assert {row["hook"] for row in found["hooks"]} >= {"exact", "bf16"}
    assert found["headroom"]["is_network_bound"]
