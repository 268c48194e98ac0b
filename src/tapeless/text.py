"""Plain-text tables."""

from collections.abc import Sequence
from typing import Any

MIB = 2**20


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
