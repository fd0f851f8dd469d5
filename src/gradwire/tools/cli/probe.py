"""`gradwire probe`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gradwire.tools.measure.probe_ranks import is_launched, probe_launched, probe_local
from gradwire.tools.records import plain
from gradwire.tools.records.progress import progress

EXAMPLES = """\
examples:
  gradwire probe                                  2 local processes, as they are
  gradwire probe --nproc 4 --link 1gbit,latency=1ms
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29500 -m gradwire probe --json
"""


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "probe",
        help=line,
        description="Time each collective over sizes, fit latency and bandwidth, and time every codec. Starts local\n"
        "processes, or measures between those that torchrun has started.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nproc", type=int, default=2, help="local processes (default: %(default)s)")
    parser.add_argument("--link", metavar="LINK", help="emulate a slower link, such as 100mbit,latency=5ms")
    parser.add_argument(
        "--pairs",
        action="store_true",
        default=None,
        help="each pair of ranks by itself as well (default: where ranks sit on several hosts)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    with progress(sys.stderr, "gradwire probe") as report:
        if is_launched():
            found = probe_launched(link=args.link, pairs=args.pairs, report=lambda part, doing: None)
        else:
            found = probe_local(args.nproc, link=args.link, pairs=args.pairs, report=report)
    if found is not None:
        print(plain.to_json(found) if args.json else to_text(found), flush=True)


def to_text(found: dict[str, Any]) -> str:
    """What is printed."""
    hosts = len(set(found["hosts"]))
    return "\n".join(
        [
            f"{found['size']} ranks on {hosts} host{'s' * (hosts > 1)}",
            f"\n{'collective':<18}{'latency us':>12}{'Mbit/s sent':>13}{'R^2':>8}{'cpu us':>9}{'cpu us/MB':>11}",
            *(_fit_line(name, fit) + _toll(found["toll"][name]) for name, fit in found["fits"].items()),
            *([f"\n{'ranks':<18}{'latency us':>12}{'Mbit/s sent':>13}{'R^2':>8}"] if found["pairs"] else []),
            *(_fit_line(name, fit) for name, fit in found["pairs"].items()),
            f"\n{'codec':<18}{'encode':>12}{'decode, add':>13}  ns a value, one core of rank 0",
            *(f"{name:<18}{s['encode_ns']:>12.2f}{s['decode_ns']:>13.2f}" for name, s in found["speeds"].items()),
        ]
    )


def _fit_line(name: str, fit: dict[str, float]) -> str:
    return f"{name:<18}{1e6 * fit['alpha_s']:>12.0f}{8e-6 * fit['bytes_per_s']:>13.0f}{fit['r_squared']:>8.3f}"


def _toll(fit: dict[str, float]) -> str:
    """Processor time of a rank, for a collective and for a MB sent."""
    return f"{1e6 * fit['alpha_s']:>9.0f}{1e12 / fit['bytes_per_s']:>11.0f}"
