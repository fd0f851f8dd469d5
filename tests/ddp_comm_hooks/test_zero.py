"""ZeRO's step inside the hook: bit for bit the training without overlap; and each bug of torch's as a test."""

import inspect
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.ddp_comm_hooks import _zero, ddp_zero_hook, debugging_hooks, default_hooks, quantization_hooks
from gradwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from gradwire.errors import RegisterError, SpecError
from gradwire.testing import RankFailed, spawn_ranks, thread_ranks

from ..kit.ranks import on_ranks
from ..kit.trial import same_everywhere
from ..kit.versions import complex_gradients
from .zero_kit import (
    ADAM,
    BOTH,
    EXACT,
    SGD,
    STEPS,
    Case,
    Odd,
    Partly,
    Sizes,
    Waves,
    Words,
    ZeroRedundancyOptimizer,
    check,
    deep,
)

EXIT_CODE = 3


@on_ranks(2, thorough=(4,))
def test_optimizers(ranks):
    """SGD with momentum and Adam, whole buckets and shared ones, for 20 steps."""
    for optimizer in (SGD, ADAM):
        case = Case(optimizer=optimizer)
        wanted = case.plain(20)
        for shard_buckets in (False, True) if ranks.size == 2 else (optimizer is ADAM,):
            check(case, shard_buckets, wanted=wanted, steps=20)


@on_ranks(2)
def test_other_optimizers(ranks):
    """Every class that torch has a functional form of."""
    kinds = ("AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax")
    for kind in kinds:
        check(Case(optimizer=(getattr(torch.optim, kind), {"lr": 0.01})), True, BOTH[:1])


@on_ranks(2)
def test_hooks_of_all_kinds(ranks):
    """The step sees what the hook averaged, whatever the hook (torch's 3.17)."""
    inner = (
        default_hooks.fp16_compress_hook,
        default_hooks.bf16_compress_hook,
        default_hooks.fp16_compress_wrapper(EXACT),
        quantization_hooks.quantization_pertensor_hook,
        quantization_hooks.quantization_perchannel_hook,
        torchs.allreduce_hook,
        elsewhere,
    )
    for hook in inner:
        check(Case(hook=hook), True)


def elsewhere(state, bucket):
    """A hook that leaves the bucket alone and returns another tensor, of another type."""
    buffer = bucket.buffer().double()
    return torchs._allreduce_fut(state or dist.group.WORLD, buffer)


@on_ranks(2)
def test_equal_to_ddp_without_a_hook(ranks):
    """Equal to DDP without any hook too: dividing by 2 or 4 does not round, so the order of dividing is no matter."""
    case = Case()
    model = case.model()
    zero = case.zero(model)
    wanted = case.train(model, zero, STEPS, lambda step: zero.step() if step >= 2 else None)
    check(case, wanted=wanted)


@on_ranks(2)
def test_noop_hook_spreads_the_owners_values(ranks):
    """Without an average, all ranks still get the owner's values."""
    for variant in BOTH:
        params = Case(hook=debugging_hooks.noop_hook).overlapped(variant, True)
        same_everywhere(params, dist.group.WORLD)


@on_ranks(2, thorough=(4,))
def test_bucket_sizes(ranks):
    """Buckets that torch cannot share out (torch's 3.29), more ranks than parameters, an empty parameter."""
    for numels in ((50, 40, 70, 40), (7,)) if ranks.size > 2 else ((50, 40, 70, 40), (1, 1000, 1), (3, 0, 2)):
        for shard_buckets in (False, True):
            check(Case(lambda numels=numels: Sizes(*numels)), shard_buckets)


@on_ranks(thorough=(4,))
def test_sub_groups(ranks):
    """Ranks 2 and 3 of 4 are stepped (torch's 3.29), with None for the model's own group (torch's 3.12)."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)  # where torch looks up its rank in the wrong list
    for shard_buckets in (False, True):
        check(Case(group=groups[ranks.rank // 2]), shard_buckets)
    dist.set_debug_level(level)
    one = [dist.new_group([member]) for member in range(ranks.size)]
    check(Case(group=one[ranks.rank]))


@on_ranks(2)
def test_layouts(ranks):
    """Strides and gradients that are views of the bucket; parameters stay where they are."""
    for view in (False, True):
        check(Case(Odd, gradient_as_bucket_view=view), True)
    case = Case(Odd)
    model = case.model()
    zero = case.zero(model, overlap_with_ddp=True)
    model.register_comm_hook(None, hook_with_zero_step(EXACT, model, zero))
    before = [(param.data_ptr(), param.stride()) for param in model.parameters()]
    case.train(model, zero, 4, lambda step: None)
    assert before == [(param.data_ptr(), param.stride()) for param in model.parameters()]


@complex_gradients
@on_ranks(2)
def test_complex_parameters(ranks):
    for view in (False, True):
        check(Case(Waves, gradient_as_bucket_view=view), True)


@on_ranks(2)
def test_parameters_of_16_bits(ranks):
    """Parameters of 16 bits: their bits travel as bytes."""
    for shard_buckets in (False, True):
        check(Case(lambda: Sizes(50, 40, 70, 41).bfloat16()), shard_buckets)


@on_ranks(2)
def test_sparse_gradients(ranks):
    """A sparse gradient is stepped as such."""
    check(Case(Words, optimizer=(torch.optim.SGD, {"lr": 0.05})))


@on_ranks(2)
def test_gradient_accumulation(ranks):
    """Gradients of several passes under no_sync make one step."""
    check(Case(accumulate=3))


@on_ranks(2)
def test_learning_rate_schedule(ranks):
    """A learning rate that changes is followed: torch's functional optimizers would keep the first."""
    for optimizer in (SGD, ADAM):
        check(Case(optimizer=optimizer, schedule=True), variants=BOTH[:1])


