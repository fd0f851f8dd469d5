"""Lightning with gradwire: a callback, or no change at all under `gradwire run`.

torchrun --nproc-per-node 2 examples/lightning_ddp.py --hook bf16
python examples/lightning_ddp.py --hook bf16                     Lightning starts the ranks itself
gradwire run --hook bf16 examples/lightning_ddp.py               without --hook: knows nothing of gradwire
"""

import argparse
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradwire


class Student(lightning.LightningModule):
    """Fits a random teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss of a batch."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As usual."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train one epoch on 2 CPU ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", help="register this one, such as bf16 (default: train without gradwire)")
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "ddp_spawn"])
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs, teacher = torch.randn(64 * args.steps, 64), nn.Linear(64, 8)
    data = DataLoader(TensorDataset(inputs, teacher(inputs).detach()), batch_size=32, shuffle=True)
    callbacks = [gradwire.integrations.lightning.Gradwire(args.hook)] if args.hook else []  # the one line
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=args.strategy,
            max_epochs=1,
            callbacks=callbacks,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Student(), data)
    if callbacks and args.strategy == "ddp":  # the ranks of ddp_spawn have ended
        checked = callbacks[0].hook.verify()
        if trainer.is_global_zero:
            print(checked)


if __name__ == "__main__":
    main()
