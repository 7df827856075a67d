"""Plan files: what `pdrelay plan` reads. See `docs/planner.md`."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from pdrelay.cluster import toml
from pdrelay.cluster.topology import CodecName, Role
from pdrelay.cluster.units import parse_rate, parse_time, quantity
from pdrelay.errors import ConfigError
from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.lengths import Lengths, lognormal
from pdrelay.plan.problem import Aim, Pool, Problem, Promise, Wire
from pdrelay.sim.build import profiles_of
from pdrelay.sim.files import ProfileTable, changed
from pdrelay.workload.base import Request, prefix_hits
from pdrelay.workload.choice import WorkloadTable, choose
from pdrelay.workload.generators import LongPrompts

SAMPLES = 4096
"""Requests that are drawn from a generator."""


class PromiseTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The service level; empty is no limit."""

    ttft: str = ""
    ttst: str = ""
    tpot: str = ""
    share: float = 0.9  # of requests for which TTFT and TTST hold


class PoolTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Instances of one kind in one cluster: those there are, or those that may be rented."""

    name: str
    cluster: str
    profile: str
    count: int
    roles: list[Role] = msgspec.field(default_factory=lambda: list(Role))
    chips: int = 8  # tensor-parallel ranks of one instance, for the deployment file


class LineTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line from one cluster to another. `codec` goes into the deployment file, `wire_ratio` says what it saves."""

    source: str
    target: str
    rate: str
    rtt: str = "1ms"
    connections: int = 64
    connection_rate: str = ""
    codec: CodecName = "none"
    wire_ratio: float = 1.0
    price_per_gb: float = 0.0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of the deployment file."""

    name: str = "model"
    path: str = "/models/model"
    dtype: str = "bfloat16"


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    description: str = ""
    aim: Aim = "rate"
    rate: float = 0.0  # requests/s that are required, with aim = "cost"
    relay: bool = True  # relays may be planned
    seed: int = 0
    workload: WorkloadTable = WorkloadTable()
    samples: int = SAMPLES  # requests that are drawn from a generator, or read of a trace (0: all of it)
    promise: PromiseTable = PromiseTable()
    model: ServedModel = ServedModel()
    cache: dict[str, float] = {}  # share of what can be hit that a cluster's cache holds
    profile: list[ProfileTable]
    pool: list[PoolTable]
    line: list[LineTable] = []


class Case(NamedTuple):
    """A file and the problem that it states."""

    file: PlanFile
    problem: Problem


def find(name: str) -> Path:
    """The path of a plan file: a file, or the name of a shipped one. Raises ConfigError naming those there are."""
    return toml.find("plan", name, "pdrelay.plan", "plans")


def load(path: Path, changes: list[str] | None = None) -> Case:
    """Reads and checks a plan file; `changes` such as `line.0.rate=1gbit` are made before. Raises ConfigError."""
    file = toml.convert(path, changed(toml.read(path), changes or []), PlanFile)
    return Case(file, problem_of(file, path.resolve().parent))


def problem_of(file: PlanFile, base: Path) -> Problem:
    """The problem; paths in `file` are relative to `base`. Raises ConfigError naming the key that does not fit."""
    profiles = profiles_of(file.profile, base)
    clusters = {pool.cluster for pool in file.pool}
    for key in [*file.cache, *(end for line in file.line for end in (line.source, line.target))]:
        if key not in clusters:
            raise ConfigError(f"cluster: found {key!r}, expected one of {', '.join(sorted(clusters))}")
    for name, share in file.cache.items():
        if not 0 <= share <= 1:
            raise ConfigError(f"cache.{name}: found {share}, expected a number from 0 to 1")
    promise = file.promise
    return Problem(
        pools=tuple(_pool(table, profiles) for table in file.pool),
        wires={(line.source, line.target): _wire(index, line) for index, line in enumerate(file.line)},
        lengths=lengths_of(file, base),
        promise=Promise(
            ttft=_limit("promise.ttft", promise.ttft),
            ttst=_limit("promise.ttst", promise.ttst),
            tpot=_limit("promise.tpot", promise.tpot),
            share=promise.share,
        ),
        aim=file.aim,
        rate=file.rate,
        cache=file.cache,
        relay=file.relay,
    )  # fmt: skip


def lengths_of(file: PlanFile, base: Path) -> Lengths:
    """The workload's lengths, exact where its distribution is known. Raises ConfigError."""
    wanted = file.samples if not file.workload.trace else file.samples or 0
    load = choose(file.workload, wanted, file.seed, base)
    if isinstance(load.workload, LongPrompts):
        known = load.workload
        return lognormal(known.mu, known.sigma, known.shortest, known.longest, known.output)
    firsts = list(itertools.islice(load.requests, load.number))
    turns = [turn for first in firsts for turn in first.turns()]
    hits = np.fromiter(prefix_hits(firsts), dtype=np.float64, count=len(turns))
    return _measured(turns, hits)


def _measured(turns: list[Request], hits: np.ndarray) -> Lengths:
    prompts = np.array([turn.prompt for turn in turns], dtype=np.float64)
    outputs = np.array([turn.output for turn in turns], dtype=np.float64)
    return Lengths.of(prompts, np.minimum(hits * prompts, prompts - 1), outputs)


def _pool(table: PoolTable, profiles: dict[str, InstanceProfile]) -> Pool:
    if table.profile not in profiles:
        raise ConfigError(f"pool.{table.name}.profile: found {table.profile!r}, expected one of {', '.join(profiles)}")
    if table.count < 0 or not table.roles or table.chips < 1:
        raise ConfigError(f"pool.{table.name}: found no role, no chip or a count below 0, expected some of each")
    return Pool(table.name, table.cluster, profiles[table.profile], table.count, frozenset(table.roles))


def _wire(index: int, table: LineTable) -> Wire:
    for key, least in (("connections", 1), ("wire_ratio", 1e-6), ("price_per_gb", 0.0)):
        if getattr(table, key) < least:
            raise ConfigError(f"line[{index}].{key}: found {getattr(table, key)}, expected at least {least:g}")
    cap = quantity(f"line[{index}].connection_rate", table.connection_rate, parse_rate) if table.connection_rate else 0
    rate = quantity(f"line[{index}].rate", table.rate, parse_rate)
    if not rate:
        raise ConfigError(f"line[{index}].rate: found {table.rate!r}, expected a rate above 0")
    return Wire(
        rate, quantity(f"line[{index}].rtt", table.rtt, parse_time), table.connections, cap or math.inf,
        table.wire_ratio, table.price_per_gb / 1e9,
    )  # fmt: skip


def _limit(key: str, text: str) -> float:
    return quantity(key, text, parse_time) if text else math.inf
