"""Records -> a page: `read(path)` -> `summarise(runs)` -> `to_html(summary)` or `to_markdown(summary)`."""

from gradwire.bench.jsonl import Records, RecordsError, read
from gradwire.report.advice import Advice, advise
from gradwire.report.markdown import to_markdown
from gradwire.report.page import Finding, to_html
from gradwire.report.summary import Group, Row, Summary, summarise

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
