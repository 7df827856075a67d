"""How thin the line may be, how far apart the datacenters, and how dear a byte, before offload stops paying.

PrfaaS's case study with each model of its Table 3 in place of the paper's own: 4 H200 instances prefill remotely, 8 H20
instances prefill and decode, against homogeneous H20 instances that cost as much. Each line rate has its own best
threshold and split. Prefill times are those that Table 3 implies on H200, and on H20 as much longer as for the paper's
model at that length; decode is as in the case study for every model.

Distance takes a round trip of 1 ms for each 100 km of fibre. It costs rate only where a connection's window is less
than what is under way: a connection carries a window each round trip.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pdrelay.perf.catalog import find_instance, find_model
from pdrelay.perf.instance import InstanceProfile, PrefillTable
from pdrelay.plan.grid import search, thresholds_of
from pdrelay.plan.problem import Pool, Problem, Promise, Wire
from pdrelay.reproduce.prfaas_models import KV_THROUGHPUT, LENGTHS, prefill_seconds
from pdrelay.reproduce.prfaas_setup import (
    BASELINE_INSTANCES,
    H20,
    H200,
    LINE,
    LOCAL,
    LOCAL_INSTANCES,
    REMOTE,
    REMOTE_INSTANCES,
)
from pdrelay.reproduce.prfaas_setup import problem as published
from pdrelay.ui.charts import Axis, Series, line_chart
from pdrelay.ui.page import Section, Table, page

KM_PER_SECOND = 100e3
"""Distance for a second of round trip: light in fibre takes 5 us a kilometre, there and back."""

CONNECTIONS = 64
WINDOW = 16 * 2**20
"""Bytes of a connection that may be under way; Linux' default most for TCP is 6 to 16 MiB."""

THRESHOLDS = 200
PAPER = "PrfaaS-1T"
MODELS = (PAPER, *KV_THROUGHPUT)
FARTHEST = 20_000.0
HOUR = 3600.0

ASSUMED = (
    "An H20 instance prefills every model as much slower than an H200 one as the paper's model at the same length (2.2 "
    "to 2.9 times); decode is 800 tokens/s an instance for every model. Both are the case study's.",
    "The baseline has as many H20 instances as cost as much as both clusters together: an H200 is taken at 2.02 H20.",
    f"{CONNECTIONS} connections with windows of {WINDOW // 2**20} MiB; 1 ms of round trip for each 100 km.",
)


class BreakEven(NamedTuple):
    """Where offload stops paying for one model."""

    model: str
    kv_per_token: float  # bytes
    gain: float  # rate at 100 Gbit/s by the baseline of equal cost
    line: float  # bytes/s below which the baseline does as well; infinite where it always does
    full: float  # bytes/s from which a wider line gains less than 1 %
    distance: float  # kilometres up to which the windows fill the break-even line
    price: float  # of a gigabyte at which egress eats the gain at 100 Gbit/s, an H20 hour = 1


def break_even(model: str) -> BreakEven:
    """One model."""
    gain = gain_at(model, LINE)
    line = _first_rate(lambda rate: gain_at(model, rate) >= 1.0)
    most = gain_at(model, 1e14)
    full = _first_rate(lambda rate: gain_at(model, rate) >= 0.99 * most)
    kv = find_model(model).kv().per_token
    distance = min(CONNECTIONS * WINDOW / line * KM_PER_SECOND, FARTHEST) if line and math.isfinite(line) else (
        FARTHEST if not line else 0.0
    )  # fmt: skip
    return BreakEven(model, kv, gain, line, full, distance, _price(model))


def gain_at(model: str, line: float) -> float:
    """Rate of both clusters with a line of `line` bytes/s, by that of the baseline of equal cost."""
    return best_rate(model, line)[0] / _baseline(model)


@cache
def best_rate(model: str, line: float) -> tuple[float, float]:
    """Requests/s at the best threshold and split, and bytes/s that cross the line then."""
    case = _problem(model)._replace(wires={(REMOTE, LOCAL): Wire(line)})
    grid = search(case, LOCAL, H20, LOCAL_INSTANCES, {H200: REMOTE_INSTANCES}, thresholds=_thresholds(model))
    row, column = grid.best
    rate, share = float(grid.total[row, column]), float(grid.offloaded[column])
    alone = search(case, LOCAL, H20, LOCAL_INSTANCES, {})
    if alone.total.max() > rate:
        return float(alone.total.max()), 0.0
    lengths = case.lengths
    goes = lengths.prompt > grid.thresholds[column]
    profile = case.pools[0].profile
    size = float(lengths.weight[goes] @ (profile.kv_fixed + profile.kv_per_token * lengths.prompt[goes]))
    return rate, rate * (size if share else 0.0)


def at_distance(model: str, kilometres: float) -> float:
    """Gain with 100 Gbit/s, as far as the windows of all connections fill it."""
    round_trip = kilometres / KM_PER_SECOND
    return gain_at(model, min(LINE, CONNECTIONS * WINDOW / round_trip) if round_trip else LINE)


def _first_rate(holds: Any) -> float:
    """The least line rate at which `holds`, to 2 %: 0 where it always does, infinite where it never does."""
    least, most = 1e5, 1e14
    if holds(least):
        return 0.0
    if not holds(most):
        return math.inf
    while most / least > 1.02:
        middle = math.sqrt(least * most)
        least, most = (least, middle) if holds(middle) else (middle, most)
    return most


def _price(model: str) -> float:
    """Egress price that eats the gain at 100 Gbit/s."""
    rate, egress = best_rate(model, LINE)
    instances = REMOTE_INSTANCES * _relative_price() + LOCAL_INSTANCES
    # The baseline makes a request for so much; what is saved may be spent on bytes.
    spared = rate * _baseline_cost(model) - instances * 8
    return max(0.0, spared) / (egress * HOUR / 1e9) if egress else math.inf


