"""Every use of a private name of torch, one function each: what it is for, and in which versions it was seen.

Public names that torch's type stubs hide are imported here too, so that the rest of the package has them typed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket, HashStore, PrefixStore, ProcessGroupGloo, Store
else:
    from torch.distributed import GradBucket, HashStore, PrefixStore, ProcessGroupGloo, Store

__all__ = ["GradBucket", "HashStore", "PrefixStore", "ProcessGroupGloo", "Store"]
