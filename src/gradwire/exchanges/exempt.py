"""The option `exempt` of several exchanges: which tensors travel in float32."""

import os
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch import Tensor

from gradwire.errors import SpecError
from gradwire.exchanges.bucket import Segment
from gradwire.spec import is_one_value

SMALL = 1024
"""Tensors of fewer values are exempt under `auto`, like those of one dimension."""
PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


def check_pattern(name: str, exempt: str) -> None:
    """Raise SpecError for what cannot be a pattern inside a spec. `name` is the hook's."""
    if not is_one_value(exempt):
        raise SpecError(
            f"{name}: exempt is part of a spec, so commas are allowed only inside brackets, brackets must be balanced "
            f"or escaped, and there must be no blanks around it; got {exempt!r}"
        )
    try:
        re.compile(exempt)
    except re.error as error:
        raise SpecError(f"{name}: exempt must be auto, none or a pattern, got {exempt!r} ({error})") from None


def check_matches(name: str, exempt: str, params: Sequence[tuple[str, Tensor]]) -> None:
    """Raise SpecError if a pattern leaves nothing to compress; warn if it matches nothing."""
    if exempt in ("auto", "none") or not params:
        return
    found = [param for param, _ in params if re.search(exempt, param)]
    if len(found) == len(params):
        raise SpecError(
            f"{name}: exempt={exempt} matches all {len(params)} parameters; use the hook 'exact', or a narrower pattern"
        )
    if not found:
        names = ", ".join(param for param, _ in params[:5])
        message = f"{name}: exempt={exempt} matches none of the {len(params)} parameters ({names}, ...)"
        warnings.warn(message, stacklevel=_level_outside())


def _level_outside() -> int:
    """The `stacklevel` that makes a warning of the caller point at the nearest line outside of gradwire."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    return level


def is_exempt(exempt: str, segment: Segment) -> bool:
    """Whether a tensor travels in float32."""
    if exempt == "none":
        return False
    if exempt == "auto":
        return segment.param.dim() <= 1 or segment.param.numel() < SMALL
    return re.search(exempt, segment.name) is not None
