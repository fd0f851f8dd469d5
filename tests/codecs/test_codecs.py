"""What is special to one codec: wires, rounding, codebooks and options. The contracts are in tests/codecs."""

import dataclasses
import importlib.util
import re
import struct
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import kernels
from gradwire.codecs import CODECS, FP16
from gradwire.codecs.codebooks import TRAINED
from gradwire.errors import SpecError
from gradwire.spec import build
from gradwire.testing.contracts import gaussian

ALL = [pytest.param(make(), id=name) for name, make in CODECS.items()]


@pytest.fixture(params=["numba", "torch"], autouse=True)
def _kernels(request, monkeypatch):
    """Run everything on both sets of kernels."""
    kernels.load()  # `gradwire.codec` does too, and must not undo the next line
    monkeypatch.setattr(kernels, "_numba", kernels.load() if request.param == "numba" else None)


once = pytest.mark.parametrize("_kernels", ["torch"], indirect=True)
"""For tests in which no kernel takes part, or only one need."""


def make(spec):
    return build("codec", spec, CODECS)


@pytest.mark.parametrize("codec", ALL)
def test_frozen_and_equal(codec):
    assert codec == type(codec)()
    assert dataclasses.is_dataclass(codec)
    assert type(codec).__dataclass_params__.frozen


@pytest.mark.parametrize("codec", ALL)
def test_wire_of_the_wrong_length_is_refused(codec):
    wire = codec.encode(gaussian(10))
    for wrong in (wire[:-1], torch.cat([wire, wire]), wire.float(), wire.view(1, -1)):
        with pytest.raises(SpecError, match=r"10 values is \d+ bytes"):
            codec.decode(wrong, 10)


VALUES = [1.0, -2.0, 0.5, 0.0, 3.0, -0.25, 0.0078125, -1.5]
GOLDEN = {
    "fp16": (
        "00 00 00 39 | 00 70 00 f4 00 6c 00 00 00 76 00 e8 00 54 00 f2",
        VALUES,
    ),
    "bf16": (
        "80 3f 00 c0 00 3f 00 00 40 40 80 be 00 3c c0 bf",
        VALUES,
    ),
    "fp8": (
        "71 f9 69 00 7e e1 39 f6 00*248 | b4 6d db 3b",
        [0.964285, -1.92857, 0.482143, 0.0, 3.0, -0.241071, 0.00753348, -1.5],
    ),
    "int8": (
        "2a ab 15 00 7f f5 00 c0 00*248 | 04 83 c1 3c",
        [0.992126, -2.00787, 0.496063, 0.0, 3.0, -0.259842, 0.0, -1.51181],
    ),
    "int6": (
        "80 | 08 | 0e 06 07 00 0f 0c 00 0b 00*24 | aa a8 aa aa ab a9 aa a8 aa*8 | 00 00",
        [1.02274, -2.05237, 0.507558, 0.0332823, 2.99147, -0.233827, 0.0332823, -1.52947],
    ),
    "int5": (
        "80 | 08 | 07 03 03 00 0f 0e 00 06 00*24 | ff fe ff ff ff fe ff fe | 00 00",
        [1.07055, -2.0315, 0.474646, 0.0667947, 2.96486, -0.200897, 0.0667947, -1.4107],
    ),
    "int4": (
        "80 | 08 | 8b 81 89 88 8f 87 88 83 88*24 | 00 00",
        [1.01593, -2.21766, 0.416594, 0.137601, 2.85892, -0.137601, 0.137601, -1.35447],
    ),
    "int3": (
        "80 | 08 | 01 01 00 00 03 03 00 01 00*8 | ff fe ff ff ff fe ff fe | 00 00",
        [0.856714, -1.53658, 0.276544, 0.276544, 2.49296, -0.276544, 0.276544, -1.53658],
    ),
    "int2:block=8": (
        "80 | 2d | ba 18",
        [0.597526, -1.99314, 0.597526, 0.597526, 1.99314, -0.597526, 0.597526, -1.99314],
    ),
    "sign:block=8": (
        "a2 | 00 00 00 | 00 20 84 3f",
        [1.03223, -1.03223, 1.03223, 1.03223, 1.03223, -1.03223, 1.03223, -1.03223],
    ),
    "topk:block=8,ratio=0.5": (
        "00 00 01 00 04 00 07 00 | 80 3f 00 c0 40 40 c0 bf",
        [1.0, -2.0, 0.0, 0.0, 3.0, 0.0, 0.0, -1.5],
    ),
    "int4:hadamard=64": (
        "80 | 5f | 58*8 6f*8 1b*8 8c*8 | 00 00",
        [0.766227, -2.02064, 0.560568, -0.112527, 3.03535, -0.146762, -0.117068, -1.57527],
    ),
    "int4:codebook=uniform": (
        "80 | 08 | 8a 82 89 88 8f 87 88 84 88*24 | 00 00",
        [0.9675, -2.1285, 0.5805, 0.1935, 2.9025, -0.1935, 0.1935, -1.3545],
    ),
    "int8:rounding=stochastic,seed=7": (
        "2a ab 15 00 7f f6 00 c1 00*248 | 04 83 c1 3c",
        [0.992126, -2.00787, 0.496063, 0.0, 3.0, -0.23622, 0.0, -1.48819],
    ),
    "int4:rounding=stochastic,seed=7": (
        "80 | 16 | 8b 72 79 87 8f 86 87 83 77 87 88 77 78 78 88 87 88 87 87 78 87 77 78 78 88 88 88 77 88 77 88 78"
        " | 00 00",
        [1.10059, -1.88704, 0.45131, -0.149068, 3.09716, -0.45131, -0.149068, -1.46735],
    ),
}
"""What is sent for VALUES, and what comes back. `00*248` is 248 times the byte, `|` is for the eye."""


