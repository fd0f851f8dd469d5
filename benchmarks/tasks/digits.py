"""A small ResNet on scikit-learn's digits (1,797 images of 8 x 8 pixels), with SGD and momentum.

`pip install scikit-learn` first; it has the images.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from common import options, run
from sklearn.datasets import load_digits
from torch import Tensor, nn

BATCH, WIDTH = 16, 32
HELD_OUT_EVERY = 5


class Residual(nn.Module):
    """x + conv(relu(norm(conv(relu(norm(x))))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Same shape."""
        return x + self.layers(x)  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    """0.13M parameters."""
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1),
        Residual(WIDTH),
        nn.Conv2d(WIDTH, 2 * WIDTH, 2, stride=2),
        Residual(2 * WIDTH),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * WIDTH, 10),
    )


def main() -> None:
    """Train."""
    args = options(__doc__, optimizer="sgd", lr=0.05)
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    held = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    train_images, train_labels = images[~held], labels[~held]

    def on_a_batch(model: nn.Module) -> Tensor:
        chosen = torch.randint(len(train_labels), (BATCH,))
        return F.cross_entropy(model(train_images[chosen]), train_labels[chosen])

    run(args, resnet, on_a_batch, lambda model: F.cross_entropy(model(images[held]), labels[held]))


if __name__ == "__main__":
    main()
