"""PDD's evaluation: what it prints, what had to be calibrated, and the deployments made of both.

Eight numbers are calibrated: the rate of a connection and how many there are, the fixed and per-token time of a
prefill, how many prefills an instance computes at once, the time of a decode step on H100, the sequences that such an
instance runs, and the time of a token in an extend.
"""

from __future__ import annotations

from typing import Any, Literal

from pdrelay.cluster.topology import Role
from pdrelay.perf.catalog import find_model
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.profile import DecodeCost, ForwardCost
from pdrelay.policy.base import PlacementPolicy
from pdrelay.policy.handoff import Mode, RelayBound, Settings
from pdrelay.policy.placement import CdcPd, IdcPd, Pdd
from pdrelay.reproduce.rows import Assumption
from pdrelay.sim.line import LineSpec
from pdrelay.sim.scenario import InstanceSpec, Scenario

Deployment = Literal["pdd", "cdc", "idc"]

PROMPT = 64_000
KV_PER_TOKEN = find_model("DeepSeek-V4-pro").kv().per_token
LINE_RATE = 20e9 / 8
ARRIVALS = {"pdd": 11.5, "cdc": 11.5, "idc": 9.0}
REQUESTS = 4390
POOL = 256

CONNECTION_RATE = 13.8e6
PREFILL = ForwardCost(fixed=3.227, per_token=1.343e-4, per_pair=0.0)
PREFILLS_AT_ONCE = 5
H100_STEP = 0.0335
H200_STEP = 0.034
H100_SEQUENCES = 19
EXTEND_PER_TOKEN = (0.3052 - H200_STEP) / 100
ROUND_TRIP = 0.02
HIT_THRESHOLD = 0.95
PRICES = (1.21, 1.31)
"""H200 node by H100 node, as the published cost reductions imply."""

ASSUMPTIONS = (
    Assumption("KV of a token", f"{KV_PER_TOKEN:.0f} B", "config.json of DeepSeek-V4-pro, fp8 with an fp4 indexer"),
    Assumption("prompt", f"{PROMPT:,} tokens", "published as 64K"),
    Assumption("hit rates", "Beta on 0.02 to 0.99, mean 0.90, 75 % above 0.95", "published: 70 to 80 % above 0.95"),
    Assumption("outputs", "gamma, mean 1,000, 30 % below 100", "published moments; the family is assumed"),
    Assumption("requests of a run", f"{REQUESTS:,}", "Figure 8: 270K and 4.12M tokens at 1,000 a request"),
    Assumption("arrivals", "Poisson, 11.5/s (PDD, CDC-PD) and 9.0/s (IDC-PD)", "rates of Table 8; process assumed"),
    Assumption("instances", "10 P + 1 RLD + 16 MD; IDC-PD 10 P + 16 D", "published; 88 nodes at 4 and 3 a P and a D"),
    Assumption("first token", "the first decode step's; transfers begin after prefill", "the paper's reading"),
    Assumption("pool", f"{POOL} connections", "calibrated: pool utilisation of Table 2, skewed"),
    Assumption("connection", f"{CONNECTION_RATE * 8 / 1e6:.0f} Mbit/s", "calibrated: P99 of Table 2, skewed"),
    Assumption("prefill", f"{PREFILL.fixed} s + {PREFILL.per_token * 1e6:.1f} us/token", "calibrated: P50, P90 of PDD"),
    Assumption("prefills at once", f"{PREFILLS_AT_ONCE} an instance", "calibrated: P50 of IDC-PD"),
    Assumption("decode step, H100", f"{H100_STEP * 1e3:.1f} ms", "calibrated: Figure 8 (60 % of the bandwidth: 33 ms)"),
    Assumption("decode step, H200", f"{H200_STEP * 1e3:.1f} ms", "1.6 TB of weights at 60 % of 16 x 4.8 TB/s"),
    Assumption("sequences of a D, H100", f"{H100_SEQUENCES}", "calibrated: P90 of IDC-PD"),
    Assumption("extend", f"{EXTEND_PER_TOKEN * 1e3:.2f} ms a token", "calibrated: Table 5"),
    Assumption("round trip", f"{ROUND_TRIP * 1e3:.0f} ms", "not published"),
    Assumption("H", f"{HIT_THRESHOLD}", "second-hand: above 95 % is the high class"),
    Assumption("H200 by H100 price", "1.21 and 1.31", "derived from the published cost reductions"),
)


def wan() -> LineSpec:
    """The line between the datacenters."""
    return LineSpec(LINE_RATE, ROUND_TRIP, POOL, CONNECTION_RATE)


def scenario(kind: Deployment, mode: Mode = "one_shot") -> Scenario:
    """One of the three deployments."""
    instances = [
        InstanceSpec(f"p-{i:02}", "near", frozenset({Role.PREFILL}), profile("P", H100_STEP, 1), PREFILLS_AT_ONCE)
        for i in range(10)
    ]
    if kind == "idc":
        decode = profile("D", H100_STEP, H100_SEQUENCES)
        instances += [InstanceSpec(f"d-{i:02}", "near", frozenset({Role.DECODE}), decode) for i in range(16)]
    else:
        main = profile("MD", H200_STEP, 256)
        instances += [InstanceSpec(f"md-{i:02}", "far", frozenset({Role.DECODE}), main) for i in range(16)]
    if kind == "pdd":
        instances.append(InstanceSpec("rld", "near", frozenset({Role.RELAY}), profile("RLD", H100_STEP, 256)))
    policies: dict[str, PlacementPolicy[Any]] = {
        "pdd": Pdd(HIT_THRESHOLD, relay_pressure=1.0), "cdc": CdcPd(), "idc": IdcPd(),
    }  # fmt: skip
    lines = {("near", "near"): LineSpec(400e9 / 8, connections=10_000), ("near", "far"): wan()}
    # PDD shows tokens as they come; its relay's bound is not published and never reached here.
    settings = Settings(mode, RelayBound(10**6, 1e6), pace=1.0)
    return Scenario(tuple(instances), lines, policies[kind], settings, overlap=False, token_zero=False)


def profile(name: str, step: float, sequences: int) -> InstanceProfile:
    """An instance whose decode step takes `step` seconds, whatever its batch."""
    return InstanceProfile(
        name=name,
        prefill=PREFILL,
        decode=DecodeCost(fixed=step, per_sequence=0.0, per_context_token=0.0),
        extend=ForwardCost(fixed=step, per_token=EXTEND_PER_TOKEN, per_pair=0.0),
        kv_per_token=KV_PER_TOKEN,
        kv_fixed=0.0,
        kv_capacity=400e9,
        max_num_seqs=sequences,
        prefill_chunk=10**6,
    )
