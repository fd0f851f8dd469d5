"""Are the verdicts of `gradwire compare` right? It is repeated on a training with planted harm, and on harmless ones.

    python benchmarks/verdicts.py --repeats 20 --seeds 5 --out verdicts.jsonl
    python benchmarks/verdicts.py --repeats 20 --seeds 5 --out verdicts.jsonl --table

Each repeat has seeds of its own, and is judged as `gradwire compare` judges one call. `plain` (DDP without a hook) does
what `exact` does, so harm there is a false alarm. `sign` and `planted`, which multiplies the gradients of one layer by
0.7, do harm. All runs are in one file, so that a second call continues it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gradwire.tools.launch.script import Script
from gradwire.tools.measure.compare import Entry, Plan, compare
from gradwire.tools.records.curves import Curve, read_curves
from gradwire.tools.records.verdicts import Comparison, conclude

SCRIPT = Script(str(Path(__file__).parent / "tasks" / "planted.py"))
HOOKS = ("exact", "plain", "sign")
PLANTED = "planted=@exact --scale 0.7"


def judged(curves: Sequence[Curve], names: Sequence[str], seeds: int) -> list[Comparison]:
    """One comparison for each group of `seeds` seeds that is complete."""
    held = {curve.key for curve in curves}
    groups = [range(first, first + seeds) for first in range(0, 1 + max(curve.seed for curve in curves), seeds)]
    whole = [group for group in groups if all((name, seed) in held for name in names for seed in group)]
    return [conclude([curve for curve in curves if curve.seed in group], names) for group in whole]


def table(found: Sequence[Comparison]) -> str:
    """By hook, how often there was which verdict, and between what the gap and the smallest visible gap lay."""
    lines = ["| | verdicts | gap | half of the 95% interval | smallest visible gap |", "|---|---|---|---|---|"]
    for at, row in enumerate(found[0].rows[1:], start=1):
        verdicts = Counter(each.rows[at].verdict for each in found)
        said = ", ".join(f"{verdict}: {count} of {len(found)}" for verdict, count in verdicts.most_common())
        gaps = [gap for each in found if (gap := each.rows[at].gap) is not None]
        columns = [[gap.mean for gap in gaps], [gap.half_width for gap in gaps], [gap.visible for gap in gaps]]
        spans = [f"{min(values):.5f} to {max(values):.5f}" if values else "-" for values in columns]
        lines.append(f"| `{row.name}` | {said} | {' | '.join(spans)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5, help="of each repeat")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("verdicts.jsonl"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    entries = (*map(Entry.of_hook, HOOKS), Entry.of_variant(PLANTED))
    seeds = tuple(range(args.repeats * args.seeds))
    plan = Plan(script=SCRIPT, entries=entries, seeds=seeds, steps=args.steps, nproc=2)
    curves = read_curves(args.out) if args.table else compare(plan, args.out)
    print(table(judged(curves, [entry.name for entry in entries], args.seeds)))


if __name__ == "__main__":
    main()
