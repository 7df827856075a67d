"""What a workload is like, beside what its paper says of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pdrelay.workload.base import Request, prefix_hits
from pdrelay.workload.generators import Target, Workload


class Comparison(NamedTuple):
    """One published figure beside the one obtained."""

    quantity: str
    published: float
    obtained: float
    error: float  # relative
    source: str


def summarise(requests: Iterable[Request]) -> dict[str, float]:
    """Means, percentiles and shares of lengths, hit rates and gaps. Hits are those of a cache that never evicts."""
    firsts = list(requests)
    turns = [turn for first in firsts for turn in first.turns()]
    prompts = np.array([turn.prompt for turn in turns], dtype=float)
    outputs = np.array([turn.output for turn in turns], dtype=float)
    hits = np.fromiter(prefix_hits(firsts), dtype=float, count=len(turns))
    figures = {"requests": float(len(turns))}
    for name, values in (("prompt", prompts), ("output", outputs), ("hit", hits), ("uncached", prompts * (1 - hits))):
        figures[f"{name}_mean"] = float(values.mean())
        for percent in (50, 90, 99):
            figures[f"{name}_p{percent}"] = float(np.percentile(values, percent))
    figures["hit_tokens"] = float((prompts * hits).sum() / prompts.sum())
    figures |= {f"hit_above_{bound}": float((hits > bound).mean()) for bound in (0.5, 0.9, 0.95)}
    figures["output_below_100"] = float((outputs < 100).mean())
    figures["prompt_above_19400"] = float((prompts > 19_400).mean())
    return figures | _arrivals([first.arrival for first in firsts])


def _arrivals(moments: list[float]) -> dict[str, float]:
    gaps = np.diff(moments)
    if not len(gaps) or not gaps.sum():
        return {}
    return {"rate": float(1 / gaps.mean()), "gap_cv": float(gaps.std() / gaps.mean())}


def compare(workload: Workload, seed: int = 0, count: int = 20_000) -> list[Comparison]:
    """How close the workload comes to each figure that its paper prints."""
    figures = summarise(itertools.islice(workload.requests(seed), count))
    return [_beside(target, figures[target.quantity]) for target in workload.targets]


def _beside(target: Target, obtained: float) -> Comparison:
    return Comparison(target.quantity, target.published, obtained, obtained / target.published - 1, target.source)
