"""Step 3, as a page: one HTML file that asks the network for nothing."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.bench.table import ms
from gradwire.report import bars, loss, scatter, speed
from gradwire.report.advice import advise
from gradwire.report.columns import COLUMNS, name, notes
from gradwire.report.crossover import crossovers
from gradwire.report.markup import Markup, join, tag
from gradwire.report.style import style
from gradwire.report.summary import Group, Summary
from gradwire.report.words import heading, origin

TITLE = "gradwire: does compression pay?"
NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses every request."""


def to_html(summary: Summary) -> str:
    """The whole page."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=NO_NETWORK),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", TITLE),
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(style(len(summary.groups)))),
    )
    body = tag("body", tag("a", "Skip to the table", href="#table", class_="skip"), _main(summary), _footer(summary))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _main(summary: Summary) -> Markup:
    top = tag("header", tag("h1", "Does compression pay?"), tag("p", heading(summary), class_="lead"))
    groups = [_group(index, group) for index, group in enumerate(summary.groups)]
    pictures = tag(
        "div",
        tag("div", *groups, class_="column"),
        tag("div", *_across(summary), class_="column"),
        class_="columns",
    )
    return tag("main", top, _choice(summary), pictures, _tables(summary))


def _choice(summary: Summary) -> Markup:
    """Radio buttons: which group the cards and the table show. The style sheet does the rest."""
    if len(summary.groups) < 2:
        return join()
    options = []
    for index, group in enumerate(summary.groups):
        checked = {"checked": "checked"} if index == 0 else {}
        button = tag("input", type="radio", name="group", id=f"choose-{index}", value=index, **checked)
        options.append(tag("label", button, tag("span", group.name)))
    return tag("fieldset", tag("legend", "Link and ranks"), *options, class_="choice")


def _group(index: int, group: Group) -> Markup:
    advice = advise(group)
    verdict = tag(
        "section",
        tag("p", group.name, class_="eyebrow"),
        tag("h2", advice.title),
        tag("p", advice.reason),
        *([tag("pre", tag("code", advice.code), tabindex=0)] if advice.code else []),
        class_=f"card verdict {'go' if advice.hook else 'stay'}",
    )
    room = _card(
        "Headroom", "What the exchange costs now, and so all that any hook could win.", _headroom(index, group)
    )
    stack = _card(
        "Where a step's time goes",
        "Milliseconds. Thick: the step, with its quartiles. Thin: the exchange's own work, added up over the chunks "
        "that travel at the same time; most of it hides behind compute.",
        join(bars.legend(), bars.stack(f"stack-{index}", group)),
    )
    return tag("div", verdict, room, stack, class_=f"column group group-{index}")


def _headroom(index: int, group: Group) -> Markup:
    picture = bars.headroom(f"headroom-{index}", group)
    if group.ceiling is None or group.exact is None or group.noop is None:
        return tag("p", "No run of exact and noop to compare.")
    exact_s, noop_s = group.exact.record.median_s, group.noop.record.median_s
    fact = tag(
        "p",
        f"At most {group.ceiling:.2f}x: {ms(exact_s)} ms a step with the exact exchange, {ms(noop_s)} ms with none.",
    )
    return join(picture, fact)


def _across(summary: Summary) -> list[Markup]:
    """What compares links, and what does not depend on them, for the ranks of the chosen group."""
    sections = []
    for ranks, groups in summary.by_ranks():
        cards = [_speed_up(ranks, groups, summary.hooks), _error(ranks, groups[0], summary.hooks)]
        cards.append(
            _card(
                f"Loss curves, {ranks} ranks",
                "Training loss in nats per byte; every hook sees the same batches. " + _link_words(groups),
                loss.losses(f"loss-{ranks}", groups[0], summary.hooks),
            )
        )
        members = " ".join(f"group-{summary.groups.index(group)}" for group in groups)
        sections.append(tag("div", *cards, class_=f"column group {members}"))
    return sections


def _speed_up(ranks: int, groups: Sequence[Group], hooks: Sequence[str]) -> Markup:
    points = [tag("li", words) for words in crossovers(groups)]
    more = tag("details", tag("summary", "Crossover points"), tag("ul", *points)) if points else join()
    words = "Against the hook exact. Above the line a hook pays; a ring marks where it begins to."
    if len(groups) == 1:
        words += " One link was measured: gradwire bench --links none 1gbit 100mbit shows more."
    picture = speed.speed_up(f"speed-up-{ranks}", groups, hooks)
    return _card(f"Speed-up against bandwidth, {ranks} ranks", words, join(picture, more))


def _error(ranks: int, group: Group, hooks: Sequence[str]) -> Markup:
    return _card(
        f"Bits against error, {ranks} ranks",
        "Energy of the error of the averaged gradient by energy of the gradient. Line: the rate-distortion limit "
        "2^-2R; crosses: Lloyd-Max, the best rounding of single values. Both are for one coding of Gaussian values; "
        "gradients are not quite Gaussian, and averaging takes part of the error out, so a hook may lie below.",
        scatter.error(f"error-{ranks}", group, hooks),
    )


def _link_words(groups: Sequence[Group]) -> str:
    return "A link changes times, not values." if len(groups) > 1 else ""


def _card(title: str, words: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title), tag("p", words, class_="hint"), content, class_="card")


def _tables(summary: Summary) -> Markup:
    tables = [_table(index, group) for index, group in enumerate(summary.groups)]
    return tag("section", tag("h2", "All numbers"), *tables, class_="card", id="table")


def _table(index: int, group: Group) -> Markup:
    heads = [tag("th", column.head, scope="col") for column in COLUMNS]
    head = tag("thead", tag("tr", tag("th", "hook", scope="col"), *heads))
    best = advise(group).hook
    rows = []
    for row in group.rows:
        cells = [_cell(column.value(row, group), column.text(row, group)) for column in COLUMNS]
        chosen = "chosen" if row.hook == best else None
        rows.append(tag("tr", tag("th", name(row), scope="row"), *cells, class_=chosen))
    table = tag("table", tag("caption", group.name), head, tag("tbody", *rows))
    frame = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Table, {group.name}")
    return tag("div", frame, *(tag("p", note, class_="hint") for note in notes(group)), class_=f"group group-{index}")


def _cell(value: float | None, text: str) -> Markup:
    """With the number in full for programs."""
    return tag("td", text if value is None else tag("data", text, value=repr(value)))


def _footer(summary: Summary) -> Markup:
    places = [tag("p", origin(made)) for made in summary.origins]
    when = f"{summary.runs} records, the first of {summary.began}. Seed {summary.settings.seed}."
    return tag("footer", *places, tag("p", when))
