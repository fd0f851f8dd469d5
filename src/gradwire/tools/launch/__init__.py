"""Starts ranks as processes and ends them: functions of ours, or a user's DDP script, unmodified.

The files, in the order of the calls:

1. `launch.py`    decides which processes a run consists of: ranks that call a function, ranks that run a script, or
                  torchrun. `follow` runs a script in this process instead if a launcher has made it a rank already.
2. `supervise.py` starts these processes and ends them all at an error, at Ctrl-C, or when the caller has enough.
3. `rank.py`      is what each process executes. `forked.py` forks such processes from one that has loaded torch.
4. `script.py`    is the user's script, and runs it in this process as Python itself would.
5. `plan.py`      says what to do with every DDP model of a script, and holds the notes that processes leave for each
                  other. It travels in the environment.
6. `startup/`     is on the path of every Python process below, so that processes the script starts follow the plan too.
7. `inside.py`    is called by the patched DistributedDataParallel.__init__, follows the plan, and notes failures.

`run.py` is the function behind `gradwire run`, and `link.py` describes and emulates a network link.
"""

from gradwire.tools.launch.launch import follow, run_ranks
from gradwire.tools.launch.plan import RunPlan
from gradwire.tools.launch.script import Script
from gradwire.tools.launch.supervise import RunFailed

__all__ = ["RunFailed", "RunPlan", "Script", "follow", "run_ranks"]
