"""Small tables of texts, for terminals and for notebooks."""

from __future__ import annotations

import html
from typing import Any, List, Sequence

Rows = Sequence[Sequence[Any]]


def count(number: float) -> str:
    """12,345; of small numbers that are not whole, one digit more."""
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:,.1f}"


def size(number: float) -> str:
    """Of bytes: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def share(number: float) -> str:
    return f"{100 * number:.1f} %"


def in_text(rows: Rows) -> str:
    """Columns side by side, a line for each row."""
    cells = [[str(one) for one in row] for row in rows]
    widths = [max(len(row[place]) for row in cells if place < len(row)) for place in range(max(map(len, cells), default=0))]
    return "\n".join("  ".join(one.ljust(width) for one, width in zip(row, widths)).rstrip() for row in cells)


def in_html(title: str, header: Sequence[str], rows: Rows) -> str:
    """What a notebook shows. All texts are escaped."""
    def line(tag: str, row: Sequence[Any]) -> str:
        return "<tr>" + "".join(f'<{tag} style="text-align:left">{html.escape(str(one))}</{tag}>' for one in row) + "</tr>"

    parts: List[str] = [f"<b>{html.escape(title)}</b>"]
    if rows:
        parts.append("<table>" + (line("th", header) if header else "") + "".join(line("td", row) for row in rows) + "</table>")
    return "".join(parts)
