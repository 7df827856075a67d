"""The HTML report of a reproduction: rows, figures, assumptions, reasons."""

from __future__ import annotations

from collections.abc import Sequence

from pdrelay.reproduce.rows import Assumption, Row
from pdrelay.ui.page import Section, Table, page


def cells(row: Row) -> tuple[str, ...]:
    """A row as text: table, quantity, unit, published, obtained, error, kind."""
    published = "-" if row.published is None else _figure(row.published)
    error = "-" if row.error is None else f"{row.error:+.1%}"
    return row.table, row.quantity, row.unit, published, _figure(row.obtained), error, row.kind


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


HEAD = ("table", "quantity", "unit", "published", "obtained", "error", "kind")


def html(title: str, rows: Sequence[Row], charts: Sequence[tuple[str, str]], assumptions: Sequence[Assumption]) -> str:
    """A page in one file; `charts` are captions and SVG."""
    sections = [
        Section("Rows", [Table(HEAD, [cells(row) for row in rows], names=3)]),
        Section("Figures", charts=charts),
        Section("Why some published numbers cannot come from the stated set-up", notes=reasons(rows)),
        Section("Assumptions", [Table(("what", "value", "origin"), assumptions, names=3)]),
    ]
    return page(title, sections)


def reasons(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with the rows that it is for."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            found.setdefault(row.reason, []).append(f"{row.table}, {row.quantity}")
    return [f"{'; '.join(names)}: {reason}." for reason, names in found.items()]
