"""Measured runs -> a page: `read(path)` -> `summarise(runs)` -> `to_html(summary)` or `to_markdown(summary)`."""

from gradwire.tools.records.jsonl import Records, RecordsError, read
from gradwire.tools.records.recommend import Recommendation as Advice
from gradwire.tools.report.advice import Finding, advise
from gradwire.tools.report.page import to_html
from gradwire.tools.report.summary import Group, Row, Summary, summarise
from gradwire.tools.report.tables import to_markdown

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
