"""PrfaaS's case study and what it does not print."""

from __future__ import annotations

from pdrelay.cluster.topology import Role
from pdrelay.perf.catalog import find_instance
from pdrelay.perf.lengths import lognormal
from pdrelay.plan.problem import Plan, Pool, Problem, Promise, Wire
from pdrelay.reproduce.rows import Assumption

LOCAL, REMOTE = "local", "remote"
H200, H20 = "h200", "h20"
K = 1024
LINE = 100e9 / 8
OUTPUT = 1024
REMOTE_INSTANCES, LOCAL_INSTANCES, BASELINE_INSTANCES = 4, 8, 12
USED = 0.8
"""Share of a deployment's rate at which waiting is shown; the paper's times have none."""

ASSUMPTIONS = (
    Assumption("K", "1,024", "E[L given L > t] is 44.0 x 1,024 tokens then, as printed"),
    Assumption("t = 19.4K", "19,400 tokens", "the share of requests above it is then 49.6 %, as printed"),
    Assumption("truncation", "samples outside of 128 to 131,072 are drawn again", "the mean is 27.5K, printed: ~27K"),
    Assumption("prefill between the lengths of Table 5", "log-log interpolation", "the profile is not printed"),
    Assumption("prefill of an H20 instance", "0.4653 + 1.3043e-4 l + 2.8671e-10 l^2 s",
               "calibrated: 1.64, 2.11, 4.44 and 9.73 of Table 6"),
    Assumption("decode of an H20 instance", "800 tokens/s: 20 sequences at 25 ms",
               "calibrated: 3.91 of Table 6 and the service level of 40 tokens/s"),
    Assumption("price of an H200 by an H20", "2.02", "calibrated: 1.54 times the rate is 1.15 times at equal cost"),
    Assumption("TTFT", "the prefill's time alone", "both columns of Table 6 that are not fitted follow from it"),
    Assumption("KV in Table 3", "from each model's config.json, bfloat16", "the paper prints throughputs alone"),
)  # fmt: skip


def problem() -> Problem:
    """Both clusters of the case study; the baseline's further H20 instances are counted in."""
    h200, h20 = find_instance("prfaas-1t-h200").profile(), find_instance("prfaas-1t-h20").profile()
    return Problem(
        pools=(
            Pool(H200, REMOTE, h200, REMOTE_INSTANCES, frozenset({Role.PREFILL})),
            Pool(H20, LOCAL, h20, BASELINE_INSTANCES, frozenset({Role.PREFILL, Role.DECODE})),
        ),
        wires={(REMOTE, LOCAL): Wire(LINE, rtt=0.01)},
        lengths=lognormal(9.90, 1.00, 128, 128 * K, OUTPUT),
        promise=Promise(tpot=0.025),
    )


def naive() -> Plan:
    """All prefill remote, all decode local."""
    counts = {(H200, Role.PREFILL): REMOTE_INSTANCES, (H20, Role.DECODE): LOCAL_INSTANCES}
    return Plan(LOCAL, 0.0, counts)
