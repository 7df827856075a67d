"""A plan as a deployment file, `pdrelay.toml`. Addresses are to be replaced by those of the machines."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pdrelay.cluster import toml
from pdrelay.cluster.topology import Role
from pdrelay.plan.evaluate import Evaluator
from pdrelay.plan.files import Case, LineTable, PoolTable
from pdrelay.plan.problem import Plan, Problem
from pdrelay.plan.rates import decode_batch

PORTS = 7000
NOTHING_IS_LONGER = 1e9


def deployment_text(case: Case, plan: Plan) -> str:
    """The file. One host for each instance, with addresses 10.CLUSTER.HOST/250.HOST."""
    return "\n".join(_lines(case, plan)) + "\n"


def policy_of(plan: Plan) -> toml.Table:
    """The policy table: the static threshold, and H where relays are planned."""
    threshold = min(plan.threshold, NOTHING_IS_LONGER)
    if any(count and role is Role.RELAY for (_, role), count in plan.counts.items()):
        return {"name": "unified", "threshold": threshold, "hit_threshold": plan.hit_threshold}
    return {"name": "prfaas", "threshold": threshold}


def _lines(case: Case, plan: Plan) -> Iterable[str]:
    clusters = _clusters(case.problem, plan)
    longest = int(max((case.problem.lengths.prompt + case.problem.lengths.output).tolist()))
    yield "# Written by `pdrelay plan`. Replace addresses and paths; `pdrelay certs` makes the directory tls."
    yield 'fleet_key_file = "tls/fleet.key"'
    model = case.file.model
    yield from toml.table("[model]", {"name": model.name, "path": model.path, "dtype": model.dtype,
                                      "max_model_len": longest + 1})  # fmt: skip
    yield from toml.table("[gateway]", {"cluster": plan.main, "listen": "0.0.0.0:8000"})
    yield from toml.table("[tls]", {"directory": "tls"})
    yield from toml.table("[policy]", policy_of(plan))
    for cluster in clusters:
        yield from toml.table("[[cluster]]", {"name": cluster})
    number = dict.fromkeys(clusters, 0)
    for pool in case.file.pool:
        for role in Role:
            for index in range(plan.of(pool.name, role)):
                number[pool.cluster] += 1
                address = _address(clusters.index(pool.cluster) + 1, number[pool.cluster])
                yield from _instance(case, plan, pool, role, index, address)
    for cluster in _joined(case.problem, plan):
        yield "\n# From prefill to decode or relay, each on a host of its own; see docs/fast-path.md for NIXL."
        yield from toml.table("[[link]]", {"source": cluster, "target": cluster, "rate": "auto", "rtt": "100us"})
    for line in case.file.line:
        if line.source in clusters and line.target in clusters:
            yield from toml.table("[[link]]", _link(line))


def _instance(
    case: Case, plan: Plan, pool: PoolTable, role: Role, index: int, address: str
) -> Iterable[str]:  # fmt: skip
    name = f"{pool.name}-{role.value}-{index}"
    host = f"host-{name}"
    yield from toml.table("[[host]]", {
        "name": host, "cluster": pool.cluster, "socket": f"/run/pdrelay/{host}.sock", "listen": f"{address}:{PORTS}",
        "metrics": f"127.0.0.1:{PORTS + 1}", "arena": _arena(case.problem, pool.name),
    })  # fmt: skip
    yield from toml.table("[[instance]]", {
        "name": name, "cluster": pool.cluster, "roles": [role.value],
        "ranks": [{"host": host, "tensor": rank} for rank in range(pool.chips)], "listen": f"{address}:{PORTS + 100}",
        "device": "cuda", "args": _arguments(case.problem, plan, pool.name, role),
    })  # fmt: skip


def _arguments(problem: Problem, plan: Plan, pool: str, role: Role) -> list[str]:
    """What the plan assumes of vLLM's scheduler."""
    profile = next(p.profile for p in problem.pools if p.name == pool)
    sequences = profile.max_num_seqs
    if role is Role.DECODE:
        sequences = max(1, decode_batch(Evaluator(problem).loads(plan), pool))
    return ["--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(profile.prefill_chunk)]


def _arena(problem: Problem, pool: str) -> str:
    """As much host memory as the instance has for KV, in whole GiB."""
    profile = next(p.profile for p in problem.pools if p.name == pool)
    return f"{max(1, math.ceil(profile.kv_capacity / 2**30))}GiB"


def _link(line: LineTable) -> toml.Table:
    return {"source": line.source, "target": line.target, "rate": line.rate, "rtt": line.rtt,
            "connections": line.connections, "codec": line.codec}  # fmt: skip


def _joined(problem: Problem, plan: Plan) -> list[str]:
    """Clusters in which KV goes from one host to another."""
    roles: dict[str, set[Role]] = {}
    for pool in problem.pools:
        roles.setdefault(pool.cluster, set()).update(role for role in Role if plan.of(pool.name, role))
    return [cluster for cluster, each in roles.items() if Role.PREFILL in each and len(each) > 1]


def _clusters(problem: Problem, plan: Plan) -> list[str]:
    """Clusters with an instance, main decode's first."""
    used = [p.cluster for p in problem.pools if any(plan.of(p.name, role) for role in Role)]
    return list(dict.fromkeys([plan.main, *used]))


def _address(cluster: int, number: int) -> str:
    return f"10.{cluster}.{number // 250}.{number % 250 + 1}"