def wire_of(text):
    repeated = re.sub(r"(\w\w)\*(\d+)", lambda found: found[1] * int(found[2]), text.replace("|", ""))
    return torch.tensor(list(bytes.fromhex(repeated)), dtype=torch.uint8)


def test_there_is_a_golden_wire_for_every_codec():
    assert {spec.partition(":")[0] for spec in GOLDEN} == set(CODECS)


@pytest.mark.parametrize("spec", GOLDEN)
def test_golden_wires(spec):
    """The bytes on the wire are a contract between versions, and so is what they mean."""
    text, values = GOLDEN[spec]
    assert make(spec).encode(torch.tensor(VALUES)).tolist() == wire_of(text).tolist()
    torch.testing.assert_close(make(spec).decode(wire_of(text), 8), torch.tensor(values), rtol=1e-5, atol=0)


def test_the_wire_is_as_drawn():
    """int8, sign and topk put together by hand from the drawings in their files."""
    codes = [round(value * 127 / 3) for value in VALUES[:-1]] + [-64]  # -63.5 and a little
    scale = struct.pack("<f", torch.tensor(3.0) * 0.007874015)
    assert bytes(make("int8").encode(torch.tensor(VALUES))) == struct.pack("<8b", *codes) + bytes(248) + scale

    two_blocks = torch.tensor([-1.0] * 3 + [1.0] * 7 + [-2.0] * 4 + [2.0, 0.0])
    signs, scales = bytes([0b0000_0111, 0b0011_1100]), struct.pack("<2f", 1.0, 12 / 8)
    assert bytes(make("sign:block=8").encode(two_blocks)) == signs + bytes(2) + scales
    crosswise = torch.tensor([1.0, -1.0] + [1.0] * 6).repeat(8)  # byte i of this block holds values i, i + 8, ...
    assert bytes(make("sign:block=64").encode(crosswise)) == bytes([0, 255] + [0] * 6) + struct.pack("<f", 1.0)

    sparse = torch.zeros(11)
    sparse[[5, 2, 1, 7, 9, 10]] = torch.tensor([-4.0, 8.0, 0.125, 0.25, 0.5, -1.0])
    places = struct.pack("<8h", 1, 2, 5, 7, 0, 1, 2, 3)
    values = struct.pack("<8H", 0x3E00, 0x4100, 0xC080, 0x3E80, 0, 0x3F00, 0xBF80, 0)
    assert bytes(make("topk:block=8,ratio=0.5").encode(sparse)) == places + values


def test_of_equals_topk_sends_the_first():
    wire = make("topk:block=8,ratio=0.5").encode(torch.tensor([1.0, -3.0, 2.0, 3.0, -2.0, 3.0, 2.0, 0.0]))
    assert wire[:8].view(torch.int16).tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("scale", [1e-30, 2e-8, 1.0, 1e5, 3e38])
def test_fp16_neither_overflows_nor_underflows(scale):
    values = gaussian(1000).clamp(-1, 1) * scale
    error = (FP16().decode(FP16().encode(values), 1000) - values).abs()
    assert float(error.max()) <= scale * 2**-11


def test_fp16_zero_dim_scale_is_a_power_of_two():
    wire = FP16().encode(gaussian(1000, scale=123.0))
    scale = float(wire[:4].view(torch.float32))
    assert scale == 2.0 ** round(torch.tensor(scale).log2().item())


# -- how good they are -----------------------------------------------------------------------------------------------

SEEDS = 256


