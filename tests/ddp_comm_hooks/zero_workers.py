"""What the ranks of the ZeRO tests run: overlapped training against DDP, then `zero.step()`."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torchs
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.ddp_comm_hooks import debugging_hooks, default_hooks, quantization_hooks
from gradwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from gradwire.errors import RegisterError, SpecError

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


def optimizers(rank, size):
    """SGD with momentum and Adam, whole buckets and shared ones, for 20 steps."""
    for optimizer in (SGD, ADAM):
        case = Case(optimizer=optimizer)
        wanted = case.plain(20)
        for shard_buckets in (False, True) if size == 2 else (optimizer is ADAM,):
            check(case, shard_buckets, wanted=wanted, steps=20)


def other_optimizers(rank, size):
    """Every class that torch has a functional form of."""
    kinds = ("AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax")
    for kind in kinds:
        check(Case(optimizer=(getattr(torch.optim, kind), {"lr": 0.01})), True, BOTH[:1])


def hooks(rank, size):
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


def no_hook(rank, size):
    """Equal to DDP without any hook too: dividing by 2 or 4 does not round, so the order of dividing is no matter."""
    case = Case()
    model = case.model()
    zero = case.zero(model)
    wanted = case.train(model, zero, STEPS, lambda step: zero.step() if step >= 2 else None)
    check(case, wanted=wanted)


def noop(rank, size):
    """Without an average, all ranks still get the owner's values."""
    for variant in BOTH:
        params = Case(hook=debugging_hooks.noop_hook).overlapped(variant, True)
        same_everywhere(params)


def same_everywhere(params):
    flat = torch.cat([param.reshape(-1) for param in params])
    first = flat.clone()
    dist.broadcast(first, 0)
    assert torch.equal(flat, first)


def sizes(rank, size):
    """Buckets that torch cannot share out (torch's 3.29), more ranks than parameters, an empty parameter."""
    for numels in ((50, 40, 70, 40), (7,)) if size > 2 else ((50, 40, 70, 40), (1, 1000, 1), (3, 0, 2)):
        for shard_buckets in (False, True):
            check(Case(lambda numels=numels: Sizes(*numels)), shard_buckets)


def sub_groups(rank, size):
    """Ranks 2 and 3 of 4 are stepped (torch's 3.29), with None for the model's own group (torch's 3.12)."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)  # where torch looks up its rank in the wrong list
    for shard_buckets in (False, True):
        check(Case(group=groups[rank // 2]), shard_buckets)
    dist.set_debug_level(level)
    one = [dist.new_group([member]) for member in range(size)]
    check(Case(group=one[rank]))


def layouts(rank, size):
    """Strides, complex values and gradients that are views of the bucket; parameters stay where they are."""
    for view in (False, True):
        for module in (Odd, Waves):
            check(Case(module, gradient_as_bucket_view=view), True)
    case = Case(Odd)
    model = case.model()
    zero = case.zero(model, overlap_with_ddp=True)
    model.register_comm_hook(None, hook_with_zero_step(EXACT, model, zero))
    before = [(param.data_ptr(), param.stride()) for param in model.parameters()]
    case.train(model, zero, 4, lambda step: None)
    assert before == [(param.data_ptr(), param.stride()) for param in model.parameters()]


def half(rank, size):
    """Parameters of 16 bits: their bits travel as bytes."""
    for shard_buckets in (False, True):
        check(Case(lambda: Sizes(50, 40, 70, 41).bfloat16()), shard_buckets)


def sparse(rank, size):
    """A sparse gradient is stepped as such."""
    check(Case(Words, optimizer=(torch.optim.SGD, {"lr": 0.05})))


def accumulation(rank, size):
    """Gradients of several passes under no_sync make one step."""
    check(Case(accumulate=3))


def schedule(rank, size):
    """A learning rate that changes is followed: torch's functional optimizers would keep the first."""
    for optimizer in (SGD, ADAM):
        check(Case(optimizer=optimizer, schedule=True), variants=BOTH[:1])


