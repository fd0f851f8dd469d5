"""The drop-in: torch's names, signatures and reference behaviours, and the bugs of torch's that are not repeated."""

import inspect

import pytest
import torch
from torch.distributed.algorithms import ddp_comm_hooks as torchs

from gradwire import ddp_comm_hooks as ours
from gradwire.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    quantization_hooks,
    register_ddp_comm_hook,
)
from gradwire.testing import spawn_ranks

from . import workers


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (
            2,
            ["reference", "noop", "wrappers", "registers_wrappers_by_name", "is_last", "half_range", "private_helpers"],
        ),
        (2, ["shared_engine", "sparse", "wrong_states"]),
        pytest.param(3, ["reference", "noop", "private_helpers"], marks=pytest.mark.thorough),
        (4, ["sub_groups"]),
    ],
    ids=str,
)
def test_ranks(size, names):
    assert spawn_ranks(size, workers.run, names) == [None] * size


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(2, "compiled_reducer", marks=pytest.mark.thorough),
        pytest.param(3, "compiled_reducer", marks=pytest.mark.thorough),
        pytest.param(2, "compiled_per_tensor", marks=pytest.mark.thorough),
        pytest.param(2, "compiled_per_channel", marks=pytest.mark.thorough),
    ],
)
def test_compiled_reducer(size, name):
    assert spawn_ranks(size, workers.run, [name], timeout_s=150) == [None] * size


@pytest.mark.parametrize(
    ("mine", "theirs", "names"),
    [
        (default_hooks, torchs.default_hooks, torchs.default_hooks.__all__),
        (debugging_hooks, torchs.debugging_hooks, torchs.debugging_hooks.__all__),
        (quantization_hooks, torchs.quantization_hooks, quantization_hooks.__all__),  # torch's has no __all__
        (ours, torchs, torchs.__all__),
    ],
    ids=["default_hooks", "debugging_hooks", "quantization_hooks", "package"],
)
def test_same_names_and_parameters(mine, theirs, names):
    for name in names:
        assert name in mine.__all__
        if inspect.isfunction(getattr(theirs, name)):
            parameters = [list(inspect.signature(getattr(side, name)).parameters) for side in (mine, theirs)]
            assert parameters[0] == parameters[1], name


def test_submodules_under_torchs_short_names():
    assert ours.default is default_hooks
    assert ours.debugging is debugging_hooks
    assert ours.quantization is quantization_hooks


@pytest.mark.parametrize("kind", DDPCommHookType, ids=lambda kind: kind.name)
def test_members_are_torchs(kind):
    assert kind.name in torchs.DDPCommHookType.__members__
    assert callable(kind.value)


def test_hooks_look_to_ddp_as_it_wants_them():
    """DDP reads names and annotations: real classes, a parameter called bucket, no bf16 name that it refuses."""
    for hook in (default_hooks.allreduce_hook, default_hooks.bf16_compress_hook, debugging_hooks.noop_hook):
        parameters = inspect.signature(hook).parameters
        assert parameters["bucket"].annotation is torch.distributed.GradBucket
        assert inspect.signature(hook).return_annotation == torch.futures.Future[torch.Tensor]
        assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")


@pytest.mark.parametrize("wrong", ["FP16_COMPRESS", None])
def test_wrong_type_lists_what_there_is(wrong):
    with pytest.raises(TypeError, match=r"DDPCommHookType\.ALLREDUCE, .*DDPCommHookType\.NOOP"):
        register_ddp_comm_hook(wrong, None)


def test_torch_s_own_types_are_told_apart():
    with pytest.raises(TypeError, match=r"torch's DDPCommHookType.FP16_COMPRESS; import DDPCommHookType from gradwire"):
        register_ddp_comm_hook(torchs.DDPCommHookType.FP16_COMPRESS, None)


def test_noop_asks_nobody():
    """As torch's: it works where no group is, so it cannot wait for ranks that do not come."""
    assert not torch.distributed.is_initialized()

    class Bucket:
        def buffer(self):
            return torch.ones(3)

    assert debugging_hooks.noop_hook(None, Bucket()).wait().tolist() == [1, 1, 1]
