"""What a reader could see of a handoff: pauses around the seam and elsewhere, and the output rate across it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from pdrelay.bench.streams import Stream

AROUND = 8
"""Gaps on each side of the seam that count as around it; windows elsewhere have as many."""

FIRST = 2
"""Gaps at the start of a stream that count nowhere: those tokens wait for prefill and transfers."""

CURVE_SECONDS = 2.0
BIN_SECONDS = 0.1


class Seams(msgspec.Struct, frozen=True, kw_only=True):
    """The handoffs of one mode. Seconds; a window is 2 AROUND neighbouring gaps, its pause the largest of them."""

    mode: str
    handoffs: int
    median_gap: float
    pause_p50: float  # of the windows around a seam
    pause_p95: float
    pause_max: float
    elsewhere_p50: float  # of the windows that touch no seam, in the same streams
    elsewhere_p95: float
    within_round_trip: float  # share of seams whose pause is at most a round trip and twice the median gap
    within_elsewhere: float  # ... at most 1.2 times elsewhere_p95
    within_both: float
    elsewhere_within_round_trip: float  # share of windows elsewhere as small: what a seam could reach at best
    rounds_mean: float
    relay_extra_tokens_mean: float
    held_back_mean: float
    curve: list[float]
    """Tokens per second and stream in bins of BIN_SECONDS, CURVE_SECONDS to both sides; 0 where no stream reaches."""


def seams(mode: str, streams: Sequence[Stream], round_trip: float) -> Seams | None:
    """None when no stream was handed over far enough from both of its ends."""
    handed = [s for s in streams if FIRST + AROUND < (s.trace["handoff_index"] or 0) < len(s.arrivals) - AROUND]
    if not handed:
        return None
    gaps = [np.diff(stream.arrivals) for stream in handed]
    at = [stream.trace["handoff_index"] - 1 for stream in handed]  # the gap before main decode's first token
    median_gap = float(np.median(np.concatenate(gaps)))
    pauses = np.array([g[k - AROUND : k + AROUND].max() for g, k in zip(gaps, at, strict=True)])
    elsewhere = np.array([pause for g, k in zip(gaps, at, strict=True) for pause in _elsewhere(g, k)])
    limits = round_trip + 2 * median_gap, 1.2 * float(np.percentile(elsewhere, 95)) if len(elsewhere) else np.inf
    within = [pauses <= limit for limit in limits]
    return Seams(
        mode=mode,
        handoffs=len(handed),
        median_gap=median_gap,
        pause_p50=float(np.median(pauses)),
        pause_p95=float(np.percentile(pauses, 95)),
        pause_max=float(pauses.max()),
        elsewhere_p50=float(np.median(elsewhere)) if len(elsewhere) else 0.0,
        elsewhere_p95=float(np.percentile(elsewhere, 95)) if len(elsewhere) else 0.0,
        within_round_trip=float(within[0].mean()),
        within_elsewhere=float(within[1].mean()),
        within_both=float((within[0] & within[1]).mean()),
        elsewhere_within_round_trip=float((elsewhere <= limits[0]).mean()) if len(elsewhere) else 0.0,
        rounds_mean=_mean(handed, "handoff_rounds"),
        relay_extra_tokens_mean=_mean(handed, "relay_extra_tokens"),
        held_back_mean=_mean(handed, "held_back"),
        curve=_curve(handed),
    )


def _elsewhere(gaps: np.ndarray, seam: int) -> list[float]:
    """Pauses of windows side by side that have no gap in common with those around the seam."""
    starts = [*range(FIRST, seam - 3 * AROUND + 1, 2 * AROUND), *range(seam + AROUND, len(gaps), 2 * AROUND)]
    return [float(gaps[start : start + 2 * AROUND].max()) for start in starts if start + 2 * AROUND <= len(gaps)]


def _curve(streams: Sequence[Stream]) -> list[float]:
    """A token counts evenly over the gap before it: bins would beat with streams that all step alike."""
    bins = np.linspace(-CURVE_SECONDS, CURVE_SECONDS, round(2 * CURVE_SECONDS / BIN_SECONDS) + 1)
    counts = np.zeros(len(bins) - 1)
    seen = np.zeros(len(bins) - 1)
    for stream in streams:
        shifted = np.array(stream.arrivals[1:]) - stream.arrivals[stream.trace["handoff_index"]]
        inside = [shifted[0] <= low and high <= shifted[-1] for low, high in pairwise(bins)]
        counts += np.where(inside, np.diff(np.interp(bins, shifted, np.arange(len(shifted)))), 0.0)
        seen += inside
    return [float(count / n / BIN_SECONDS) if n else 0.0 for count, n in zip(counts, seen, strict=True)]


def _mean(streams: Sequence[Stream], key: str) -> float:
    return float(np.mean([stream.trace.get(key, 0) for stream in streams]))
