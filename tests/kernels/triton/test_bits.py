"""Triton kernels in the interpreter give the bits of the torch kernels: whole messages, and one tensor at a time."""

import pytest
import torch

from gradwire.codecs import CODECS
from gradwire.codecs.base import new_total
from gradwire.exchanges.plan import Run, encode_part, one_shot_, plan, two_shot_
from gradwire.spec import build
from tests.kernels.test_kernels import SUMS, reduced, same_values, same_wires, samples

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy warns of inf and NaN

VARIANTS = [
    *CODECS,
    "int8:block=32",
    "int8:block=4096",
    "int8:rounding=stochastic,seed=8589934599",
    "fp8:block=8",
    "sign:block=8",
    "sign:block=1024",
    "topk:ratio=0.1,block=64",
    "topk:ratio=1,block=16",
    "int4:block=8",
    "int4:block=256",
    "int4:block=512",
    "int4:codebook=uniform",
    "int5:codebook=lloyd",
    "int3:codebook=lloyd,hadamard=128",
    "int2:hadamard=256",
    "int4:hadamard=64,block=32",
    "int6:rounding=stochastic,seed=3",
    "int4:rounding=stochastic,hadamard=256,seed=-5",
    "int2:rounding=stochastic,seed=8589934599",
]
SIZE, RANK = 3, 1
EXEMPT = torch.tensor([1.0, -0.0, torch.inf, torch.nan, 1e-42])


class Scripted:
    """The collectives of rank 1 of 3. What it sends is kept, and what it receives was made with the torch kernels."""

    rank, size = RANK, SIZE

    def __init__(self, codec, split, others):
        self.codec, self.split, self.others, self.sent = codec, split, others, []

    def rows(self, numel, dtype, device):
        return torch.zeros((SIZE, numel), dtype=dtype)

    def _made(self, rank, part):
        wire = torch.zeros(self.split.wire_bytes, dtype=torch.uint8)
        encode_part(self.codec, self.others[rank], self.split.parts[part], wire)
        return wire

    def all_gather_(self, rows):
        self.sent.append(rows[RANK].clone())
        for rank in (0, 2):
            rows[rank] = self._made(rank, rank if len(self.split.parts) > 1 else 0)
        return rows

    def all_to_all(self, wires):
        self.sent += [wires[0].clone(), wires[2].clone()]
        return torch.stack([self._made(rank, RANK) for rank in range(SIZE)])


def message(codec, turn, dtype=torch.float32):
    """Values of three ranks. Every kind of gradient with a corner of its own is a tensor, of 1 value to 2 programs."""
    program = 16 * codec.block if hasattr(codec, "grid") else 4096
    sizes = 1, codec.align + 3, program + codec.align + 5
    names = list(samples(1))
    numels = [sizes[(i + turn) % 3] for i in range(len(names))]
    flats = []
    for rank in range(SIZE):
        kinds = names[rank * 4 :] + names[: rank * 4]
        values = [samples(numel)[kind] for numel, kind in zip(numels, kinds, strict=True)]
        flats.append(torch.cat([*values[:7], EXEMPT.roll(rank), *values[7:]]).to(dtype))
    runs = [Run(numel, False) for numel in numels]
    return flats, (*runs[:7], Run(len(EXEMPT), True), *runs[7:])


def exchanged(codec, flats, split, residual):
    """What rank 1 sends, and the mean and the residual that it ends with."""
    comm, flat = Scripted(codec, split, flats), flats[RANK].clone()
    left = torch.full((flat.numel(),), 7.0) if residual else None
    (one_shot_ if len(split.parts) == 1 else two_shot_)(flat, split, codec, comm, left)
    return comm.sent, flat, left


def assert_same_messages(codec, split, messages):
    """Piece by piece: a NaN may have any bits."""
    parts = split.parts if len(split.parts) == 1 else [split.parts[0], split.parts[2], split.parts[RANK]]
    for part, wires in zip(parts, zip(*messages, strict=True), strict=True):
        for piece in part.pieces:
            pair = [wire[piece.at : piece.at + piece.wire_bytes] for wire in wires]
            assert same_wires(codec, pair, piece.numel), piece
        raw = [wire[part.exempt_at :][: 4 * part.exempt_numel].view(torch.float32) for wire in wires]
        assert same_values(*raw)


