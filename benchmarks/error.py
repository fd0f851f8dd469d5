"""What codecs lose of real gradients, against their bits and against theory: two tables and a plot.

    python benchmarks/error.py                # writes benchmarks/results/error.md and error.svg, in about 2 minutes

1. The built-in GPT is trained in one process. At three of its steps, 8 simulated workers take the gradient of the same
   model, each on its own batch.
2. Every worker's tensors are encoded one by one, decoded, and averaged in float32: that is one-shot. Two-shot encodes
   and decodes the average once more. Codecs of few bits leave 1-D tensors and tensors under 1024 values exact, as hooks
   do.
3. `vNMSE` is |mean_hat - mean|^2 / |mean|^2 over the whole gradient; `per tensor` is the mean of the same over the
   tensors that were encoded; `NMSE` is what one encoding loses of one worker's gradient. All are geometric means over
   the steps.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire import kernels
from gradwire.bench.workload import Workload, WorkloadSettings
from gradwire.codecs import CODECS, decode
from gradwire.spec import build

RESULTS = Path(__file__).parent / "results"
WORKERS, TRAINED_ON = 8, 2
STEPS = (5, 60, 240)
SMALL = 1024
"""Tensors with fewer values are exempt from codecs of few bits, and so are 1-D tensors."""
VARIANTS = (
    *(f"int{bits}:codebook=lloyd" for bits in (3, 4, 5)),
    *(f"int{bits}:codebook=uniform" for bits in (2, 3, 4, 5)),
    *(f"int{bits}:hadamard={group}" for bits in (2, 3, 4) for group in (64, 128, 256)),
)
"""Besides the defaults; int2's default is its Lloyd-Max codebook."""
LLOYD_MAX = {
    "sign:block=256": 0.3634,
    "int2:codebook=lloyd,block=256": 0.1175,
    "int3:codebook=lloyd,block=256": 0.03454,
    "int4:codebook=lloyd,block=256": 0.009497,
    "int5:codebook=lloyd,block=256": 0.002499,
}
"""The least NMSE of 2**bits levels on normal values. Blocks of 256, so that the scale is known well."""
WITHIN = 0.02
GOALS = {("int8", "two"): 1e-4, ("int4", "two"): 1.2e-2, ("int4", "two_t"): 1.5e-2}
"""At most so much error, by scheme and column."""


def main() -> None:
    """Train, measure, print and write."""
    args = parse_args()
    torch.set_num_threads(1)  # the same sums on every machine
    kernels.load()
    settings = WorkloadSettings()
    snapshots = gradients(settings, args.steps, args.workers)
    rows = []
    for scheme in schemes():
        rows.append(measured(scheme, snapshots))
        print(f"{scheme.name}: NMSE {rows[-1].single:.2e}", file=sys.stderr, flush=True)
    result = page(described(settings, args.steps, snapshots), rows, normal_rows(args.normal))
    print(result)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "error.md").write_text(result)
    (args.out / "error.svg").write_text(plot([row.point() for row in rows]))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS), help="steps whose gradients are taken")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--normal", type=int, default=4_194_304, help="normal values, for the comparison with theory")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for error.md and error.svg")
    return parser.parse_args()


# -- real gradients --------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One tensor's place in a flat gradient."""

    start: int
    stop: int
    exempt: bool
    """A codec of few bits leaves it alone."""


class Snapshot(NamedTuple):
    """All workers' gradients at one step."""

    flats: Tensor
    """(workers, numel) float32."""
    parts: tuple[Part, ...]

    def kappa(self) -> float:
        """Sum of |gradient|^2 over workers^2 * |mean|^2: an error D of each makes D * kappa of the mean."""
        return float(self.flats.pow(2).sum() / self.flats.mean(0).pow(2).sum() / len(self.flats) ** 2)


def gradients(settings: WorkloadSettings, steps: Sequence[int], workers: int) -> list[Snapshot]:
    """Train on the first workers' batches; every worker's gradient at each of `steps`."""
    loads = [Workload(settings, seed=0, rank=rank, size=workers) for rank in range(workers)]
    model = loads[0].model()
    optimizer = loads[0].optimizer(model)
    found = []
    for step in range(max(steps) + 1):
        taking = step in steps
        flats = torch.stack([gradient(load, model, step) for load in loads[: workers if taking else TRAINED_ON]])
        if taking:
            found.append(Snapshot(flats, parts_of(model)))
        apply(model, flats[:TRAINED_ON].mean(0), optimizer, loads[0].learning_rate(step))
    return found


