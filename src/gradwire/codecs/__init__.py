"""Every codec by name. Adding a line here adds a hook, its documentation row and its contract tests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gradwire.codecs.base import Codec, check_wire, decode
from gradwire.codecs.bf16 import BF16
from gradwire.codecs.fp16 import FP16

CODECS: Mapping[str, Any] = MappingProxyType({"fp16": FP16, "bf16": BF16})

__all__ = ["BF16", "CODECS", "FP16", "Codec", "check_wire", "decode"]
