"""A test kit for hooks, codecs and exchanges: ranks as threads, ranks as processes, and the contracts to hold.

`thread_ranks` runs a function on ranks that are threads over real gloo, in tens of milliseconds. `spawn_ranks` runs one
in processes of their own, for DDP itself; a child's traceback comes back to the test. `check_codec` and
`check_exchange` run all contracts (`gradwire.testing.contracts`) on one object and raise AssertionError;
`gradwire.testing.mutants` has the wrong exchanges that the contracts must reject.
"""

from gradwire.testing.contracts import check_codec, check_exchange
from gradwire.testing.processes import RankFailed, spawn_ranks
from gradwire.testing.threads import Rank, thread_ranks

__all__ = ["Rank", "RankFailed", "check_codec", "check_exchange", "spawn_ranks", "thread_ranks"]
