"""What every Python process below a run does first, without torch: a package of that name stands in for it."""

import os
import signal
import subprocess
import sys

from gradwire.tools.launch.plan import PARENT, STARTUP

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
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=env, capture_output=True, text=True, timeout=540, check=False
    )
    assert (done.stderr, done.stdout.splitlines()) == ("", ["mine too", f"True {tmp_path / 'sitecustomize.py'}"])


def test_a_rank_that_has_not_begun_ends_at_ctrl_c_without_a_word():
    env = {**os.environ, "PYTHONPATH": str(STARTUP)}
    words = [sys.executable, "-c", "import os; os.kill(os.getpid(), 2)"]
    ours, other = (
        subprocess.run(words, env=env | more, capture_output=True, text=True, timeout=540, check=False)
        for more in ({PARENT: str(os.getpid())}, {})
    )
    assert (ours.returncode, ours.stderr) == (-signal.SIGINT, "")
    assert other.stderr.endswith("KeyboardInterrupt\n")  # processes of the script do as they always do
