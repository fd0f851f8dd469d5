"""Every exchange by name, and `exchange()`, which makes one from its spec."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from gradwire import codecs
from gradwire.codecs import CODECS
from gradwire.errors import SpecError
from gradwire.exchanges.base import Comm, Exchange
from gradwire.exchanges.bucket import Bucket, make_bucket
from gradwire.exchanges.coded import Coded
from gradwire.exchanges.exact import Exact, Noop
from gradwire.exchanges.low_rank import LowRank
from gradwire.exchanges.two_level import TwoLevel
from gradwire.plugins import Plugins, load
from gradwire.spec import NestedSpec, build, option_types, read

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
    "registered",
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


def _two_level(
    *, inside: NestedSpec | None = None, across: NestedSpec | None = None, node: int | None = None
) -> Exchange:
    """`two_level(inside=exact, across=int4(block=32))`; by default `exact` inside and `int8` across."""
    return TwoLevel(exchange(inside or "exact"), exchange(across or "int8"), node)


POLICIES: Mapping[str, Callable[..., Exchange]] = MappingProxyType({"two_level": _two_level})
"""Exchanges made of exchanges."""


def registered() -> dict[str, Callable[..., Exchange]]:
    """Every exchange by name, with those of other packages.

    Returns:
        By name, what makes the exchange from the options of its spec.

    Examples:
        >>> sorted(gradwire.exchanges.registered())
    """
    coded = {name: _coded(codec) for name, codec in codecs.plugins().classes.items()}
    return {**EXCHANGES, **POLICIES, **coded, **_plugins().classes}


def _plugins() -> Plugins:
    return load("gradwire.exchanges", Exchange, frozenset({*EXCHANGES, *POLICIES, "auto"}))


def exchange(spec: str | Exchange, **options: object) -> Exchange:
    """The exchange that a spec names.

    Args:
        spec: Text such as `"int4:block=32"`; or an exchange object, which is returned as it is.
        options: Options of the spec as keywords; they take precedence over those in the text.

    Returns:
        A frozen object; equal specs make equal objects.

    Raises:
        SpecError: For an unknown name or option, a value that an option cannot take, or a broken plug-in. The message
            points at the character.

    Examples:
        >>> gradwire.exchange("int4", block=32)
    """
    if isinstance(spec, str):
        name = read(spec).name
        if name == "auto":
            raise SpecError("auto chooses a hook for a model: use it as gradwire.register(model, 'auto'), nowhere else")
        for found in (codecs.plugins(), _plugins()):
            found.check(str(name))
        return build("hook", spec, registered(), options)
    if not isinstance(spec, Exchange):
        raise SpecError(f"a hook is a spec such as 'fp16' or an exchange object, got {type(spec).__name__}")
    if options:
        raise SpecError(f"options ({', '.join(options)}) go with a spec; this exchange object is {spec} already")
    return spec
