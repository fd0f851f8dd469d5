"""`gradwire simulate`."""

import argparse
import dataclasses
import itertools
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES
from gradwire.tools.cli.arguments import add_json, add_verb, error_limit
from gradwire.tools.launch.link import Link, seconds
from gradwire.tools.measure.simulate import MODES, Forecast, Scene, as_dict, picks, simulate
from gradwire.tools.measure.simulate_sharded import PAIRS, REPLICAS, simulate_sharded
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import progress
from gradwire.tools.records.table import text_table
from gradwire.tools.report.winners import latency_text, limit_text, link_text, mode_text, to_html
from gradwire.tools.report.write import check_page, save

DESCRIPTION = """\
Predict step times with the cost model. The work of a hook on that number of ranks is timed on one core of this machine;
the network and the computation of the model are simulated. With several links, print which hook to use on each. With
--mode fsdp a hook is a pair: int8/bf16 reduces gradients in int8 and gathers parameters in bf16. With --mode hsdp the
hook averages across replicas of --shards ranks.
"""
EXAMPLES = """\
gradwire simulate --ranks 8..4096 --links 10gbit --latency 50us --compute 100ms
gradwire simulate --report winners.html              which hook is best on which link and number of ranks
gradwire simulate --ranks 2,4,8 --links 100mbit 1gbit --compute 2s --params 1.3B --hooks bf16 int8 int4
gradwire simulate --mode fsdp --ranks 2..64 --links 1gbit --compute 300ms --hooks bf16/bf16 int8/bf16
gradwire simulate --mode hsdp --shards 8 --ranks 16..128 --links 1gbit --inside 100gbit
gradwire simulate --links 25gbit 100gbit --compute 80ms --codec-speed 30 --cores 2 --max-error 0.05 --json
"""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
LINK = "10gbit"
LINKS = ("100mbit", "300mbit", "1gbit", "3gbit", "10gbit", "25gbit", "100gbit")
HOOKS = {"ddp": tuple(EXCHANGES), "fsdp": PAIRS, "hsdp": REPLICAS}
LIMITS = (0.02, 0.2, math.inf)


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "simulate", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option("--mode", choices=MODES, default="ddp", help="how the model is parallelised (default: %(default)s)")
    option("--ranks", help="numbers of ranks: 8..512 (doubling) or 2,4,6 (default: 2..512; hsdp: from 2 replicas on)")
    option("--shards", type=int, metavar="N", help="hsdp: ranks of a node, which share one copy (default: 8)")
    option("--inside", metavar="LINK", help="hsdp: link of each rank inside its node (default: takes no time)")
    option(
        "--link",
        "--links",
        dest="links",
        nargs="+",
        metavar="LINK",
        help=f"link of each rank, one or several (default: {LINK}; for a page {' '.join(LINKS)})",
    )
    option("--latency", metavar="TIME", help="one-way latency of the links, such as 50us")
    option("--compute", default="100ms", metavar="TIME", help="step time without communication (default: %(default)s)")
    option(
        "--params",
        default="124M",
        metavar="N",
        help="parameters of the model, such as 124M or 1.3B (default: %(default)s)",
    )
    option("--hooks", nargs="+", metavar="HOOK", help="specs, or with fsdp pairs (default: all, or a few)")
    option("--cores", type=float, default=1.0, help="cores of each rank, shared with backward (default: 1)")
    option(
        "--codec-speed",
        type=float,
        default=1.0,
        metavar="X",
        help="how many times as fast a core is as one of this machine (default: 1)",
    )
    option(
        "--max-error",
        nargs="+",
        type=error_limit,
        default=list(LIMITS),
        metavar="E",
        help="largest relative error of the mean on random values; one pick for each (default: 0.02 0.2 inf)",
    )
    option("--report", type=Path, metavar="PATH", help="write a page, such as winners.html")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Predict and print the results."""
    if args.mode != "hsdp" and (args.shards, args.inside) != (None, None):
        raise SpecError("--shards and --inside are for --mode hsdp; leave them out")
    shards = 8 if args.shards is None else args.shards
    scene = Scene(
        mode=args.mode,
        shards=shards,
        inside=None if args.inside is None else Link.parse(args.inside),
        ranks=ranks_of(args.ranks or (f"{2 * shards}..512" if args.mode == "hsdp" else "2..512")),
        links=links_of(args.links or ([LINK] if args.report is None else LINKS), args.latency),
        compute_s=seconds(args.compute, "--compute"),
        params=params_of(args.params),
        cores=args.cores,
        codec_speed=args.codec_speed,
    )
    limits = list(dict.fromkeys(args.max_error))
    if args.report is not None:
        check_page(args.report)
    with progress(sys.stderr, "gradwire simulate") as report:
        predict = simulate if scene.mode == "ddp" else simulate_sharded
        forecasts = predict(args.hooks or HOOKS[scene.mode], scene, report=report)
    if args.report is not None:
        save(args.report, to_html(forecasts, scene, limits))
    if args.json:
        path = None if args.report is None else str(args.report)
        print(json_text({**as_dict(forecasts, scene, limits), "report": path}), flush=True)
    else:
        print(to_text(forecasts, scene, limits, args.report), flush=True)


def links_of(texts: Sequence[str], latency: str | None) -> tuple[Link, ...]:
    """The links from the slowest to the fastest. The latency comes from either option."""
    links = {_link_of(text, latency) for text in texts}
    return tuple(sorted(links, key=lambda link: (link.bits_per_s, link.latency_s)))


def _link_of(text: str, latency: str | None) -> Link:
    link = Link.parse(text)
    if latency is None:
        return link
    if link.latency_s:
        raise SpecError(f"the latency is given twice: --links {text} and --latency {latency}")
    return dataclasses.replace(link, latency_s=seconds(latency, "--latency"))


def ranks_of(text: str) -> tuple[int, ...]:
    """`"8..64"` -> 8, 16, 32, 64; `"2,3"` -> 2, 3."""
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low, high = int(match[1]), int(match[2])
        if 0 < low <= high:
            doubled = itertools.takewhile(lambda count: count < high, (low << power for power in range(64)))
            return (*doubled, high)
    elif re.fullmatch(r"\d+(,\d+)*", text):
        return tuple(sorted({int(part) for part in text.split(",")}))
    raise SpecError(f"--ranks must be a range such as 8..512 or a list such as 2,4,6, got {text!r}")


def params_of(text: str) -> int:
    """`"124M"` -> 124 million."""
    match = re.fullmatch(r"(\d+\.?\d*)([kmb]?)", text.lower())
    if match is None:
        raise SpecError(f"--params must be a number such as 124M or 1.3B, got {text!r}")
    return round(float(match[1]) * UNITS[match[2]])


def to_text(forecasts: Sequence[Forecast], scene: Scene, limits: Sequence[float], path: Path | None = None) -> str:
    """On one link the step times and which hook to use where; on several links only which hook to use where."""
    if len(scene.links) == 1:
        parts = [_times(forecasts, scene), "\n".join(wins(forecasts, scene, limits))]
    else:
        parts = [f"Which hook to use: {_setting(scene)}", *(_grid(forecasts, scene, limit) for limit in limits)]
    return "\n\n".join([*parts, *([] if path is None else [f"report: {path}"])])


def _setting(scene: Scene) -> str:
    how = f"{mode_text(scene)}, " if scene.mode != "ddp" else ""
    return f"{how}{scene.params / 1e6:g}M parameters, {_ms(scene.compute_s)} ms of compute{latency_text(scene)}"


def _times(forecasts: Sequence[Forecast], scene: Scene) -> str:
    """One row per hook, one column per number of ranks."""
    rows = [["ranks", *map(str, scene.ranks), "error"]]
    for each in forecasts:
        times = [_ms(prediction.step_s) for prediction in each.predictions[0]]
        rows.append([each.hook + each.mark, *times, f"{each.error:.1e}"])
    notes = ["† does not average: this is the limit of what a hook can gain"] * any(
        not each.averages for each in forecasts
    )
    notes += ["‡ changes the weights that the model computes with: never picked, compare the loss first"] * any(
        each.changes_weights for each in forecasts
    )
    title = f"Predicted step time in ms: {_setting(scene)}, {scene.links[0]} per rank"
    return "\n".join([title, "", text_table(rows, right=range(1, len(rows[0]))), *notes])


def _grid(forecasts: Sequence[Forecast], scene: Scene, limit: float) -> str:
    """One row per link, one column per number of ranks."""
    rows = [["ranks", *map(str, scene.ranks)]]
    for link, row in zip(scene.links, picks(forecasts, scene, limit), strict=True):
        rows.append([link_text(link, scene), *(f"{pick.hook} {pick.speed_up:.2f}x" for pick in row)])
    return "\n".join([limit_text(limit), text_table(rows, right=range(1, len(rows[0])))])


def wins(forecasts: Sequence[Forecast], scene: Scene, limits: Sequence[float]) -> list[str]:
    """For the first link: which hook to use on which numbers of ranks."""
    lines = []
    for limit in limits:
        best = dict(zip(scene.ranks, (pick.hook for pick in picks(forecasts, scene, limit)[0]), strict=True))
        for hook, same in itertools.groupby(best, key=best.__getitem__):
            counts = list(same)
            where = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
            lines.append(f"{limit_text(limit)}, on {where} ranks: {hook}")
    return lines


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.0f}" if time_s >= 0.1 else f"{1e3 * time_s:.1f}"
