"""What every Python process below a run does first, without torch: a package of that name stands in for it."""

import os
import subprocess
import sys

from gradwire.launch.plan import STARTUP

FAKE = """
class DistributedDataParallel:
    def __init__(self): print("built")
"""
ASK = """
import sys
assert "gradwire" not in sys.modules
import torch.nn.parallel.distributed as distributed
print(hasattr(distributed.DistributedDataParallel.__init__, "gradwire_original"), sys.modules["sitecustomize"].__file__)
"""


def test_ddp_is_patched_when_torch_comes_and_another_sitecustomize_still_runs(tmp_path):
    folder = tmp_path / "torch" / "nn" / "parallel"
    folder.mkdir(parents=True)
    for package in (tmp_path / "torch", tmp_path / "torch" / "nn", folder):
        (package / "__init__.py").touch()
    (folder / "distributed.py").write_text(FAKE)
    (tmp_path / "sitecustomize.py").write_text("print('mine too')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(STARTUP), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stderr, done.stdout.splitlines()) == ("", ["mine too", f"True {tmp_path / 'sitecustomize.py'}"])