@pytest.mark.parametrize("spec", VARIANTS)
@pytest.mark.parametrize("shots", [1, SIZE], ids=["one-shot", "two-shot"])
@pytest.mark.parametrize(
    ("dtype", "residual"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=["fp32", "fp32 with feedback", "bf16", "fp16"],
)
def test_messages(spec, shots, dtype, residual, both):
    """With feedback, 16-bit gradients are worked on in float32."""
    codec, turn = build("codec", spec, CODECS), VARIANTS.index(spec)
    flats, runs = message(codec, turn + shots, dtype)
    split = plan(runs, shots, codec)
    (sent, mean, left), (wanted, wanted_mean, wanted_left) = both(lambda: exchanged(codec, flats, split, residual))
    assert_same_messages(codec, split, (sent, wanted))
    assert same_values(mean.float(), wanted_mean.float())
    assert left is None or same_values(left, wanted_left)
    assert not wanted_mean.isfinite().all()
    assert wanted_mean.isfinite().any()


@pytest.mark.parametrize("spec", VARIANTS)
def test_padding_is_written(spec, both):
    """Where no NaN is about, all bytes are equal, and what lay in memory before does not travel."""
    codec = build("codec", spec, CODECS)
    runs = tuple(Run(numel, False) for numel in (1, 3, codec.align + 1, codec.align + 2))
    flat, whole = torch.randn(sum(run.numel for run in runs)), plan(runs, 1, codec)

    class Dirty(Scripted):
        def rows(self, numel, dtype, device):
            return torch.full((SIZE, numel), 77, dtype=dtype)

        def all_gather_(self, rows):
            self.sent.append(rows[RANK].clone())
            return rows.copy_(rows[RANK].clone())

    def send():
        comm = Dirty(codec, whole, [])
        one_shot_(flat.clone(), whole, codec, comm)
        return comm.sent[0]

    assert torch.equal(*both(send))


@pytest.mark.parametrize("spec", VARIANTS)
def test_single_tensors(spec, both):
    """The functions of `kernels/torch` one by one, on rows that lie apart in memory."""
    codec = build("codec", spec, CODECS)
    numel, kinds = codec.align + 3, SUMS[0]
    table = torch.zeros((SIZE, codec.wire_bytes(numel) + 8), dtype=torch.uint8)
    for row, kind in zip(table, kinds, strict=True):
        codec.encode(samples(numel)[kind], out=row[4:-4])
    wires, own = table[:, 4:-4], samples(numel)["half empty"]
    for dtype in (torch.float32, torch.bfloat16):
        assert same_wires(codec, both(lambda d=dtype: codec.encode(own.to(d))), numel)
        start = torch.linspace(-1, 1, numel).to(dtype)
        outs = both(lambda s=start: codec.decode_(s.clone(), wires[1], alpha=1 / 3, add=True))
        assert same_values(*(out.float() for out in outs))
        sums = both(lambda d=dtype: codec.sum_(torch.empty(numel, dtype=d), wires, 1 / 3))
        assert same_values(*(out.float() for out in sums))
        assert same_wires(codec, both(lambda d=dtype: reduced(codec, own.to(d), wires, 2)), numel)
    assert new_total(own).dtype == torch.float32


def test_every_half(both):
    """All 65,536 patterns of 16 bits, both ways."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for name in ("fp16", "bf16"):
        codec = build("codec", name, CODECS)
        wire = torch.zeros(codec.wire_bytes(65536), dtype=torch.uint8)
        wire[wire.numel() - 2 * 65536 :] = patterns.view(torch.uint8)
        if name == "fp16":
            wire[:4] = torch.ones(1).view(torch.uint8)
        values = both(lambda c=codec, w=wire: c.decode_(torch.empty(65536), w))
        assert same_values(*values)
        assert same_wires(codec, both(lambda c=codec, v=values[0]: c.encode(v)), 65536)
