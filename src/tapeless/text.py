"""Plain-text tables, and rows of a label and a text."""

import textwrap
from collections.abc import Sequence
from typing import Any

MIB = 2**20
LABEL = 11  # width of the labels in front of a row
WIDTH = 100  # columns
Row = tuple[str, str]  # a label, and a text of any length; without a label it is a command, which is not wrapped


def rows_text(rows: Sequence[Row]) -> str:
    margin = " " * LABEL

    def wrapped(text: str) -> str:
        return textwrap.fill(text, WIDTH - LABEL, subsequent_indent=margin, break_on_hyphens=False)

    return "\n".join(f"{label:<{LABEL}}{wrapped(text) if label else text}".rstrip() for label, text in rows)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, the first to the left and numbers to the right; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
