"""The directions of PowerSGD. They belong to parameters, and each step starts from those of the step before."""

import zlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.low_rank.matrices import Matrices

Side = Literal["p", "q"]
"""Q lies next to the columns of a matrix; one-sided iteration starts from P, next to the rows, in every other step."""


class Directions(NamedTuple):
    """Where the directions are kept between steps, and how the first ones are made."""

    side: Side
    batched: bool
    seed: int
    warm_start: bool
    """If False, every step starts from random directions."""

    @property
    def key(self) -> str:
        """Their key in `Bucket.memory`."""
        return f"whole_{self.side}" if self.batched else self.side

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

    def keep(self, bucket: Bucket, group: Matrices, new_BRN: Tensor, finite: Tensor) -> None:
        """Keep the directions for a later step; those from before if what travelled was not finite."""
        if bucket.memory is None or not self.warm_start:
            return
        for name, new in zip(group.names, new_BRN.float(), strict=True):
            old = self.kept(bucket, name, group)
            kept = torch.where(finite, new, torch.zeros_like(new) if old is None else old)
            bucket.memory.setdefault(name, {})[self.key] = kept

    def random(self, step: int, name: str, group: Matrices, like: Tensor) -> Tensor:
        """Directions to start from, (R, N), the same on all ranks."""
        seed = zlib.crc32(repr((self.seed, step, name)).encode())
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn(self.shape(group), generator=generator, dtype=like.dtype, device=like.device)

    def kept(self, bucket: Bucket, name: str, group: Matrices) -> Tensor | None:
        """The directions that are kept, if there are any for this shape."""
        kept = (bucket.memory or {}).get(name, {}).get(self.key) if self.warm_start else None
        return kept if kept is not None and kept.shape == self.shape(group) else None

    def shape(self, group: Matrices) -> tuple[int, int]:
        """The directions of one matrix: how many, and how long."""
        return group.matrix_rank, group.stack.cols if self.side == "q" else group.stack.rows
