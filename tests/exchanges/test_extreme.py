"""Extreme values, found by hypothesis: what no gradient should hold is never hidden, and never stays.

Every hook averages three steps of random tensors on the real engine: one that is normal, one with inf, NaN, zeros,
denormals and the largest floats in random places, and one that is normal again. `make fuzz` tries thousands.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import gradwire
from gradwire._torch import HashStore
from gradwire.engine.checkpoint import pack
from gradwire.engine.hook import Hook
from gradwire.exchanges import EXCHANGES, make_bucket
from gradwire.testing.contracts.exchanges import same_bits
from gradwire.testing.threads import Rank

from ..kit.models import Deep, batch, seeded
from ..kit.ranks import AVERAGING, Ranks, on_ranks

EXAMPLES = int(os.environ.get("GRADWIRE_FUZZ_EXAMPLES", "40"))
SPECS = (
    *(name for name in EXCHANGES if name != "noop"),
    "fp16:accumulate=wire",
    "bf16:shots=two,feedback=true",
    "fp16:shots=one,feedback=true",
    "fp8:feedback=true",
    "int8:feedback=true",
    "int8:rounding=stochastic",
    "int4:exempt=none,feedback=true",
    "int4:hadamard=64,feedback=true",
    "int3:allocate=true,exempt=none",
    "int2:feedback=true,shots=one",
    "sign:feedback=true,exempt=none",
    "topk:feedback=false",
    "powersgd:rank=1,min_compression=0.5",
    "powersgd:rank=2,feedback=false,iterations=2",
    "powersgd:rank=2,batched=true",
    "powersgd:wire=int8,rank=1,min_compression=0.5",
    "two_level:inside=exact,across=int4(exempt=none, feedback=true),node=1",
    "two_level:inside=bf16,across=int8,node=2",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP = 20
"""After every warm-up."""


class Crew:
    """Ranks that are threads, with one hook each for all examples: connecting takes longer than averaging."""

    def __init__(self, size: int) -> None:
        store = HashStore()
        self.ranks = [Rank(rank, size, store, 60.0) for rank in range(size)]
        self.threads = ThreadPoolExecutor(size)
        self.hooks: list[Hook] = self.all(lambda rank: rank.hook("exact", chunk_bytes=16_384))
        self.used: set[str] = set()

    def all(self, run: Callable[[Rank], Any]) -> list[Any]:
        return list(self.threads.map(run, self.ranks))

    def use(self, spec: str) -> None:
        """Switch to a spec, and drop all state."""
        exchange, agreed = gradwire.exchange(spec), spec in self.used
        self.used.add(spec)
        self.all(lambda rank: self.hooks[rank.rank].use(exchange, agreed=agreed))
        for hook in self.hooks:
            hook.load_state_dict(pack(spec, 0, hook.rank, hook.size, {}))


crew = cache(Crew)


@dataclass(frozen=True)
class Example:
    """What every rank averages in the second step: random tensors, with these values in these places."""

    spec: str
    size: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    scale: float
    seed: int
    places: tuple[tuple[int, int, float, float], ...]
    """(rank, tensor, place in it from 0 to 1, value); rank -1 is all ranks, and place -1 the whole tensor."""

    def grads(self, rank: int, step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 10 * step + rank)
        made = [(torch.randn(shape, generator=generator) * self.scale).to(self.dtype) for shape in self.shapes]
        for at_rank, tensor, place, value in self.places if step == 1 else ():
            flat = made[tensor].view(-1)
            if at_rank in (rank, -1) and flat.numel():
                at = min(int(place * flat.numel()), flat.numel() - 1)
                flat[slice(None) if place < 0 else at] = value
        return made


def values_of(dtype: torch.dtype) -> st.SearchStrategy[float]:
    info = torch.finfo(dtype)
    signs = st.sampled_from((1.0, -1.0))
    sizes = (math.inf, 0.0, info.max, info.max / 2, info.max / 4, info.tiny, info.smallest_normal / 8, 1e-45)
    return st.one_of(st.just(math.nan), st.builds(lambda sign, size: sign * size, signs, st.sampled_from(sizes)))


@st.composite
def examples(draw: st.DrawFn) -> Example:
    size = draw(st.integers(1, 4))
    spec = draw(st.sampled_from([spec for spec in SPECS if not (spec.endswith("node=2") and size % 2)]))
    dtype = draw(st.sampled_from(DTYPES))
    length = st.one_of(st.integers(0, 300), st.sampled_from((1023, 1024, 1025, 4096, 33_000, 100_000)))
    matrix = st.tuples(st.integers(1, 80), st.integers(1, 80))
    shapes = draw(st.lists(st.one_of(st.tuples(length), matrix), min_size=1, max_size=4))
    where = st.one_of(st.floats(0.0, 1.0), st.just(-1.0))
    place = st.tuples(st.integers(-1, size - 1), st.integers(0, len(shapes) - 1), where, values_of(dtype))
    places = draw(st.lists(place, max_size=4))
    scale = draw(st.sampled_from((1.0, 1.0, 1e-3, 100.0)))
    return Example(spec, size, dtype, tuple(shapes), scale, draw(st.integers(0, 2**20)), tuple(places))


@dataclass(frozen=True)
class Averaged:
    """What became of one step on one rank."""

    came: Tensor
    mean: Tensor
    residual: Tensor | None
    """What is kept after the step, like `mean`."""
    tensors: tuple[int, ...]
    """The number of values of each tensor."""
    chunks: tuple[int, ...]
    """The number of values of each chunk, whose residual is kept or replaced as a whole."""


def averaged(hook: Hook, example: Example, rank: int) -> list[Averaged]:
    steps = []
    for step in range(3):
        bucket = make_bucket(example.grads(rank, step))
        came = bucket.flat.clone()
        hook.steps = STEP + step
        hook.mean(bucket).wait()
        kept = hook.state_dict()["residuals"]
        residual = torch.cat([kept[name] for name in bucket.names]) if kept else None
        tensors = tuple(segment.numel for segment in bucket.segments)
        chunks = tuple(chunk.flat.numel() for chunk in hook.chunks(bucket))
        steps.append(Averaged(came, bucket.flat, residual, tensors, chunks))
    return steps


def finite(values: Tensor, numels: Sequence[int]) -> list[bool]:
    return [bool(torch.isfinite(part).all()) for part in values.split(numels)]


def too_large(spec: str, size: int, rank: int, place: float) -> Example:
    """What a rank loses of this overflows, although the mean does not."""
    return Example(spec, size, torch.float32, ((40, 64),), 1.0, 3, ((rank, 0, place, torch.finfo(torch.float32).max),))


def test_extreme_values_are_never_hidden_and_never_stay() -> None:
    tried = itertools.count()

    @example(too_large("fp16:shots=one,feedback=true", 2, 0, 0.3))
    @example(too_large("int4:hadamard=64,feedback=true", 4, 1, -1.0))
    @example(too_large("sign:feedback=true,exempt=none", 4, -1, 0.3))
    @given(examples())
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    def check(case: Example) -> None:
        next(tried)
        ranks = crew(case.size)
        ranks.use(case.spec)
        check_laws(case, ranks.all(lambda rank: averaged(ranks.hooks[rank.rank], case, rank.rank)))

    check()
    print(f"{next(tried)} inputs with extreme values")


def check_laws(example: Example, everyone: list[list[Averaged]]) -> None:
    for step, ranks in enumerate(zip(*everyone, strict=True)):
        tensors = ranks[0].tensors
        came = [all(oks) for oks in zip(*(finite(own.came, tensors) for own in ranks), strict=True)]
        for own in ranks:
            assert same_bits(own.mean, ranks[0].mean), f"step {step}: the bits differ between ranks"
            hidden = [i for i, ok in enumerate(finite(own.mean, tensors)) if ok and not came[i]]
            assert not hidden, f"step {step}: inf or NaN was hidden in tensors {hidden}"
            assert own.residual is None or own.residual.isfinite().all(), f"step {step}: the residual is not finite"
        before = None if step == 0 else [own[step - 1].residual for own in everyone]
        check_chunks(example, step, ranks, before)
    if not any(abs(value) > 1e4 and math.isfinite(value) for *_, value in example.places):
        assert everyone[0][2].mean.isfinite().all(), "inf or NaN stayed"


def check_chunks(
    example: Example, step: int, ranks: Sequence[Averaged], before: Sequence[Tensor | None] | None
) -> None:
    """A chunk whose mean is not finite keeps its residual. One whose mean is finite holds what came in."""
    at = 0
    for numel, ok in zip(ranks[0].chunks, finite(ranks[0].mean, ranks[0].chunks), strict=True):
        here, at = slice(at, at + numel), at + numel
        olds = [torch.zeros(numel) if old is None else old[here] for old in before or [None] * len(ranks)]
        if not ok:
            news = [old if own.residual is None else own.residual[here] for own, old in zip(ranks, olds, strict=True)]
            assert all(map(torch.equal, news, olds)), f"step {step}: the residual of a step to skip has changed"
        elif numel:
            check_mean(example, step, here, ranks, olds)


def check_mean(example: Example, step: int, here: slice, ranks: Sequence[Averaged], olds: Sequence[Tensor]) -> None:
    """Conservation with feedback, and the bound of the exchange without it. Denormals may become zero."""
    came = torch.stack([own.came[here].double() + old for own, old in zip(ranks, olds, strict=True)])
    mean, size, largest = ranks[0].mean[here].double(), len(ranks), float(came.abs().max())
    rounding, tiny = torch.finfo(example.dtype).eps, 1e-6 if FP16 & {example.dtype, example.spec[:4]} else 1e-36
    if ranks[0].residual is not None:
        if largest > 1e37:  # a loss that is too large for float32 is dropped
            return
        kept = torch.stack([own.residual[here].double() for own in ranks])
        off = float((mean + kept.mean(0) - came.mean(0)).abs().max())
        assert off <= tiny + largest * size * max(rounding, 1e-5), f"step {step}: {off:.3g} of {largest:.3g} was lost"
    elif size > 1 and not example.spec.startswith("two_level"):
        bound = gradwire.exchange(example.spec).bound(size)
        off, rms = float((mean - came.mean(0)).norm()), float(came.square().sum(1).mean().sqrt())
        assert off <= tiny * mean.numel() + rms * (bound + size * rounding), (
            f"step {step}: off by {off:.3g} of {rms:.3g}"
        )


FP16 = {torch.float16, "fp16"}


@on_ranks(2, specs=AVERAGING)
def test_a_grad_scaler_skips_the_step_on_all_ranks_and_goes_on(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(Deep, 3))
    hook, optimizer = ranks.register(model), torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)

    def step(number: int, factor: float = 1.0) -> list[Tensor]:
        optimizer.zero_grad()
        loss = model(batch(ranks.rank, number)).square().mean() * (factor if ranks.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return [param.detach().clone() for param in model.parameters()]

    for number, bad in ((0, math.inf), (3, math.nan)):
        before, kept, scale = step(number), hook.state_dict()["residuals"], scaler.get_scale()
        assert all(map(torch.equal, step(number + 1, bad), before)), "a step that should be skipped was taken"
        assert scaler.get_scale() == scale / 2
        assert all(map(torch.equal, hook.state_dict()["residuals"].values(), kept.values()))
        after = step(number + 2)
        assert all(torch.isfinite(param).all() for param in after)
        assert not any(map(torch.equal, after, before)), "training did not go on"
