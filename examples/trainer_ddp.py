"""transformers.Trainer with gradwire: a callback, or no change at all under `gradwire run`.

torchrun --nproc-per-node 2 examples/trainer_ddp.py --hook bf16
gradwire run --hook bf16 --nproc 2 examples/trainer_ddp.py       without --hook: knows nothing of gradwire
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradwire


def main() -> None:
    """Train a very small GPT on random text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hook", help="register this one, such as bf16 (default: train without gradwire)")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2))
    text = torch.randint(64, (8 * args.steps, 16))
    data = [{"input_ids": ids, "labels": ids} for ids in text]
    callbacks = [gradwire.integrations.transformers.Gradwire(args.hook)] if args.hook else []  # the one line
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
        trainer = Trainer(model, settings, train_dataset=data, callbacks=callbacks)
        trainer.train()
    if callbacks:
        checked = callbacks[0].hook.verify()
        if trainer.is_world_process_zero():
            print(checked)


if __name__ == "__main__":
    main()
