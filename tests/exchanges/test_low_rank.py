"""Low-rank averaging against an independent dense reference, and at the edges where others go to NaN or grow."""

import numpy as np
import pytest
import torch
from torch import nn

from gradwire import SpecError, StateError
from gradwire.engine.lanes import GroupComm
from gradwire.exchanges import exchange
from gradwire.exchanges.bucket import Bucket, make_bucket, segments_of
from gradwire.exchanges.low_rank.matrices import shape_of
from gradwire.kernels.numba import low_rank as cpu
from gradwire.kernels.torch import low_rank as plain
from gradwire.testing import thread_ranks

ROWS, COLS = 24, 40


def matrix(seed, rows=ROWS, cols=COLS):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def averaged(hook, *grads, names=None):
    """One step: the averages, shaped like the gradients."""
    bucket = make_bucket(grads, names)
    hook.begin(bucket)
    hook.mean(bucket).wait()
    return [grad.clone() for grad in bucket.grads]


def run(size, spec, grads_of, steps=1, **options):
    """`grads_of(rank, step)` averaged step after step: per rank, the averages of each step and the hook's state."""

    def main(rank):
        hook = rank.hook(exchange(spec), **options)
        return [averaged(hook, *grads_of(rank.rank, step)) for step in range(steps)], hook.state_dict()

    return thread_ranks(size, main, timeout_s=300)


# -- the same mathematics as the paper -------------------------------------------------------------------------------


def dense_powersgd(grads_TNMK, q, feedback=True):
    """PowerSGD in numpy and float64, one matrix, as its authors tell it; `q` is where it starts."""
    errors = np.zeros_like(grads_TNMK[0])
    for grads in grads_TNMK:
        a = grads + errors
        q, _ = np.linalg.qr(q)
        p, _ = np.linalg.qr(sum(a) @ q)
        locals_ = [matrix.T @ p for matrix in a]
        q = np.mean(locals_, axis=0)
        if feedback:
            errors = np.stack([own - p @ local.T for own, local in zip(a, locals_, strict=True)])
        yield p @ q.T


def dense_one_sided(grads_TNMK, q, feedback=True):
    """One factor per step, the other one is that of the step before."""
    errors, basis = np.zeros_like(grads_TNMK[0]), q
    for step, grads in enumerate(grads_TNMK):
        a = grads + errors if step % 2 == 0 else (grads + errors).transpose(0, 2, 1)
        basis, _ = np.linalg.qr(basis)
        locals_ = a @ basis
        out = np.concatenate([locals_.mean(0)[None], locals_]) @ basis.T
        lost = a - out[1:]
        basis = locals_.mean(0)
        if feedback:
            errors = lost if step % 2 == 0 else lost.transpose(0, 2, 1)
        yield out[0] if step % 2 == 0 else out[0].T


DENSE = {"two": dense_powersgd, "one": dense_one_sided}


@pytest.mark.parametrize("sides", DENSE)
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("feedback", [True, False])
def test_equals_a_dense_reference_over_twenty_steps(sides, rank, feedback):
    steps, size = 20, 3
    spec = f"powersgd:rank={rank},min_compression=0.1,resync=0,sides={sides},feedback={str(feedback).lower()}"
    outcomes = run(size, spec, lambda who, step: [matrix(100 * who + step)], steps)
    inputs = np.stack([[matrix(100 * who + step).double().numpy() for who in range(size)] for step in range(steps)])
    started = exchange(spec)._turn(0)[0].random(0, "0", _group(spec), torch.empty(0)).double().numpy().T
    for step, wanted in enumerate(DENSE[sides](inputs, started, feedback)):
        got = outcomes[0][0][step][0].double().numpy()
        assert np.abs(got - wanted).max() <= 1e-3 * np.abs(wanted).max(), step


