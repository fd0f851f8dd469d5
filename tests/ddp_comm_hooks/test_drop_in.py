"""The drop-in: torch's names, signatures and reference behaviours, and the bugs of torch's hooks as tests."""

import copy
import inspect
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import ddp_comm_hooks as torch_hooks
from torch.distributed.algorithms import ddp_comm_hooks as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire import ddp_comm_hooks as ours
from gradwire.ddp_comm_hooks import (
    DDPCommHookType,
    _group,
    debugging_hooks,
    default_hooks,
    quantization_hooks,
    register_ddp_comm_hook,
)
from gradwire.engine.runner import LaneRunner
from gradwire.errors import SpecError

from ..kit.ranks import on_ranks

HOOKS = {
    "ALLREDUCE": (default_hooks.allreduce_hook, {"rtol": 1e-5, "atol": 0.0}),
    "FP16_COMPRESS": (default_hooks.fp16_compress_hook, {"rtol": 1e-5, "atol": 1e-4}),
    "BF16_COMPRESS": (default_hooks.bf16_compress_hook, {"rtol": 1e-2, "atol": 1e-3}),  # 8 significant bits
    "QUANTIZE_PER_TENSOR": (quantization_hooks.quantization_pertensor_hook, {"rtol": 1e-5, "atol": 1e-4}),
    "QUANTIZE_PER_CHANNEL": (quantization_hooks.quantization_perchannel_hook, {"rtol": 1e-5, "atol": 1e-4}),
}
WRAPPERS = {
    "fp16_compress_wrapper": (default_hooks.fp16_compress_wrapper, {"rtol": 1e-3, "atol": 1e-3}),
    "bf16_compress_wrapper": (default_hooks.bf16_compress_wrapper, {"rtol": 2e-2, "atol": 1e-2}),
}


class Task(nn.Module):
    """The small reference model of torch's own test: its forward depends on the rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.p = nn.Parameter(torch.randn(40, 20))

    def forward(self, x, rank):
        return self.p * (x ** (1 + rank))


def gradient(model, rank):
    out = model(torch.randn(40, 20, generator=torch.Generator().manual_seed(1)), rank)
    out.mean().backward()
    return model.module.p.grad.clone()


@on_ranks(2, thorough=(3,))
def test_every_way_of_registering_gives_plain_ddps_gradient(ranks):
    """Every way of registering every hook gives plain DDP's gradient."""
    plain = gradient(DDP(Task()), ranks.rank)
    for name, (hook, tolerance) in HOOKS.items():
        if ranks.size > 2:  # two-shot rounds twice
            tolerance = {**tolerance, "atol": 2 * tolerance["atol"]}
        for group in (None, dist.group.WORLD):
            direct = DDP(Task())
            direct.register_comm_hook(group, hook)
            by_type, by_value = DDP(Task()), DDP(Task())
            made = register_ddp_comm_hook(DDPCommHookType[name], by_type, group)
            DDPCommHookType[name].value(model=by_value, state=group)
            for model in (direct, by_type, by_value):
                torch.testing.assert_close(
                    gradient(model, ranks.rank), plain, msg=lambda m, n=name: f"{n}: {m}", **tolerance
                )
            assert made.verify().identical


@on_ranks(2, thorough=(3,))
def test_noop_keeps_the_local_gradient(ranks):
    """noop keeps the local gradient; a manual all-reduce afterwards is plain DDP."""
    plain = gradient(DDP(Task()), ranks.rank)
    direct, by_type = DDP(Task()), DDP(Task())
    direct.register_comm_hook(None, debugging_hooks.noop_hook)
    register_ddp_comm_hook(DDPCommHookType.NOOP, by_type)
    for model in (direct, by_type):
        local = gradient(model, ranks.rank)
        own = Task()
        own(torch.randn(40, 20, generator=torch.Generator().manual_seed(1)), ranks.rank).mean().backward()
        torch.testing.assert_close(local, own.p.grad, rtol=0, atol=0)
        dist.all_reduce(local)
        torch.testing.assert_close(local / ranks.size, plain, rtol=1e-5, atol=0)


@on_ranks(2)
def test_wrappers_return_float32_gradients(ranks):
    """A wrapper around our hook and around torch's gives a float32 gradient near plain DDP's (torch's 3.11)."""
    plain = gradient(DDP(Task()), ranks.rank)
    inners = [default_hooks.allreduce_hook, torch_hooks.default_hooks.allreduce_hook]
    for wrap, tolerance in WRAPPERS.values():
        for inner in inners:
            model, seen = DDP(Task()), []
            wrapped = wrap(inner)

            def spying(state, bucket, wrapped=wrapped, seen=seen):
                future = wrapped(state, bucket)
                return future.then(
                    lambda done: (seen.append((done.value().dtype, bucket.buffer().dtype)), done.value())[1]
                )

            model.register_comm_hook(None, spying)
            torch.testing.assert_close(gradient(model, ranks.rank), plain, **tolerance)
            assert seen == [(torch.float32, torch.float32)]


