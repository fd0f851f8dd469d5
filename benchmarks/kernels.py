"""Encode, decode and the fused reduce of every codec, as multiples of memcpy. One thread, nothing on the wire.

    python benchmarks/kernels.py --out kernels.jsonl

A multiple is the time of a kernel over the time of `Tensor.copy_` of the same float32 values, taken right before it:
memcpy, kernel, memcpy, kernel, and so on, so that a slow minute of the machine hits both. The table has the median and
the quartiles over the repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.codecs import CODECS, Codec
from gradwire.kernels.memory import Scratch
from gradwire.spec import build

VARIANTS = (
    "int4:hadamard=64",
    "int4:hadamard=256",
    "int4:rounding=stochastic",
    "int8:rounding=stochastic",
    "int4:codebook=lloyd",
)
RANKS = 4
"""Whose wires the fused reduce adds up; one of them is one's own."""
GOALS = {
    ("int8", "encode"): 1.0,
    ("int8", "decode-add"): 1.0,
    **{(f"int{bits}", "encode"): 2.0 for bits in range(3, 7)},
    **{(f"int{bits}", "decode-add"): 1.5 for bits in range(3, 7)},
    ("sign", "encode"): 0.8,
}
"""In multiples of memcpy, for codecs with their defaults."""
REDUCE_GOAL, HADAMARD_GOAL = 4.0, 2.5
"""For every codec with a fused reduce and its defaults; for what a rotation adds to int4."""
HEADER = f"{'codec':<28}{'kernel':<16}{'x memcpy':>9}  {'quartiles':<13}{'ms':>8}{'goal':>9}"


def main() -> None:
    """Measure, print and write."""
    args = parse_args()
    torch.set_num_threads(1)
    kernels.load()
    print(f"{args.numel:,} float32 values ({args.numel * 4 / 1e6:.1f} MB), 1 thread, {args.repeats} repeats\n{HEADER}")
    records = []
    for record in measured((*CODECS, *VARIANTS), args.numel, args.repeats):
        records.append(record)
        print(line(record), flush=True)
    for record in extras(records):
        records.append(record)
        print(line(record))
    print(f"\nmemcpy: {copy_speed(records):.1f} GB/s (bytes copied, each counted once)")
    write(args.out, records)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=6_553_600, help="float32 values")
    parser.add_argument("--repeats", type=int, default=21, help="pairs of memcpy and kernel; at least 2")
    parser.add_argument("--out", help="JSON lines")
    return parser.parse_args()


# -- the clock -------------------------------------------------------------------------------------------------------


def measured(specs: Iterable[str], numel: int, repeats: int) -> Iterator[dict[str, Any]]:
    """A record for every kernel of every codec."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    copy = torch.empty_like(values)
    for spec in specs:
        for kernel, run in calls(build("codec", spec, CODECS), values):
            copies, times = interleaved(lambda: copy.copy_(values), run, repeats)
            yield {
                "codec": spec,
                "kernel": kernel,
                "numel": numel,
                "memcpy_s": copies,
                "kernel_s": times,
                "goal": goal(spec, kernel),
            }


def calls(codec: Any, values: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """The kernels of a codec, by name, ready to be called: every buffer exists, as in a hook's steady state."""
    wire, out = codec.encode(values), torch.zeros_like(values)
    yield "encode", lambda: codec.encode(values, out=wire)
    yield "decode-add", lambda: codec.decode_(out, wire, alpha=0.5, add=True)
    if type(codec).reduce_ is not Codec.reduce_:  # the default decodes and encodes again
        wires = wire.repeat(RANKS, 1)
        yield f"reduce {RANKS} ranks", lambda: codec.reduce_(wire, values, wires, 0, 1 / RANKS)


def interleaved(copy: Callable[[], object], run: Callable[[], object], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of every copy, and of the run that followed it. The first pair warms up (Numba compiles) and is lost."""
    scratch, times = Scratch(), []
    for _ in range(repeats + 1):
        copied = seconds(copy)
        with scratch.job():
            times.append((copied, seconds(run)))
    copies, runs = zip(*times[1:], strict=True)
    return list(copies), list(runs)


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- the table -------------------------------------------------------------------------------------------------------


def goal(spec: str, kernel: str) -> float | None:
    """What a kernel should not exceed, in multiples of memcpy; None where nothing was promised."""
    if kernel.startswith("reduce"):
        return REDUCE_GOAL if spec in CODECS else None
    return GOALS.get((spec, kernel))


def multiples(record: dict[str, Any]) -> list[float]:
    """Each run over the copy before it."""
    return [run / copy for copy, run in zip(record["memcpy_s"], record["kernel_s"], strict=True)]


def extras(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a rotation adds to int4: differences of the medians."""
    medians = {(record["codec"], record["kernel"]): statistics.median(multiples(record)) for record in records}
    return [
        {"codec": f"{spec} - int4", "kernel": kernel, "extra": value - medians["int4", kernel], "goal": HADAMARD_GOAL}
        for (spec, kernel), value in medians.items()
        if spec.startswith("int4:hadamard") and not kernel.startswith("reduce")
    ]


def line(record: dict[str, Any]) -> str:
    """One row, with a mark if it misses its goal."""
    if "extra" in record:
        middle, quartiles, ms = record["extra"], "", ""
    else:
        low, middle, high = statistics.quantiles(multiples(record), n=4, method="inclusive")
        quartiles, ms = f"{low:.2f}-{high:.2f}", f"{1e3 * statistics.median(record['kernel_s']):.2f}"
    limit = record["goal"]
    wanted = "" if limit is None else f"<= {limit:.1f}" + ("  MISSED" if middle > limit else "")
    return f"{record['codec']:<28}{record['kernel']:<16}{middle:>9.2f}  {quartiles:<13}{ms:>8}   {wanted}".rstrip()


def copy_speed(records: list[dict[str, Any]]) -> float:
    """GB/s of all copies, in the median."""
    timed = [record for record in records if "memcpy_s" in record]
    return statistics.median(4 * record["numel"] / took / 1e9 for record in timed for took in record["memcpy_s"])


def write(path: str | None, records: list[dict[str, Any]]) -> None:
    """Records as JSON lines, if there is a path."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
