"""For tests of local training: a real process group between ranks that are threads, models and data."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

from gradwire.testing import Rank, thread_ranks

SPECS = [
    "exact",
    "int4:exempt=none,feedback=true",
    "int4:exempt=none,rounding=stochastic",
    "powersgd:rank=1,min_compression=1",
]
"""Without memory, with feedback, with randomness, with memory."""

GLOO = dist.ProcessGroup.BackendType.GLOO


@contextmanager
def group(rank: Rank, name: str = "group") -> Iterator[dist.ProcessGroup]:
    """A process group of all ranks, which are threads, known to torch as the groups of `new_group` are."""
    store = PrefixStore(name, rank.store)
    made = dist.ProcessGroup(store, rank.rank, rank.size)
    backend = ProcessGroupGloo(PrefixStore("gloo", store), rank.rank, rank.size, timedelta(seconds=rank.timeout_s))
    made._register_backend(torch.device("cpu"), GLOO, backend)
    made._set_default_backend(GLOO)
    c10d._world.pg_map[made] = ("gloo", store)
    try:
        yield made
    finally:
        del c10d._world.pg_map[made]


def on_ranks(size, run):
    """`run(rank, group)` on ranks that are threads; their results in order."""

    def main(rank):
        with group(rank) as made:
            return run(rank, made)

    return thread_ranks(size, main)


class Net(nn.Module):
    """Parameters of several shapes; one is laid out by columns."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(12, 8, generator=generator) / 3)
        self.bias = nn.Parameter(torch.randn(12, generator=generator) / 3)
        self.second = nn.Parameter(torch.randn(12, 5, generator=generator).t() / 3)

    def forward(self, x):
        return torch.tanh(x @ self.first.t() + self.bias) @ self.second.t()


def train(model, optimizer, rank, steps, shape=(16, 8, 5), average=lambda: True):
    """Steps on data of this rank's own. `steps` are numbers: the data of a step depend on its number."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        rows, inputs, outputs = shape
        x, y = torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if average():
            optimizer.step()


def values(model):
    return torch.cat([param.detach().flatten().clone() for param in model.parameters()])


def simulated(size, steps, every, *, lr=1.0, momentum=0.0, fragments=1, delay=0, cut=None):
    """Local training of `size` ranks in one thread, parameter by parameter, with torch's own SGD as the outer step."""
    nets = [Net() for _ in range(size)]
    inners = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    outer = Net()
    steppers = {
        name: torch.optim.SGD([param], lr=lr, momentum=momentum, nesterov=momentum > 0)
        for name, param in outer.named_parameters()
    }
    offsets = {name: ((cut or {}).get(name, 0) + 1) * every // fragments % every for name in steppers}
    under_way = {}

    def depart(name, due):
        started = [net.get_parameter(name).detach().clone() for net in nets]
        under_way[name] = due, started, outer.get_parameter(name).detach() - torch.stack(started).mean(0)

    def arrive(name):
        _, started, mean = under_way.pop(name)
        outer.get_parameter(name).grad = mean
        steppers[name].step()
        for net, old in zip(nets, started, strict=True):
            param = net.get_parameter(name)
            param.data.copy_(outer.get_parameter(name).detach() + (param.detach() - old))

    for step in range(steps):
        for rank, (net, inner) in enumerate(zip(nets, inners, strict=True)):
            train(net, inner, rank, [step])
        for name in offsets:
            if (step + 1) % every == offsets[name]:
                depart(name, step + 1 + delay)
            if name in under_way and under_way[name][0] <= step + 1:
                arrive(name)
    return nets, outer
