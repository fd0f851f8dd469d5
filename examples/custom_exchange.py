"""An exchange of your own: float32 on the wire, summed in float64, so that the order of the ranks does not matter.

    all-to-all   rank r gets every rank's part r of the gradients, and averages it
    all-gather   every rank gets all averages

Run this file to hold it to every contract. `gradwire.register(model, "wide")` finds it by the entry point

    [project.entry-points."gradwire.exchanges"]
    wide = "custom_exchange:Wide"
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

import gradwire
from gradwire.exchanges import Bucket, Comm


@dataclass(frozen=True, slots=True)
class Wide(gradwire.Exchange):
    """The mean with a float64 sum."""

    name: ClassVar[str] = "wide"
    lanes = 2  # mean_ issues two collectives

    def bound(self, size: int) -> float:
        return 2.0**-23  # the mean is rounded once

    def mean_(self, bucket: Bucket, comm: Comm, residual: Tensor | None = None) -> None:
        flat = bucket.flat
        if flat.numel() == 0:
            return
        parts = pad(flat, (0, -flat.numel() % comm.size)).view(comm.size, -1)
        mean = comm.all_to_all(parts).to(torch.float64).mean(0)
        flat.copy_(comm.all_gather(mean.to(flat.dtype)).view(-1)[: flat.numel()])


if __name__ == "__main__":
    gradwire.testing.check_exchange(Wide())
    print("wide keeps every contract of an exchange")
