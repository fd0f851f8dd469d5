"""A byte-level LSTM of 0.5M parameters on the source of Python's standard library, with AdamW."""

from common import options, run_on_text
from torch import Tensor, nn

from gradwire.tools.workload import BYTES

WIDTH = 256


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
    run_on_text(options(__doc__, optimizer="adamw", lr=3e-3), Lstm, batch=16, length=33)


if __name__ == "__main__":
    main()
