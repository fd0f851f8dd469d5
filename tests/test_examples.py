"""Every example runs, as its own first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example(example):
    text = example.read_text()
    assert text.count("\n") < 80
    command = re.search(r"^torchrun (.+)$", text, re.MULTILINE).group(1)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "replicas bit-identical" in done.stdout
