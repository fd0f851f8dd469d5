"""References: the result that an exchange must give, calculated slowly and obviously from the gradients of all ranks.

A reference knows nothing of chunks, lanes, wire layouts or fused kernels. It encodes and decodes each piece with the
codec and adds up in the order that the exchange documents. Where the arithmetic is the same the bits must be the same;
elsewhere `Reference.tolerance` states how far a value may be off. `gradwire.testing` and `Hook.verify()` compare with
it, because a worst-case bound alone is no check: for codecs of 3 bits and fewer, a result of zeros is within the bound.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.base import Codec
from gradwire.exchanges.bucket import Bucket

GAIN = 0.002
"""The relative error that the whole result may have along itself, or in its sum, besides independent rounding."""
SIGMAS = 6.0


@dataclass(frozen=True, slots=True)
class Reference:
    """What `Exchange.mean_` must give for the gradients of all ranks."""

    mean: Tensor
    """The result, the same on all ranks."""
    tolerance: Tensor
    """How far each value of the result, or of a residual, may be off: like `mean`, or a single number."""
    residuals: tuple[Tensor, ...] | None = None
    """The residual of each rank afterwards; None without feedback."""

    def difference(self, result: Tensor) -> str:
        """Say where `result` is not the mean; empty if it is.

        Besides the tolerance for each value, the errors of all values together must be unbiased. Errors of rounding are
        independent of each other; a wrong factor, or rounding that prefers one direction, is not.
        """
        if text := _outside(result, self.mean, self.tolerance):
            return text
        fine = torch.isfinite(self.mean)
        wanted = self.mean.double()[fine]
        error = result.double()[fine] - wanted
        for weight, what in ((wanted, "a wrong factor"), (torch.ones_like(wanted), "a bias")):
            allowed = GAIN * (wanted * weight).abs().sum() + SIGMAS * (error * weight).norm()
            if (off := (error * weight).sum().abs()) > allowed:
                return f"the errors have {what}: their sum is {float(off):.3g}, allowed is {float(allowed):.3g}"
        return ""

    def residual_difference(self, rank: int, residual: Tensor | None) -> str:
        """Say where the residual of a rank is not what it must be; empty if it is."""
        if residual is None or self.residuals is None:
            return ""
        text = _outside(residual, self.residuals[rank], self.tolerance)
        return text and f"the residual of rank {rank}: {text}"


def _outside(got: Tensor, wanted: Tensor, tolerance: Tensor) -> str:
    if got.shape != wanted.shape:
        return f"{got.numel()} values instead of {wanted.numel()}"
    got, wanted = got.double(), wanted.double()
    wrong = torch.isfinite(got) != torch.isfinite(wanted)
    wrong |= torch.isfinite(wanted) & ~((got - wanted).abs() <= tolerance)
    if not wrong.any():
        return ""
    at = int(wrong.to(torch.uint8).argmax())
    return f"{int(wrong.sum())} of {got.numel()} values are wrong; value {at} is {got[at]:.9g}, not {wanted[at]:.9g}"


def join(parts: Sequence[Reference]) -> Reference:
    """The reference of a bucket from those of its chunks."""
    residuals = [part.residuals for part in parts]
    ranks = zip(*(residual for residual in residuals if residual is not None), strict=True)
    return Reference(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.tolerance.to(part.mean.device).expand(part.mean.shape) for part in parts]),
        None if residuals[0] is None else tuple(torch.cat(pieces) for pieces in ranks),
    )


# -- what the references of exchanges are made of ---------------------------------------------------------------------


def fed(bucket: Bucket, residual: Tensor | None) -> Tensor:
    """A rank's gradients and its residual: float64 for float64 gradients, else float32."""
    values = bucket.flat.clone() if bucket.flat.dtype == torch.float64 else bucket.flat.float()
    return values if residual is None else values + residual


