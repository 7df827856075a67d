"""Horizontal bars as inline SVG, for values of things that have names."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pdrelay.ui.charts import COLOURS, WIDTH

BAR, GAP, LEFT, RIGHT, TOP, BOTTOM = 9, 8, 190, 50, 22, 30


def bar_chart(groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], label: str) -> str:
    """An SVG element: for each named group a bar for each of `names`, to the right of 0 or to the left of it."""
    if not groups:
        return '<p class="empty">nothing to draw</p>'
    values = [value for _, bars in groups for value in bars]
    least, most = min(0.0, *values), max(0.0, *values)
    span = (most - least) or 1.0
    height = TOP + BOTTOM + len(groups) * (BAR * len(names) + GAP)

    def across(value: float) -> float:
        return LEFT + (value - least) / span * (WIDTH - LEFT - RIGHT)

    signed = least < 0
    parts = [_legend(names)] if len(names) > 1 else []
    for number, (name, bars) in enumerate(groups):
        y = TOP + number * (BAR * len(names) + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{y + BAR * len(names) / 2 + 4:.1f}" text-anchor="end">'
                     f"{escape(name)}</text>")  # fmt: skip
        for place, value in enumerate(bars):
            start, end = sorted((across(0.0), across(value)))
            parts.append(f'<rect x="{start:.1f}" y="{y + place * BAR}" width="{max(end - start, 0.5):.1f}" '
                         f'height="{BAR - 1}" fill="{COLOURS[place % len(COLOURS)]}"/>')  # fmt: skip
            shown = f"{value:+.3g}" if signed else f"{value:.3g}"
            parts.append(f'<text x="{end + 4:.1f}" y="{y + place * BAR + BAR - 1}" font-size="9">{shown}</text>')
    zero = across(0.0)
    parts.append(f'<path fill="none" stroke="#444" d="M{zero:.1f},{TOP - 2}V{height - BOTTOM}"/>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(label)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">' + "".join(parts) + "</svg>"


def _legend(names: Sequence[str]) -> str:
    parts = []
    for number, name in enumerate(names):
        x = LEFT + 110 * number
        parts.append(f'<rect x="{x}" y="6" width="12" height="8" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 17}" y="14">{escape(name)}</text>')
    return "".join(parts)
