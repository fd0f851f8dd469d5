"""transformers.Trainer with gradwire: a callback, or no change at all under `gradwire run`.

torchrun --nproc-per-node 2 examples/trainer_ddp.py --hook bf16
gradwire run --hook bf16 --nproc 2 examples/trainer_ddp.py       without --hook: knows nothing of gradwire
"""

import argparse
import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import gradwire


class Gradwire(TrainerCallback):
    """Registers a hook once the Trainer has wrapped the model, and says at the end what it did."""

    def __init__(self, trainer: Trainer, spec: str) -> None:
        self.trainer, self.spec = trainer, spec

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """trainer.model_wrapped is the DistributedDataParallel; the callback's own `model` is not."""
        self.hook = gradwire.register(self.trainer.model_wrapped, self.spec)

    def on_train_end(self, args: TrainingArguments, *others: Any, **kwargs: Any) -> None:
        """On every rank: verify() compares them."""
        checked = self.hook.verify()
        if args.process_index == 0:
            print(checked)


def main() -> None:
    """Train a very small GPT on random text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", help="register this one, such as bf16 (default: train without gradwire)")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
        text = torch.randint(64, (8 * args.steps, 16))
        trainer = Trainer(model, settings, train_dataset=[{"input_ids": ids, "labels": ids} for ids in text])
        if args.hook:
            trainer.add_callback(Gradwire(trainer, args.hook))
        trainer.train()


if __name__ == "__main__":
    main()
