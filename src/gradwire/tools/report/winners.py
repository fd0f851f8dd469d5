"""The page of `gradwire simulate`: where each hook wins, over links and numbers of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from gradwire.tools.launch.link import Link
from gradwire.tools.measure.simulate import Forecast, Pick, Scene, picks
from gradwire.tools.records.records import Origin
from gradwire.tools.records.table import ms
from gradwire.tools.report.crossover import rate_text
from gradwire.tools.report.document import document
from gradwire.tools.report.markup import Markup, join, tag
from gradwire.tools.report.style import style
from gradwire.tools.report.svg import colour
from gradwire.tools.report.words import origin

TITLE = "gradwire: where each hook wins"
STYLE = """
.winners{border-collapse:separate;border-spacing:3px}
.winners td{text-align:center;min-width:5.4em;border:0;border-left:5px solid var(--c);border-radius:4px;
background:color-mix(in srgb,var(--c) 22%,var(--card))}
.winners td.dashed{border-left-style:dashed}.winners td.hook-exact{--c:var(--compute)}
.winners th{border:0}.winners thead th+th{text-align:center}.winners b{display:block}.winners data{font-size:.84rem}
.legend .hook-exact{--c:var(--compute)}.legend i{background:var(--c)}
details+details{margin-top:4px}#table{margin-top:16px}
@media (max-width:480px){.winners td{min-width:4.4em;padding:5px 3px}.winners th:first-child{padding:5px 4px}}
"""


def to_html(forecasts: Sequence[Forecast], scene: Scene, limits: Sequence[float]) -> str:
    """The whole page, with a grid for each limit on the error."""
    grids = [picks(forecasts, scene, limit) for limit in limits]
    winners = {pick.hook for grid in grids for row in grid for pick in row}
    hooks = [each.hook for each in forecasts if each.hook in winners]
    cards = [
        _card(index, limit, grid, scene, hooks) for index, (limit, grid) in enumerate(zip(limits, grids, strict=True))
    ]
    top = tag("header", tag("h1", "Where each hook wins"), tag("p", _lead(scene), class_="lead"))
    main = tag("main", top, _choice(limits), tag("div", *cards), _numbers(forecasts, scene))
    footer = tag("footer", tag("p", f"Predicted, not measured. Hooks were rehearsed on: {origin(Origin.here())}"))
    skip = tag("a", "Skip to all numbers", href="#table", class_="skip")
    return document(TITLE, style(len(limits)) + STYLE, skip, main, footer)


def limit_text(limit: float) -> str:
    """In words."""
    return f"error at most {limit:g}" if math.isfinite(limit) else "any error"


def _lead(scene: Scene) -> str:
    cores = "one core" if scene.cores == 1 else f"{scene.cores:g} cores"
    speed = "" if scene.codec_speed == 1 else f", {scene.codec_speed:g} times as fast as here"
    return (
        f"A transformer of {scene.params / 1e6:.3g}M parameters, {1e3 * scene.compute_s:g} ms of compute a step, "
        f"{cores} a rank{speed}; each rank has its link to itself{latency_text(scene)}. In each cell: the most exact "
        "hook within 3% of the fastest, and how much faster a step is than with the hook exact, which sends what plain "
        "DDP sends. Where no hook gains 10%, the cell says exact: do not compress."
    )


def _choice(limits: Sequence[float]) -> Markup:
    """Radio buttons, as on the report's page: which grid is shown."""
    if len(limits) < 2:
        return join()
    options = []
    for index, limit in enumerate(limits):
        checked = {"checked": "checked"} if index == 0 else {}
        button = tag("input", type="radio", name="group", id=f"choose-{index}", value=index, **checked)
        options.append(tag("label", button, tag("span", limit_text(limit))))
    return tag("fieldset", tag("legend", "Error of the mean that you allow"), *options, class_="choice")