def _group(spec):
    return exchange(spec).lay_out(make_bucket([matrix(0)])).matrices[0]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_full_rank_gives_the_exact_mean(wire):
    spec = f"powersgd:rank={ROWS},min_compression=0.01,wire={wire}"
    outcomes = run(2, spec, lambda who, step: [matrix(who)])
    exact = (matrix(0) + matrix(1)) / 2
    assert (outcomes[0][0][0][0] - exact).norm() <= {"fp32": 1e-5, "bf16": 1e-2, "int8": 2e-2}[wire] * exact.norm()


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=4", "powersgd:rank=2,batched=true"])
@pytest.mark.parametrize("integers", [True, False])
def test_mean_of_low_rank_is_reproduced(spec, integers):
    """Whatever the approximation rank has to spare, and from the first step on: no direction is wasted on noise."""

    def low(seed):
        factors = [matrix(seed, 64, 1), matrix(seed + 7, 1, 64)]
        left, right = (part.mul(3).round() if integers else part for part in factors)
        return left @ right

    same = low(0)  # both ranks, so that the mean is of rank 1 too
    outcomes = run(2, spec, lambda who, step: [same * (who + 1)], 30)
    for step, (got,) in enumerate(outcomes[0][0]):
        assert (got - 1.5 * same).norm() <= 1e-5 * same.norm(), step


# -- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 5, cpu.MANY + 1])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (5, 7), (33, 64), (64, 31)])
def test_kernels_agree(rank, shape):
    """Numba's and torch's, on stacks with gaps between the matrices."""
    rows, cols = shape
    stack = plain.Stack(3, rows * cols + 2, 3, rows, cols)
    flat, residual, mean = (matrix(seed, 1, 3 + 3 * (rows * cols + 2))[0] for seed in range(3))
    p, q = matrix(4, 3 * rank, rows).view(3, rank, rows), matrix(5, 3 * rank, cols).view(3, rank, cols)
    outcomes = []
    for kernel in (plain, cpu):
        a, e, to_rows, to_cols = flat.clone(), residual.clone(), p.clone(), q.clone()
        kernel.project_(to_rows, a, e, stack, q)
        kernel.project_back_(to_cols, a, e, stack, p)
        kernel.rebuild_(a, e, stack, (0.7 * p, q), (p, 0.5 * q), torch.tensor(True))
        b = mean.clone()
        kernel.rebuild_(b, residual.clone(), stack, (p, q), (p, q), torch.tensor(False))
        outcomes.append((to_rows, to_cols, a, e, b))
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    gap = flat[:3], residual[3 + rows * cols : 5 + rows * cols]
    for _, _, a, e, _ in outcomes:
        assert torch.equal(a[:3], gap[0])
        assert torch.equal(e[3 + rows * cols : 5 + rows * cols], gap[1])


@pytest.mark.parametrize("kernel", [plain, cpu])
@pytest.mark.parametrize("scale", [1e-37, 1e-20, 1.0, 1e20, 1e35])
@pytest.mark.parametrize("rank", [1, 2, 7])
def test_rows_are_orthonormal_or_zero(kernel, scale, rank):
    """Whatever their scale, dependence or number."""
    wide = matrix(0, rank, 50)
    cases = {
        "normal": (wide, rank),
        "zero": (wide * 0, 0),
        "equal": (wide[:1].expand(rank, -1), 1),
        "nearly equal": (wide[:1] * (1 + 1e-7 * matrix(1, rank, 1)), 1),
        "graded": (wide * torch.logspace(0, -12, rank).view(-1, 1), rank),
        "one long row": (torch.cat([wide[:1] * 100, wide[1:]]), rank),
        "short": (matrix(2, rank, 3), min(rank, 3)),
    }
    for name, (rows, independent) in cases.items():
        x = (rows * scale).clone()[None]
        kernel.orthonormalize_(x)
        gram = x[0].double() @ x[0].double().T
        assert torch.isfinite(x).all(), name
        kept = gram.diagonal() > 0.5
        if scale == 1.0 or name in ("zero", "normal"):
            assert int(kept.sum()) == independent, name
        assert (gram - torch.diag(kept.double())).abs().max() <= 1e-5, name


@pytest.mark.parametrize("kernel", [plain, cpu])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_rows_with_inf_or_nan_are_not_hidden(kernel, bad):
    x = matrix(0, 3, 9)[None].clone()
    x[0, 1, 4] = bad
    kernel.orthonormalize_(x)
    assert not torch.isfinite(x).all()


# -- edges -----------------------------------------------------------------------------------------------------------

