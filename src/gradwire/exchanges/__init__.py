"""Every exchange by name, and `exchange()`, which makes one from its spec."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gradwire.codecs import CODECS
from gradwire.errors import SpecError
from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket, make_bucket
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.exact import Exact, Noop
from gradwire.exchanges.low_rank import LowRank
from gradwire.exchanges.two_level import TwoLevel
from gradwire.spec import build, option_types, read

__all__ = [
    "EXCHANGES",
    "POLICIES",
    "Bucket",
    "Coded",
    "Comm",
    "Exact",
    "Exchange",
    "LowRank",
    "Noop",
    "TwoLevel",
    "exchange",
    "make_bucket",
]


def _coded(codec: Any) -> Callable[..., Exchange]:
    """A factory whose options are the codec's and Coded's together."""
    own = {field.name for field in dataclasses.fields(codec)}

    def make(**options: Any) -> Exchange:
        inner = {key: options.pop(key) for key in own & options.keys()}
        return Coded(codec(**inner), **options)

    types = {**option_types(codec), **option_types(Coded)}
    types.pop("codec")
    keyword = inspect.Parameter.KEYWORD_ONLY
    make.__annotations__ = types
    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(key, keyword, annotation=kind) for key, kind in types.items()]
    )
    return make


EXCHANGES: Mapping[str, Callable[..., Exchange]] = MappingProxyType(
    {"exact": Exact, "noop": Noop, "powersgd": LowRank, **{name: _coded(codec) for name, codec in CODECS.items()}}
)


def _two_level(*, inside: str = "exact", across: str = "int8", node: int | None = None) -> Exchange:
    """Options of the parts are divided by semicolons: `across=int4:block=32;exempt=none`."""
    return TwoLevel(exchange(inside.replace(";", ",")), exchange(across.replace(";", ",")), node)


POLICIES: Mapping[str, Callable[..., Exchange]] = MappingProxyType({"two_level": _two_level})
"""Exchanges made of exchanges."""


def exchange(spec: str | Exchange, **options: object) -> Exchange:
    """The exchange that `spec` names, with `options` on top; an exchange object comes back as it is."""
    if isinstance(spec, str):
        if read(spec)[0] == "auto":
            raise SpecError("auto chooses a hook for a model: use it as gradwire.register(model, 'auto'), nowhere else")
        return build("hook", spec, {**EXCHANGES, **POLICIES}, options)
    if not isinstance(spec, Exchange):
        raise SpecError(f"a hook is a spec such as 'fp16' or an exchange object, got {type(spec).__name__}")
    if options:
        raise SpecError(f"options ({', '.join(options)}) go with a spec; this exchange object is {spec} already")
    return spec
