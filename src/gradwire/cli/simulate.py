"""`gradwire simulate`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from gradwire.advisor.link import Link, seconds
from gradwire.advisor.simulate import Outlook, Scene, as_dict, fastest, simulate
from gradwire.bench.progress import progress
from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES

EXAMPLES = """\
examples:
  gradwire simulate --ranks 8..4096 --link 10gbit --latency 50us --compute 100ms
  gradwire simulate --ranks 2,4,8 --link 1gbit --compute 2s --params 1.3B --hooks bf16 int8 int4
  gradwire simulate --link 25gbit --compute 80ms --codec-speed 30 --cores 2 --json
"""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def add(verbs: Any) -> None:
    """The verb and its options."""
    parser = verbs.add_parser(
        "simulate",
        help="predict the step time of every hook on more ranks than there are here",
        description="Predict step times by the cost model: hooks are rehearsed on one core of this machine as they\n"
        "would run among so many ranks, and played against the link and the compute.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", default="8..512", help="8..512 (doubling), or 2,4,6 (default: %(default)s)")
    parser.add_argument("--link", default="10gbit", metavar="LINK", help="of each rank (default: %(default)s)")
    parser.add_argument("--latency", metavar="TIME", help="of the link, one way, such as 50us")
    parser.add_argument("--compute", default="100ms", metavar="TIME", help="a step alone (default: %(default)s)")
    parser.add_argument(
        "--params", default="124M", metavar="N", help="of the model, 124M or 1.3B (default: %(default)s)"
    )
    parser.add_argument("--hooks", nargs="+", default=list(EXCHANGES), metavar="HOOK", help="specs (default: all)")
    parser.add_argument("--cores", type=float, default=1.0, help="of each rank, shared with backward (default: 1)")
    parser.add_argument(
        "--codec-speed", type=float, default=1.0, metavar="X", help="times as fast as a core of this machine"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    scene = Scene(
        ranks=ranks_of(args.ranks),
        link=link_of(args.link, args.latency),
        compute_s=seconds(args.compute, "--compute"),
        params=params_of(args.params),
        cores=args.cores,
        codec_speed=args.codec_speed,
    )
    with progress(sys.stderr, "gradwire simulate") as report:
        outlooks = simulate(args.hooks, scene, report=report)
    print(json.dumps(as_dict(outlooks, scene), indent=2) if args.json else to_text(outlooks, scene), flush=True)


def link_of(text: str, latency: str | None) -> Link:
    """The link, with its latency from either option."""
    link = Link.parse(text)
    if latency is None:
        return link
    if link.latency_s:
        raise SpecError(f"the latency is given twice: --link {text} and --latency {latency}")
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


def to_text(outlooks: Sequence[Outlook], scene: Scene) -> str:
    """A row a hook, a column a number of ranks, and who wins where."""
    width = max(len(outlook.hook) for outlook in outlooks) + 3
    head = "ranks".ljust(width) + "".join(f"{count:>9}" for count in scene.ranks)
    rows = [
        (outlook.hook + ("" if outlook.averages else " *")).ljust(width)
        + "".join(f"{_ms(prediction.step_s):>9}" for prediction in outlook.predictions)
        for outlook in outlooks
    ]
    notes = ["* does not average: the limit of what a hook can gain"] * any(not each.averages for each in outlooks)
    return "\n".join(
        [
            f"Predicted step time in ms: {scene.params / 1e6:g}M parameters, {scene.link} a rank, "
            f"{_ms(scene.compute_s)} ms of compute",
            "",
            head,
            *rows,
            *notes,
            "",
            *wins(fastest(outlooks, scene)),
        ]
    )


def wins(best: dict[int, str]) -> list[str]:
    """Runs of numbers of ranks with the same winner."""
    lines = []
    for hook, same in itertools.groupby(best, key=best.__getitem__):
        counts = list(same)
        where = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        lines.append(f"fastest on {where} ranks: {hook}")
    return lines


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.0f}" if time_s >= 0.1 else f"{1e3 * time_s:.1f}"