EDGES = {
    "zeros": lambda x: x * 0,
    "ones": lambda x: torch.ones_like(x),
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x * 1e30,
    "one row": lambda x: x * (torch.arange(ROWS) == 5).view(-1, 1),
    "one column": lambda x: x * (torch.arange(COLS) == 5),
    "one value": lambda x: x * (torch.arange(ROWS * COLS) == 77).view(ROWS, COLS),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("rank", [1, 3])
def test_edges_stay_finite_and_are_averaged(edge, rank):
    """The steps after them are averaged as usual: zeros must not make a direction vanish for good."""
    grads = [EDGES[edge](matrix(0)), EDGES[edge](matrix(1))]
    later = [matrix(2, ROWS, 1) @ matrix(3, 1, COLS)] * 2

    def grads_of(who, step):
        return [grads[who] if step < 2 else later[who]]

    outcomes = run(2, f"powersgd:rank={rank},min_compression=0.1,feedback=false", grads_of, 6)
    for (first,), (second,) in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)
    mean = (grads[0] + grads[1]) / 2
    if edge not in ("tiny", "huge"):  # those are of full rank
        assert (outcomes[0][0][1][0] - mean).norm() <= 1e-5 * mean.norm()
    assert (outcomes[0][0][5][0] - later[0]).norm() <= 1e-5 * later[0].norm()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "spec",
    [
        "powersgd:rank=2,min_compression=0.1",
        "powersgd:rank=2,wire=int8,batched=true",
        "powersgd:rank=2,sides=one,wire=int8",
    ],
)
def test_inf_and_nan_pass_through_and_leave_no_trace(bad, spec):
    """The run with a bad step goes on exactly as the one without: memory and directions are as they were."""

    def with_bad_step(rank):
        hook = rank.hook(exchange(spec))
        averaged(hook, matrix(rank.rank, 64, 64), torch.ones(64))
        before = hook.state_dict()
        broken = matrix(9, 64, 64)
        broken[3, 4] = bad if rank.rank == 1 else 0.0
        got = averaged(hook, broken, torch.ones(64))
        return before, hook.state_dict(), got

    for before, after, got in thread_ranks(2, with_bad_step):
        assert not torch.isfinite(got[0]).all()
        for name, residual in before["residuals"].items():
            assert torch.equal(residual, after["residuals"][name])
        assert before["residuals"]["0"].any()
        for name, kept in before["memory"].items():
            for key, q in kept.items():
                same_span = torch.linalg.lstsq(q.T.double(), after["memory"][name][key].T.double()).residuals
                assert (same_span < 1e-9 * q.double().square().sum()).all()


def test_inf_in_an_exact_tensor_leaves_no_trace():
    def main(rank):
        hook = rank.hook(exchange("powersgd:rank=2"))
        averaged(hook, matrix(rank.rank, 64, 64), torch.ones(64))
        before = hook.state_dict()["residuals"]["0"]
        got = averaged(hook, matrix(5, 64, 64), torch.full((64,), float("inf")))
        return torch.equal(before, hook.state_dict()["residuals"]["0"]), got[1]

    for same, bias in thread_ranks(2, main):
        assert same
        assert torch.isinf(bias).all()


def test_tensors_sent_exactly_have_no_residual():
    def grads_of(who, step):
        return [matrix(who + step, 64, 64), matrix(who, 1, 64)[0] * 1e3, matrix(who, 3, 64)]

    outcomes = run(2, "powersgd:rank=2,resync=2", grads_of, 5)
    residuals = outcomes[0][1]["residuals"]
    assert residuals["0"].any()
    assert not residuals["1"].any()
    assert not residuals["2"].any()
    exact = (matrix(0, 1, 64)[0] * 1e3 + matrix(1, 1, 64)[0] * 1e3) / 2
    assert torch.equal(outcomes[0][0][4][1], exact)


