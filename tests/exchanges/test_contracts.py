"""Every registered exchange, with the options that matter, keeps every contract; and no contract accepts a mutant."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from gradwire.exchanges import EXCHANGES, Exchange, exchange
from gradwire.exchanges.bucket import Bucket, make_bucket
from gradwire.exchanges.reference import backend_mean
from gradwire.exchanges.simulated import simulate
from gradwire.testing import Rank, check_exchange, thread_ranks
from gradwire.testing.contracts import exchanges as contracts
from gradwire.testing.contracts import gaussian
from gradwire.testing.contracts.exchanges import Observed, compare, input_of, observe, references, same_bits

from ..kit.mutants import MUTANTS, RESIDUAL_MUTANTS, Mutant, mutants, noting

SPECS = [
    *EXCHANGES,
    "fp16:accumulate=wire",
    "bf16:accumulate=wire",
    "fp16:shots=one",
    "bf16:shots=two",
    "fp16:feedback=true",
    "bf16:shots=one,feedback=true",
    "bf16:shots=two,feedback=true",
    "int8:rounding=stochastic",
    "int8:shots=one,feedback=true",
    "int4:exempt=none,feedback=true",
    "int2:feedback=true",
    "sign:feedback=true",
    "topk:feedback=false",
    "int4:hadamard=64",
    "int4:rounding=stochastic,feedback=true",
    "int4:allocate=true",
    "int3:allocate=true,exempt=none,fairness=1.0",
    "powersgd:rank=1,warm_start=false,seed=3",
    "powersgd:rank=2,feedback=false,iterations=2",
    "powersgd:rank=2,batched=true",
    "powersgd:rank=12,min_compression=0.5,resync=3",
    "powersgd:resync=2,iterations=2,warmup=1",
    "powersgd:wire=bf16",
    "powersgd:rank=8,sides=one",
    "powersgd:sides=one,wire=int8,batched=true,resync=2",
    "powersgd:wire=int8,batched=true,resync=0",
]
TWO_LEVEL = [
    ("two_level:inside=exact,across=int8,node=2", 4),
    ("two_level:inside=exact,across=int4(exempt=none, feedback=true),node=2", 4),
    ("two_level:inside=bf16,across=int4,node=2", 4),
    ("two_level:inside=exact,across=int4(allocate=true),node=2", 4),
    ("two_level:inside=exact,across=fp16(feedback=true),node=2", 2),
    ("two_level:inside=exact,across=exact,node=1", 3),
    ("two_level:inside=fp16,across=sign,node=3", 3),
]

LOSSY = [case for case in TWO_LEVEL if "fp16(feedback=true)" not in case[0]]
"""That one has a single node, so nothing is lost and its residuals stay zero whatever a mutant does to them."""


def cases(quick_sizes, all_sizes, specs=SPECS, quick_specs=SPECS):
    """Each spec on all numbers of ranks; those that are not quick run in `make test-all`."""

    def marks(spec, size):
        return () if size in quick_sizes and spec in quick_specs else pytest.mark.thorough

    return [pytest.param(spec, size, marks=marks(spec, size)) for size in all_sizes for spec in specs]


def first(count, of):
    """So many cases, and the others in `make test-all`."""
    return [*of[:count], *(pytest.param(*case, marks=pytest.mark.thorough) for case in of[count:])]


on_ranks = pytest.mark.parametrize(("spec", "size"), [*cases((3,), (2, 3, 4)), *TWO_LEVEL])
"""Three ranks are the fewest on which every exchange takes its own way over the wire."""
KINDS = [
    *EXCHANGES,
    "fp16:accumulate=wire",
    "bf16:shots=two,feedback=true",
    "int4:exempt=none,feedback=true",
    "int4:allocate=true",
    "powersgd:rank=2,batched=true",
]
"""Every registered exchange, and every option that changes what is sent in which order."""
FEEDBACK = [spec for spec in SPECS if exchange(spec).takes_residual]
AVERAGING = [spec for spec in SPECS if exchange(spec).averages]


pytestmark = pytest.mark.usefixtures("one_thread")


@on_ranks
def test_results_are_those_of_the_reference(spec, size):
    contracts.check_reference(exchange(spec), size)


@on_ranks
def test_inf_and_nan_reach_all_ranks(spec, size):
    contracts.check_non_finite_reaches_all(exchange(spec), size)


@pytest.mark.parametrize(("spec", "size"), [*cases((2,), (2, 3, 4), quick_specs=KINDS), *first(2, TWO_LEVEL)])
def test_many_buckets_in_flight(spec, size):
    contracts.check_many_in_flight(exchange(spec), size)


@pytest.mark.parametrize(("spec", "size"), cases((3,), (2, 3, 4), FEEDBACK))
def test_conservation(spec, size):
    contracts.check_conservation(exchange(spec), size)


@pytest.mark.parametrize(("spec", "size"), [case for case in TWO_LEVEL if exchange(case[0]).takes_residual])
def test_conservation_on_two_levels(spec, size):
    contracts.check_conservation(exchange(spec), size)


@pytest.mark.parametrize(("spec", "size"), cases((2,), (2, 3, 4), FEEDBACK))
def test_a_residual_survives_an_inf(spec, size):
    contracts.check_residual_survives_inf(exchange(spec), size)


@pytest.mark.parametrize(("spec", "size"), cases((2,), (2,)))
def test_no_more_is_sent_than_by_an_all_reduce(spec, size):
    contracts.check_traffic(exchange(spec), size)


@pytest.mark.parametrize(("spec", "size"), cases((3,), (3, 4), [spec for spec in SPECS if "shots=one" not in spec]))
def test_what_is_sent_does_not_grow_with_the_ranks(spec, size):
    contracts.check_traffic(exchange(spec), size)


@pytest.mark.parametrize("spec", SPECS)
def test_one_rank_keeps_its_gradients(spec):
    contracts.check_reference(exchange(spec), 1)


@pytest.mark.parametrize(
    "across", ["int4(exempt=none, feedback=true)", "fp16", pytest.param("sign", marks=pytest.mark.thorough)]
)
def test_three_ranks_in_a_node_add_up_in_any_order(across):
    """The mean inside is only known up to rounding, so a value may land on the next code across."""
    contracts.check_reference(exchange(f"two_level:inside=exact,across={across},node=3"), 6)


# -- mutants -----------------------------------------------------------------------------------------------------------


def check_rejects_mutants(exchange: Exchange, size: int) -> None:
    """The comparison with the reference rejects every mutant of the exchange, so it is worth something.

    It needs an exchange with a `reference`; a mutant that changes nothing is an error too.
    """

    def inputs(rank: int, step: int) -> list[Bucket]:
        return [input_of(rank, step)]

    def run(rank: Rank) -> dict[str, list[Observed]]:
        runner = rank.runner()  # connections cost more than the steps
        return {name: observe(rank, made, inputs, runner=runner) for name, made in {"": right, **run_apart}.items()}

    wrong, right = mutants(exchange), noting(exchange)
    noted = {mutant.kind for mutant in right.others}
    run_apart = {name: made for name, made in wrong.items() if name not in noted}
    everyone = thread_ranks(size, run, 100.0)
    seen = {name: [own[name] for own in everyone] for name in ("", *run_apart)}
    for name in noted:
        seen[name] = [
            [replace(one, result=right.result(name, rank, one.chunks)) for one in own]
            for rank, own in enumerate(seen[""])
        ]
    wanted = references(exchange, seen[""])
    compare(exchange, seen[""], wanted)
    for name, made in wrong.items():
        assert not _same(seen[name], seen[""]), f"{made} changes nothing"
        try:
            compare(made, seen[name], wanted)
        except AssertionError:
            continue
        raise AssertionError(f"{made} passes the comparison with the reference of {exchange}")


def _same(some: Sequence[Sequence[Observed]], others: Sequence[Sequence[Observed]]) -> bool:
    """Whether two runs have the same results and residuals, bit for bit, on all ranks."""
    pairs = [pair for mine, theirs in zip(some, others, strict=True) for pair in zip(mine, theirs, strict=True)]
    tensors = [(a.result, b.result) for a, b in pairs]
    tensors += [(a.residual, b.residual) for a, b in pairs if a.residual is not None and b.residual is not None]
    return all(same_bits(*pair) for pair in tensors)


def test_there_are_enough_mutants():
    assert len({**MUTANTS, **RESIDUAL_MUTANTS}) >= 12
    assert len(mutants(exchange("topk"))) == len(MUTANTS) + len(RESIDUAL_MUTANTS)
    assert len(mutants(exchange("int8"))) == len(MUTANTS)


@pytest.mark.parametrize("spec", ["int8", "int4:exempt=none,feedback=true"])
def test_noted_results_are_those_of_the_mutants(spec):
    """What one run notes of each mutant is what a run of that mutant gives, bit for bit."""
    right, wrong = noting(exchange(spec)), mutants(exchange(spec))

    def run(rank):
        runner = rank.runner()
        first, *others = (
            observe(rank, made, lambda rank, step: [input_of(rank, step)], runner=runner)
            for made in (right, *(wrong[mutant.kind] for mutant in right.others))
        )
        for mutant, seen in zip(right.others, others, strict=True):
            for one, other in zip(first, seen, strict=True):
                assert same_bits(right.result(mutant.kind, rank.rank, one.chunks), other.result), mutant.kind
                assert one.residual is None or same_bits(one.residual, other.residual), mutant.kind

    thread_ranks(2, run)
    assert len(right.others) == len(MUTANTS) - 2


def test_a_mutant_delegates_every_member():
    """What `Exchange` declares and a mutant does not, it would answer for itself."""
    declared = {name for name, _ in inspect.getmembers(Exchange) if not name.startswith("_")} - {"name"}
    assert declared <= vars(Mutant).keys()


@pytest.mark.parametrize(("spec", "size"), [*cases((3,), (2, 3, 4), AVERAGING), *LOSSY])
def test_mutants_are_rejected(spec, size):
    check_rejects_mutants(exchange(spec), size)


@pytest.mark.parametrize("spec", ["int3", "int2", "sign", "topk", "powersgd"])
def test_zeros_are_rejected_where_the_bound_allows_them(spec):
    made = exchange(spec)
    with pytest.raises(AssertionError, match="values are wrong"):
        check_exchange(mutants(made)["zeros"], sizes=(2,))


# -- exchanges without a reference -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Halves(Exchange):
    """Sends float16, as the example in `exchanges/base.py` does."""

    name: ClassVar[str] = "halves"

    def bound(self, size):
        return size * 2.0**-10

    def mean_(self, bucket, comm, residual=None):
        bucket.flat.copy_(comm.all_reduce_(bucket.flat.div(comm.size).half()))


@dataclass(frozen=True, slots=True)
class Referenced(Halves):
    """The same with a reference."""

    def reference(self, buckets, residuals=None):
        return backend_mean([bucket.flat for bucket in buckets], torch.float16)


@pytest.mark.parametrize("size", [2, 3])
def test_an_exchange_without_a_reference_is_simulated(size):
    check_exchange(Halves(), sizes=(1, size))
    with pytest.raises(AssertionError):
        check_exchange(mutants(Halves())["1% gain"], sizes=(size,))


@pytest.mark.parametrize("size", [2, 3])
def test_a_third_party_reference_rejects_mutants(size):
    check_exchange(Referenced(), sizes=(size,))
    check_rejects_mutants(Referenced(), size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", ["exact", "int8", "int4:exempt=none,feedback=true", "int4:allocate=true", "powersgd"])
def test_simulation_and_reference_agree(spec, size):
    """Two ways to the same result, neither of which uses the engine."""
    made = exchange(spec)
    buckets = [make_bucket([gaussian(4096, seed=rank).view(64, 64), gaussian(33, seed=rank)]) for rank in range(size)]
    zeros = [torch.zeros(4129) for _ in range(size)] if made.takes_residual else None
    simulated, wanted = simulate(made, buckets, zeros), made.reference(buckets, zeros)
    assert not wanted.difference(simulated.mean)
    assert all(
        not wanted.residual_difference(rank, (simulated.residuals or [None] * size)[rank]) for rank in range(size)
    )


def test_an_error_in_a_simulation_ends_all_ranks():
    class Broken(Halves):
        def mean_(self, bucket, comm, residual=None):
            if comm.rank == 1:
                raise ArithmeticError("no")
            comm.all_reduce_(bucket.flat)

    with pytest.raises(Exception, match=r"no|Broken|^$"):
        simulate(Broken(), [make_bucket([torch.ones(4)]) for _ in range(3)])
