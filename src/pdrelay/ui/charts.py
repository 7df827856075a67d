"""Line charts as inline SVG, so that a report is one file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

Point = tuple[float, float]
COLOURS = ("#1f6fb4", "#d1582a", "#2b8a5f", "#8a4fb0", "#a08000", "#555555", "#c0487a", "#2a9aa8")
WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 12, 44
LEGEND_LETTER = 6.2  # width of one, about
LEGEND_ROW = 16


class Series(NamedTuple):
    """One line of a chart, or one set of dots."""

    name: str
    points: Sequence[Point]
    dashed: bool = False
    marks: bool = False  # a dot at each point
    dots: bool = False


class Axis(NamedTuple):
    """One direction: its label and scale."""

    label: str
    logarithmic: bool = False
    least: float | None = None
    most: float | None = None


def line_chart(series: Sequence[Series], x: Axis, y: Axis) -> str:
    """An SVG element with axes, ticks and a legend. Points that are not finite, outside of an axis, or not
    above 0 on a log axis, are left out. The legend is above.
    """
    drawn = [line._replace(points=[p for p in line.points if _usable(p, x, y)]) for line in series]
    drawn = [line for line in drawn if line.points]
    if not drawn:
        return '<p class="empty">nothing to draw</p>'
    across = _Scale(x, [p[0] for line in drawn for p in line.points], LEFT, WIDTH - RIGHT)
    up = _Scale(y, [p[1] for line in drawn for p in line.points], HEIGHT - BOTTOM, TOP)
    legend, above = _legend(drawn)
    body = [*_ticks(across, up, x, y), *(_path(line, i, across, up) for i, line in enumerate(drawn)), *legend]
    return (
        f'<svg viewBox="0 {-above} {WIDTH} {HEIGHT + above}" role="img" '
        f'aria-label="{escape(y.label)} by {escape(x.label)}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#333">' + "".join(body) + "</svg>"
    )


class _Scale:
    """Data to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        least = min(values) if axis.least is None else axis.least
        most = max(values) if axis.most is None else axis.most
        if axis.logarithmic:
            least, most = max(least, 1e-12), max(most, least * 1.001)
        elif most - least < 1e-9 * max(abs(least), abs(most), 1e-9):
            least, most = least - max(0.5, abs(least) / 2), least + max(0.5, abs(least) / 2)
        self.least, self.most, self._log = least, most, axis.logarithmic
        self._start, self._span = start, end - start

    def __call__(self, value: float) -> float:
        if self._log:
            share = math.log(max(value, 1e-12) / self.least) / math.log(self.most / self.least)
        else:
            share = (value - self.least) / (self.most - self.least)
        return self._start + self._span * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Round values inside the scale."""
        if self._log:
            powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            for factors in ((1,), (1, 3), (1, 2, 5), range(1, 10)):  # as many as make three ticks
                found = [factor * 10.0**power for power in powers for factor in factors]
                found = [value for value in found if self.least <= value <= self.most]
                if len(found) >= 3:
                    return found
            return [self.least, self.most]
        step = 10 ** math.floor(math.log10((self.most - self.least) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.most - self.least) / (step * factor) <= 6)
        first = math.ceil(self.least / step)
        return [number * step for number in range(first, int(self.most / step) + 1)]


def _usable(point: Point, x: Axis, y: Axis) -> bool:
    return all(
        math.isfinite(value)
        and (value > 0 or not axis.logarithmic)
        and (axis.least is None or value >= axis.least - 1e-9)
        and (axis.most is None or value <= axis.most + 1e-9)
        for value, axis in zip(point, (x, y), strict=True)
    )


def _path(line: Series, number: int, across: _Scale, up: _Scale) -> str:
    if line.dots:
        dots = "".join(f'<circle cx="{across(a):.1f}" cy="{up(b):.1f}" r="2"/>' for a, b in line.points)
        return f'<g fill="{_colour(number)}" fill-opacity="0.6">{dots}</g>'
    places = [(across(a), up(b)) for a, b in line.points]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    path = f'<polyline fill="none" stroke="{_colour(number)}" stroke-width="1.6"{dash} points="{points}"/>'
    if not line.marks:
        return path
    return path + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(number)}"/>' for x, y in places)


def _ticks(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path fill="none" stroke="#444" d="M{LEFT},{TOP}V{bottom}H{right}"/>']
    for value in across.ticks():
        at = across(value)
        parts.append(f'<path fill="none" stroke="#eee" d="M{at:.1f},{TOP}V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{_number(value)}</text>')
    for value in up.ticks():
        at = up(value)
        parts.append(f'<path fill="none" stroke="#eee" d="M{LEFT},{at:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{escape(y.label)}</text>'
    )
    return parts


def _legend(drawn: Sequence[Series]) -> tuple[list[str], int]:
    """The names in rows above the frame, and the height of these."""
    parts: list[str] = []
    x, row = LEFT, 0
    places = []
    for line in drawn:
        width = round(30 + LEGEND_LETTER * len(line.name))
        if x + width > WIDTH and x > LEFT:
            x, row = LEFT, row + 1
        places.append((x, row))
        x += width
    for number, (line, (x, at)) in enumerate(zip(drawn, places, strict=True)):
        y = LEGEND_ROW * (at - row) - 4
        parts.append(f'<rect x="{x}" y="{y - 5}" width="12" height="3" fill="{_colour(number)}"/>')
        parts.append(f'<text x="{x + 17}" y="{y}">{escape(line.name)}</text>')
    return parts, LEGEND_ROW * (row + 1)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _number(value: float) -> str:
    size = abs(value)
    if size >= 1e6 or (size and size < 1e-3):
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"
