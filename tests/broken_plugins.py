"""What other packages may get wrong."""

from dataclasses import dataclass
from typing import ClassVar

import gradwire

NotAClass = 4


class Stranger:
    """Inherits from nothing."""


@dataclass(frozen=True)
class HalfCodec(gradwire.Codec):
    """Cannot decode."""

    name: ClassVar[str] = "half"
    bound = 1.0

    def encode(self, flat, out=None):
        return flat


@dataclass(frozen=True)
class HalfExchange(gradwire.Exchange):
    """Does not average."""

    name: ClassVar[str] = "empty"

    def bound(self, size):
        return 1.0
