"""PDD's service level and cost tables by the planner: its equations on the published deployments, and its optimum.

Everything that a simulation of this evaluation takes is in `pdd_setup.py`; here the same numbers go into the planner's
problem. A prefill instance that computes several prompts at once is so many instances here, each for its share of the
price. Prices are in nodes of H100.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from pdrelay.cluster.topology import Role
from pdrelay.perf.lengths import Lengths
from pdrelay.plan.evaluate import Evaluator, Worth
from pdrelay.plan.optimise import optimise
from pdrelay.plan.problem import LOCAL_ONLY, Aim, Plan, Pool, Problem, Promise, Wire
from pdrelay.reproduce.pdd_setup import (
    ARRIVALS,
    H100_SEQUENCES,
    H100_STEP,
    H200_STEP,
    HIT_THRESHOLD,
    PREFILLS_AT_ONCE,
    PRICES,
    PROMPT,
    profile,
    wan,
)
from pdrelay.reproduce.rows import Row
from pdrelay.workload.arrivals import Arrivals
from pdrelay.workload.generators import PDD_HITS, AgenticRequests

NEAR, FAR = "near", "far"
NODES = {"p": 4, "rld": 3, "md": 2, "d": 3}
FULL_BATCH = 28
"""Sequences of a main decode instance that is full: a fifth more than it runs at the published rate. How a step grows
with the batch is not printed, and a step that does not grow would let two instances do the work of sixteen."""

SAMPLES = 8192
SERVICE_LEVEL = Promise(ttst=10.0, tpot=0.05)
"""P90. The paper's first token is the first decode step's, the planner's second one."""

PDD = Plan(FAR, 0.0, {("p", Role.PREFILL): 10 * PREFILLS_AT_ONCE, ("rld", Role.RELAY): 1, ("md", Role.DECODE): 16},
           HIT_THRESHOLD)  # fmt: skip
CDC = Plan(FAR, 0.0, {("p", Role.PREFILL): 10 * PREFILLS_AT_ONCE, ("md", Role.DECODE): 16})
IDC = Plan(NEAR, LOCAL_ONLY, {("p", Role.PREFILL): 10 * PREFILLS_AT_ONCE, ("d", Role.DECODE): 16})


def problem(price: float, aim: Aim = "rate", most: int = 1) -> Problem:
    """Both datacenters with `most` times the published instances; `price` is that of an H200 node."""
    kinds = {
        "p": (NEAR, profile("p", H100_STEP, 1), NODES["p"] / PREFILLS_AT_ONCE, 10 * PREFILLS_AT_ONCE, Role.PREFILL),
        "rld": (NEAR, profile("rld", H100_STEP, 256), NODES["rld"], 1, Role.RELAY),
        "md": (FAR, profile("md", H200_STEP, FULL_BATCH), NODES["md"] * price, 16, Role.DECODE),
        "d": (NEAR, profile("d", H100_STEP, H100_SEQUENCES), NODES["d"], 16, Role.DECODE),
    }
    pools = tuple(Pool(name, cluster, replace(each, price=cost), most * count, frozenset({role}))
                  for name, (cluster, each, cost, count, role) in kinds.items())  # fmt: skip
    line = wan()
    wire = Wire(line.rate, line.rtt, line.connections, line.connection_rate)
    return Problem(pools, {(NEAR, FAR): wire}, _lengths(), SERVICE_LEVEL, aim)


def _lengths() -> Lengths:
    drawn = AgenticRequests(Arrivals(1.0), PDD_HITS, PROMPT).requests(0)
    requests = list(itertools.islice(drawn, SAMPLES))
    return Lengths.of([r.prompt for r in requests], [r.cached for r in requests], [r.output for r in requests])


def plan_rows() -> list[Row]:
    """Tables 4 and 8 without a simulation, and what the optimiser would have built instead."""
    rows = _latencies()
    for price, cost, benefit in zip(PRICES, (0.929, 0.965), (1.375, 1.324), strict=True):
        evaluator = Evaluator(problem(price))
        pdd, idc = evaluator.worth(PDD), evaluator.worth(IDC)
        if price == PRICES[0]:
            rows += _goodput(pdd, idc)
        at = f"(H200 at {price})"
        where = "Table 8, by the planner"
        rows += [
            Row(where, f"cost, PDD by IDC-PD {at}", "times", cost, pdd.cost / idc.cost, "input"),
            Row(where, f"benefit-cost ratio {at}", "times", benefit, pdd.ratio / idc.ratio, "calibrated"),
            *_optimum(price, idc),
        ]
    return rows


def _latencies() -> list[Row]:
    evaluator = Evaluator(problem(PRICES[0]))
    pdd, cdc = (evaluator.times(plan, ARRIVALS["pdd"]).ttst for plan in (PDD, CDC))
    where = "Table 4, by equations"
    late = "As in Table 4 by simulation: the line of Table 2 does not make CDC-PD's P90 that late"
    return [
        Row(where, "PDD: P50 TTFT", "s", 4.2, pdd[0], "calibrated"),
        Row(where, "PDD: P90 TTFT", "s", 9.8, pdd[1], "calibrated"),
        Row(where, "PDD: P99 TTFT", "s", 14.4, pdd[2], "predicted"),
        Row(where, "CDC-PD: P90 TTFT", "s", 18.3, cdc[1], "predicted", late),
        Row(where, "CDC-PD: P99 TTFT", "s", 29.7, cdc[2], "predicted"),
    ]


def _goodput(pdd: Worth, idc: Worth) -> list[Row]:
    where = "Table 8, by the planner"
    return [
        Row(where, "IDC-PD: goodput at the service level", "requests/s", 9.0, idc.goodput, "calibrated"),
        Row(where, "PDD: goodput at the service level", "requests/s", 11.5, pdd.goodput, "calibrated"),
        Row(where, "goodput, PDD by IDC-PD", "times", 1.278, pdd.goodput / idc.goodput, "calibrated"),
    ]


def _optimum(price: float, idc: Worth) -> list[Row]:
    """The best benefit-cost ratio of the same kinds of nodes."""
    best = optimise(problem(price, "ratio", most=2)).best
    built = ", ".join(f"{n} {name}" for (name, _), n in best.plan.counts.items())
    quantity = f"best ratio found, by IDC-PD (H200 at {price}): {built}, H {best.plan.hit_threshold:g}"
    return [Row("Beyond: optimum of the same nodes", quantity, "times", None, best.ratio / idc.ratio, "predicted")]
