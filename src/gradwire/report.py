"""Measured runs -> a page: `read(path)` -> `summarise(runs)` -> `to_html(summary)` or `to_markdown(summary)`."""

from gradwire.tools.records.jsonl import Records, RecordsError, read
from gradwire.tools.report.advice import Advice, advise
from gradwire.tools.report.markdown import to_markdown
from gradwire.tools.report.page import Finding, to_html
from gradwire.tools.report.summary import Group, Row, Summary, summarise

__all__ = [
    "Advice",
    "Finding",
    "Group",
    "Records",
    "RecordsError",
    "Row",
    "Summary",
    "advise",
    "read",
    "summarise",
    "to_html",
    "to_markdown",
]
