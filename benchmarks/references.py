"""What `error.py` compares: real gradients, and the ways to send them, gradwire's and emulations of others'."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradwire.codecs import CODECS
from gradwire.spec import build
from gradwire.tools.workload import Workload, WorkloadSettings

TRAINED_ON = 2
REMEMBERED = 4
"""Steps before each snapshot whose gradients are kept too."""
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


# -- real gradients --------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One tensor's place in a flat gradient."""

    start: int
    stop: int
    exempt: bool
    """A codec of few bits leaves it alone."""
    name: str
    shape: torch.Size


class Snapshot(NamedTuple):
    """All workers' gradients at one step."""

    flats: Tensor
    """(workers, numel) float32."""
    parts: tuple[Part, ...]
    before: tuple[Tensor, ...]
    """The same as `flats` at the steps before, oldest first."""

    def kappa(self) -> float:
        """Sum of |gradient|^2 over workers^2 * |mean|^2: an error D of each makes D * kappa of the mean."""
        return float(self.flats.pow(2).sum() / self.flats.mean(0).pow(2).sum() / len(self.flats) ** 2)


def gradients(settings: WorkloadSettings, steps: Sequence[int], workers: int) -> list[Snapshot]:
    """Train on the first workers' batches; every worker's gradient at each of `steps`, and shortly before."""
    loads = [Workload(settings, seed=0, rank=rank, size=workers) for rank in range(workers)]
    model = loads[0].model()
    optimizer = loads[0].optimizer(model)
    found, before = [], deque[Tensor](maxlen=REMEMBERED)
    for step in range(max(steps) + 1):
        taking = any(wanted - REMEMBERED <= step <= wanted for wanted in steps)
        flats = torch.stack([gradient(load, model, step) for load in loads[: workers if taking else TRAINED_ON]])
        if step in steps:
            found.append(Snapshot(flats, parts_of(model), tuple(before)))
        before.append(flats)
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
    for name, param in model.named_parameters():
        exempt = param.dim() <= 1 or param.numel() < SMALL
        parts.append(Part(at, at + param.numel(), exempt, name, param.shape))
        at += param.numel()
    return tuple(parts)


def tensors(flat: Tensor, parts: Sequence[Part]) -> tuple[list[Tensor], list[str]]:
    """A flat gradient as tensors of their own shapes, and their names."""
    return [flat[part.start : part.stop].view(part.shape) for part in parts], [part.name for part in parts]


def few(parts: Sequence[Part]) -> list[Part]:
    """The tensors that codecs of few bits encode."""
    return [part for part in parts if not part.exempt]


def described(settings: WorkloadSettings, steps: Sequence[int], snapshots: Sequence[Snapshot]) -> str:
    """Whose gradients these are."""
    flats, parts, _ = snapshots[0]
    exempt = sum(part.stop - part.start for part in parts if part.exempt) / flats.shape[1]
    kappas = ", ".join(f"{snapshot.kappa():.2f}" for snapshot in snapshots)
    return (
        f"A GPT of {flats.shape[1] / 1e6:.1f}M parameters ({settings.layers} layers of {settings.width}), AdamW, "
        f"{len(flats)} workers with {settings.batch} windows of {settings.context} bytes each, gradients at steps "
        f"{', '.join(map(str, steps))} (kappa = sum |x|^2 / (workers^2 |mean|^2) = {kappas}). "
        f"Codecs of few bits leave {exempt:.2%} of the values exact."
    )


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
    few_bits = codec.exempts_small
    return Scheme(spec, lambda flat: codec.decode(codec.encode(flat), flat.numel()), codec.wire_bytes, kind, few_bits)


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
