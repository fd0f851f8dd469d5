"""JSON for other programs: NaN and infinity, which JSON does not know, become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def to_json(content: Any, indent: int | None = 2) -> str:
    """Text that every reader of JSON takes."""
    return json.dumps(_known(content), indent=indent, allow_nan=False)


def _known(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _known(value) for key, value in content.items()}
    return [_known(value) for value in content] if isinstance(content, list | tuple) else content
