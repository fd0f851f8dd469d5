"""A process may leave while a collective is under way: it ends with its own exit code, and is not aborted."""

import pytest

from .kit.forked import run_programs

LEAVE = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from gradwire.tools.measure.alternate import Alternating, Clock
from gradwire.exchanges.bucket import make_bucket
from gradwire.models.ddp import make_hook
from gradwire.exchanges import exchange

store, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + store)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
if what == "headroom":
    start = Alternating(model, Clock(8, lambda *_: None), None)._all_reduce
else:
    start = make_hook(exchange(what), dist.group.WORLD, torch.device("cpu")).mean
bucket = make_bucket([torch.ones(300_000)])
time.sleep(0.2 * rank)
start(bucket)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "what", ["headroom", "int8", *(pytest.param(spec, marks=pytest.mark.thorough) for spec in ("exact", "powersgd"))]
)
def test_rank_that_exits_during_a_collective_is_not_aborted(tmp_path, what):
    script = tmp_path / "leave.py"
    script.write_text(LEAVE)
    ended = run_programs(*([str(script), str(tmp_path / "store"), str(rank), what] for rank in range(2)))
    assert [(err, code) for code, _, err in ended] == [("", 7)] * 2


LATE = """
import builtins, os, sys, time, torch, torch.distributed as dist
from gradwire.exchanges.bucket import make_bucket
from gradwire.models.ddp import make_hook
from gradwire.exchanges import exchange

class Last:
    # deleted by the interpreter itself, after all exit handlers: threads that need the interpreter from now on end here
    def __del__(self, begin=os.mkdir, is_there=os.path.exists, sleep=time.sleep, folder=sys.argv[1]):
        begin(folder + "/leaving")
        while not is_there(folder + "/came"):
            sleep(0.02)
        sleep(0.2)

folder, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + folder + "/store")
hook = make_hook(exchange(what), dist.group.WORLD, torch.device("cpu"))
bucket = make_bucket([torch.ones(300_000)])
if rank == 0:
    builtins.last = Last()
    hook.mean(bucket)
    sys.exit(7)
while not os.path.exists(folder + "/leaving"):
    time.sleep(0.02)
try:
    hook.mean(bucket).wait()
except RuntimeError as error:
    print(error)
finally:
    os.mkdir(folder + "/came")
"""


@pytest.mark.parametrize("what", ["int8", pytest.param("exact", marks=pytest.mark.thorough)])
def test_rank_that_does_not_wait_for_the_others_is_not_aborted(tmp_path, what):
    """The other rank comes while the interpreter of the first one ends, and learns that it has left."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    left, late = run_programs(*([str(script), str(tmp_path), str(rank), what] for rank in range(2)))
    assert left == (7, "", "")
    code, said, complaint = late
    assert (code, complaint) == (0, "")
    assert "another rank failed (rank 0: its process ended in the middle of a step)" in said


FORK = """
import os, sys, time
from datetime import timedelta
from gradwire._torch import HashStore
from gradwire.engine.lanes import Lanes
from gradwire.engine.runner import LaneRunner

runner = LaneRunner(Lanes(HashStore(), 0, 1, timedelta(seconds=20), "forked"))
runner.open(1)
runner.run(lambda comm: None)
child = os.fork()
if child == 0:
    sys.exit(3)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
    _, status = os.waitpid(child, 0)
runner.run(lambda comm: print("the engine works"))
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_fork_of_a_process_ends_and_leaves_its_engine_alone(tmp_path):
    """The threads of the engine and of gloo are not in the fork: waiting for them would take for ever."""
    script = tmp_path / "fork.py"
    script.write_text(FORK)
    assert run_programs([str(script)]) == [(3, "the engine works\n", "")]