@on_ranks(2)
def test_static_graph(ranks):
    """Three passes update nothing; a parameter without a gradient is neither decayed nor moved (torch's 3.32)."""
    for shard_buckets in (False, True):
        check(Case(Partly, static_graph=True), shard_buckets)


@on_ranks(2)
def test_first_steps_update_nothing(ranks):
    """Plain SGD at rate 1 on a gradient of 1: 0, 0, -1, -2 (0, 0, 0, -1 with a static graph)."""
    for variant in BOTH:
        for static, wanted in ((False, [0, 0, -1, -2]), (True, [0, 0, 0, -1])):
            model = DDP(nn.Linear(1, 1, bias=False), static_graph=static)
            nn.init.zeros_(model.module.weight)
            zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, overlap_with_ddp=True)
            model.register_comm_hook(None, variant(EXACT, model, zero))
            got = []
            for _ in range(4):
                model(torch.ones(1, 1)).sum().backward()
                got.append(model.module.weight.item())
                zero.zero_grad()
            assert got == wanted


@on_ranks(2, thorough=(4,))
def test_many_buckets(ranks):
    """Dozens of buckets in flight, where torch's interleaved form hangs (torch's 3.29)."""
    counts = []

    def counting(state, bucket):
        counts.append(bucket.index())
        return EXACT(state, bucket)

    case = Case(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(24)]), counting)
    check(case, ranks.size == 4, [hook_with_zero_step_interleaved])
    assert max(counts) >= 23


@on_ranks(2, thorough=(4,))
def test_bad_input_is_refused(ranks):
    """Refused when the hook is made, by all ranks alike."""
    case, kind = Case(), SGD[0]
    model, other = case.model(), case.model()
    zero = case.zero(model, overlap_with_ddp=True)
    group = dist.new_group([0, 1])
    refused = [
        (SpecError, "overlap_with_ddp=True", EXACT, model, case.zero(model)),
        (SpecError, "hook must be a function", "fp16", model, zero),
        (RegisterError, "wrap the model first", EXACT, model.module, zero),
        (RegisterError, "must be a ZeroRedundancyOptimizer, got SGD", EXACT, model, kind(model.parameters(), 0.1)),
        (RegisterError, "does not have these parameters", EXACT, other, zero),
        (RegisterError, r"in no bucket .* shape \(3,\)", EXACT, model, zero_of([*model.parameters(), torch.ones(3)])),
        (
            SpecError,
            "one parameter group, got 12",
            EXACT,
            model,
            zero_of([{"params": [p]} for p in model.parameters()]),
        ),
    ]
    finding, taken, stepped = DDP(deep(), find_unused_parameters=True), case.model(), case.model()
    taken.register_comm_hook(None, EXACT)
    stepped.module[0].weight._in_backward_optimizers = []
    for text, bad in (
        ("find_unused_parameters", finding),
        ("already has the hook", taken),
        ("use one of the two", stepped),
    ):
        refused.append((RegisterError, text, EXACT, bad, zero_of(bad.parameters())))
    if ranks.size > 2 and ranks.rank < 2:
        narrow = zero_of(model.parameters(), process_group=group)
        refused.append((RegisterError, "same process_group", EXACT, model, narrow))
    for error, text, *arguments in refused:
        for variant in BOTH:
            with pytest.raises(error, match=text):
                variant(*arguments)


def zero_of(params, **options):
    kind, defaults = SGD
    params = [param.requires_grad_() if isinstance(param, torch.Tensor) else param for param in params]
    return ZeroRedundancyOptimizer(params, kind, overlap_with_ddp=True, **options, **defaults)


@on_ranks(2, thorough=(4,))
def test_bad_use_is_refused(ranks):
    """Ranks that want different things, the compiled reducer, and an optimizer that has a hook."""
    case = Case()
    model = case.model()
    zero = case.zero(model, overlap_with_ddp=True)
    with pytest.raises(RegisterError, match="all ranks must ask for the same ZeRO hook"):
        hook_with_zero_step(EXACT, model, zero, shard_buckets=ranks.rank == 0)
    hook = hook_with_zero_step(EXACT, model, zero)
    with pytest.raises(RegisterError, match="compiled reducer"):
        hook(None, (torch.ones(3), nn.Parameter(torch.ones(3))))
    model.register_comm_hook(None, hook)
    case.train(model, zero, 3, lambda step: None)
    with pytest.raises(RegisterError, match="already stepped by a hook"):
        hook_with_zero_step(EXACT, DDP(model.module), zero)