@on_ranks(2)
def test_ddp_accepts_the_names_of_bf16_hooks(ranks):
    """DDP refuses hooks by torch's bf16 names off NCCL; ours carry others (torch's 3.35)."""
    for wrap, _ in WRAPPERS.values():
        DDP(Task()).register_comm_hook(None, wrap(default_hooks.allreduce_hook))
    DDP(Task()).register_comm_hook(None, default_hooks.bf16_compress_hook)


@on_ranks(2)
def test_is_last_is_set_once_per_step(ranks):
    """Over an 11-layer model, is_last comes exactly once a step, and last."""
    model, seen = DDP(nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(11)]), bucket_cap_mb=1), []

    def recording(state, bucket):
        seen.append(bucket.is_last())
        return default_hooks.allreduce_hook(state, bucket)

    model.register_comm_hook(None, recording)
    for step in range(3):
        seen.clear()
        model(torch.randn(2, 600)).sum().backward()
        assert len(seen) == (11 if step else 1)  # DDP cuts its buckets after the first step
        assert seen == [False] * (len(seen) - 1) + [True]


@on_ranks(4)
def test_state_none_is_the_models_own_group(ranks):
    """`state=None` is the model's own group wherever the model is known (torch's 3.12)."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[ranks.rank // 2]
    for name in HOOKS:
        model = DDP(nn.Linear(3, 1, bias=False), process_group=own)
        register_ddp_comm_hook(DDPCommHookType[name], model)
        model(torch.full((1, 3), float(ranks.rank))).sum().backward()
        torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), 0.5 if ranks.rank < 2 else 2.5))
    direct = DDP(nn.Linear(3, 1, bias=False), process_group=own)
    direct.register_comm_hook(own, default_hooks.fp16_compress_hook)
    direct(torch.full((1, 3), float(ranks.rank))).sum().backward()
    torch.testing.assert_close(direct.module.weight.grad, torch.full((1, 3), 0.5 if ranks.rank < 2 else 2.5))


@on_ranks(2)
def test_fp16_hook_keeps_large_and_small_values(ranks):
    """1e5 and 2e-8 survive the fp16 hook (torch's 3.10)."""
    for value in (1e5, 2e-8):
        model = DDP(nn.Linear(3, 1, bias=False))
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        model(torch.full((1, 3), value)).sum().backward()
        torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), value), rtol=1e-3, atol=0)


@on_ranks(2)
def test_sparse_gradients(ranks):
    """Every hook takes a sparse gradient, under the wrappers too: it travels as it is (torch's 3.16)."""
    exact = default_hooks.allreduce_hook
    wrapped = [wrapper(exact) for wrapper, _ in WRAPPERS.values()]
    for hook in (*(hook for hook, _ in HOOKS.values()), *wrapped):
        model = DDP(nn.Embedding(10, 4, sparse=True))
        model.register_comm_hook(None, hook)
        model(torch.tensor([ranks.rank, 5])).sum().backward()
        grad = model.module.weight.grad.to_dense()
        assert torch.equal(grad[5], torch.ones(4))
        assert torch.equal(grad[ranks.rank], torch.full((4,), 1 / ranks.size))


@on_ranks(2)
def test_wrong_states_are_refused(ranks):
    """What is not a process group is said to be none, where it is registered if that is in our hands."""
    with pytest.raises(SpecError, match="expected a process group that this rank is in"):
        register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, DDP(Task()), "world")
    model = DDP(Task())
    model.register_comm_hook("world", default_hooks.fp16_compress_hook)
    with pytest.raises(SpecError, match="expected a process group that this rank is in"):
        gradient(model, ranks.rank)


@on_ranks(2, thorough=(3,))
def test_private_helpers_that_torch_builds_on(ranks):
    """`_allreduce_fut` and `_compress_hook` are what torch's other modules build on."""
    tensor = torch.full((2, 3), float(ranks.rank))
    result = default_hooks._allreduce_fut(None, tensor).wait()
    assert result is tensor
    torch.testing.assert_close(tensor, torch.full((2, 3), (ranks.size - 1) / 2))
    model = DDP(nn.Linear(3, 1, bias=False))
    model.register_comm_hook(None, lambda state, bucket: default_hooks._compress_hook(torch.bfloat16, state, bucket))
    model(torch.full((1, 3), float(ranks.rank))).sum().backward()
    torch.testing.assert_close(model.module.weight.grad, torch.full((1, 3), (ranks.size - 1) / 2))


