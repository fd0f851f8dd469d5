"""Specs: text that names a hook or a codec and its options, such as `"int4:block=32"`.

    spec     name | name:options | name(options)
    options  option=value[, option=value ...]
    value    text | a nested spec, as name or name(options) | a list of nested specs, as [spec, spec, ...]

Nesting has one form: `two_level(inside=exact, across=int4(block=32))`. The brackets of a value are balanced, so that it
may hold commas inside them, as the regular expression `exempt=(norm|bias){1,2}` does; after a backslash a bracket or a
comma is an ordinary character. `read` takes text apart, `write` puts it together, and `build` calls a factory from a
registry with the options turned into the types of its signature. Every error points at the character.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from gradwire.errors import SpecError, unknown

T = TypeVar("T")
EXAMPLE = "'fp16' or 'fp16:accumulate=wire'"
PAIRS = {"(": ")", "[": "]", "{": "}"}


class SpecText(str):
    """A part of a spec's text that knows where it stands in the whole, so that errors can point at it."""

    __slots__ = ("at", "source")
    source: str
    at: int

    def __new__(cls, text: str, source: str | None = None, at: int = 0) -> SpecText:
        """`text` begins at position `at` of `source`, by default at the beginning of itself."""
        made = super().__new__(cls, text)
        made.source, made.at = text if source is None else source, at
        return made

    def part(self, begin: int, end: int | None = None) -> SpecText:
        """The text between two positions, without blanks around it."""
        text = self[begin:end]
        stripped = text.lstrip()
        return SpecText(stripped.rstrip(), self.source, self.at + begin + len(text) - len(stripped))

    def error(self, message: str, at: int = 0) -> SpecError:
        """An error whose text shows the spec and points at position `at` of this part."""
        return SpecError(f"{message}\n  {self.source!s}\n  {' ' * (self.at + at)}^")


class NestedSpec(SpecText):
    """The type of an option whose value is itself a spec."""

    __slots__ = ()


class Parsed(NamedTuple):
    """A spec, taken apart."""

    name: SpecText
    options: dict[str, SpecText]
    keys: dict[str, SpecText]
    """The names of the options as they stand in the text."""


# -- reading and writing ------------------------------------------------------------------------------------------


def read(text: str) -> Parsed:
    """Split `"name:a=1,b=2"` or `"name(a=1, b=2)"` into the name and its options."""
    if not isinstance(text, str):
        raise SpecError(f"a spec is text such as {EXAMPLE}, got {type(text).__name__}")
    if "\n" in text or not text.isprintable():
        raise SpecError(f"a spec is one line of printable characters, got {text!r}")
    whole = (text if isinstance(text, SpecText) else SpecText(text)).part(0)
    end = next((i for i, char in enumerate(whole) if char in ":([{,=)]}"), len(whole))
    name = whole.part(0, end)
    if not name:
        raise whole.error(f"the spec has no name; write for instance {EXAMPLE}")
    return _read_options(whole, name, end)


def _read_options(whole: SpecText, name: SpecText, end: int) -> Parsed:
    opener = whole[end : end + 1]
    if opener == "(":
        close = _closing(whole, end)
        if whole[close + 1 :].strip():
            raise whole.error("nothing may follow the closing bracket of a spec", close + 1)
        rest = whole.part(end + 1, close)
    elif opener in ("", ":"):
        rest = whole.part(end + 1)
    else:
        raise whole.error(f"{opener!r} cannot follow the name of a hook; write {name}(option=value)", end)
    parsed = Parsed(name, {}, {})
    for item in _split(rest):
        key, value = _read_option(item)
        if str(key) in parsed.options:
            raise key.error(f"option {str(key)!r} is given twice")
        parsed.options[str(key)], parsed.keys[str(key)] = value, key
    return parsed


def _read_option(item: SpecText) -> tuple[SpecText, SpecText]:
    equals = item.find("=")
    key, value = item.part(0, max(equals, 0)), item.part(equals + 1)
    if equals < 0 or not key or not value:
        raise item.error(f"{str(item)!r} is not of the form option=value")
    return key, value


def _split(text: SpecText) -> Iterator[SpecText]:
    """The parts between commas that are not inside brackets."""
    begin = 0
    for comma in [*_commas(text), len(text)]:
        part = text.part(begin, comma)
        if part:
            yield part
        elif comma < len(text) or begin:
            raise text.error("there is nothing between two commas, or after the last one", min(comma, len(text) - 1))
        begin = comma + 1


def _commas(text: SpecText) -> list[int]:
    commas, at = [], 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in PAIRS:
            at = _closing(text, at)
        elif text[at] in PAIRS.values():
            raise text.error(f"{text[at]!r} closes no bracket; write \\{text[at]} for the character itself", at)
        elif text[at] == ",":
            commas.append(at)
        at += 1
    return commas


