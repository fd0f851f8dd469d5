"""Who averages what: plans cover everything once, blocks keep to their tensor, exempt tensors travel as they are."""

import random
import re
import warnings

import pytest
import torch

from gradwire import Hook, make_bucket
from gradwire.codecs import CODECS
from gradwire.engine.runner import Meter
from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES, exchange
from gradwire.exchanges.plan import Run, joined, plan
from gradwire.spec import build, option_types
from gradwire.testing import thread_ranks
from gradwire.testing.contracts import gaussian

CUTS = [*CODECS, "int4:hadamard=256", "int8:block=32", "sign:block=64", "topk:block=128"]


def random_runs(seed):
    """Tensors as buckets hold them: tiny and large ones, whole blocks and odd ends, exempt or not."""
    rng = random.Random(seed)
    sizes = [
        rng.choice([0, 1, 5, 63, 64, 65, 256, 1000, 4096, rng.randrange(1, 9000)]) for _ in range(rng.randint(1, 9))
    ]
    return tuple(Run(numel, rng.random() < 0.4) for numel in sizes)


def owners(runs):
    """The run that each value of the bucket belongs to."""
    return [index for index, run in enumerate(runs) for _ in range(run.numel)]


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("spec", CUTS)
def test_every_value_is_in_one_part(spec, parts):
    codec = build("codec", spec, CODECS)
    for seed in range(12):
        runs = joined(random_runs(seed), codec)
        owner, made = owners(runs), plan(runs, parts, codec)
        dealt = [[*((piece.start, piece.numel) for piece in part.pieces), *part.exempt] for part in made.parts]
        places = sorted(at for spans in dealt for start, numel in spans for at in range(start, start + numel))
        assert places == list(range(len(owner))), seed
        for part in made.parts:
            for exempt, spans in ((True, part.exempt), (False, [piece[:2] for piece in part.pieces])):
                for start, numel in spans:
                    assert numel > 0
                    assert owner[start] == owner[start + numel - 1], (seed, start, numel)
                    assert runs[owner[start]].exempt == exempt


