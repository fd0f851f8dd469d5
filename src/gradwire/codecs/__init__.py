"""Every codec by name. A line here adds a hook and its contract tests; other packages add theirs as plug-ins."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs.base import Codec
from gradwire.codecs.bf16 import BF16
from gradwire.codecs.fp8 import FP8
from gradwire.codecs.fp16 import FP16
from gradwire.codecs.int8 import Int8
from gradwire.codecs.levels import Int2, Int3, Int4, Int5, Int6
from gradwire.codecs.sign import Sign
from gradwire.codecs.topk import TopK
from gradwire.errors import SpecError
from gradwire.plugins import Plugins, load
from gradwire.spec import build, read

CODECS: Mapping[str, Any] = MappingProxyType(
    {codec.name: codec for codec in (FP16, BF16, FP8, Int8, Int6, Int5, Int4, Int3, Int2, Sign, TopK)}
)

__all__ = [
    "BF16",
    "CODECS",
    "Codec",
    "FP8",
    "FP16",
    "Int2",
    "Int3",
    "Int4",
    "Int5",
    "Int6",
    "Int8",
    "NamedCodec",
    "Sign",
    "TopK",
    "codec",
]


class NamedCodec:
    """A codec for use outside a hook: any floating tensor to bytes, and back.

    Examples:
        >>> codec = gradwire.codec("int4")
        >>> codec.wire_bytes(1_000_000)
    """

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    def encode(self, tensor: Tensor) -> Tensor:
        """The bytes of a tensor of any shape, as a flat uint8 tensor."""
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise SpecError(f"{self.inner.name}: encode takes a tensor of a floating type, got {what}")
        if tensor.layout != torch.strided:
            raise SpecError(f"{self.inner.name}: encode takes a dense tensor, got {tensor.layout}; use to_dense()")
        return self.inner.encode(tensor.detach().reshape(-1).float().contiguous())

    def decode(self, wire: Tensor, numel: int) -> Tensor:
        """The `numel` values on the wire, flat and float32."""
        return self.inner.decode(wire, self._count(numel))

    def wire_bytes(self, numel: int) -> int:
        """How many bytes `encode` makes of so many values."""
        return self.inner.wire_bytes(self._count(numel))

    def _count(self, numel: int) -> int:
        if not isinstance(numel, int) or numel < 0:
            raise SpecError(f"{self.inner.name}: numel must be a whole number of at least 0, got {numel!r}")
        return numel

    def __repr__(self) -> str:
        return f"<gradwire codec {self.inner}>"


def codec(spec: str, **options: object) -> NamedCodec:
    """A codec by its spec, for use without a hook.

    Args:
        spec: The codec, such as `"int4"` or `"int8:block=128"`.
        options: Options of the spec as keywords.

    Returns:
        A codec for tensors of any floating type and shape.

    Raises:
        SpecError: If the spec names no codec, or an option that it does not have.

    Examples:
        >>> codec = gradwire.codec("int4")
        >>> wire = codec.encode(tensor)
        >>> values = codec.decode(wire, tensor.numel())
    """
    kernels.load()
    found = plugins()
    found.check(str(read(spec).name))
    return NamedCodec(build("codec", spec, {**CODECS, **found.classes}, options))


def plugins() -> Plugins:
    """The codecs of other packages."""
    return load("gradwire.codecs", Codec, frozenset(CODECS))
