"""Tables of text. `text_table` is for a terminal and `markdown_table` for a pull request; both take the same rows."""

from collections.abc import Collection, Sequence

from gradwire.tools.records.records import PLAIN

Rows = Sequence[Sequence[str]]


def text_table(rows: Rows, *, right: Collection[int] = ()) -> str:
    """Rows of cells as lines of text, the header first: columns are padded and separated by two blanks.

    `right` holds the indices of the columns that are aligned to the right. Lines have no blanks at their end.
    """
    return "\n".join("  ".join(cells).rstrip() for cells in _padded(rows, right))


def markdown_table(rows: Rows, *, right: Collection[int] = ()) -> str:
    """The same rows as a markdown table whose columns are padded, so that it also reads well in a terminal."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    head, *body = _padded(escaped, right, least=3)
    rule = ["-" * (len(cell) - 1) + (":" if at in right else "-") for at, cell in enumerate(head)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *body))


def _padded(rows: Rows, right: Collection[int], least: int = 0) -> list[list[str]]:
    """All cells of a column get the same width, at least `least`."""
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]


def label(hook: str) -> str:
    """The name of a hook in tables and charts."""
    return "plain DDP" if hook == PLAIN else hook


def ms(seconds: float) -> str:
    """Milliseconds with one decimal, without the unit."""
    return f"{1e3 * seconds:.1f}"