@pytest.mark.parametrize(
    ("resync", "steps", "limit"),
    [
        pytest.param("", 6000, 1000, marks=pytest.mark.thorough),
        (",resync=50", 600, 60),
        pytest.param(",resync=50,sides=one", 600, 60, marks=pytest.mark.thorough),
    ],
)
def test_memories_stay_bounded_where_ranks_differ_a_hundredfold(resync, steps, limit):
    """A mean of rank 1, hidden under differences between the ranks that are 100 times larger and never change."""
    shared = matrix(1, 32, 1) @ matrix(2, 1, 32)
    apart = 100 * matrix(3, 32, 32)

    def main(rank):
        hook = rank.hook(exchange(f"powersgd:rank=1,min_compression=0.1{resync}"))
        own, norms, errors = shared + (apart if rank.rank else -apart), [], []
        for step in range(1, steps + 1):
            (got,) = averaged(hook, own)
            errors.append(float((got - shared).norm() / shared.norm()))
            if step % (steps // 6) == 0:
                norms.append(float(hook.state_dict()["residuals"]["0"].norm() / own.norm()))
        return norms, errors

    norms, errors = thread_ranks(2, main, timeout_s=300)[0]
    assert max(norms) <= limit  # about the steps in which every row is averaged once
    assert max(norms[3:]) <= 1.5 * max(norms[:3])
    assert max(errors[-500:]) <= (0.1 if "one" in resync else 2e-2)


def test_memories_grow_without_resync():
    """The test above can fail."""
    apart = 100 * matrix(3, 32, 32)

    def main(rank):
        hook = rank.hook(exchange("powersgd:rank=1,min_compression=0.1,resync=0"))
        norms = []
        for step in range(1, 601):
            averaged(hook, matrix(1, 32, 1) @ matrix(2, 1, 32) + (apart if rank.rank else -apart))
            if step % 300 == 0:
                norms.append(float(hook.state_dict()["residuals"]["0"].norm()))
        return norms

    halfway, end = thread_ranks(2, main, timeout_s=300)[0]
    assert end > 1.8 * halfway


# -- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "spec",
    [
        "powersgd:rank=2",
        "powersgd:rank=2,iterations=2",
        "powersgd:rank=2,batched=true",
        "powersgd:rank=4,sides=one",
        "powersgd:rank=4,sides=one,batched=true",
    ],
)
def test_sent_bytes_equal_the_formula(size, spec):
    """P, Q and the exact tensors, 2 (N - 1) / N times; what averaging the memories costs is within 3% of it.

    One-sided at twice the rank is as much.
    """
    shapes, steps = [(128, 96), (128,), (96, 128), (4, 6)], 80
    numel = 2 * 128 * 96 + 128 + 4 * 6

    def main(rank):
        hook = rank.hook(exchange(spec))
        for step in range(steps):
            averaged(hook, *(torch.randn(shape, generator=torch.Generator().manual_seed(step)) for shape in shapes))
        return hook.stats().sent_bytes

    values = (2 if "iterations" in spec else 1) * 2 * 2 * (128 + 96) + 128 + 4 * 6
    if "batched" in spec:
        values = 2 * 2 * numel**0.5 + _left_over(spec, numel)
    formula = 4 * values * 2 * (size - 1) / size
    for sent in thread_ranks(size, main):
        assert formula * 0.97 <= sent <= formula * 1.03


@pytest.mark.parametrize("shapes", [[(64, 64)], [(64, 64), (9,)], [(9,)]], ids=str)
@pytest.mark.parametrize(("spec", "each"), [("powersgd:rank=1", 2), ("powersgd:rank=1,sides=one", 1)])
def test_chunk_takes_two_collectives_none_of_them_empty(shapes, spec, each, monkeypatch):
    """One for P with all that rides along, one for Q; where nothing is a matrix, one (torch's 3.23)."""
    seen, collect = [], GroupComm._collect

    def counted(comm, name, issue, moved_bytes):
        seen.append(moved_bytes)
        collect(comm, name, issue, moved_bytes)

    def main(rank):
        hook = rank.hook(exchange(spec))
        rank.store.set(f"ready/{rank.rank}", "")
        rank.store.wait(["ready/0", "ready/1"])  # so that only averaging is counted
        monkeypatch.setattr(GroupComm, "_collect", counted)
        averaged(hook, *(torch.randn(shape) for shape in shapes))

    thread_ranks(2, main)
    assert len(seen) == 2 * (each if (64, 64) in shapes else 1)
    assert all(seen)