@on_ranks(2, thorough=(4,))
def test_error_on_one_rank_reaches_all(ranks):
    """An error in one rank's step reaches all, with its reason."""
    for variant in BOTH:
        case = Case()
        model = case.model()
        zero = case.zero(model, overlap_with_ddp=True)
        model.register_comm_hook(None, variant(EXACT, model, zero, shard_buckets=True))
        case.train(model, zero, 4, lambda step: None)
        if ranks.rank == 0:
            zero.optim.step = _fail
        with pytest.raises(RuntimeError, match="no more steps"):
            case.train(model, zero, 1, lambda step: None)


def _fail(gradients):
    raise ArithmeticError("no more steps")


def _die(gradients):
    os._exit(EXIT_CODE)


def die_on_the_last_rank(rank, size, folder):
    """The last rank ends in the middle of a step. The others write down what they saw."""
    case = Case()
    model = case.model()
    zero = case.zero(model, overlap_with_ddp=True)
    model.register_comm_hook(None, hook_with_zero_step_interleaved(EXACT, model, zero, shard_buckets=True))
    case.train(model, zero, 4, lambda step: None)
    if rank == size - 1:
        zero.optim.step = _die
    with pytest.raises(RuntimeError) as caught:
        case.train(model, zero, 1, lambda step: None)
    Path(folder, f"{rank}.txt").write_text(str(caught.value))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_rank_that_dies_ends_the_others(size, tmp_path):
    with pytest.raises(RankFailed) as caught:
        spawn_ranks(size, die_on_the_last_rank, tmp_path, timeout_s=100)
    assert str(caught.value) == f"rank {size - 1}: died with exit code {EXIT_CODE}"
    for rank in range(size - 1):
        assert "another rank failed" in Path(tmp_path, f"{rank}.txt").read_text()


def test_same_names_and_parameters():
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torchs

    assert ddp_zero_hook.__all__ == torchs.__all__
    for name in torchs.__all__:
        ours, theirs = (inspect.signature(getattr(side, name)).parameters for side in (ddp_zero_hook, torchs))
        assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def parts(*sizes):
    """One parameter of each size, with values that a sum of numbers would not keep: -0.0, and NaN with a message."""
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    for value in values:
        value[0] = -0.0
        value.view(torch.int32)[-1] = 0x7FC12345
    return values


def spread(rank, sizes_by_owner):
    """Spread parameters that only their owner knows; what this rank has then, and what it sent."""
    wanted = [parts(*sizes) for sizes in sizes_by_owner]
    own = [
        [value.clone() if owner == rank.rank else torch.full_like(value, 7.0) for value in values]
        for owner, values in enumerate(wanted)
    ]
    sent = []

    def job(comm):
        _zero.spread_(own, comm)
        sent.append(comm.traffic.sent_bytes)

    rank.hook("exact").run(job)
    bits = [torch.cat(side).view(torch.int32) for values in zip(own, wanted, strict=True) for side in values if side]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(bits[::2], bits[1::2], strict=True))
    return sent[0]


@pytest.mark.parametrize(
    ("sizes_by_owner", "sent_values"),
    [
        ([[60, 40], [50, 50]], 100),  # gathered: each value once
        ([[60, 40], []], 100),  # summed or gathered, the same on 2 ranks
        ([[90, 30], [50], [30, 30], [60]], 360),
        ([[100], [], [], []], 150),  # summed: 2 * 3 / 4
        ([[50], [], [50], []], 150),
        ([[], [], [], []], 0),
    ],
)
def test_spread_keeps_every_bit(sizes_by_owner, sent_values):
    sent = thread_ranks(len(sizes_by_owner), lambda rank: spread(rank, sizes_by_owner))
    assert sent == [4.0 * sent_values] * len(sizes_by_owner)


def test_whole_buckets_are_dealt_in_turn():
    buckets = [parts(3, 4), parts(5), parts(6)]
    owners = _zero.whole(buckets, 2)
    assert [[owners[param] for param in params] for params in buckets] == [[0, 0], [1], [0]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("numels", [[[50, 40, 70, 40]], [[1000], [1], [1, 1]], [[5] * 9, [100, 3, 3]], [[7]]])
def test_parameters_are_shared_out_evenly(numels, size):
    """Every parameter has an owner, and no rank has more than an even part and one parameter."""
    buckets = [parts(*sizes) for sizes in numels]
    owners = _zero.shared_out(buckets, size)
    flat = [param for params in buckets for param in params]
    assert len(owners) == len(flat)
    loads = [sum(param.numel() for param in flat if owners[param] == rank) for rank in range(size)]
    assert max(loads) <= sum(loads) / size + max(param.numel() for param in flat)
