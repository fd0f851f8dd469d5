"""A byte-level GPT of 0.5M parameters on the source of Python's standard library: AdamW, Muon, or SGD with momentum."""

import torch
import torch.nn.functional as F  # noqa: N812
from common import options, run
from torch import Tensor, nn

from gradwire.tools.workload import GPT, WorkloadSettings, even_windows, library_text

SETTINGS = WorkloadSettings(layers=2, width=128)
BATCH, LENGTH = 8, SETTINGS.context + 1


def main() -> None:
    """Train."""
    args = options(__doc__, optimizer="adamw", lr=2e-3)
    text = library_text(4_000_000)
    offsets = torch.arange(LENGTH)

    def of(model: nn.Module, windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def on_a_batch(model: nn.Module) -> Tensor:
        starts = torch.randint(text.train.numel() - LENGTH, (BATCH,))
        return of(model, text.train[starts[:, None] + offsets].long())

    held_out = even_windows(text.held_out, 256, LENGTH)
    run(args, lambda: GPT(SETTINGS), on_a_batch, lambda model: of(model, held_out))


if __name__ == "__main__":
    main()
