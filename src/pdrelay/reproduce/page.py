"""The HTML report of a reproduction: rows, figures, assumptions, reasons."""

from __future__ import annotations

from collections.abc import Sequence

from pdrelay.reproduce.pdd import Report
from pdrelay.reproduce.pdd_setup import ASSUMPTIONS
from pdrelay.reproduce.rows import Row
from pdrelay.ui.charts import Axis, Series, line_chart
from pdrelay.ui.page import Section, Table, page

NAMES = {"pdd": "PDD", "cdc": "CDC-PD", "idc": "IDC-PD"}


def cells(row: Row) -> tuple[str, ...]:
    """A row as text: table, quantity, unit, published, obtained, error, kind."""
    published = "-" if row.published is None else f"{row.published:,.4g}"
    error = "-" if row.error is None else f"{row.error:+.1%}"
    return row.table, row.quantity, row.unit, published, f"{row.obtained:,.4g}", error, row.kind


HEAD = ("table", "quantity", "unit", "published", "obtained", "error", "kind")


def html(report: Report) -> str:
    """A page in one file."""
    charts = [
        ("Figure 7(a): transfers", _curves(report, ("cdc", "pdd"), "transfer_curve")),
        ("Figure 7(b): time to first token", _curves(report, ("cdc", "pdd", "idc"), "ttft_curve")),
    ]
    return page(
        "PDD: published beside obtained",
        [
            Section("Rows", [Table(HEAD, [cells(row) for row in report.rows])]),
            Section("Figures", charts=charts),
            Section("Why some published numbers cannot come from the stated set-up", notes=reasons(report.rows)),
            Section("Assumptions", [Table(("what", "value", "origin"), ASSUMPTIONS)]),
        ],
    )


def reasons(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with the rows that it is for."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            found.setdefault(row.reason, []).append(f"{row.table}, {row.quantity}")
    return [f"{'; '.join(names)}: {reason}." for reason, names in found.items()]


def _curves(report: Report, kinds: Sequence[str], name: str) -> str:
    lines = [Series(NAMES[kind], getattr(report.served[kind], name)) for kind in kinds]
    return line_chart(lines, Axis("seconds", logarithmic=True), Axis("share of requests", least=0, most=1))