def kept(mean: Tensor, before: Sequence[Tensor] | None, after: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The residuals: those from before if the mean is not finite, as the optimizer will skip the step."""
    if before is None:
        return None
    return tuple(residual.float() for residual in (after if torch.isfinite(mean).all() else before))


def backend_mean(values: Sequence[Tensor], dtype: torch.dtype) -> Reference:
    """Divide, then sum in `dtype`. The backend chooses the order, which makes a difference from three ranks on."""
    size = len(values)
    shares = torch.stack([value.div(size).to(dtype).double() for value in values])
    mean = shares.sum(0).to(dtype)
    off = torch.zeros(()) if size <= 2 else shares.abs().sum(0) * ((size - 1) * torch.finfo(dtype).eps)
    if size > 2 and values[0].dtype.itemsize < 4:
        off += torch.finfo(values[0].dtype).eps * mean.double().abs()
    return Reference(mean.to(values[0].dtype), off)


def exact_reference(buckets: Sequence[Bucket], residuals: Sequence[Tensor] | None) -> Reference:
    """The mean including the residuals, up to what the type of the gradients cannot represent."""
    dtype = buckets[0].flat.dtype
    totals = [fed(bucket, None if residuals is None else residuals[i]) for i, bucket in enumerate(buckets)]
    sent = [total.to(dtype) for total in totals]
    result = backend_mean(sent, dtype)
    left = [total - own for total, own in zip(totals, sent, strict=True)]
    return Reference(result.mean, result.tolerance, kept(result.mean, residuals, left))


def coded_mean(
    values: Sequence[Tensor], codecs: Sequence[Codec | None], owner: int | None
) -> tuple[Tensor, list[Tensor]]:
    """The mean of some values through a codec (None: float32 as it is), and what each rank's share has lost.

    One-shot (`owner` is None): the ranks' decoded values, in the order of the ranks. Two-shot: the owner's own values
    first, then the others' decoded ones; the owner encodes the mean.
    """
    size = len(values)
    wires = [None if rank == owner else _encoded(codecs[rank], x) for rank, x in enumerate(values)]
    lost = [x - _decoded(codecs[rank], x, wires[rank]) for rank, x in enumerate(values)]
    order = sorted(range(size), key=lambda rank: rank != owner)
    shares = [_decoded(codecs[rank], values[rank], wires[rank], 1.0 / size) for rank in order]
    mean = shares[0]
    for share in shares[1:]:
        mean = mean + share
    if owner is None:
        return mean, lost
    result = _decoded(codecs[owner], mean, _encoded(codecs[owner], mean))
    lost[owner] = (mean - result) * size
    return result, lost


def _encoded(codec: Codec | None, values: Tensor) -> Tensor | None:
    return None if codec is None else codec.encode(values.contiguous())


def _decoded(codec: Codec | None, values: Tensor, wire: Tensor | None, alpha: float = 1.0) -> Tensor:
    """`alpha` times what comes out of a wire, or the values themselves if there is none."""
    if codec is None or wire is None:
        return values * alpha
    return codec.decode_(torch.empty_like(values), wire, alpha=alpha)


def coded_message(
    values: Sequence[Tensor], numels: Sequence[int], exempt: Sequence[bool], codecs: Sequence[Codec], one_shot: bool
) -> tuple[Tensor, list[Tensor]]:
    """`coded_mean` of whole messages of runs with `numels` values each; exempt ones travel in float32.

    A block of the codec never holds values of two runs, and what is exempt loses nothing.
    """
    size, starts = len(values), list(itertools.accumulate(numels, initial=0))
    mean, lost = torch.zeros_like(values[0]), [torch.zeros_like(x) for x in values]
    for out in (False, True):
        chosen = [tensor for tensor, is_out in enumerate(exempt) if is_out == out]
        align = 1 if out else codecs[0].align
        for place, begin, numel, part in _dealt([numels[i] for i in chosen], align, 1 if one_shot else size):
            where = slice(starts[chosen[place]] + begin, starts[chosen[place]] + begin + numel)
            pieces = [x[where].float() if out else x[where] for x in values]
            result, gone = coded_mean(pieces, [None] * size if out else codecs, None if one_shot else part)
            mean[where] = result
            for own, piece in zip(lost, gone, strict=True):
                own[where] = 0 if out else piece
    return mean, lost


def _dealt(numels: Sequence[int], align: int, parts: int) -> Iterator[tuple[int, int, int, int]]:
    """Deal tensors out in whole blocks: (tensor, first value, values, part) for each piece.

    Block k of all tensors together belongs to part k // share; a tensor's last block may be shorter.
    """
    blocks = [-(-numel // align) for numel in numels]
    share, first = max(1, -(-sum(blocks) // parts)), 0
    for tensor, (numel, count) in enumerate(zip(numels, blocks, strict=True)):
        for part in range(first // share, -(-(first + count) // share)):
            begin, end = max(align * (share * part - first), 0), min(align * (share * (part + 1) - first), numel)
            if begin < end:
                yield tensor, begin, end - begin, part
        first += count