def _card(index: int, limit: float, grid: Sequence[Sequence[Pick]], scene: Scene, hooks: Sequence[str]) -> Markup:
    won = Counter(pick.hook for row in grid for pick in row)
    title = f"{sum(won.values()) - won['exact']} of {sum(won.values())} cells gain from a hook"
    hint = (
        f"Hooks whose mean is off by at most {limit:g} of itself, on random values (see all numbers)."
        if math.isfinite(limit)
        else "All hooks that average, whatever they lose."
    )
    rows = [_row(link, row, scene, hooks) for link, row in zip(scene.links, grid, strict=True)]
    heads = [tag("th", f"{count} ranks", scope="col") for count in scene.ranks]
    head = tag("thead", tag("tr", tag("th", "link", scope="col"), *heads))
    table = tag("table", head, tag("tbody", *rows), class_="winners")
    frame = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Grid, {limit_text(limit)}")
    content = (tag("h2", title), tag("p", hint, class_="hint"), _legend(won, hooks), frame)
    return tag("section", *content, class_=f"card group group-{index}")


def _legend(won: Counter[str], hooks: Sequence[str]) -> Markup:
    items = []
    for hook in (hook for hook in hooks if won[hook]):
        words = f"{hook}{' (do not compress)' if hook == 'exact' else ''}: {won[hook]}"
        items.append(tag("li", tag("i", class_=colour(hook, hooks), aria_hidden="true"), words))
    return tag("ul", *items, class_="legend")


def _row(link: Link, row: Sequence[Pick], scene: Scene, hooks: Sequence[str]) -> Markup:
    cells = []
    for pick in row:
        words = f"{pick.hook}: {ms(pick.step_s)} ms a step, exact {ms(pick.step_s * pick.speed_up)} ms"
        faster = tag("data", f"{pick.speed_up:.2f}x", value=repr(pick.speed_up))
        cells.append(tag("td", tag("b", pick.hook), faster, class_=colour(pick.hook, hooks), title=words))
    return tag("tr", tag("th", link_text(link, scene), scope="row"), *cells)


def link_text(link: Link, scene: Scene) -> str:
    """The rate, and the latency where links differ in it."""
    differ = len({other.latency_s for other in scene.links}) > 1
    return rate_text(link.bits_per_s) + (f", {_micros(link.latency_s)}" if differ else "")


def latency_text(scene: Scene) -> str:
    """Where all links have the same, to be added to a sentence."""
    found = {link.latency_s for link in scene.links}
    return "" if len(found) > 1 else f", {_micros(*found)} one way" if any(found) else ", without latency"


def _micros(latency_s: float) -> str:
    return f"{1e3 * latency_s:g} ms" if latency_s >= 1e-3 else f"{1e6 * latency_s:g} µs"


def _numbers(forecasts: Sequence[Forecast], scene: Scene) -> Markup:
    """All step times, a table a link."""
    hint = (
        "Predicted step times in milliseconds. Error: of the mean, relative to the mean, of one step on random values "
        "of 4 ranks that have nothing in common. Gradients have more in common, and a structure that low rank and "
        "top-k live on: measure it with gradwire advise. † does not average: the limit of what any hook can gain."
    )
    tables = [_times(at, link, forecasts, scene) for at, link in enumerate(scene.links)]
    return tag("section", tag("h2", "All numbers"), tag("p", hint, class_="hint"), *tables, class_="card", id="table")


def _times(at: int, link: Link, forecasts: Sequence[Forecast], scene: Scene) -> Markup:
    name = link_text(link, scene)
    heads = [tag("th", words, scope="col") for words in ("hook", "error", *(f"{count} ranks" for count in scene.ranks))]
    rows = []
    for each in forecasts:
        times = [tag("td", tag("data", ms(found.step_s), value=repr(found.step_s))) for found in each.predictions[at]]
        hook = tag("th", each.hook + ("" if each.averages else " †"), scope="row")
        rows.append(tag("tr", hook, tag("td", f"{each.error:.1e}"), *times))
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    frame = tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Step times, {name}")
    return tag("details", tag("summary", name), frame)
