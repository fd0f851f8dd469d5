"""The page of `gradwire simulate`: which hook wins on each link and number of ranks."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradwire.tools.launch.link import Link
from gradwire.tools.measure.simulate import Forecast, Pick, Scene, picks
from gradwire.tools.records.records import Origin
from gradwire.tools.report.page import render
from gradwire.tools.report.summary import rate_text
from gradwire.tools.report.svg import colour
from gradwire.tools.report.tables import origin_text


def to_html(forecasts: Sequence[Forecast], scene: Scene, limits: Sequence[float]) -> str:
    """The whole page, with a grid for each limit on the error."""
    grids = [picks(forecasts, scene, limit) for limit in limits]
    winners = {pick.hook for grid in grids for row in grid for pick in row}
    hooks = [each.hook for each in forecasts if each.hook in winners]
    links = [link_text(link, scene) for link in scene.links]
    return render(
        "winners.html.j2",
        scene=scene,
        forecasts=forecasts,
        latency=latency_text(scene),
        mode=mode_text(scene),
        choices=[limit_text(limit) for limit in limits],
        colours={hook: colour(hook, hooks) for hook in hooks},
        heads=["link", *(f"{count} ranks" for count in scene.ranks)],
        links=links,
        grids=[_grid(limit, grid, links, hooks) for limit, grid in zip(limits, grids, strict=True)],
        origin=origin_text(Origin.here()),
    )


def _grid(limit: float, grid: Sequence[Sequence[Pick]], links: Sequence[str], hooks: Sequence[str]) -> dict[str, Any]:
    won = Counter(pick.hook for row in grid for pick in row)
    return {
        "limit": limit,
        "limited": math.isfinite(limit),
        "gaining": won.total() - won["exact"],
        "cells": won.total(),
        "won": {hook: won[hook] for hook in hooks if won[hook]},
        "rows": list(zip(links, grid, strict=True)),
    }


def limit_text(limit: float) -> str:
    """A limit on the error in words."""
    return f"error at most {limit:g}" if math.isfinite(limit) else "any error"


def link_text(link: Link, scene: Scene) -> str:
    """The rate of a link, and its latency if the links of the scene differ in it."""
    differ = len({other.latency_s for other in scene.links}) > 1
    return rate_text(link.bits_per_s) + (f", {_latency(link.latency_s)}" if differ else "")


def mode_text(scene: Scene) -> str:
    """How the model is parallelised."""
    if scene.mode != "hsdp":
        return scene.mode.upper()
    inside = "no time" if scene.inside is None else f"a link of {rate_text(scene.inside.bits_per_s)}"
    return f"HSDP with {scene.shards} shards and {inside} inside a node"


def latency_text(scene: Scene) -> str:
    """The latency of all links, as the end of a sentence; empty if they differ in it."""
    latencies = {link.latency_s for link in scene.links}
    if len(latencies) > 1:
        return ""
    return f", {_latency(*latencies)} one way" if any(latencies) else ", without latency"


def _latency(latency_s: float) -> str:
    return f"{1e3 * latency_s:g} ms" if latency_s >= 1e-3 else f"{1e6 * latency_s:g} µs"
