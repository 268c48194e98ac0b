"""Plain-text tables, rows of a label and a text, and text from elsewhere that is safe to print.

Tested by: tests/test_plain_text.py."""

import textwrap
from collections.abc import Sequence
from typing import Any

MIB = 2**20
LABEL = 11  # width of the labels in front of a row
WIDTH = 100  # columns
Row = tuple[str, str]  # a label, and a text of any length; without a label it is a command, which is not wrapped


def printable(text: str) -> str:
    """In one line, with control characters escaped, also those that turn the direction of text: names of files and keys, of
    which messages consist, may hold any."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def readable(text: str) -> str:
    """Lines that are safe to print: a model may generate any byte, including terminal control sequences."""
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else "\ufffd" for c in text)


def rows_text(rows: Sequence[Row]) -> str:
    margin = " " * LABEL

    def wrapped(text: str) -> str:
        return textwrap.fill(printable(text), WIDTH - LABEL, subsequent_indent=margin, break_on_hyphens=False)

    return "\n".join(f"{label:<{LABEL}}{wrapped(text) if label else printable(text)}".rstrip() for label, text in rows)


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
