"""The directions Q of PowerSGD. They belong to parameters, and each step starts from those of the step before."""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.low_rank.matrices import Matrices


class Directions(NamedTuple):
    """Where the directions are kept between steps, and how the first ones are made."""

    key: str
    """Their key in `Bucket.memory`."""
    seed: int
    warm_start: bool
    """If False, every step starts from random directions."""

    def recall(self, bucket: Bucket, group: Matrices, like: Tensor) -> Tensor:
        """Orthonormal directions to start from, (B, R, N). Directions that became zero are replaced by random ones."""
        kept = [self.kept(bucket, name, group) for name in group.names]
        q = torch.stack(
            [
                self.random(bucket.step, name, group, like) if old is None else old.to(like.dtype)
                for old, name in zip(kept, group.names, strict=True)
            ]
        )
        kernel = kernels.pick("low_rank", q)
        kernel.orthonormalize_(q)
        gone = (q == 0).all(2, keepdim=True)
        if like.device.type != "cpu" or gone.any():  # reading `gone` would synchronise an accelerator
            fresh = torch.stack([self.random(bucket.step, name, group, like) for name in group.names])
            replaced = torch.where(gone, fresh, q)
            kernel.orthonormalize_(replaced)
            q = torch.where(gone.any(), replaced, q)  # a second time changes the last bits, so only where the CPU does
        return q

    def keep(self, bucket: Bucket, group: Matrices, q_BRN: Tensor) -> None:
        """Keep the directions for the next step."""
        if bucket.memory is not None and self.warm_start:
            for name, q in zip(group.names, q_BRN.float(), strict=True):
                bucket.memory.setdefault(name, {})[self.key] = q

    def random(self, step: int, name: str, group: Matrices, like: Tensor) -> Tensor:
        """Directions to start from, (R, N), the same on all ranks."""
        seed = zlib.crc32(repr((self.seed, step, name)).encode())
        generator = torch.Generator(like.device).manual_seed(seed)
        shape = (group.matrix_rank, group.stack.cols)
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)

    def kept(self, bucket: Bucket, name: str, group: Matrices) -> Tensor | None:
        """The directions of the last step, if there are any for this shape."""
        kept = (bucket.memory or {}).get(name, {}).get(self.key) if self.warm_start else None
        return kept if kept is not None and kept.shape == (group.matrix_rank, group.stack.cols) else None
