"""gradwire beside other packages that average gradients: bytes, error, step time and CPU time on shaped hosts. As root.

    python benchmarks/peers.py --out peers.jsonl --page

Packages are installed from PyPI into `.benchmarks/peers` (see `peer_envs.py`), and run on the same hosts with the same
model, data and steps. Each has processes of its own, which take turns with those of gradwire's and torch's hooks, pass
after pass. A package that cannot be installed or does not run is a row that says so. `--source grace=git:/a/folder`
takes a package from elsewhere. `--page` writes `benchmarks/results/peers.md` and `peers.svg` from what `--out` has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import netns
import peer_envs
import peers_page
import rounds

RANKS = Path(__file__).with_name("peer_ranks.py")
OURS = (
    "noop",
    "plain",
    "exact",
    "bf16",
    "int8",
    "int4",
    "int2",
    "powersgd:rank=4",
    "powersgd:rank=4,sides=one",
    "diloco:exact",
    "torch:FP16_COMPRESS",
    "torch:BF16_COMPRESS",
)


class Peer(NamedTuple):
    """A package, where it comes from, and what is measured of it."""

    package: str
    source: str
    rows: tuple[tuple[str, ...], ...]
    """Names for `peer_ranks.py`; those of one tuple share processes."""


TELEMETRY = " ".join(
    f"opentelemetry-{part}==1.39.1" for part in ("api", "sdk", "proto", "exporter-otlp-proto-http")
)  # torchft names no upper limit, and the newest ones need parts that are not on PyPI
PEERS = (
    Peer("deepspeed", "deepspeed==0.19.8", (("deepspeed:fp32", "deepspeed:bf16"),)),
    Peer("torchft", f"torchft==0.2.0 {TELEMETRY}", (("torchft:ddp",), ("torchft:ddp-quantized",), ("torchft:diloco",))),
    Peer("epfml-powersgd", "git:https://github.com/epfml/powersgd", (("epfml:rank=4", "epfml:rank=8"),)),
    Peer("grace", "git:https://github.com/sands-lab/grace", (("grace:qsgd", "grace:fp16"),)),
    Peer("powersgd", "powersgd==0.0.2", (("powersgd from PyPI",),)),
    Peer("pccl", "pccl==0.0.0", (("pccl",),)),
    Peer("bagua", "bagua==0.9.2", (("bagua",),)),
)
EMPTY = {
    "powersgd": "the wheel on PyPI has no code; the rows of epfml are from its repository",
    "pccl": "the wheel on PyPI is a placeholder of another project; PCCL itself must be built with CMake",
}
"""Packages that can be installed at most, and why they have no rows."""
TORCH_ALONE = ("torch:POWER_SGD", "torch:POWER_SGD_RANK2")
"""Hooks that are known to abort: they get processes of their own."""


class Launch(NamedTuple):
    """Rows that share processes, and the folder of their package."""

    names: tuple[str, ...]
    folder: Path | None


def main() -> None:
    """Install, measure pass after pass, and write the page."""
    args = parse_args()
    if args.passes:
        netns.check_usable()
        launches, failed = prepare(dict(item.split("=", 1) for item in args.source), args.only)
        measure(launches, failed, args)
    rows = [json.loads(line) for line in Path(args.out).read_text().splitlines()]
    print(peers_page.table(rows))
    if args.page:
        peers_page.write(rows, Path(__file__).parent / "results", args.note)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--passes", type=int, default=3, help="0: only print and write what --out has")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a pass")
    parser.add_argument("--seconds", type=float, default=0.8, help="time a row gets in a round")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which processes are stopped")
    parser.add_argument("--only", nargs="*", help="packages to run, instead of all")
    parser.add_argument("--source", nargs="*", default=[], help="a package=requirement or package=git:address")
    parser.add_argument("--out", default=".benchmarks/peers.jsonl", help="JSON lines")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--note", default="", help="a remark for the page, such as that the machine was busy")
    return parser.parse_args()


def prepare(sources: dict[str, str], only: Sequence[str] | None) -> tuple[list[Launch], list[dict[str, Any]]]:
    """What to launch, and the rows of what could not be installed."""
    launches, failed = [Launch(OURS, None), *(Launch((name,), None) for name in TORCH_ALONE)], []
    for peer in PEERS:
        if only is not None and peer.package not in only:
            continue
        names = [name for group in peer.rows for name in group]
        try:
            folder = peer_envs.installed(peer.package, sources.get(peer.package, peer.source))
        except peer_envs.InstallError as error:
            failed += [{"hook": name, "failed": f"cannot be installed: {error}"} for name in names]
            continue
        if peer.package in EMPTY:
            failed += [{"hook": name, "failed": EMPTY[peer.package]} for name in names]
        else:
            launches += [Launch(group, folder) for group in peer.rows]
        print(f"{peer.package} {peer_envs.version(folder, peer.package)}", file=sys.stderr, flush=True)
    return launches, failed


def measure(launches: Sequence[Launch], failed: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    """All rows, with the rounds of all passes. They are written after every launch, so that none is lost."""
    rows: dict[str, dict[str, Any]] = {}
    stamp = {"ranks": args.ranks, "rate": args.rate, "date": f"{datetime.date.today():%Y-%m-%d}"}
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    with netns.hosts(args.ranks, args.rate) as hosts:
        for _ in range(args.passes):
            for launch in launches:
                for row in once(launch, hosts, args):
                    merge(rows, row)
                records = [{**stamp, **row} for row in [*rows.values(), *failed]]
                Path(args.out).write_text("".join(json.dumps(record) + "\n" for record in records))
                print(f"{', '.join(launch.names)}: done", file=sys.stderr, flush=True)


def once(launch: Launch, hosts: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One pass of some rows."""
    paths = [str(launch.folder)] if launch.folder else []
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"rounds": args.rounds, "seconds": args.seconds}
    limit_s = args.limit * (1 + len(launch.names) / 4)
    env = {"PYTHONPATH": path, "RUST_LOG": "error"}
    rows = rounds.launch(hosts, launch.names, settings, limit_s, str(RANKS), env)
    return [
        {**row, "failed": row["failed"].replace("hangs (stopped after", "no result (stopped after")}
        if "failed" in row
        else {**row, "cpu_ms": [row["cpu_ms"]]}
        for row in rows
    ]  # on a busy machine a slow start looks like a hang


def merge(rows: dict[str, dict[str, Any]], row: dict[str, Any]) -> None:
    """Add the rounds of a pass. A row that failed once stays failed."""
    known = rows.setdefault(row["hook"], row)
    if known is row or "failed" in known:
        return
    if "failed" in row:
        rows[row["hook"]] = row
        return
    for key in ("step_ms", "cpu_ms"):
        known[key] += row[key]


if __name__ == "__main__":
    main()