def _left_over(spec, numel):
    """What does not fit into the one, nearly square matrix of a bucket: a fraction of a row."""
    layout = exchange(spec).lay_out(make_bucket([torch.ones(numel)]))
    (left,) = [count for _, count in layout.rest]
    assert left <= 0.2 * numel**0.5
    return left


def test_same_shapes_are_one_stack_even_with_vectors_between():
    grads = [part for _ in range(4) for part in (matrix(0, 32, 32), torch.ones(32))]
    layout = exchange("powersgd:rank=1").lay_out(make_bucket([*grads, matrix(0, 32, 64)]))
    assert [(group.stack.depth, group.stack.rows, group.stack.cols) for group in layout.matrices] == [
        (4, 32, 32),
        (1, 32, 64),
    ]
    assert layout.matrices[0].names == ("0", "2", "4", "6")
    assert len(layout.rest) == 4


def test_matrices_are_read_as_they_lie_in_memory():
    """A transposed or channels-last weight with a gradient of rank 1 comes out to rounding."""
    conv = nn.Parameter(torch.randn(16, 8, 3, 3).to(memory_format=torch.channels_last))
    weight = nn.Parameter(torch.randn(24, 40).t())
    assert shape_of(weight) == (24, 40)
    assert shape_of(conv) == (16, 72)
    assert shape_of(torch.ones(3)) == (0, 0)
    assert shape_of(torch.ones(())) == (0, 0)
    assert shape_of(torch.ones(4, 0)) == (0, 0)
    assert shape_of(torch.ones(4, 5, dtype=torch.complex64)) == (4, 10)
    outer = [(matrix(1, 24, 1) @ matrix(2, 1, 40)).t(), None]
    outer[1] = (matrix(3, 16, 1) @ matrix(4, 1, 72)).view(16, 8, 3, 3).to(memory_format=torch.channels_last)

    def main(rank):
        hook = rank.hook(exchange("powersgd:rank=1,min_compression=0.1"))
        flat = torch.cat([outer[0].t().reshape(-1), outer[1].permute(0, 2, 3, 1).reshape(-1)])
        bucket = Bucket(0, flat, segments_of([weight, conv], ["w", "c"]), is_last=True)
        hook.mean(bucket).wait()
        return bucket.grads

    for got in thread_ranks(2, main):
        for mean, wanted in zip(got, outer, strict=True):
            assert mean.stride() == wanted.stride()
            assert (mean - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_gradient_type(dtype):
    grad = (matrix(0) + (1j * matrix(1) if dtype.is_complex else 0)).to(dtype)
    outcomes = run(2, f"powersgd:rank={COLS},min_compression=0.01", lambda who, step: [grad * (who + 1)])
    got, wanted = outcomes[0][0][0][0], grad * 1.5
    assert got.dtype == dtype
    eps = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12, torch.complex64: 1e-5}[dtype]
    assert (got - wanted).norm() <= eps * wanted.norm()


def test_warmup_averages_exactly_and_compresses_afterwards():
    outcomes = run(2, "powersgd:rank=1,warmup=3", lambda who, step: [matrix(who + step, 64, 64)], 5)
    for step, (got,) in enumerate(outcomes[0][0]):
        exact = (matrix(step, 64, 64) + matrix(step + 1, 64, 64)) / 2
        assert torch.allclose(got, exact) == (step < 3), step


