"""Artificial runs: their times follow a simple model of a link, so that hooks pay on slow links only."""

from dataclasses import replace

from gradwire.report import summarise
from gradwire.tools.records.records import NO_LINK, Cell, Origin, Record, Run, Settings, Split

ORIGIN = Origin(
    machine="Some <Processor> & Co", system="Linux x86_64", cores=2, python="3.11.0", torch="2.13.0", gradwire="0.1.0"
)
LINKS = {NO_LINK: None, "1gbit": 1e9, "100mbit": 1e8}
BITS = {"exact": 32, "noop": 0, "powersgd": 0.6, "bf16": 16, "fp16": 16, "int8": 8.2, "int4": 4.2, "sign": 1.1}
ERROR = {"exact": 3e-8, "noop": 0.97, "powersgd": 0.6, "bf16": 1.4e-3, "fp16": 1.8e-4, "int8": 5e-3, "int4": 0.08}
WORK_MS = {"exact": 0, "noop": 0, "powersgd": 12, "bf16": 4, "fp16": 5, "int8": 7, "int4": 9, "sign": 6}
SLOW = "100mbit"
COMPUTE_S, PARAMS, STEPS, UNTIMED = 0.080, 2_500_000, 40, 2


def run(hook, link=NO_LINK, *, ranks=2, repeat=0, repeats=1, **changes):
    """One run; `changes` apply to its record."""
    sent = BITS[hook] / 8 * PARAMS * 2 * (ranks - 1) / ranks
    wire_s = 8 * sent / (LINKS[link] or 2e10)
    work_s = WORK_MS[hook] / 1e3
    wait_s = 0.7 * (wire_s + work_s)
    times = [COMPUTE_S + wait_s + (step % 5 + repeat) * 5e-4 for step in range(STEPS - UNTIMED)]
    worse = 0.1 if hook in ("sign", "powersgd") else 0.0
    losses = [5.5 * 0.985**step + worse * step / STEPS + 0.05 * (step % 3) for step in range(STEPS)]
    record = Record(
        hook=hook,
        steps=STEPS,
        step_s=tuple(times),
        sent_bytes=sent,
        sent_is_counted=True,
        gradient_error=ERROR.get(hook, 0.6),
        loss=3.0 + worse + 0.001 * repeat,
        averages=hook != "noop",
        identical=hook != "noop",
        verified=f"{hook}: fine",
        kept_promises=True,
        params=PARAMS,
    )
    record = replace(record, **changes)
    wait_s = wait_s * record.median_s / (COMPUTE_S + wait_s)
    return Run(
        cell=Cell(repeat, ranks, link, hook),
        repeats=repeats,
        link_bits_per_s=LINKS[link],
        settings=Settings(steps=STEPS, nproc=ranks, seed=repeat),
        origin=ORIGIN,
        began="2026-01-01T00:00:00+00:00",
        split=Split(
            compute_s=record.median_s - wait_s, encode_s=work_s / 2, wire_s=wire_s, decode_s=work_s / 2, wait_s=wait_s
        ),
        losses=tuple(losses),
        record=record,
    )


def runs(hooks=tuple(BITS), links=tuple(LINKS), *, ranks=(2,), repeats=1):
    """One run for every cell."""
    return [
        run(hook, link, ranks=count, repeat=repeat, repeats=repeats)
        for repeat in range(repeats)
        for count in ranks
        for link in links
        for hook in hooks
    ]


def at(ms, hook, link=NO_LINK, spread=0.01, **changes):
    """A run whose step times lie evenly between `ms` minus and plus `spread`."""
    step_s = tuple(ms / 1e3 * (1 + spread * (step / 10 - 1)) for step in range(21))
    return run(hook, link, step_s=step_s, **changes)


def group(*members):
    """The only group of some runs."""
    (only,) = summarise(members).groups
    return only