def errors_of_means(spec, seeds=SEEDS, numel=2048):
    """Squared error of one encoding, and of the mean over many seeds, for normal values."""
    values, total, single = gaussian(numel, seed=3), torch.zeros(numel, dtype=torch.float64), 0.0
    for seed in range(seeds):
        codec = dataclasses.replace(make(spec), seed=seed)
        back = codec.decode(codec.encode(values), numel).double()
        single += float((back - values).square().sum()) / seeds
        total += back / seeds
    return single, float((total - values).square().sum())


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
def test_stochastic_rounding_is_unbiased(name):
    """The error of a mean of T falls like 1/T. Nearest rounding makes the same error every time."""
    single, of_mean = errors_of_means(f"{name}:rounding=stochastic")
    assert of_mean <= 1.5 * single / SEEDS
    single, of_mean = errors_of_means(name, seeds=4)
    assert of_mean > 0.9 * single


def test_positions_and_seeds_draw_apart():
    """Equal values of one tensor, or of two ranks, must not all be rounded the same way."""
    codec = make("int8:rounding=stochastic")
    values = torch.full((4096,), 0.5 / 127)
    values[::256] = 1.0
    other = dataclasses.replace(codec, seed=1).encode(values).view(torch.int8)[:4096]
    ups = codec.encode(values).view(torch.int8)[:4096] == 1
    assert 0.4 < float(ups.float().mean()) < 0.6
    assert 0.4 < float((ups == (other == 1)).float().mean()) < 0.6


@once
@pytest.mark.parametrize(
    ("spec", "limit"),
    [
        ("sign:block=256", 0.3634),
        ("int2:codebook=lloyd,block=256", 0.1175),
        ("int3:codebook=lloyd,block=256", 0.03454),
        ("int4:codebook=lloyd,block=256", 0.009497),
        ("int5:codebook=lloyd,block=256", 0.002499),
    ],
)
def test_lloyd_codebooks_reach_the_limit(spec, limit):
    """What Lloyd and Max found to be the least squared error of 2**bits levels for a normal distribution."""
    values = gaussian(1 << 20, seed=1)
    error = make(spec).decode(make(spec).encode(values), values.numel()) - values
    assert float(error.square().mean() / values.square().mean()) == pytest.approx(limit, rel=0.02)


@once
def test_codebooks_are_those_that_training_gives():
    path = Path(__file__).parents[2] / "benchmarks" / "codebooks.py"
    spec = importlib.util.spec_from_file_location("benchmarks_codebooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    books = module.trained()
    assert books.keys() == TRAINED.keys()
    for key, book in books.items():
        assert (book.bits, book.widest) == (TRAINED[key].bits, TRAINED[key].widest)
        assert book.encoder == pytest.approx(TRAINED[key].encoder, rel=1e-4), key
        assert book.decoder == pytest.approx(TRAINED[key].decoder, rel=1e-4), key


# -- bad input -------------------------------------------------------------------------------------------------------

BLOCKED = [name for name, codec in CODECS.items() if "block" in {field.name for field in dataclasses.fields(codec)}]


@once
@pytest.mark.parametrize("block", [100, 4, 8192, -8, -64, 0, 1])
@pytest.mark.parametrize("name", BLOCKED)
def test_bad_block(name, block):
    for wrong in (lambda: gradwire.codec(f"{name}:block={block}"), lambda: CODECS[name](block=block)):
        with pytest.raises(SpecError, match=f"^{name}: block must be a power of two from 8 to 4096, got {block}$"):
            wrong()


@once
def test_block_of_another_type():
    for wrong in (64.0, "64", None, True):
        with pytest.raises(SpecError, match="int8: block must be a power of two"):
            CODECS["int8"](block=wrong)
    with pytest.raises(SpecError, match=r"int8: block must be a whole number, got '64\.0'"):
        gradwire.codec("int8:block=64.0")


def test_a_named_codec_checks_what_it_is_given():
    named = gradwire.codec("int4", block=32)
    assert named.wire_bytes(64) == gradwire.codec("int4:block=32").wire_bytes(64)
    for numel in (-1, 1.5, "8"):
        with pytest.raises(SpecError, match="int4: numel must be a whole number of at least 0"):
            named.wire_bytes(numel)
        with pytest.raises(SpecError, match="int4: numel must be a whole number of at least 0"):
            named.decode(named.encode(torch.ones(8)), numel)
    with pytest.raises(SpecError, match=r"int4: encode takes a dense tensor, got torch\.sparse_coo"):
        named.encode(torch.ones(4).to_sparse())


@once
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("topk:ratio=0", r"topk: ratio must be in \(0, 1\], got 0.0"),
        ("topk:ratio=-0.5", r"topk: ratio must be in \(0, 1\], got -0.5"),
        ("topk:ratio=1.5", r"topk: ratio must be in \(0, 1\], got 1.5"),
        ("topk:ratio=nan", r"topk: ratio must be in \(0, 1\], got nan"),
        ("topk:ratio=inf", r"topk: ratio must be in \(0, 1\], got inf"),
        ("topk:ratio=some", "topk: ratio must be a number, got 'some'"),
        ("int6:codebook=lloyd", "int6: codebook must be one of trained, uniform, got lloyd"),
        ("int2:codebook=trained", "int2: codebook must be one of lloyd, uniform, got trained"),
        ("int4:codebook=mine", "int4: codebook must be one of trained, lloyd, uniform, got 'mine'"),
        ("int4:hadamard=100", "int4: hadamard must be one of 0, 64, 128, 256, got '100'"),
        ("int4:hadamard=-64", "int4: hadamard must be one of 0, 64, 128, 256, got '-64'"),
        ("int4:hadamard=256,block=8", "int4: hadamard=256 needs blocks of 16 values or more, got block=8"),
        ("int8:rounding=up", "int8: rounding must be one of nearest, stochastic, got 'up'"),
        ("int8:seed=x", "int8: seed must be a whole number, got 'x'"),
        ("int8:hadamard=64", "int8: unknown option 'hadamard'. Available: block, rounding, seed"),
        ("fp16:block=64", "fp16: unknown option 'block'. Available: none"),
        ("int4:blok=64", "int4: unknown option 'blok'. Did you mean 'block'"),
    ],
)
def test_bad_options(spec, text):
    with pytest.raises(SpecError, match=text):
        gradwire.codec(spec)
    if ":hadamard=64" not in spec and "fp16" not in spec and "blok" not in spec:
        with pytest.raises(SpecError, match=text):
            gradwire.exchange(spec)