def gradient(load: Workload, model: nn.Module, step: int) -> Tensor:
    """One worker's gradient, flat."""
    grads = torch.autograd.grad(load.loss(model, load.batch(step)), list(model.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


def apply(model: nn.Module, flat: Tensor, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """One step of the optimizer."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for param, part in zip(model.parameters(), parts_of(model), strict=True):
        param.grad = flat[part.start : part.stop].view_as(param)
    optimizer.step()


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """Where each parameter lies in the flat gradient."""
    parts, at = [], 0
    for param in model.parameters():
        parts.append(Part(at, at + param.numel(), param.dim() <= 1 or param.numel() < SMALL))
        at += param.numel()
    return tuple(parts)


# -- schemes: ours, and emulations of others' ------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A way to send values."""

    name: str
    through: Callable[[Tensor], Tensor]
    """A flat tensor as it comes out at the other end."""
    wire_bytes: Callable[[int], int]
    kind: str = "default"
    """`default`, `variant` or `emulated`."""
    few_bits: bool = False
    """Leaves exempt tensors exact."""
    whole: bool = False
    """Takes the whole gradient at once, not tensor by tensor."""

    def skips(self, part: Part) -> bool:
        """Whether a tensor is left exact."""
        return self.few_bits and part.exempt

    def sent(self, flat: Tensor, parts: Sequence[Part]) -> Tensor:
        """A whole gradient as it comes out at the other end."""
        if self.whole:
            return self.through(flat)
        out = flat.clone()
        for part in parts:
            if not self.skips(part):
                out[part.start : part.stop] = self.through(flat[part.start : part.stop])
        return out


def schemes() -> list[Scheme]:
    """Every row of the table."""
    ours = [coded(name, "default") for name in CODECS] + [coded(spec, "variant") for spec in VARIANTS]
    return [
        *ours,
        Scheme("MXFP8 e4m3 (emulated)", mxfp8, lambda numel: 33 * math.ceil(numel / 32), "emulated"),
        Scheme("MXFP4 e2m1 (emulated)", mxfp4, lambda numel: 17 * math.ceil(numel / 32), "emulated", few_bits=True),
        Scheme("torch int8 per tensor (emulated)", one_scale, lambda numel: numel + 8, "emulated", whole=True),
    ]


def coded(spec: str, kind: str) -> Scheme:
    """One of gradwire's codecs."""
    codec = build("codec", spec, CODECS)
    few_bits = getattr(codec, "few_bits", False)
    return Scheme(spec, lambda flat: decode(codec, codec.encode(flat), flat.numel()), codec.wire_bytes, kind, few_bits)


def mxfp8(flat: Tensor) -> Tensor:
    """OCP MXFP8: e4m3 under a power of two for every 32 values, saturating."""
    return microscaled(flat, 8, lambda x: x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float())


def mxfp4(flat: Tensor) -> Tensor:
    """OCP MXFP4: e2m1 under a power of two for every 32 values, saturating."""
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    borders = (levels[1:] + levels[:-1]) / 2
    return microscaled(flat, 2, lambda x: levels[torch.bucketize(x.abs(), borders)].copysign(x))


def microscaled(flat: Tensor, exponent: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Round blocks of 32 under the scale that OCP prescribes: the largest value's binade goes to 2**exponent."""
    blocks = nn.functional.pad(flat, (0, -flat.numel() % 32)).view(-1, 32)
    top = blocks.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(top)) - exponent)
    return (rounded(blocks / scale) * scale).view(-1)[: flat.numel()]


def one_scale(flat: Tensor) -> Tensor:
    """What torch's quantization_pertensor_hook does: 256 even steps from the least value to the largest."""
    low, high = flat.min().clamp_max(0.0), flat.max().clamp_min(0.0)
    scale = ((high - low) / 255).clamp_min(torch.finfo(torch.float32).eps)
    zero = (-torch.round(low / scale)).clamp(0, 255)
    return (torch.clamp(torch.round(flat / scale) + zero, 0, 255) - zero) * scale


# -- errors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A scheme and its errors, as in the table."""

    scheme: Scheme
    bits: float
    one: float
    one_t: float
    two: float
    two_t: float
    single: float

    def point(self) -> tuple[str, str, float, float]:
        """What the plot shows of it."""
        return self.scheme.name.removesuffix(" (emulated)"), self.scheme.kind, self.bits, self.single

    def missed(self) -> list[str]:
        """The goals it does not reach; empty if it reaches all, or has none."""
        wanted = {column: limit for (name, column), limit in GOALS.items() if name == self.scheme.name}
        return [f"{limit:.1e}" for column, limit in wanted.items() if getattr(self, column) > limit]


def measured(scheme: Scheme, snapshots: Sequence[Snapshot]) -> Row:
    """All errors of a scheme, as geometric means over the snapshots."""
    columns = zip(*(errors(scheme, snapshot) for snapshot in snapshots), strict=True)
    means = [math.exp(sum(math.log(max(value, 1e-30)) for value in column) / len(column)) for column in columns]
    return Row(scheme, bits(scheme, snapshots[0].parts), *means)


def errors(scheme: Scheme, snapshot: Snapshot) -> tuple[float, ...]:
    """One-shot vNMSE and per tensor, two-shot vNMSE and per tensor, and the NMSE of one encoding of one gradient."""
    flats, parts = snapshot
    mean, one = flats.mean(0), torch.zeros_like(flats[0])
    for flat in flats:
        one += scheme.sent(flat, parts) / len(flats)
    two = scheme.sent(one, parts)
    coded_parts = [part for part in parts if not scheme.skips(part)]
    both = [value for hat in (one, two) for value in (nmse(hat, mean), per_tensor(hat, mean, coded_parts))]
    return *both, encoded_only(scheme.sent(flats[0], parts), flats[0], parts)


def nmse(hat: Tensor, exact: Tensor) -> float:
    """|hat - exact|^2 / |exact|^2; 0 if both are 0."""
    lost = (hat - exact).double().pow(2).sum()
    return float(lost / exact.double().pow(2).sum()) if lost else 0.0


def per_tensor(hat: Tensor, exact: Tensor, parts: Sequence[Part]) -> float:
    """The mean of the tensors' own NMSE."""
    each = [nmse(hat[part.start : part.stop], exact[part.start : part.stop]) for part in parts]
    return sum(each) / len(each)


def encoded_only(hat: Tensor, exact: Tensor, parts: Sequence[Part]) -> float:
    """NMSE over the tensors that no scheme exempts, so that all points of the plot are about the same values."""
    kept = [slice(part.start, part.stop) for part in parts if not part.exempt]
    return nmse(torch.cat([hat[where] for where in kept]), torch.cat([exact[where] for where in kept]))


def bits(scheme: Scheme, parts: Sequence[Part]) -> float:
    """Bits a value on the wire, of what is encoded."""
    sizes = [part.stop - part.start for part in parts if not scheme.skips(part)]
    sizes = [sum(sizes)] if scheme.whole else sizes
    return 8 * sum(map(scheme.wire_bytes, sizes)) / sum(sizes)


def normal_rows(numel: int) -> list[list[str]]:
    """Theory against practice on normal values."""
    values, rows = torch.randn(numel, generator=torch.Generator().manual_seed(0)), []
    for spec, theory in LLOYD_MAX.items():
        lost = nmse(coded(spec, "default").through(values), values)
        goal = "met" if abs(lost / theory - 1) <= WITHIN else "MISSED"
        rows.append([spec, f"{lost:.5f}", f"{theory:.5f}", f"{lost / theory:.3f}", goal])
    return rows


# -- the page --------------------------------------------------------------------------------------------------------


HEADER = ("codec", "bits", "1-shot vNMSE", "per tensor", "2-shot vNMSE", "per tensor", "NMSE", "goal")
PAGE = """# What codecs lose of real gradients

Made by `benchmarks/error.py`, which says how.

{about}

`bits` and `per tensor` are over the tensors that are encoded, `vNMSE` is over all. `NMSE` is one encoding of one
worker's gradient, over the tensors that no codec leaves exact.
The goals, for two-shot: {goals}.

{gradients}

![Bits against error](error.svg)

## Normal values, against theory

The best 2^bits levels for normal values (Lloyd-Max) against ours, with blocks of 256 so that the scale is known well.
The goal is to be within {within:.0%}. A ratio just under 1 is no mistake: theory has one scale, a block has its own.

{normal}
"""


def page(about: str, rows: Iterable[Row], normal: Iterable[Sequence[str]]) -> str:
    """error.md."""
    names = {"two": "vNMSE", "two_t": "per tensor"}
    return PAGE.format(
        about=about,
        goals=", ".join(f"{name} {names[column]} <= {limit:.1e}" for (name, column), limit in GOALS.items()),
        gradients=table(HEADER, map(cells, rows)),
        within=WITHIN,
        normal=table(("codec", "NMSE", "Lloyd-Max", "ratio", "goal"), normal),
    )


def described(settings: WorkloadSettings, steps: Sequence[int], snapshots: Sequence[Snapshot]) -> str:
    """Whose gradients these are."""
    flats, parts = snapshots[0]
    exempt = sum(part.stop - part.start for part in parts if part.exempt) / flats.shape[1]
    kappas = ", ".join(f"{snapshot.kappa():.2f}" for snapshot in snapshots)
    return textwrap.fill(
        f"A GPT of {flats.shape[1] / 1e6:.1f}M parameters ({settings.layers} layers of {settings.width}), AdamW, "
        f"{len(flats)} workers with {settings.batch} windows of {settings.context} bytes each, gradients at steps "
        f"{', '.join(map(str, steps))} (kappa = sum |x|^2 / (workers^2 |mean|^2) = {kappas}). "
        f"Codecs of few bits leave {exempt:.2%} of the values exact.",
        width=120,
    )


def cells(row: Row) -> list[str]:
    """A row of the table."""
    has_goal = any(name == row.scheme.name for name, _ in GOALS)
    missed = row.missed()
    goal = f"MISSED {', '.join(missed)}" if missed else "met" if has_goal else ""
    values = (row.one, row.one_t, row.two, row.two_t, row.single)
    return [row.scheme.name, f"{row.bits:.2f}", *(f"{value:.1e}" for value in values), goal]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, aligned for those who read it as text: words to the left, numbers to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<", *">" * (len(header) - 2), "<"]
    texts = [[f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)] for line in lines]
    rule = ["-" * (width - 1) + (":" if side == ">" else "-") for side, width in zip(sides, widths, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [texts[0], rule, *texts[1:]])


# -- the plot --------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 960, 600
LEFT, RIGHT, TOP, BOTTOM = 90, 30, 56, 70
MAX_BITS, DECADES = 17, 10
STYLES = {
    "variant": ("#b9bec7", 3.5, "gradwire, other codebooks and rotations"),
    "emulated": ("#d9722e", 5.5, "others, emulated"),
    "default": ("#2563c9", 5.5, "gradwire, defaults"),
}
"""Colour, radius and legend by kind, in the order they are drawn."""
FONT = 13
Box = tuple[float, float, float, float]
Point = tuple[str, str, float, float]


def x_of(bits: float) -> float:
    """Pixels from the left."""
    return LEFT + bits / MAX_BITS * (WIDTH - LEFT - RIGHT)


def y_of(error: float) -> float:
    """Pixels from the top; the axis is logarithmic."""
    return TOP - math.log10(error) / DECADES * (HEIGHT - TOP - BOTTOM)


def plot(points: Sequence[Point]) -> str:
    """Bits against NMSE as an SVG, with the rate-distortion limit drawn in. A point is (name, kind, bits, error)."""
    shown = [point for kind in STYLES for point in points if point[1] == kind]
    marks = [
        f'<circle cx="{x_of(bits):.1f}" cy="{y_of(error):.1f}" r="{STYLES[kind][1]}" fill="{STYLES[kind][0]}">'
        f"<title>{escape(name)}: {bits:.2f} bits, NMSE {error:.2e}</title></circle>"
        for name, kind, bits, error in shown
    ]
    style = f'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="{FONT}" fill="#1f2937"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    back = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fcfcfd"/>'
    return "\n".join([head, back, *axes(), *limit(), *marks, *labels(shown), *legend(), "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(words)}</text>'


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    """A straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'


def axes() -> list[str]:
    """Grid, ticks and titles."""
    low, right, parts = y_of(10.0**-DECADES), WIDTH - RIGHT, []
    for bits in range(MAX_BITS + 1):
        parts.append(stroke(x_of(bits), TOP, x_of(bits), low, "#e8eaee"))
        parts.append(text(x_of(bits), low + 20, str(bits), "middle"))
    for decade in range(DECADES + 1):
        y = y_of(10.0**-decade)
        parts += [
            stroke(LEFT, y, right, y, "#e8eaee"),
            text(LEFT - 10, y + 4, f"1e-{decade}" if decade else "1", "end"),
        ]
    parts += [stroke(LEFT, TOP, LEFT, low, "#6b7280"), stroke(LEFT, low, right, low, "#6b7280")]
    parts.append(text((LEFT + right) / 2, HEIGHT - 22, "on the wire, scales included (bits a value)", "middle"))
    middle = (TOP + low) / 2
    turned = f'transform="rotate(-90 24 {middle:.1f})"'
    return [*parts, text(24, middle, "error of one encoding (NMSE: |error|^2 / |gradient|^2)", "middle", turned)]


def limit() -> list[str]:
    """2**(-2 bits), as far as the axes go, and what it is."""
    end = min(MAX_BITS, DECADES / math.log10(4))
    words = ("least possible for normal values", "of one variance: 2^(-2 bits)")
    at = x_of(8.6), y_of(4**-9.6)
    notes = [text(at[0], at[1] + 17 * i, line, "end", 'fill="#a11d33"') for i, line in enumerate(words)]
    return [stroke(x_of(0), y_of(1), x_of(end), y_of(4**-end), "#a11d33", 1.6), *notes]


def legend() -> list[str]:
    """What the colours mean, in one line above the plot."""
    parts, x = [], LEFT + 6.0
    for colour, radius, words in reversed(STYLES.values()):
        parts += [f'<circle cx="{x:.1f}" cy="26" r="{radius}" fill="{colour}"/>', text(x + 12, 30, words)]
        x += 44 + 7.6 * len(words)
    return parts


def labels(points: Sequence[Point]) -> list[str]:
    """Names beside their points, each at the first place where it covers no point, line or other name."""
    taken = [around(x_of(bits), y_of(error), 6) for _, _, bits, error in points]
    taken += [around(x_of(i / 20), y_of(4 ** -(i / 20)), 3) for i in range(20 * MAX_BITS)]
    parts = []
    for name, kind, bits, error in reversed(points):  # gradwire's own choose first
        if kind != "variant":
            x, y, box = place(x_of(bits), y_of(error), 7.9 * len(name), taken)
            taken.append(box)
            parts.append(text(x, y, name))
    return parts


def place(x: float, y: float, width: float, taken: Sequence[Box]) -> tuple[float, float, Box]:
    """Where words beside (x, y) start, and the box they fill. The first place is used if none is free."""
    sides = [(x + 10, y + 5 + dy) for dy in (0, 4, -4)]
    sides += [(x - 10 - width, y + 5), (x - width / 2, y - 11), (x - width / 2, y + 21)]
    sides += [(at, y + 5 + dy) for dy in (-14, 14, -24, 24, -34, 34) for at in (x + 8, x - 8 - width)]
    boxes = [(at, base - FONT + 2, at + width, base + 3) for at, base in sides]
    free = [i for i, box in enumerate(boxes) if box[0] > LEFT and not any(overlap(box, other) for other in taken)]
    best = free[0] if free else 0
    return *sides[best], boxes[best]


def around(x: float, y: float, radius: float) -> Box:
    """The square about a point: left, top, right, bottom."""
    return x - radius, y - radius, x + radius, y + radius


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share any area."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


if __name__ == "__main__":
    main()
