"""Plots in plain text."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
WIDTH, HEIGHT = 60, 14


def scatter(points: Sequence[Point], marked: Point, x: str, y: str) -> str:
    """Points as dots and `marked` as a star, from 0 up to the largest values; axes are named at their ends."""
    every = [*points, marked]
    right, top = max(p[0] for p in every) or 1.0, max(p[1] for p in every) or 1.0
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for point, sign in [*((p, "o") for p in points), (marked, "*")]:
        column = min(int(point[0] / right * (WIDTH - 1)), WIDTH - 1)
        row = HEIGHT - 1 - min(int(point[1] / top * (HEIGHT - 1)), HEIGHT - 1)
        rows[row][column] = sign
    ends = {0: f"{top:.4g}", HEIGHT - 1: "0"}
    lines = [f"{ends.get(number, ''):>10} |{''.join(row).rstrip()}" for number, row in enumerate(rows)]
    return "\n".join([f"{y:>10}", *lines, f"{'':>11}+{'-' * WIDTH}", f"{'':>12}0{x:^{WIDTH - 12}}{right:>11.4g}"])