def _closing(text: SpecText, begin: int) -> int:
    """The position of the bracket that closes the one at `begin`."""
    open_at = [begin]
    at = begin + 1
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 1
        elif char in PAIRS:
            open_at.append(at)
        elif char in PAIRS.values():
            if char != PAIRS[text[open_at[-1]]]:
                raise text.error(f"{char!r} does not close {text[open_at[-1]]!r}", at)
            open_at.pop()
            if not open_at:
                return at
        at += 1
    raise text.error(f"{text[open_at[-1]]!r} is never closed", open_at[-1])


def write(name: str, options: Mapping[str, object]) -> str:
    """Put a spec together; the inverse of `read`. Specs inside it make it take the form with brackets."""
    texts = {key: _text(value) for key, value in options.items()}
    if not texts:
        return name
    if any(isinstance(value, NestedSpec | tuple) for value in options.values()):
        return f"{name}({', '.join(f'{key}={text}' for key, text in texts.items())})"
    return f"{name}:{','.join(f'{key}={text}' for key, text in texts.items())}"


def nested(spec: str) -> str:
    """A spec in the form that it has inside another one: `int4:block=32` -> `int4(block=32)`."""
    name, options, _ = read(spec)
    inner = ", ".join(f"{key}={value}" for key, value in options.items())
    return f"{name}({inner})" if inner else str(name)


def is_one_value(text: str) -> bool:
    """Whether text can be the value of an option: not empty, no outer blanks or commas, brackets balanced."""
    escapes = len(text) - len(text.rstrip("\\"))
    try:
        return bool(text) and text.isprintable() and not escapes % 2 and list(_split(SpecText(text))) == [text]
    except SpecError:
        return False


def changed(settings: Any) -> dict[str, object]:
    """The fields of a dataclass that differ from their defaults."""
    return {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if getattr(settings, field.name) != field.default
    }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, NestedSpec):
        return nested(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(nested, value))}]"
    return str(value)


# -- building -----------------------------------------------------------------------------------------------------


def build(
    kind: str, text: str, registry: Mapping[str, Callable[..., T]], overrides: Mapping[str, object] | None = None
) -> T:
    """Call the factory that `text` names, with its options and `overrides` checked against its signature."""
    name, options, keys = read(text)
    if str(name) not in registry:
        raise name.error(unknown(kind, name, registry))
    factory = registry[str(name)]
    types = option_types(factory)
    given: dict[str, object] = {**options, **(overrides or {})}
    for key in given:
        if key not in types:
            message = f"{name}: {unknown('option', key, types)}"
            raise keys[key].error(message) if key in keys else SpecError(message)
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
    try:
        return _coerced(value, _not_none(kind))
    except _WrongValue as wrong:
        message = f"{what} must be {wrong}, got {value!r}"
        raise value.error(message) if isinstance(value, SpecText) else SpecError(message) from None


class _WrongValue(Exception):
    """Its text says what the value must be."""


def _coerced(value: object, kind: Any) -> object:
    if get_origin(kind) is Literal:
        return _choice(value, get_args(kind))
    if kind is NestedSpec:
        return _nested_spec(value)
    if get_origin(kind) is tuple:
        return tuple(_nested_spec(item) for item in _items(value))
    if kind is bool:
        return _bool(value)
    return _plain(value, kind)


def _plain(value: object, kind: Any) -> object:
    if isinstance(value, str) and kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not isinstance(value, bool):
        return str(value) if kind is str else value
    raise _WrongValue({int: "a whole number", float: "a number", str: "text"}.get(kind, f"of type {kind}"))


def _choice(value: object, allowed: Sequence[object]) -> object:
    for choice in allowed:
        if value == choice or value == str(choice):
            return choice
    raise _WrongValue(f"one of {', '.join(map(str, allowed))}")


def _bool(value: object) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, bool):
        return value
    raise _WrongValue("true or false")


def _nested_spec(value: object) -> NestedSpec:
    """A nested spec, checked for its form. Inside other text only the form with brackets is clear."""
    if isinstance(value, NestedSpec):
        return value
    if isinstance(value, SpecText):
        name = read(value).name
        if value[len(name) :].lstrip().startswith(":"):
            raise value.error(f"inside a spec, options go in brackets: {nested(value)}", value.index(":"))
        return NestedSpec(value, value.source, value.at)
    if not isinstance(value, str):
        raise _WrongValue(f"a spec such as {EXAMPLE}")
    read(value)
    return NestedSpec(value)


def _items(value: object) -> Sequence[object]:
    """The items of a list, which is a sequence, or text such as `[int8, int4(block=32)]`."""
    if isinstance(value, list | tuple):
        return value
    if not isinstance(value, str):
        raise _WrongValue("a list of specs such as [int8, int4(block=32)]")
    text = value if isinstance(value, SpecText) else SpecText(value)
    if not text.startswith("["):
        return [text]
    close = _closing(text, 0)
    if text[close + 1 :].strip():
        raise text.error("nothing may follow the closing bracket of a list", close + 1)
    return list(_split(text.part(1, close)))


def _not_none(kind: Any) -> Any:
    """`T | None` -> `T`: leaving an option out is how to say None."""
    rest = [part for part in get_args(kind) if part is not type(None)]
    return rest[0] if isinstance(kind, UnionType) and len(rest) == 1 else kind
