"""A test kit for hooks, codecs and exchanges: ranks as threads, ranks as processes, and the contracts to hold.

`thread_ranks` runs a function on ranks that are threads over real gloo, which takes tens of milliseconds.
`spawn_ranks` runs one in new processes, for DDP itself; the traceback of a rank comes back to the test.
`RankPool` does so again and again in the same processes, as a test suite needs it.
`contracts` has the laws, as functions that raise AssertionError.
"""

from gradwire.testing.processes import RankFailed, RankPool, spawn_ranks
from gradwire.testing.threads import Rank, thread_ranks

__all__ = ["Rank", "RankFailed", "RankPool", "spawn_ranks", "thread_ranks"]
