"""Every example runs, as its own first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = {"accelerate_ddp.py", "lightning_ddp.py", "trainer_ddp.py"}
"""Examples that need other packages."""
CUSTOM = sorted((ROOT / "examples").glob("custom_*.py"))
EXAMPLES = [
    pytest.param(path, id=path.name, marks=[pytest.mark.integrations] if path.name in OTHERS else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path not in CUSTOM
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_and_its_replicas_stay_identical(example):
    text = example.read_text()
    assert text.count("\n") < 80
    command = re.search(r"^torchrun (.+)$", text, re.MULTILINE).group(1)
    assert "replicas bit-identical" in output_of("-m", "torch.distributed.run", "--standalone", *command.split())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", CUSTOM, ids=lambda path: path.name)
def test_a_codec_or_exchange_of_ones_own_keeps_every_contract(example):
    assert "keeps every contract" in output_of(str(example))


def output_of(*arguments: str) -> str:
    run = [sys.executable, *arguments]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout
