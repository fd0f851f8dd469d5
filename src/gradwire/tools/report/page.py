"""Step 3, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.tools.records.table import ms
from gradwire.tools.report import bars, loss, scatter, speed
from gradwire.tools.report.advice import Advice, advise
from gradwire.tools.report.columns import columns, name, notes
from gradwire.tools.report.crossover import crossovers
from gradwire.tools.report.document import document
from gradwire.tools.report.markup import Markup, join, tag
from gradwire.tools.report.style import style
from gradwire.tools.report.summary import Group, Summary, by_latency
from gradwire.tools.report.words import heading, origin

TITLE = "gradwire: does compression pay?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What `gradwire advise` has found, to be told in place of what the records say about it."""

    advice: Advice
    lead: str
    """What was trained, and how often."""
    step_s: float
    """With communication."""
    exposed_s: float
    """How much of it communication is to blame for."""


def to_html(summary: Summary, found: Finding | None = None) -> str:
    """The whole page."""
    skip = tag("a", "Skip to the table", href="#table", class_="skip")
    return document(TITLE, style(len(summary.groups)), skip, _main(summary, found), _footer(summary))


def _main(summary: Summary, found: Finding | None) -> Markup:
    lead = heading(summary) if found is None else found.lead
    top = tag("header", tag("h1", "Does compression pay?"), tag("p", lead, class_="lead"))
    groups = [_group(index, group, found) for index, group in enumerate(summary.groups)]
    pictures = tag(
        "div",
        tag("div", *groups, class_="column"),
        tag("div", *_across(summary), class_="column"),
        class_="columns",
    )
    return tag("main", top, _choice(summary), pictures, _tables(summary, found))


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


def _advice(group: Group, found: Finding | None) -> Advice:
    return advise(group) if found is None else found.advice


def _group(index: int, group: Group, found: Finding | None) -> Markup:
    advice = _advice(group, found)
    verdict = tag(
        "section",
        tag("p", group.name, class_="eyebrow"),
        tag("h2", advice.title),
        tag("p", advice.reason),
        *([tag("pre", tag("code", advice.code), tabindex=0)] if advice.code else []),
        class_=f"card verdict {'go' if advice.hook else 'stay'}",
    )
    room = _card(
        "Headroom", "What the exchange costs now, and so all that any hook could win.", _headroom(index, group, found)
    )
    stack = _card(
        "Where a step's time goes",
        "Milliseconds. Thick: the step, with its quartiles. Thin: the exchange's own work, added up over the chunks "
        "that travel at the same time; most of it hides behind compute.",
        join(bars.legend(), bars.stack(f"stack-{index}", group)),
    )
    return tag("div", verdict, room, stack, class_=f"column group group-{index}")


def _headroom(index: int, group: Group, found: Finding | None) -> Markup:
    if found is not None:
        exact_s, noop_s = found.step_s, found.step_s - found.exposed_s
    elif group.exact is not None and group.noop is not None:
        exact_s, noop_s = group.exact.record.median_s, group.noop.record.median_s
    else:
        return tag("p", "No run of exact and noop to compare.")
    picture = bars.headroom(f"headroom-{index}", group.name, exact_s, noop_s)
    fact = tag(
        "p",
        f"At most {exact_s / noop_s:.2f}x: {ms(exact_s)} ms a step with the exact exchange, {ms(noop_s)} ms with none.",
    )
    return join(picture, fact)


def _across(summary: Summary) -> list[Markup]:
    """What compares links, and what does not depend on them, for the ranks of the chosen group."""
    sections = []
    for ranks, groups in summary.by_ranks():
        cards = [
            _speed_up(ranks, groups, summary.hooks),
            _error(ranks, groups[0], summary.hooks),
            _losses(ranks, groups, summary.hooks),
        ]
        members = " ".join(f"group-{summary.groups.index(group)}" for group in groups)
        sections.append(tag("div", *cards, class_=f"column group {members}"))
    return sections


def _speed_up(ranks: int, groups: Sequence[Group], hooks: Sequence[str]) -> Markup:
    alike = by_latency(groups)
    points = [tag("li", words) for members in alike for words in crossovers(members)]
    more = tag("details", tag("summary", "Crossover points"), tag("ul", *points)) if points else join()
    if len(groups) == 1:
        words = (
            "Against the hook exact: right of the line a hook pays. One link was measured; gradwire bench --links none "
        )
        picture = bars.speed_ups(f"speed-up-{ranks}", groups[0])
        return _card(
            f"Speed-up, {ranks} ranks", f"{words}1gbit 100mbit compares several, for the built-in model.", picture
        )
    words = "Against the hook exact. Above the line a hook pays; a ring marks where it begins to."
    keys = [f"speed-up-{ranks}" + (f"-{at}" if at else "") for at in range(len(alike))]
    pictures = [speed.speed_up(key, members, hooks) for key, members in zip(keys, alike, strict=True)]
    return _card(f"Speed-up against bandwidth, {ranks} ranks", words, join(*pictures, more))


def _error(ranks: int, group: Group, hooks: Sequence[str]) -> Markup:
    return _card(
        f"Bits against error, {ranks} ranks",
        "Energy of the error of the averaged gradient by energy of the gradient. Line: the rate-distortion limit "
        "2^-2R; crosses: Lloyd-Max, the best rounding of single values. Both are for one coding of Gaussian values; "
        "gradients are not quite Gaussian, and averaging takes part of the error out, so a hook may lie below.",
        scatter.error(f"error-{ranks}", group, hooks),
    )


def _losses(ranks: int, groups: Sequence[Group], hooks: Sequence[str]) -> Markup:
    title, picture = f"Loss curves, {ranks} ranks", loss.losses(f"loss-{ranks}", groups[0], hooks)
    if not picture:
        return _card(
            title, "None: advise does not see the script's loss. Train under the hook for a while and compare.", join()
        )
    words = "Training loss in nats per byte; every hook sees the same batches. "
    return _card(title, words + _link_words(groups), picture)


def _link_words(groups: Sequence[Group]) -> str:
    return "A link changes times, not values." if len(groups) > 1 else ""


def _card(title: str, words: str, content: Markup) -> Markup:
    return tag("section", tag("h2", title), tag("p", words, class_="hint"), content, class_="card")


def _tables(summary: Summary, found: Finding | None) -> Markup:
    tables = [_table(index, group, _advice(group, found)) for index, group in enumerate(summary.groups)]
    return tag("section", tag("h2", "All numbers"), *tables, class_="card", id="table")


def _table(index: int, group: Group, advice: Advice) -> Markup:
    shown = columns(group)
    heads = [tag("th", column.head, scope="col") for column in shown]
    head = tag("thead", tag("tr", tag("th", "hook", scope="col"), *heads))
    rows = []
    for row in group.rows:
        cells = [_cell(column.value(row, group), column.text(row, group)) for column in shown]
        chosen = "chosen" if row.hook == advice.hook else None
        rows.append(tag("tr", tag("th", name(row), scope="row"), *cells, class_=chosen))
    table = tag("table", tag("caption", group.name), head, tag("tbody", *rows))
    frame = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Table, {group.name}")
    return tag("div", frame, *(tag("p", note, class_="hint") for note in notes(group)), class_=f"group group-{index}")


def _cell(value: float | None, text: str) -> Markup:
    """With the number in full for programs."""
    return tag("td", text if value is None else tag("data", text, value=repr(value)))


def _footer(summary: Summary) -> Markup:
    ours = any(row.losses for group in summary.groups for row in group.rows)  # a script has a seed of its own
    seed = f" Seed {summary.settings.seed}." if ours else ""
    when = f"{summary.runs} records, the first of {summary.began}.{seed}"
    return tag("footer", tag("p", origin(summary.origin)), tag("p", when))
