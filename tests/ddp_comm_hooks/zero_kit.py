"""What the ZeRO checks are made of: models, and a way of training that runs overlapped or not."""

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradwire.ddp_comm_hooks import default_hooks
from gradwire.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, about torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

BOTH = (hook_with_zero_step, hook_with_zero_step_interleaved)
EXACT = default_hooks.allreduce_hook
SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
ADAM = (torch.optim.Adam, {"lr": 0.01})
STEPS = 8
"""Six of them with an update."""


def deep():
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])


class Sizes(nn.Module):
    """Parameters of given sizes, each used once; up to 260 values are one bucket."""

    def __init__(self, *sizes):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)

    def forward(self, x):
        return torch.stack([part.square().sum() * value for part, value in zip(self.parts, x[0], strict=False)])


class Odd(nn.Module):
    """Parameters that do not lie in memory as their shape says, and a scalar."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        image = x.reshape(-1)[:32].view(1, 2, 4, 4)
        return self.conv(image).square().sum() * self.scale + (self.turned * x[0, :5]).square().sum()


class Waves(nn.Module):
    """Complex parameters; ZeRO takes no others beside them."""

    def __init__(self):
        super().__init__()
        self.wide, self.long = (nn.Parameter(torch.randn(*shape, dtype=torch.complex64)) for shape in ((3, 2), (2, 16)))

    def forward(self, x):
        return self.wide @ self.long @ x.to(torch.complex64).t()


class Partly(nn.Module):
    """One layer never takes part."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(16, 8), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.first(x))


class Words(nn.Module):
    """An embedding with a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.words(x[0].abs().long()))


class Case:
    """One way of training, overlapped or not."""

    def __init__(self, module=deep, hook=EXACT, optimizer=SGD, *, group=None, state=None, schedule=False, **options):
        self.module, self.hook, self.optimizer = module, hook, optimizer
        self.group, self.state, self.schedule = group, state, schedule
        self.accumulate = options.pop("accumulate", 1)
        self.options = {"bucket_cap_mb": 0.001, "process_group": group, **options}

    def model(self):
        torch.manual_seed(0)
        return DDP(self.module(), **self.options)

    def zero(self, model, **options):
        kind, defaults = self.optimizer
        return ZeroRedundancyOptimizer(model.parameters(), kind, process_group=self.group, **options, **defaults)

    def overlapped(self, variant, shard_buckets=False, steps=STEPS):
        model = self.model()
        zero = self.zero(model, overlap_with_ddp=True)
        model.register_comm_hook(self.state, variant(self.hook, model, zero, shard_buckets))
        return self.train(model, zero, steps, lambda step: None)

    def plain(self, steps=STEPS):
        """The first steps update nothing there, so they do not here."""
        model, free = self.model(), 3 if self.options.get("static_graph") else 2
        model.register_comm_hook(self.group, self.hook)
        zero = self.zero(model)
        return self.train(model, zero, steps, lambda step: zero.step() if step >= free else None)

    def train(self, model, zero, steps, update):
        rank = dist.get_rank()
        for step in range(steps):
            zero.param_groups[0]["lr"] *= 0.8 if self.schedule else 1
            for part in range(self.accumulate):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * rank + 10 * step + part))
                last = part == self.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    model(x).abs().square().sum().mul(0.01).backward()
            update(step)
            zero.zero_grad()
        return [param.detach().clone() for param in model.parameters()]


def check(case, shard_buckets=False, variants=BOTH, wanted=None, steps=STEPS):
    """Bit for bit what non-overlapped training gives, and something has changed at all."""
    wanted = wanted or case.plain(steps)
    start = [param.detach() for param in case.model().parameters()]
    assert not all(map(torch.equal, wanted, start))
    for variant in variants:
        got = case.overlapped(variant, shard_buckets, steps)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
