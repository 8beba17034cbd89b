"""Rows of cells as aligned text and as HTML."""

import html
from collections.abc import Iterable, Sequence


def as_text(rows: Iterable[Sequence[str]]) -> str:
    """One line a row, every column as wide as its widest cell.

    Example:
        >>> print(as_text([("leaf", "bytes"), ("params", "4")]))
        leaf    bytes
        params  4
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def as_html(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a head, every cell escaped.

    Example:
        >>> as_html(["n"], [["<1"]])
        '<table><tr><th>n</th></tr><tr><td>&lt;1</td></tr></table>'
    """
    lines = ["".join(f"<th>{html.escape(name)}</th>" for name in head)]
    lines += ["".join(f"<td>{html.escape(str(c))}</td>" for c in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
