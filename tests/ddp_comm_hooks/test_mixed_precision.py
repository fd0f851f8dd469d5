"""The drop-in mixed-precision hook, inside DDP's own mixed precision as far as a CPU can run it.

On a CPU every operation is complete when its call returns, so streams and events are replaced by ones that do nothing.
"""

import dataclasses
import inspect
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch._dynamo  # DDP wants it, and it wants the true streams
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import mixed_precision_hooks as torchs
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

from gradwire.ddp_comm_hooks import mixed_precision_hooks as ours

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import on_ranks
from ..kit.trial import loss


class Stream:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait_stream(self, other):
        assert isinstance(other, Stream)


class Event:
    def record(self):
        pass

    def wait(self, stream):
        assert isinstance(stream, Stream)


@contextmanager
def streams():
    """DDP's mixed precision where there is no accelerator, with our hook in it."""
    with ExitStack() as stack:
        for where, name, instead in (
            (torch, "Stream", Stream),
            (torch, "Event", Event),
            (torch.accelerator, "current_stream", Stream),
            (torchs, "_AllreduceUpcastHookState", ours._AllreduceUpcastHookState),
            (torchs, "_reducer_allreduce_and_upcast_hook", ours._reducer_allreduce_and_upcast_hook),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        yield


def mixed(module, param=torch.bfloat16, reduce=torch.bfloat16, **ddp):
    config = _MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=param)
    return DDP(module, mixed_precision=config, **ddp)


@on_ranks(2)
def test_training_is_near_full_precision(ranks):
    """Near training in full precision, from the first step on (3.31); parameters and gradients come back in float32."""
    for reduce in (torch.bfloat16, torch.float32):
        for ddp in ({}, {"bucket_cap_mb": 0.002}):
            with streams():
                model, exact = mixed(seeded(Deep, 4), reduce=reduce, **ddp), DDP(seeded(Deep, 4))
                optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, exact)]
                for step in range(4):
                    for each, optimizer in zip((model, exact), optimizers, strict=True):
                        optimizer.zero_grad()
                        loss(
                            each(batch(ranks.rank, step).to(torch.bfloat16 if each is model else torch.float32))
                        ).backward()
                    compare(model, exact)
                    for optimizer in optimizers:
                        optimizer.step()


def compare(model, exact):
    for mine, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        error = (mine.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.05, float(error)
        first = mine.grad.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, mine.grad)


@on_ranks(2)
def test_mean_of_large_values_fits_in_float16(ranks):
    """The mean of 30000 and 60000 fits in float16 though their sum does not (3.31)."""
    with streams():
        model = mixed(nn.Linear(1, 1, bias=False), torch.float16, torch.float16)
        model(torch.full((1, 1), 30000.0 * (1 + ranks.rank), dtype=torch.float16)).sum().backward()
        assert float(model.module.weight.grad) == float(torch.tensor(45000.0).half())


@on_ranks(2)
def test_frozen_layer_returns_to_float32(ranks):
    """A layer without gradients is in float32 again too."""
    with streams():
        module = seeded(Deep, 3)
        module.layers[1].requires_grad_(False)
        model = mixed(module)
        for step in range(2):
            model.zero_grad()
            loss(model(batch(ranks.rank, step).to(torch.bfloat16))).backward()
            assert all(param.dtype == torch.float32 for param in model.parameters())
            assert all(param.grad is None for param in model.module.layers[1].parameters())


@on_ranks(2)
def test_hook_needs_no_streams(ranks):
    """The hook itself needs none."""
    model = DDP(nn.Linear(2, 1, bias=False))
    model.mixed_precision = _MixedPrecision(torch.float32, torch.float64, None)
    state = ours._AllreduceUpcastHookState(lambda: model, None)
    model.register_comm_hook(state, ours._reducer_allreduce_and_upcast_hook)
    weight = model.module.weight
    weight._fp_param, weight._mp_param = weight.detach().clone(), torch.zeros(2)
    model(torch.full((1, 2), float(ranks.rank))).sum().backward()
    assert weight.data_ptr() == weight._fp_param.data_ptr()
    assert weight._mp_param.untyped_storage().size() == 0
    assert weight.grad.tolist() == [[(ranks.size - 1) / 2] * 2]
    assert not state.wait_for_stream_enqueued


def test_same_names_and_parameters():
    mine, theirs = (dataclasses.fields(side._AllreduceUpcastHookState) for side in (ours, torchs))
    assert [(field.name, field.default) for field in mine] == [(field.name, field.default) for field in theirs]
    hooks = [side._reducer_allreduce_and_upcast_hook for side in (ours, torchs)]
    assert list(inspect.signature(hooks[0]).parameters) == list(inspect.signature(hooks[1]).parameters)