def test_only_the_seed_decides_the_first_directions(monkeypatch):
    """The global random state is not touched, on any device (torch's 3.24)."""
    for place in ("torch.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"):
        monkeypatch.setattr(place, lambda seed: pytest.fail("the global seed was set"))
    torch.random.default_generator.manual_seed(0)
    before = torch.random.get_rng_state()
    first, again, other = (
        run(2, f"powersgd:rank=1,seed={seed}", lambda who, step: [matrix(who, 64, 64)])[0][0][0][0]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_more_iterations_come_closer():
    errors = []
    for iterations in (1, 3):
        spec = f"powersgd:rank=2,feedback=false,warm_start=false,iterations={iterations}"
        (got,) = run(2, spec, lambda who, step: [matrix(who, 64, 64)])[0][0][0]
        errors.append(float((got - (matrix(0, 64, 64) + matrix(1, 64, 64)) / 2).norm()))
    assert errors[1] < errors[0]


# -- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,sides=one"])
def test_resuming_is_exact_and_ranks_may_change(spec):
    def grads_of(who, step):
        return [matrix(10 * who + step, 64, 48), matrix(who, 1, 64)[0]]

    def main(rank):
        hook = rank.hook(exchange(spec))
        for step in range(3):
            averaged(hook, *grads_of(rank.rank, step))
        saved = hook.state_dict()
        resumed = rank.hook(exchange(spec))
        resumed.load_state_dict(saved)
        pairs = [
            (averaged(hook, *grads_of(rank.rank, step)), averaged(resumed, *grads_of(rank.rank, step)))
            for step in range(3, 6)
        ]
        return pairs, hook.state_dict(merged=True)

    outcomes = thread_ranks(3, main)
    for whole, resumed in outcomes[0][0]:
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    merged = outcomes[0][1]

    def go_on(rank):
        hook = rank.hook(exchange(spec))
        hook.load_state_dict(merged)
        return hook.state_dict()["residuals"]["0"]

    total = sum(thread_ranks(2, go_on))
    torch.testing.assert_close(total, merged["residuals"]["0"])


def test_loss_scale_change_rescales_the_memory():
    def main(rank):
        plain, scaled = (rank.hook(exchange("powersgd:rank=1")) for _ in range(2))
        for hook in (plain, scaled):
            averaged(hook, matrix(rank.rank, 64, 64))
        scaled.scale_state(0.5)
        (usual,) = averaged(plain, matrix(5 + rank.rank, 64, 64))
        (halved,) = averaged(scaled, matrix(5 + rank.rank, 64, 64) * 0.5)
        return usual, halved

    usual, halved = thread_ranks(2, main)[0]
    torch.testing.assert_close(halved, usual * 0.5)


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), "2", None])
def test_scale_state_refuses_wrong_input(factor):
    def main(rank):
        with pytest.raises(StateError, match="factor must be a finite number above 0"):
            rank.hook("powersgd").scale_state(factor)

    thread_ranks(1, main)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("powersgd:rank=0", "rank must be at least 1, got 0"),
        ("powersgd:rank=-2", "rank must be at least 1"),
        ("powersgd:rank=two", "rank must be a whole number"),
        ("powersgd:warmup=-1", "warmup must be at least 0"),
        ("powersgd:iterations=0", "iterations must be at least 1"),
        ("powersgd:sides=one,iterations=2", "sides=one continues the step before"),
        ("powersgd:sides=one,warm_start=false", "sides=one continues the step before"),
        ("powersgd:sides=three", "sides must be one of one, two"),
        ("powersgd:resync=-5", "resync must be at least 0"),
        ("powersgd:min_compression=0", "min_compression must be above 0"),
        ("powersgd:min_compression=nan", "min_compression must be above 0"),
        ("powersgd:wire=fp8", "wire must be one of fp32, fp16, bf16, int8"),
        ("powersgd:exempt=(", "is never closed"),
        ("powersgd:exempt=+", "exempt must be"),
        ("powersgd:batched=true,exempt=head", "does not go with exempt"),
        ("powersgd:ranks=2", "rank"),
    ],
)
def test_bad_options(spec, said):
    with pytest.raises(SpecError, match=said.replace("(", r"\(")):
        exchange(spec)


@pytest.mark.parametrize(
    ("first", "then", "shape"),
    [
        ("powersgd:rank=1", "powersgd:rank=4", (16, 16)),
        ("powersgd:rank=8,batched=true,min_compression=0.1",) * 2 + ((4, 5),),
    ],
)
def test_hook_loads_its_own_checkpoint(first, then, shape):
    """Also where a switch has made a matrix not worth it, and where a bucket has fewer rows than `rank`."""

    def main(rank):
        hook = rank.hook(first)
        averaged(hook, matrix(rank.rank, *shape))
        hook.switch(then)
        averaged(hook, matrix(rank.rank, *shape))
        model = [("0", torch.zeros(shape))]
        exchange(then).check_memory(hook.state_dict()["memory"], model)
        return True

    assert all(thread_ranks(2, main))
