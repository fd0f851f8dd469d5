"""A codec of your own: ternary values, 2 bits each and one scale per block.

    [ B * block codes, 4 per byte ][ B scales, float32 ]

Run this file to hold it to every contract. `gradwire.register(model, "ternary:block=128")` finds it by the entry point

    [project.entry-points."gradwire.codecs"]
    ternary = "custom_codec:Ternary"
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

import gradwire


@dataclass(frozen=True, slots=True)
class Ternary(gradwire.Codec):
    """-1, 0 or 1 times the mean magnitude of the values that are not 0."""

    name: ClassVar[str] = "ternary"
    exempts_small: ClassVar[bool] = True
    block: int = 64

    align = property(lambda self: self.block)
    bound = 1.0  # the result is a projection, so it is never further away than 0

    def wire_bytes(self, numel: int) -> int:
        return -(-numel // self.block) * (self.block // 4 + 4)

    def encode(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        wire = self.new_wire(flat, out)
        x_BK = pad(flat.double(), (0, -flat.numel() % self.block)).view(-1, self.block)
        mean_B1 = x_BK.abs().mean(1, keepdim=True)
        kept_BK = x_BK.abs() > 0.7 * mean_B1
        scale_B1 = (x_BK.abs() * kept_BK).sum(1, keepdim=True) / kept_BK.sum(1, keepdim=True).clamp(min=1)
        scale_B1 = torch.where(torch.isfinite(mean_B1), scale_B1, float("nan"))  # inf and NaN are never hidden
        codes = (x_BK.sign() * kept_BK + 1).nan_to_num(1).to(torch.uint8).view(-1, 4)
        packed, scales = wire.split([codes.shape[0], 4 * x_BK.shape[0]])
        packed.copy_(codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6)
        scales.view(torch.float32).copy_(scale_B1.view(-1))
        return wire

    def decode_(self, out: Tensor, wire: Tensor, *, alpha: float = 1.0, add: bool = False) -> Tensor:
        blocks = -(-out.numel() // self.block)
        packed, scales = wire.split([blocks * self.block // 4, 4 * blocks])
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 1).view(blocks, self.block)
        values = (codes.float() - 1) * (scales.view(torch.float32) * alpha).view(-1, 1)
        return out.add_(values.view(-1)[: out.numel()]) if add else out.copy_(values.view(-1)[: out.numel()])


if __name__ == "__main__":
    gradwire.testing.check_codec(Ternary())
    print("ternary keeps every contract of a codec")
