"""The memory that a hook on a model with `fully_shard` takes: what the formula in docs/fsdp2.md says, and no more.

The formula must hold from both sides: a bound that is far above what is used would hide copies that nobody needs.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradwire.engine.gloo import THREADS
from gradwire.engine.sharded import ShardedHook
from gradwire.exchanges.bucket import Bucket
from gradwire.models.fsdp import MOST_PENDING

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.sharded import HeldComm, mesh_of, shard
from ..kit.versions import sharded_models

pytestmark = sharded_models

LAYERS = 6
SLACK_BYTES = 16 << 10
"""Per job, for values that travel in float32, such as biases, while they are put together."""
TIGHT = 1.5
"""The formula may give this many times as much as is used."""
WIDE = 4
"""Bytes of a value in float32."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Setting(NamedTuple):
    """A model, and how its messages are cut."""

    width: int
    chunk_bytes: int | None = None
    policy: MixedPrecisionPolicy | None = None
    dtype: torch.dtype = torch.float32


SETTINGS = (
    Setting(96),
    Setting(256),
    Setting(256, chunk_bytes=64 << 10),
    Setting(256, policy=BF16),
    Setting(256, dtype=torch.bfloat16),
)
SPECS = ("int8", "bf16", "int4:exempt=none", "int4:feedback=true,exempt=none")


class Allocations(TorchDispatchMode):
    """Counts what is allocated and not freed yet, in whichever threads it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            if id_of(made) not in given:
                self.add(made.untyped_storage())
        return result

    def add(self, storage: Any) -> None:
        with self._lock:
            key = storage.data_ptr()
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def deep(ranks: Ranks, setting: Setting) -> Any:
    """Units of the same size, and a root without parameters of its own."""
    module = seeded(Deep, LAYERS, setting.width).to(setting.dtype)
    options = {} if setting.policy is None else {"mp_policy": setting.policy}
    return shard(module, mesh_of(ranks), **options)


def step(model: Any, ranks: Ranks, setting: Setting, number: int) -> None:
    model(batch(ranks.rank, number, setting.width, setting.dtype)).float().square().mean().backward()


class Job(NamedTuple):
    """What one job moves and computes with."""

    wires: int
    """The encoded rows of all ranks."""
    row: int
    """Values of a row."""
    tensor: int
    """Values of the largest tensor in it that is encoded."""


def jobs_of(hook: ShardedHook, coded: Any, itemsize: int) -> list[Job]:
    """The jobs of one unit's message."""
    row = hook.gathered[0]
    bucket = Bucket(0, torch.empty(sum(segment.numel for segment in row)), row, is_last=False)
    found = []
    for _, chunk in hook.columns(bucket, itemsize, coded):
        plan = coded.plan(chunk, 1)
        largest = max(piece.numel for piece in plan.parts[0].pieces)
        found.append(Job(hook.size * plan.wire_bytes, chunk.flat.numel(), largest))
    return found


def scatter_bound(hook: ShardedHook, coded: Any, reduced: torch.dtype, result: torch.dtype) -> int:
    """The formula for gradients."""
    jobs = jobs_of(hook, coded, reduced.itemsize)
    widens = reduced.itemsize < WIDE and coded.codec.wire_dtype != reduced and not coded.takes_residual
    each = []
    for job in jobs:
        sent = max(job.wires, WIDE * job.tensor if result.itemsize < WIDE else 0)
        received = max(job.wires, WIDE * job.tensor if widens else 0)
        work = WIDE * hook.size * (job.row + 2) if coded.takes_residual else 0  # and whether sums are finite
        if coded.takes_residual and result.itemsize < WIDE:
            work += WIDE * job.tensor
        each.append(sent + received + work)
    return min(THREADS, (MOST_PENDING + 1) * len(jobs)) * max(each)


def gather_bound(hook: ShardedHook, coded: Any, gathered: torch.dtype) -> int:
    """The formula for parameters. Nothing is prefetched in these tests: one message at a time."""
    jobs = jobs_of(hook, coded, gathered.itemsize)
    each = [job.wires + (WIDE * job.tensor if gathered.itemsize < WIDE else 0) for job in jobs]
    return min(THREADS, len(jobs)) * max(each)


def hold_back(hook: ShardedHook, chunks: int) -> Allocations:
    """Let as many reductions as possible be under way at once. What all of them allocate."""
    make, allocated = hook.scatter_jobs, Allocations()
    at_once, arrived = min(THREADS, (MOST_PENDING + 1) * chunks), [threading.Event() for _ in range(LAYERS * chunks)]
    numbers = iter(range(LAYERS * chunks))

    def held(number: int, job: Any, comm: Any) -> None:
        last = arrived[min(number + at_once, LAYERS * chunks) - 1]
        with allocated:
            job(HeldComm(comm, lambda: (arrived[number].set(), last.wait(100.0))))

    hook.scatter_jobs = lambda *args: [partial(held, next(numbers), job) for job in make(*args)]  # type: ignore[method-assign]
    return allocated


@on_ranks(2, 4, specs=SPECS)
def test_the_formula_of_the_documentation_is_what_is_held(ranks: Ranks) -> None:
    for setting in SETTINGS:
        model = deep(ranks, setting)
        hook = ranks.register(model, gather="int8", chunk_bytes=setting.chunk_bytes)
        assert isinstance(hook, ShardedHook)
        step(model, ranks, setting, 0)
        model.zero_grad()
        moved = torch.bfloat16 if setting.policy else setting.dtype
        wanted = scatter_bound(hook, hook.exchange, moved, setting.dtype)
        chunks = len(jobs_of(hook, hook.exchange, moved.itemsize))
        slack = min(THREADS, (MOST_PENDING + 1) * chunks) * SLACK_BYTES
        allocated = hold_back(hook, chunks)
        hook.reset_stats()
        step(model, ranks, setting, 1)
        parts = hook.stats_by_part()
        held = parts["gradients"].peak_bytes
        assert wanted / TIGHT <= held <= wanted, f"{setting}: {held} held, {wanted} by the formula"
        most = held + slack
        assert allocated.peak_bytes <= most, f"{setting}: {allocated.peak_bytes} allocated, {most} counted"
        held, wanted = parts["parameters"].peak_bytes, gather_bound(hook, hook.gathers, moved)
        assert wanted / TIGHT <= held <= wanted, f"{setting}: {held} held for parameters, {wanted} by the formula"
        assert hook.stats().peak_bytes == sum(part.peak_bytes for part in parts.values())
        hook.close()


@on_ranks(2)
def test_gradients_are_released_before_those_of_the_next_unit_are_put_together(ranks: Ranks) -> None:
    setting = Setting(256)
    model = deep(ranks, setting)
    hook = ranks.register(model, "int8", gather="int8")
    assert isinstance(hook, ShardedHook)
    alive, most, make = list[Any](), list[int](), hook.scatter_jobs

    def watched(bucket: Any, rows: torch.Tensor, *rest: Any) -> Any:
        most.append(sum(reference() is not None for reference in alive))
        alive.append(weakref.ref(rows.untyped_storage()))
        return make(bucket, rows, *rest)

    hook.scatter_jobs = watched  # type: ignore[method-assign]
    for number in range(3):
        step(model, ranks, setting, number)
        model.zero_grad()
    assert most == [0] * 3 * LAYERS, "gradients of earlier units are still held"
