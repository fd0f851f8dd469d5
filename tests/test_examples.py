"""Every example runs, as its own first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OTHERS = {"accelerate_ddp.py", "lightning_ddp.py", "trainer_ddp.py"}
"""Examples that need other packages."""
EXAMPLES = [
    pytest.param(path, id=path.name, marks=[pytest.mark.integrations] if path.name in OTHERS else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    text = example.read_text()
    assert text.count("\n") < 80
    command = re.search(r"^torchrun (.+)$", text, re.MULTILINE).group(1)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "replicas bit-identical" in done.stdout
