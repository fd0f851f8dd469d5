"""`gradwire probe`."""

import argparse
import sys
from typing import Any

from gradwire.tools.cli.arguments import add_json, add_link, add_verb
from gradwire.tools.measure.probe import is_launched, probe_launched, probe_local
from gradwire.tools.records.jsonl import json_text
from gradwire.tools.records.progress import progress
from gradwire.tools.records.table import text_table

DESCRIPTION = """\
Time each collective over several sizes, fit latency and bandwidth to the times, and time every codec. This starts
local processes, or measures between the processes that torchrun has started.
"""
EXAMPLES = """\
gradwire probe                                  2 local processes on the real link
gradwire probe --nproc 4 --link 1gbit,latency=1ms
torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m gradwire probe --json
"""
FIT_HEADS = ("latency us", "Mbit/s sent", "R^2")


def add(verbs: Any, line: str) -> None:
    """Add the verb and its options."""
    parser = add_verb(verbs, "probe", line, DESCRIPTION, EXAMPLES)
    option = parser.add_argument
    option("--nproc", type=int, default=2, help="number of local processes (default: %(default)s)")
    add_link(parser)
    option(
        "--pairs",
        action="store_true",
        default=None,
        help="measure each pair of ranks by itself as well (default: if the ranks are on several hosts)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Measure and print the result, on rank 0 only."""
    with progress(sys.stderr, "gradwire probe") as report:
        if is_launched():
            result = probe_launched(link=args.link, pairs=args.pairs, report=lambda part, doing: None)
        else:
            result = probe_local(args.nproc, link=args.link, pairs=args.pairs, report=report)
    if result is not None:
        print(json_text(result) if args.json else to_text(result), flush=True)


def to_text(result: dict[str, Any]) -> str:
    """The tables of collectives, of pairs of ranks and of codecs."""
    hosts = len(set(result["hosts"]))
    collectives = [
        (name, *_fit_cells(fit), *_cpu_cells(result["cpu_cost"][name])) for name, fit in result["fits"].items()
    ]
    pairs = [(name, *_fit_cells(fit)) for name, fit in result["pairs"].items()]
    codecs = [(name, f"{each['encode_ns']:.2f}", f"{each['decode_ns']:.2f}") for name, each in result["speeds"].items()]
    tables = [
        text_table([("collective", *FIT_HEADS, "cpu us", "cpu us/MB"), *collectives], right=range(1, 6)),
        *([text_table([("ranks", *FIT_HEADS), *pairs], right=range(1, 4))] if pairs else []),
        text_table([("codec", "encode", "decode, add"), *codecs], right=(1, 2)),
    ]
    title = f"{result['size']} ranks on {hosts} host{'s' * (hosts > 1)}; codecs in ns per value, on one core of rank 0"
    return "\n\n".join([title, *tables])


def _fit_cells(fit: dict[str, float]) -> tuple[str, str, str]:
    return f"{1e6 * fit['alpha_s']:.0f}", f"{8e-6 * fit['bytes_per_s']:.0f}", f"{fit['r_squared']:.3f}"


def _cpu_cells(fit: dict[str, float]) -> tuple[str, str]:
    """CPU time of a rank, per collective and per MB sent."""
    return f"{1e6 * fit['alpha_s']:.0f}", f"{1e12 / fit['bytes_per_s']:.0f}"
