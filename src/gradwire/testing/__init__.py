"""A test kit for hooks, codecs and exchanges: ranks as threads, ranks as processes, and the contracts to hold.

`thread_ranks` runs a function on ranks that are threads over real gloo: tens of milliseconds a test.
`spawn_ranks` runs one in processes of their own, for DDP itself; a child's traceback comes back to the test.
`contracts` has the laws, as functions that raise AssertionError.
"""

from gradwire.testing.processes import RankFailed, spawn_ranks
from gradwire.testing.threads import Rank, thread_ranks

__all__ = ["Rank", "RankFailed", "spawn_ranks", "thread_ranks"]