def _baseline_cost(model: str) -> float:
    """H20 hours for an hour of a request a second on the baseline."""
    return _baseline_instances() * 8 / _baseline(model)


def _relative_price() -> float:
    pools = published().pools
    return pools[0].price / pools[1].price


def _baseline_instances() -> float:
    return REMOTE_INSTANCES * _relative_price() + LOCAL_INSTANCES


@cache
def _baseline(model: str) -> float:
    """Requests/s of H20 instances of equal cost; between whole numbers of instances in proportion."""
    grid = search(_problem(model), LOCAL, H20, BASELINE_INSTANCES, {})
    return float(grid.total.max()) * _baseline_instances() / BASELINE_INSTANCES


@cache
def _thresholds(model: str) -> np.ndarray:
    return thresholds_of(_problem(model), LOCAL, THRESHOLDS)


@cache
def _problem(model: str) -> Problem:
    """The case study with another model."""
    case = published()
    if model == PAPER:
        return case
    h200, h20 = (pool.profile for pool in case.pools)
    seconds = prefill_seconds(model)
    slower = [h20.prefill_seconds(n) / h200.prefill_seconds(n) for n in LENGTHS]
    pools = (
        case.pools[0]._replace(profile=_profile(h200, model, seconds)),
        Pool(H20, LOCAL, _profile(h20, model, tuple(s * f for s, f in zip(seconds, slower, strict=True))),
             BASELINE_INSTANCES, case.pools[1].roles),
    )  # fmt: skip
    return case._replace(pools=pools, promise=Promise(tpot=0.025))


def _profile(like: InstanceProfile, model: str, seconds: tuple[float, ...]) -> InstanceProfile:
    kv = find_model(model).kv()
    # Memory is the case study's: how much of it the weights of each model leave is not the question here.
    capacity = find_instance("prfaas-1t-h20").profile().kv_capacity * max(1.0, kv.per_token / like.kv_per_token)
    table = PrefillTable(tokens=tuple(map(float, LENGTHS)), seconds=seconds)
    return replace(like, prefill=table, kv_per_token=kv.per_token, kv_fixed=kv.fixed, kv_capacity=capacity)


# ---- what is shown ----


def table(found: list[BreakEven]) -> Table:
    """Break-even of each model."""
    rows = [
        (b.model, f"{b.kv_per_token / 1e3:.1f}", f"{b.gain:.2f}", _rate(b.line), _rate(b.full), f"{b.distance:,.0f}",
         f"{b.price:.4f}" if math.isfinite(b.price) else "any")
        for b in found
    ]  # fmt: skip
    head = ("model", "KV, kB/token", "gain at 100 Gbit/s", "break-even line", "99 % of the gain from", "farthest, km",
            "break-even price/GB")  # fmt: skip
    return Table(head, rows)


def sentences(found: list[BreakEven]) -> list[str]:
    """What it comes to."""
    pays = [b for b in found if b.gain > 1 and math.isfinite(b.line)]
    thinnest, widest = min(pays, key=lambda b: b.line), max(pays, key=lambda b: b.line)
    never = [b.model for b in found if not math.isfinite(b.line)]
    said = [
        f"For 4 H200 instances {thinnest.model} needs {_rate(thinnest.line)} to pay, {widest.model} "
        f"{_rate(widest.line)}; each has 99 % of its gain from {_rate(thinnest.full)} and {_rate(widest.full)} on",
        f"Distance takes rate only by windows: {widest.model} pays {_far(widest)}, {thinnest.model} {_far(thinnest)}; "
        "the round trip itself delays the second token, which a relay hides",
    ]
    if never:
        said.append(f"Not worth it at equal cost, whatever the line: {', '.join(never)}")
    return said


def _far(found: BreakEven) -> str:
    if found.distance >= FARTHEST:
        return "anywhere on Earth"
    return f"up to {found.distance:,.0f} km"


def _rate(rate: float) -> str:
    if not math.isfinite(rate):
        return "none"
    return f"{rate * 8e-9:.3g} Gbit/s" if rate else "any"


def html(found: list[BreakEven]) -> str:
    """A page in one file."""
    rates = np.geomspace(0.1e9 / 8, 2e12 / 8, 48)
    by_line = [Series(m, [(r * 8e-9, gain_at(m, r)) for r in rates.tolist()]) for m in MODELS]
    even = Series("as good without", [(0.1, 1.0), (2000.0, 1.0)], dashed=True)
    far = np.geomspace(10, FARTHEST, 32)
    by_distance = [Series(m, [(km, at_distance(m, km)) for km in far.tolist()]) for m in MODELS]
    even_far = Series("as good without", [(10.0, 1.0), (FARTHEST, 1.0)], dashed=True)
    gain = Axis("rate by the baseline of equal cost", least=0)
    charts = [
        ("Gain by line rate", line_chart([*by_line, even], Axis("line, Gbit/s", logarithmic=True), gain)),
        (
            "Gain by distance, 100 Gbit/s",
            line_chart([*by_distance, even_far], Axis("km", logarithmic=True), gain),
        ),
    ]
    return page(
        "Lines and distances: when offloaded prefill pays",
        [Section("Break-even", [table(found)], charts, sentences(found)), Section("What is assumed", notes=ASSUMED)],
    )


def as_dict(found: list[BreakEven]) -> dict[str, Any]:
    """For JSON; what is never reached is None."""
    rows = [{k: None if isinstance(v, float) and math.isinf(v) else v for k, v in b._asdict().items()} for b in found]
    return {"models": rows, "sentences": sentences(found), "assumptions": list(ASSUMED)}
