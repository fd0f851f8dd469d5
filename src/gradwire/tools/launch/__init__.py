"""Runs a user's DDP script, unmodified, and calls a function of ours with every DDP model it builds.

How the pieces fit:

1. `plan.py`      what to do with each model, and where to note what happened; travels in the environment.
2. `startup/`     on the path of every Python process below, so that children of the script follow the plan too.
3. `models.py`    called by the patched DistributedDataParallel.__init__: follows the plan.
4. `script.py`    runs the script in this process, as __main__; `rank.py` is a process that does only this.
                  `modules.py` says before that whether there is a module to run.
5. `failures.py`  an error that ends such a process, or one that the script has started, is noted for the others.
6. `supervise.py` starts such processes, ends them all at Ctrl-C or at an error, and shows one traceback.
7. `launch.py`    from a script and a plan to processes: ranks of its own, or torchrun's (`torchrun.py`).
8. `follow.py`    all of it: in new processes, or in this one where a launcher has already made it a rank.
"""

from gradwire.tools.launch.follow import follow
from gradwire.tools.launch.plan import Plan
from gradwire.tools.launch.script import Script, ScriptFailed

__all__ = ["Plan", "Script", "ScriptFailed", "follow"]
