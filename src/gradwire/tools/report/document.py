"""The frame of a page: one HTML file that asks the network for nothing."""

from __future__ import annotations

from gradwire.tools.report.markup import Markup, tag

NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses every request."""


def document(title: str, style: str, *content: str) -> str:
    """The whole file, for light and dark, phone and desk."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=NO_NETWORK),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style)),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *content), lang='en')}\n"