@once
@pytest.mark.parametrize("name", ["int7", "int1", "int9", "int", "exact", "INT4"])
def test_unknown_codecs_list_what_exists(name):
    with pytest.raises(SpecError, match=f"unknown codec '{name}'.*Available: {', '.join(sorted(CODECS))}\n"):
        gradwire.codec(name)


@once
@pytest.mark.parametrize("wrong", [None, 4, b"int4", ["int4"], CODECS["int4"]])
def test_not_a_spec(wrong):
    with pytest.raises(SpecError, match="a spec is text such as"):
        gradwire.codec(wrong)


# -- gradwire.codec --------------------------------------------------------------------------------------------------

SHAPED = {
    "scalar": gaussian(1)[0],
    "empty": torch.empty(0, 5),
    "matrix": gaussian(300).view(20, 15),
    "transposed": gaussian(300).view(20, 15).t(),
    "strided": gaussian(600)[::2],
    "expanded": gaussian(20).view(20, 1).expand(20, 15),
    "channels last": gaussian(360).view(2, 3, 6, 10).to(memory_format=torch.channels_last),
    "parameter": torch.nn.Parameter(gaussian(300).view(20, 15)),
    **{str(dtype): gaussian(300).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)},
}


@pytest.mark.parametrize("kind", SHAPED)
@pytest.mark.parametrize("name", CODECS)
def test_named_codec_takes_any_tensor(name, kind):
    codec, tensor = gradwire.codec(name), SHAPED[kind]
    numel, values = tensor.numel(), tensor.detach().float().flatten()
    wire = codec.encode(tensor)
    assert (wire.dtype, wire.shape, wire.requires_grad) == (torch.uint8, (codec.wire_bytes(numel),), False)
    back = codec.decode(wire, numel)
    assert torch.equal(back, codec.inner.decode(codec.inner.encode(values), numel))
    assert (back.dtype, back.shape) == (torch.float32, (numel,))
    assert float((back - values).norm()) <= codec.inner.bound * float(values.norm())


def test_named_codec_has_its_options():
    codec = gradwire.codec("int8:block=128")
    assert codec.inner == CODECS["int8"](block=128)
    assert codec.wire_bytes(129) == 2 * (128 + 4)
    assert repr(codec) == "<gradwire codec int8:block=128>"


@pytest.mark.parametrize("name", CODECS)
def test_named_codec_refuses(name):
    codec = gradwire.codec(name)
    for wrong, what in (([1.0], "list"), (1.0, "float"), (None, "NoneType"), (torch.ones(3).numpy(), "ndarray")):
        with pytest.raises(SpecError, match=f"^{name}: encode takes a tensor of a floating type, got {what}$"):
            codec.encode(wrong)
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(SpecError, match=f"encode takes a tensor of a floating type, got {dtype}"):
            codec.encode(torch.ones(3, dtype=dtype))
    wire = codec.encode(gaussian(2000))
    for wrong, numel in ((wire[4:], 2000), (wire, 1), (wire, 5000), (wire.view(torch.int8), 2000)):
        with pytest.raises(SpecError, match=f"^{name}: the wire of {numel} values is "):
            codec.decode(wrong, numel)
