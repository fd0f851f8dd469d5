"""`gradwire report`: read a file of records, write a page or markdown, and print the recommendation."""

import os
from pathlib import Path
from typing import Any, TextIO

from gradwire.errors import SpecError
from gradwire.tools.records.curves import is_curves, read_curves
from gradwire.tools.records.jsonl import RecordsError, json_text, read
from gradwire.tools.records.verdicts import conclude_all
from gradwire.tools.report import comparison
from gradwire.tools.report.advice import advise
from gradwire.tools.report.page import environment, to_html
from gradwire.tools.report.summary import Group, Summary, summarise
from gradwire.tools.report.tables import to_markdown

PAGE = "report.html"
STDOUT = Path("-")


def report(records: Path, path: Path | None, *, kind: str, as_json: bool, out: TextIO, err: TextIO) -> None:
    """Write the report to `path`. The recommendation and the path go to `out`, unless the report itself does."""
    if as_json and path == STDOUT:
        raise SpecError("--json and --out - both write to stdout: give --out a file")
    if path is not None and path.exists() and records.exists() and path.samefile(records):
        raise SpecError(f"--out {path} would overwrite the records; name another file, such as {PAGE}")
    if is_curves(records):
        _report_comparison(records, path, kind=kind, as_json=as_json, out=out)
        return
    held = read(records)
    if held.torn:
        err.write(f"gradwire report: {held.torn_text(records)}\n")
    if not held.runs:
        raise RecordsError(f"{records} holds no record; `gradwire bench --out {records}` measures some")
    summary = summarise(held.runs)
    text = to_html(summary) if kind == "html" else to_markdown(summary)
    target = path or (Path(PAGE) if kind == "html" else None if as_json else STDOUT)
    if target == STDOUT:
        out.write(text)
    else:
        if target is not None:
            save(target, text)
        out.write(to_json(summary, target) if as_json else to_text(summary, target))
    out.flush()


def _report_comparison(records: Path, path: Path | None, *, kind: str, as_json: bool, out: TextIO) -> None:
    """The same for the runs of `gradwire compare`."""
    result = conclude_all(read_curves(records))
    text = comparison.to_html(result) if kind == "html" else comparison.to_markdown(result)
    target = path or (Path(PAGE) if kind == "html" else None if as_json else STDOUT)
    if target == STDOUT:
        out.write(text)
    else:
        if target is not None:
            save(target, text)
        content = {**result.as_dict(), "report": None if target is None else str(target)}
        shown = json_text(content) if as_json else f"{comparison.to_text(result)}\nreport: {target}"
        out.write(f"{shown}\n")
    out.flush()


def to_text(summary: Summary, path: Path | None) -> str:
    """One line with the recommendation for each group, and the path."""
    lines = [f"{group.name}: {advise(group)}" for group in summary.groups]
    return "\n".join([*lines, f"report: {path}"]) + "\n"


def to_json(summary: Summary, path: Path | None) -> str:
    """The same for programs, with the numbers it is based on."""
    content = {"report": None if path is None else str(path), "groups": [_group(group) for group in summary.groups]}
    return json_text(content) + "\n"


def _group(group: Group) -> dict[str, Any]:
    advice = advise(group)
    rows = {
        row.hook: {
            "median_step_s": row.record.median_s,
            "quartiles_step_s": row.record.quartiles_s,
            "speed_up": group.speed_up(row),
            "gradient_error": row.record.gradient_error,
            "loss": row.record.loss,
        }
        for row in group.rows
    }
    return {
        "link": group.link,
        "ranks": group.ranks,
        "ceiling": group.ceiling,
        "hook": advice.hook,
        "title": advice.title,
        "reason": advice.reason,
        "rows": rows,
    }


def check_writable(path: Path) -> None:
    """Check before a measurement that its result can be written to `path`, and raise SpecError if not."""
    if path.is_dir():
        raise SpecError(f"cannot write {path}: it is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "no permission" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise SpecError(f"cannot write {path}: {why}")


def check_page(path: Path) -> None:
    """The same for a page. An existing file that is not a page, such as the script to run, is not overwritten either.

    Raises:
        SpecError: The page cannot be written.
        GradwireError: jinja2 is not installed.
    """
    environment()
    check_writable(path)
    if path.is_file() and path.stat().st_size and not path.read_bytes()[:20].lower().startswith(b"<!doctype html"):
        raise SpecError(f"{path} exists and is not a page, so it is not overwritten; name another file, such as {PAGE}")


def save(path: Path, text: str) -> None:
    """Write a file, and raise RecordsError if that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RecordsError(f"cannot write {path}: {error.strerror}") from error
