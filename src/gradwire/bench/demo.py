"""The demo: the built-in workload under plain DDP and under every hook, a table, and what it means in plain words."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

import torch

from gradwire.bench.measure import checked, measure
from gradwire.bench.progress import progress
from gradwire.bench.ranks import cores, threads_each
from gradwire.bench.records import PLAIN, Record, Settings
from gradwire.bench.table import GBIT, label, ms, table
from gradwire.version import __version__

LIMIT_S = 35.0
"""Training time when nobody asks for a number of steps."""
SAME_LOSS = 0.02
"""Final losses closer than this count as equal: another seed moves them by more."""
SAME_BYTES = 1.02
"""And so do bytes sent within this factor."""
FEW_STEPS = 8
"""Fewer timed steps than this say nothing about speed."""
PROSE_WIDTH = 100


def demo(hooks: Sequence[str], settings: Settings, *, as_json: bool, out: TextIO, err: TextIO) -> None:
    """Measure plain DDP and `hooks`; progress goes to `err`, the table and its meaning (or JSON) to `out`."""
    names = checked([PLAIN, *hooks])
    with progress(err, "gradwire demo") as report:
        records = measure(names, settings, report=report)
    width = shutil.get_terminal_size().columns if out.isatty() else None
    out.write(to_json(records, settings) if as_json else to_text(records, settings, width))
    out.flush()


def to_text(records: Sequence[Record], settings: Settings, width: int | None) -> str:
    """Everything the demo prints, for a terminal of this width, or None for a file. `records` begin with PLAIN."""
    prose = min(width or PROSE_WIDTH, PROSE_WIDTH)
    first = textwrap.fill(heading(records[0], settings), prose)
    points = [textwrap.fill(f"- {text}", prose, subsequent_indent="  ") for text in meaning(records)]
    return "\n".join([first, "", table(records, width), "", *points, *code(records)]) + "\n"


def to_json(records: Sequence[Record], settings: Settings) -> str:
    """The records with what is computed from them, the settings, and where they come from."""
    content = {
        "gradwire": __version__,
        "torch": torch.__version__,
        "cores": cores(),
        "settings": asdict(settings),
        "records": [{**record.as_dict(), **_derived(record, records[0])} for record in records],
    }
    return json.dumps(content, indent=2) + "\n"


def _derived(record: Record, plain: Record) -> dict[str, Any]:
    return {
        "median_step_s": record.median_s,
        "quartiles_step_s": record.quartiles_s,
        "speed_up": plain.median_s / record.median_s,
        "wire_s_at_1_gbit_per_s": record.wire_s(GBIT),
    }


def heading(record: Record, settings: Settings) -> str:
    """What was trained, where and how often."""
    turn = min(settings.round_steps, record.steps)
    cut = f" (of {settings.steps}, as time was up)" if record.steps < settings.steps else ""
    return (
        f"A GPT of {record.params / 1e6:.1f}M parameters learns the text of Python's standard library: "
        f"{_count(record.steps, 'step')}{cut} under each hook, {turn} at a time, seed {settings.seed}. "
        f"{_count(settings.nproc, 'process')} with {_count(threads_each(settings.nproc), 'thread')} each on "
        f"{_count(cores(), 'core')}, gloo over loopback, torch {torch.__version__}."
    )


def meaning(records: Sequence[Record]) -> list[str]:
    """What the table says and what it does not."""
    if not records[0].sent_bytes:
        return ["One process has nothing to exchange: take --nproc 2 or more to compare hooks."]
    return [text for text in (_fastest(records), _loopback(records), _on_a_link(records), _replicas(records)) if text]


def recommended(records: Sequence[Record]) -> Record | None:
    """Of the hooks that keep plain DDP's loss and their promises, one that sends least; of equals the most exact."""
    highest = records[0].loss + SAME_LOSS
    fit = [record for record in records[1:] if record.averages and record.kept_promises and record.loss <= highest]
    least = min((record.sent_bytes for record in fit), default=0.0)
    equals = [record for record in fit if record.sent_bytes <= SAME_BYTES * least]
    return min(equals, key=lambda record: record.gradient_error, default=None)


def code(records: Sequence[Record]) -> list[str]:
    """The line to add to a program."""
    best = recommended(records)
    if best is None or not records[0].sent_bytes:
        return []
    return [f"- To train with {best.hook}, one line:", "", f'    hook = gradwire.register(ddp_model, "{best.hook}")']


def _fastest(records: Sequence[Record]) -> str:
    plain, ours = records[0], [record for record in records[1:] if record.averages]
    if not ours:
        return ""
    best = min(ours, key=lambda record: record.median_s)
    text = f"Fastest hook here: {best.hook}, {plain.median_s / best.median_s:.2f}x the speed of plain DDP"
    if len(best.step_s) < FEW_STEPS:
        return f"{text}; but so few timed steps ({len(best.step_s)}) say little."
    overlap = best.quartiles_s[1] >= plain.quartiles_s[0]
    return f"{text}; their quartiles overlap, so do not read much into it." if overlap else f"{text}."


def _loopback(records: Sequence[Record]) -> str:
    text = "The processes talk over loopback, which is faster than any network, so no hook can win much here"
    limit = next((record for record in records if not record.averages), None)
    if limit is None:
        return f"{text}."
    ratio = f"{records[0].median_s / limit.median_s:.2f}x"
    return f"{text}: sending nothing at all ({limit.hook}) runs at {ratio} the speed of plain DDP."


def _on_a_link(records: Sequence[Record]) -> str:
    plain, best = records[0], recommended(records)
    if best is None:
        return ""
    return (
        f"On a link of 1 Gbit/s the bytes of a step take {ms(plain.wire_s(GBIT))} ms under plain DDP and "
        f"{ms(best.wire_s(GBIT))} ms under {best.hook} (calculated; part of it hides behind the backward pass)."
    )


def _replicas(records: Sequence[Record]) -> str:
    broken = [f"{record.hook}: {record.verified}" for record in records if not record.kept_promises]
    if broken:
        return f"Hook.verify() found BROKEN PROMISES. {'. '.join(broken)}"
    apart = [record for record in records if not record.identical]
    if any(record.averages for record in apart):
        return f"The ranks' parameters DIFFER under {', '.join(label(record.hook) for record in apart)}."
    where = f"every hook but {', '.join(record.hook for record in apart)}" if apart else "every hook"
    return f"Hook.verify() holds, and the ranks ended with bit-identical parameters under plain DDP and {where}."


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"
