"""Text <-> configuration: `"fp16:accumulate=wire"` names a thing and its options.

The grammar is `name[:key=value[,key=value ...]]`. `read` takes text apart, `write` puts it together again, and
`build` calls a factory from a registry with the options turned into the types its signature asks for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from gradwire.errors import SpecError, unknown

T = TypeVar("T")


def read(text: str) -> tuple[str, dict[str, str]]:
    """Split `"name:a=1,b=2"` into `("name", {"a": "1", "b": "2"})`."""
    if not isinstance(text, str):
        raise SpecError(f"a spec is text such as 'fp16' or 'fp16:accumulate=wire', got {type(text).__name__}")
    name, _, rest = text.strip().partition(":")
    options: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise SpecError(f"spec {text!r}: {item!r} is not of the form option=value")
        if key in options:
            raise SpecError(f"spec {text!r}: option {key!r} is given twice")
        options[key] = value
    if not name:
        raise SpecError(f"spec {text!r} has no name; write for instance 'fp16' or 'fp16:accumulate=wire'")
    return name.strip(), options


def write(name: str, options: Mapping[str, object]) -> str:
    """Put a spec together; the inverse of `read`."""
    parts = (f"{key}={_text(value)}" for key, value in options.items())
    return f"{name}:{','.join(parts)}" if options else name


def changed(settings: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults."""
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }


def build(
    kind: str, text: str, registry: Mapping[str, Callable[..., T]], overrides: Mapping[str, object] | None = None
) -> T:
    """Call the factory that `text` names, with its options and `overrides` checked against its signature."""
    name, options = read(text)
    if name not in registry:
        raise SpecError(unknown(kind, name, registry))
    factory = registry[name]
    types = option_types(factory)
    given: dict[str, object] = {**options, **(overrides or {})}
    for key in given:
        if key not in types:
            raise SpecError(f"{name}: {unknown('option', key, types)}")
    return factory(**{key: coerce(f"{name}: {key}", value, types[key]) for key, value in given.items()})


def option_types(factory: Callable[..., object]) -> dict[str, Any]:
    """The options a factory takes, with their types: its keyword parameters."""
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    return {
        key: hints.get(key, parameter.annotation)
        for key, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }


def coerce(what: str, value: object, kind: Any) -> object:
    """Turn text into `kind`, or check that a value already is one: `what must be ..., got ...` otherwise."""
    kind = _not_none(kind)
    if get_origin(kind) is Literal:
        allowed = get_args(kind)
        for choice in allowed:
            if value == choice or value == str(choice):
                return choice
        raise SpecError(f"{what} must be one of {', '.join(map(str, allowed))}, got {value!r}")
    if kind is bool:
        return _bool(what, value)
    if isinstance(value, str) and kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, bool):
        return value
    told = {int: "a whole number", float: "a number", str: "text"}.get(kind, f"of type {kind}")
    raise SpecError(f"{what} must be {told}, got {value!r}")


def _not_none(kind: Any) -> Any:
    """`T | None` -> `T`: leaving an option out is how to say None."""
    rest = [part for part in get_args(kind) if part is not type(None)]
    return rest[0] if isinstance(kind, UnionType) and len(rest) == 1 else kind


def _bool(what: str, value: object) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, bool):
        return value
    raise SpecError(f"{what} must be true or false, got {value!r}")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
