"""A test kit for hooks, codecs and exchanges: ranks as threads, ranks as processes, and the contracts to hold.

`thread_ranks` runs a function on ranks that are threads over real gloo, in tens of milliseconds. `spawn_ranks` runs one
in new processes, for DDP itself, and `RankPool` does so again and again in the same processes; the traceback of a rank
comes back to the test. `check_codec` and `check_exchange` run all contracts (`gradwire.testing.contracts`) on one
object and raise AssertionError.
"""

from gradwire.testing.contracts import check_codec, check_exchange
from gradwire.testing.processes import RankFailed, RankPool, spawn_ranks
from gradwire.testing.threads import Rank, thread_ranks

__all__ = ["Rank", "RankFailed", "RankPool", "check_codec", "check_exchange", "spawn_ranks", "thread_ranks"]