def static_graph(rank, size):
    """Three passes update nothing; a parameter without a gradient is neither decayed nor moved (torch's 3.32)."""
    for shard_buckets in (False, True):
        check(Case(Partly, static_graph=True), shard_buckets)


def update_free(rank, size):
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
                got.append(float(model.module.weight))
                zero.zero_grad()
            assert got == wanted


def many_buckets(rank, size):
    """Dozens of buckets in flight, where torch's interleaved form hangs (torch's 3.29)."""
    counts = []

    def counting(state, bucket):
        counts.append(bucket.index())
        return EXACT(state, bucket)

    case = Case(lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(24)]), counting)
    check(case, size == 4, [hook_with_zero_step_interleaved])
    assert max(counts) >= 23


def bad_input(rank, size):
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
        (RegisterError, r"in no bucket .* shape \(3,\)", EXACT, model, _zero([*model.parameters(), torch.ones(3)])),
        (SpecError, "one parameter group, got 12", EXACT, model, _zero([{"params": [p]} for p in model.parameters()])),
    ]
    finding, taken, stepped = DDP(deep(), find_unused_parameters=True), case.model(), case.model()
    taken.register_comm_hook(None, EXACT)
    stepped.module[0].weight._in_backward_optimizers = []
    for text, bad in (
        ("find_unused_parameters", finding),
        ("already has the hook", taken),
        ("use one of the two", stepped),
    ):
        refused.append((RegisterError, text, EXACT, bad, _zero(bad.parameters())))
    if size > 2 and rank < 2:
        narrow = _zero(model.parameters(), process_group=group)
        refused.append((RegisterError, "same process_group", EXACT, model, narrow))
    for error, text, *arguments in refused:
        for variant in BOTH:
            with pytest.raises(error, match=text):
                variant(*arguments)


def _zero(params, **options):
    kind, defaults = SGD
    params = [param.requires_grad_() if isinstance(param, torch.Tensor) else param for param in params]
    return ZeroRedundancyOptimizer(params, kind, overlap_with_ddp=True, **options, **defaults)


def bad_use(rank, size):
    """Ranks that want different things, the compiled reducer, and an optimizer that has a hook."""
    case = Case()
    model = case.model()
    zero = case.zero(model, overlap_with_ddp=True)
    with pytest.raises(RegisterError, match="all ranks must ask for the same ZeRO hook"):
        hook_with_zero_step(EXACT, model, zero, shard_buckets=rank == 0)
    hook = hook_with_zero_step(EXACT, model, zero)
    with pytest.raises(RegisterError, match="compiled reducer"):
        hook(None, (torch.ones(3), nn.Parameter(torch.ones(3))))
    model.register_comm_hook(None, hook)
    case.train(model, zero, 3, lambda step: None)
    with pytest.raises(RegisterError, match="already stepped by a hook"):
        hook_with_zero_step(EXACT, DDP(model.module), zero)


def one_fails(rank, size):
    """An error in one rank's step reaches all, with its reason."""
    for variant in BOTH:
        case = Case()
        model = case.model()
        zero = case.zero(model, overlap_with_ddp=True)
        model.register_comm_hook(None, variant(EXACT, model, zero, shard_buckets=True))
        case.train(model, zero, 4, lambda step: None)
        if rank == 0:
            zero.optim.step = _fail
        with pytest.raises(RuntimeError, match="no more steps"):
            case.train(model, zero, 1, lambda step: None)


def _fail(gradients):
    raise ArithmeticError("no more steps")


def _die(gradients):
    os._exit(EXIT_CODE)


def one_dies(rank, size, folder):
    """The last rank ends in the middle of a step; the others do not wait for it. They leave what they saw in files."""
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


def run(rank, size, names, folder):
    for name in names:
        globals()[name](rank, size)
        dist.barrier()
    one_dies(rank, size, folder)
