"""HTML and SVG as text, escaped unless it is made here."""

from __future__ import annotations

import html

VOID = frozenset({"meta", "link", "input"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: object) -> Markup:
    """An element. `class_` is class, `_` in other names is `-`; None leaves an attribute out; plain text is escaped."""
    written = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: str) -> Markup:
    """One after the other."""
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def _value(value: object) -> str:
    return html.escape(f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value))