@on_ranks(2)
def test_models_share_one_engine(ranks):
    """All models of a process that use a hook on a group share one engine, so threads do not pile up."""
    counts = []
    for _ in range(5):
        model = DDP(Task())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        gradient(model, ranks.rank)
        counts.append(sum(len(made) for made in _group._hooks.values()))
    assert len(set(counts)) == 1
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("gradwire-")]
    runners = [hook.runner for made in _group._hooks.values() for hook in made.values()]
    engines = [runner for runner in runners if isinstance(runner, LaneRunner)]  # a group of one rank has another
    assert threads
    assert set(threads) == {thread for engine in engines for thread in engine._threads}


@on_ranks(thorough=(2, 3), timeout_s=450)
def test_compiled_reducer(ranks):
    """The form `hook(state, (grad, param))` of DDP's compiled reducer, traced and untraced (torch's 3.34)."""
    hooks = {"NOOP": debugging_hooks.noop_hook, **{name: hook for name, (hook, _) in HOOKS.items()}}
    if ranks.size > 2:
        hooks = {"FP16_COMPRESS": hooks["FP16_COMPRESS"]}  # the one with other collectives here than on 2 ranks
    for name, hook in hooks.items():
        if not name.startswith("QUANTIZE"):
            _compare_compiled(name, hook, ranks.rank, ranks.size)
    _compare_untraced([hook for hook, _ in HOOKS.values()], ranks.rank, ranks.size)


@on_ranks(thorough=(2,), timeout_s=450)
def test_compiled_per_tensor(ranks):
    _compare_compiled("QUANTIZE_PER_TENSOR", quantization_hooks.quantization_pertensor_hook, ranks.rank, ranks.size)
    _compare_untraced([quantization_hooks.quantization_pertensor_hook], ranks.rank, ranks.size)


@on_ranks(thorough=(2,), timeout_s=450)
def test_compiled_per_channel(ranks):
    _compare_compiled("QUANTIZE_PER_CHANNEL", quantization_hooks.quantization_perchannel_hook, ranks.rank, ranks.size)
    _compare_untraced([quantization_hooks.quantization_perchannel_hook], ranks.rank, ranks.size)


def _compare_compiled(name, hook, rank, size):
    import torch._dynamo

    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    wanted = copy.deepcopy(net)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DDP(net)
        model.register_comm_hook(None, hook)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            torch.compile(model, backend="aot_eager")(x).square().sum().backward()
    wanted(x).square().sum().backward()
    for got, param in zip(net.parameters(), wanted.parameters(), strict=True):
        largest = param.grad.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if name != "NOOP":
            dist.all_reduce(param.grad)
            param.grad /= size
        atol = 1e-2 * float(largest)  # two roundings to 8 bits
        torch.testing.assert_close(got.grad, param.grad, rtol=1e-2, atol=atol, msg=lambda m: f"{name}: {m}")


def _compare_untraced(hooks, rank, size):
    for hook in hooks:
        values = torch.full((4,), float(rank))
        hook(None, (values, nn.Parameter(torch.zeros(4))))
        torch.testing.assert_close(values, torch.full((4,), (size - 1) / 2))


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


def test_hooks_have_the_signature_that_ddp_requires():
    """DDP reads names and annotations: real classes, a parameter called bucket, no bf16 name that it refuses."""
    for hook in (default_hooks.allreduce_hook, default_hooks.bf16_compress_hook, debugging_hooks.noop_hook):
        parameters = inspect.signature(hook).parameters
        assert parameters["bucket"].annotation is torch.distributed.GradBucket
        assert inspect.signature(hook).return_annotation == torch.futures.Future[torch.Tensor]
        assert hook.__name__ not in ("bf16_compress_hook", "bf16_compress_wrapper_hook")


@pytest.mark.parametrize("wrong", ["FP16_COMPRESS", None])
def test_error_of_a_wrong_type_lists_the_types(wrong):
    with pytest.raises(TypeError, match=r"DDPCommHookType\.ALLREDUCE, .*DDPCommHookType\.NOOP"):
        register_ddp_comm_hook(wrong, None)


def test_types_of_torch_are_refused():
    with pytest.raises(TypeError, match=r"torch's DDPCommHookType.FP16_COMPRESS; import DDPCommHookType from gradwire"):
        register_ddp_comm_hook(torchs.DDPCommHookType.FP16_COMPRESS, None)


def test_noop_needs_no_process_group():
    """As torch's: it works where no group is, so it cannot wait for ranks that do not come."""
    assert not torch.distributed.is_initialized()

    class Bucket:
        def buffer(self):
            return torch.ones(3)

    assert debugging_hooks.noop_hook(None, Bucket()).wait().tolist() == [1, 1, 1]