@pytest.mark.parametrize("spec", CUTS)
def test_only_tensors_smaller_than_a_block_share_a_run(spec):
    codec = build("codec", spec, CODECS)
    for seed in range(40):
        tensors, runs = random_runs(seed), joined(random_runs(seed), codec)
        run_of, begin = owners(runs), 0
        assert joined(runs, codec) == runs
        for tensor in tensors:
            own = runs[run_of[begin]] if tensor.numel else None
            begin += tensor.numel
            if own is not None and tensor.numel >= codec.align > 1 and not tensor.exempt:
                assert own == tensor
            assert own is None or own.exempt >= tensor.exempt


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("spec", CUTS)
def test_wires_lie_side_by_side(spec, parts):
    """Each piece has the room its codec asks for, exempt values the rest; nothing overlaps, nothing sticks out."""
    codec = build("codec", spec, CODECS)
    for seed in range(12):
        made, end = plan(random_runs(seed), parts, codec), 0
        assert len(made.parts) == parts
        for part in made.parts:
            at = 0
            for piece in part.pieces:
                assert (piece.at, piece.wire_bytes) == (at, codec.wire_bytes(piece.numel))
                at += piece.wire_bytes
            assert part.exempt_at == at
            assert at % 4 == 0
            end = max(end, at + 4 * part.exempt_numel)
        assert made.wire_bytes == end


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("spec", CUTS)
def test_shares_are_equal_and_of_whole_blocks(spec, parts):
    codec = build("codec", spec, CODECS)
    align = codec.align
    for seed in range(12):
        runs = joined(random_runs(seed), codec)
        owner, made = owners(runs), plan(runs, parts, codec)
        blocks = sum(-(-run.numel // align) for run in runs if not run.exempt)
        exempt = sum(run.numel for run in runs if run.exempt)
        for part in made.parts:
            assert sum(-(-piece.numel // align) for piece in part.pieces) <= -(-blocks // parts)
            assert part.exempt_numel <= -(-exempt // parts)
            for piece in part.pieces:
                end = piece.start + piece.numel
                ends_its_tensor = end == len(owner) or owner[end] != owner[piece.start]
                assert ends_its_tensor or piece.numel % align == 0


def test_empty_bucket():
    made = plan((Run(0, False),), 3, CODECS["int8"]())
    assert made.wire_bytes == 0
    assert not any(part.pieces or part.exempt for part in made.parts)


# -- exemptions, on ranks that are threads ---------------------------------------------------------------------------

SHAPES = {
    "embed.weight": (60, 50),
    "norm.weight": (70,),
    "head.weight": (31, 33),
    "head.bias": (2000,),
    "scale.weight": (4, 5),
    "deep.weight": (3, 11, 7, 13),
}
LARGE = {"embed.weight", "deep.weight"}
"""What `auto` codes: more than one dimension, and 1024 values or more. 31 * 33 is 1023."""


def grads_of(rank):
    """Whole numbers up to 2**12, whose mean over 2 or 4 ranks is exact in float32 and in no codec."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-4096, 4096, shape, generator=generator).float() for shape in SHAPES.values()]


def coded_names(spec, size, **options):
    """The tensors whose mean over the ranks is not exact."""

    def run(rank):
        bucket = make_bucket(grads_of(rank.rank), list(SHAPES))
        rank.hook(spec, **options).mean(bucket).wait()
        return bucket.grads

    means = thread_ranks(size, run)
    exact = [torch.stack(grads).double().mean(0) for grads in zip(*map(grads_of, range(size)), strict=True)]
    for other in means[1:]:
        assert all(torch.equal(one, two) for one, two in zip(means[0], other, strict=True))
    together = zip(SHAPES, means[0], exact, strict=True)
    return {name for name, mean, wanted in together if not torch.equal(mean.double(), wanted)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("spec", "coded"),
    [
        ("int4", LARGE),
        ("int4:exempt=auto", LARGE),
        ("int4:exempt=none", set(SHAPES)),
        ("int4:exempt=weight", {"head.bias"}),
        ("int4:exempt=norm|bias|^head", {"embed.weight", "scale.weight", "deep.weight"}),
        ("int4:exempt=nothing like it", set(SHAPES)),
        ("int8", set(SHAPES) - {"scale.weight"}),  # 20 values take fewer bytes in float32 than in a block
        ("int8:exempt=auto", LARGE),
        ("fp8:exempt=head", {"embed.weight", "norm.weight", "deep.weight"}),
        ("sign", LARGE),
        ("topk", LARGE),
        ("int2:hadamard=64", LARGE),
        ("bf16:exempt=auto", LARGE),
        ("bf16:exempt=embed|deep|head|norm", {"scale.weight"}),
    ],
)
def test_exempt_tensors_are_averaged_exactly(spec, coded, size):
    assert coded_names(spec, size) == coded


@pytest.mark.parametrize("size", [2, 4])
def test_chunk_border_changes_no_exemption(size):
    """A piece of a large matrix is still part of a large matrix, one of a long vector still of a vector."""
    assert coded_names("int4", size, chunk_bytes=1024) == LARGE


@pytest.mark.parametrize("shots", ["one", "two"])
@pytest.mark.parametrize("feedback", [False, True])
def test_exempt_tensors_with_feedback_and_either_shot(shots, feedback):
    assert coded_names(exchange("int4", shots=shots, feedback=feedback), 4) == LARGE


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_values_reach_all_ranks_from_exempt_tensors(bad):
    def run(rank):
        grads = grads_of(rank.rank)
        if rank.rank == 1:
            grads[1][3] = bad
        bucket = make_bucket(grads, list(SHAPES))
        rank.hook("int4").mean(bucket).wait()
        return bucket.grads

    for size in (2, 3):
        for grads in thread_ranks(size, run):
            finite = [bool(torch.isfinite(grad).all()) for grad in grads]
            assert finite == [name != "norm.weight" for name in SHAPES]
            assert int(torch.isfinite(grads[1]).sum()) == 69


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("spec", "limit"), [("int8", 0.02), ("int4", 0.2), ("fp8", 0.06), ("int4:hadamard=256", 0.2)])
def test_small_values_keep_their_precision_next_to_huge_ones(spec, limit, size):
    """No block, tile or rotation holds values of two tensors, whatever their sizes and wherever chunks are cut."""
    scales = (1e-6, 1e6, 1e-6, 1e6, 1e-12)
    shapes = ((37, 41), (33, 50), (1, 1025), (5, 301), (64, 64))

    def grads(rank):
        pairs = zip(shapes, scales, strict=True)
        return [gaussian(rows * cols, 10 * rank + i, s).view(rows, cols) for i, ((rows, cols), s) in enumerate(pairs)]

    def run(rank, chunk_bytes):
        return rank.mean(exchange(spec, exempt="none"), grads(rank.rank), chunk_bytes=chunk_bytes).grads

    for chunk_bytes in (1 << 20, 8192):
        means = thread_ranks(size, lambda rank, chunk_bytes=chunk_bytes: run(rank, chunk_bytes))[0]
        for mean, *inputs in zip(means, *map(grads, range(size)), strict=True):
            exact = torch.stack(inputs).double().mean(0)
            assert float((mean - exact).norm() / exact.norm()) <= limit, (mean.shape, chunk_bytes)


# -- what registration says ------------------------------------------------------------------------------------------

PARAMS = [(name, torch.empty(shape)) for name, shape in SHAPES.items()]


class NoRunner:
    """A rank alone never runs anything."""

    meter = Meter()

    def close(self):
        pass


def register(spec, **options):
    """A hook over PARAMS as `gradwire.register` makes it."""
    made = exchange(spec, **options)
    return Hook(made, NoRunner(), rank=0, size=1, device=torch.device("cpu"), params=lambda: PARAMS)


def test_pattern_that_matches_nothing_warns():
    text = "int4: exempt=nrom matches none of the 6 parameters (embed.weight, norm.weight, "
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        register("int4:exempt=nrom")
    assert caught[0].filename == __file__  # the line that wrote the pattern, not one of the library


@pytest.mark.parametrize("pattern", ["", " bias", "a,b", "(a", "a\\"])
def test_pattern_that_no_spec_can_hold_is_refused(pattern):
    with pytest.raises(SpecError, match="exempt is part of a spec, so commas are allowed only inside brackets"):
        register("int4", exempt=pattern)


def test_pattern_that_matches_everything_is_refused():
    for pattern in (".", "weight|bias"):
        with pytest.raises(SpecError, match="matches all 6 parameters; use the hook 'exact', or a narrower pattern"):
            register("int4", exempt=pattern)


def test_patterns_that_match_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in ("int4", "int8", "int4:exempt=none", "int8:exempt=auto", "int4:exempt=norm|bias", "int4:exempt=^h"):
            register(spec)


def test_switch_checks_the_pattern():
    hook = register("int4")
    with pytest.raises(SpecError, match="matches all 6"):
        hook.switch("int4:exempt=.")
    assert str(hook.exchange) == "int4"
    with pytest.warns(UserWarning, match="matches none"):
        hook.switch("int8:exempt=nrom")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("int4:exempt=[", r"'\[' is never closed"),
        ("int4:exempt=(a", r"'\(' is never closed"),
        ("int4:exempt=+a", "exempt must be auto, none or a pattern, got '\\+a'"),
        ("int4:exempt=*", "exempt must be auto, none or a pattern"),
        ("int4:exempt=", "not of the form option=value"),
        ("bf16:accumulate=wire,exempt=auto", "bf16: accumulate=wire takes neither feedback nor shots nor exempt"),
        ("bf16:accumulate=wire,exempt=bias", "use accumulate=fp32"),
        ("int8:accumulate=wire", r"int8: accumulate=wire is for wires the backend can sum \(fp16, bf16\)"),
        ("sign:accumulate=wire", "sign: accumulate=wire is for wires the backend can sum"),
        ("exact:exempt=bias", "exact: unknown option 'exempt'"),
        ("int4:exmept=bias", "int4: unknown option 'exmept'. Did you mean 'exempt'"),
        ("int4:shots=three", "int4: shots must be one of auto, one, two, got 'three'"),
    ],
)
def test_wrong_options_are_refused(spec, text):
    with pytest.raises(SpecError, match=text):
        register(spec)


# -- the text of an exchange -----------------------------------------------------------------------------------------

OTHERS = {
    "accumulate": ["fp32", "wire"],
    "allocate": [True, False],
    "block": [32, 128, 4096],
    "codebook": ["trained", "lloyd", "uniform"],
    "exempt": ["auto", "none", "norm|bias", r"^h.*[0-9]\.w$", "a=b"],
    "fairness": [0.5, 0.25, 1.0],
    "feedback": [True, False],
    "hadamard": [0, 64, 256],
    "residual": ["fp32", "int8"],
    "ratio": [0.01, 0.001, 1e-05, 0.3, 1.0],
    "rounding": ["nearest", "stochastic"],
    "seed": [0, 5, -3, 2**40],
    "shots": ["auto", "one", "two"],
    "whiten": [True, False],
}
IMPOSSIBLE = {
    ("int6", "codebook", "lloyd"),
    ("int2", "codebook", "trained"),
    *((name, "accumulate", "wire") for name in CODECS if name not in ("fp16", "bf16")),
    *((name, "residual", "int8") for name in CODECS if not CODECS[name].needs_feedback),
    *((name, "whiten", True) for name in CODECS if CODECS[name].wire_dtype is not None),
    *((name, "allocate", True) for name in CODECS if name not in ("int6", "int5", "int4", "int3", "int2")),
}
ONE_OPTION = [
    (name, option, value)
    for name in CODECS
    for option in option_types(EXCHANGES[name])
    for value in OTHERS.get(option, [])
    if (name, option, value) not in IMPOSSIBLE
]


def test_every_option_is_tested_here():
    assert {option for name in CODECS for option in option_types(EXCHANGES[name])} <= OTHERS.keys()


@pytest.mark.parametrize("name", CODECS)
def test_text_of_every_option_round_trips(name):
    for one, option, value in ONE_OPTION:
        if one == name:
            made = exchange(name, **{option: value})
            assert exchange(str(made)) == made, str(made)
            assert getattr(made if hasattr(made, option) else made.codec, option) == value
            text = f"{name}:{option}={str(value).lower() if isinstance(value, bool) else value}"
            assert str(made) == (name if made == exchange(name) else text)


@pytest.mark.parametrize("name", CODECS)
def test_text_of_many_options_round_trips(name):
    rng = random.Random(name)
    for _ in range(30):
        found = [(option, value) for one, option, value in ONE_OPTION if one == name and value != "wire"]
        options = dict(rng.sample(found, rng.randint(1, len(found))))
        if options.get("allocate"):
            options.pop("feedback", None)
            options.pop("whiten", None)
        if options.get("feedback") is False:
            options.pop("residual", None)
        made = exchange(name, **options)
        assert exchange(str(made)) == made, str(made)
        assert str(exchange(str(made))) == str(made)


def test_defaults_are_not_in_the_text():
    assert [str(exchange(name)) for name in CODECS] == list(CODECS)
    assert str(exchange("topk:feedback=true,exempt=auto,ratio=0.01")) == "topk"
    assert str(exchange("topk:feedback=false")) == "topk:feedback=false"
    assert str(exchange("int8:exempt=none,feedback=false,block=256")) == "int8"


# -- small tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_many_small_tensors_take_no_more_bytes_than_one_large_one(codec, parts):
    def wire_bytes(*shapes):
        return (
            exchange(codec, exempt="none").plan(make_bucket([torch.zeros(shape) for shape in shapes]), parts).wire_bytes
        )

    large = wire_bytes((10_000,))
    assert wire_bytes(*[(10,)] * 1000) == large
    assert wire_bytes(*[(7,), (13,), (5,), (15,)] * 250) == large


@pytest.mark.parametrize("codec", CODECS)
def test_no_tensor_takes_more_bytes_than_in_float32(codec):
    rng = random.Random(0)
    for _ in range(200):
        sizes = [rng.choice([1, 2, 3, 10, 63, 65, 300, rng.randrange(1, 3000)]) for _ in range(rng.randint(1, 6))]
        bucket = make_bucket([torch.zeros(numel) for numel in sizes])
        for exempt in ("none", "auto"):
            assert exchange(codec, exempt=exempt).plan(bucket, 1).wire_bytes <= 4 * sum(sizes), (sizes, exempt)


def test_a_small_tensor_between_large_ones_travels_alone():
    """Next to gradients that are a million times as large it would be lost in a block of theirs."""

    def run(rank):
        return rank.mean(
            "int8", [torch.full((512,), 1e6), torch.full((10,), 0.1 + rank.rank), torch.full((512,), 1e6)]
        ).grads

    for grads in thread_ranks(3, run):
        torch.testing.assert_close(grads[1], torch.full((10,), 1.1))
