"""A byte-level LSTM of 0.5M parameters on the source of Python's standard library, with AdamW."""

import torch
import torch.nn.functional as F  # noqa: N812
from common import options, run
from torch import Tensor, nn

from gradwire.tools.workload import BYTES, even_windows, library_text

BATCH, LENGTH, WIDTH = 16, 33, 256


class Lstm(nn.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.cells = nn.Embedding(BYTES, WIDTH // 2), nn.LSTM(WIDTH // 2, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 -> (batch, time, 256)."""
        return self.head(self.cells(self.bytes(tokens))[0])  # type: ignore[no-any-return]


def main() -> None:
    """Train."""
    args = options(__doc__, optimizer="adamw", lr=3e-3)
    text = library_text(4_000_000)
    offsets = torch.arange(LENGTH)

    def of(model: nn.Module, windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def on_a_batch(model: nn.Module) -> Tensor:
        starts = torch.randint(text.train.numel() - LENGTH, (BATCH,))
        return of(model, text.train[starts[:, None] + offsets].long())

    held_out = even_windows(text.held_out, 256, LENGTH)
    run(args, Lstm, on_a_batch, lambda model: of(model, held_out))


if __name__ == "__main__":
    main()
