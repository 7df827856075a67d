"""Transfer latencies of the Table 2 experiment as distribution functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pdrelay.bench import plots
from pdrelay.bench.table2 import DISTRIBUTIONS, PUBLISHED, Table2


def plot(result: Table2, path: Path) -> None:
    """Draws one panel for each distribution, a curve for each carrier, the published points. Raises BenchError."""
    figure = plots.figure(10, 4.5)
    for axes, name in zip(figure.subplots(1, len(DISTRIBUTIONS), sharex=True, sharey=True), DISTRIBUTIONS, strict=True):
        for arm in result.arms:
            if arm.distribution == name:
                latencies = np.sort(arm.latencies)
                axes.plot(
                    latencies, np.arange(1, len(latencies) + 1) / len(latencies), label=arm.carrier, linewidth=1.2
                )
        row = PUBLISHED[name]
        axes.plot([row.p50, row.p99], [0.5, 0.99], "k+", markersize=9, label="published P50, P99 (no queueing)")
        axes.set_xscale("log")
        axes.set_xlabel("transfer latency, seconds")
        axes.set_title(f"{name} deltas, mean hit rate 0.90", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("share of transfers")
    figure.suptitle(f"A full line of {result.rate * 8 / 1e6:g} Mbit/s, 20 Gbit/s at 1/{result.scale:g}", fontsize=10)
    plots.save(figure, path)
