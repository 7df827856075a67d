"""Makes a scenario and its workload from a scenario file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdrelay.cluster.config import PolicySettings
from pdrelay.cluster.units import parse_rate, parse_size, parse_time, quantity
from pdrelay.errors import ConfigError
from pdrelay.perf.catalog import find_chip, find_instance, find_model
from pdrelay.perf.instance import InstanceProfile, from_profile
from pdrelay.perf.profile import load, shipped
from pdrelay.perf.roofline import Efficiency, Weights, roofline
from pdrelay.policy.handoff import RelayBound, Settings
from pdrelay.policy.named import policy_of
from pdrelay.sim.files import InstanceTable, LineTable, ProfileTable, ScenarioFile
from pdrelay.sim.line import LineSpec
from pdrelay.sim.scenario import Fault, InstanceSpec, Scenario, ServiceLevel
from pdrelay.workload.choice import Load, choose


def scenario_of(file: ScenarioFile, base: Path) -> Scenario:
    """The deployment; paths in `file` are relative to `base`. Raises ConfigError naming the key that does not fit."""
    profiles = profiles_of(file.profile, base)
    return Scenario(
        instances=tuple(_instances(file, profiles)),
        lines={(line.source, line.target): _line(index, line) for index, line in enumerate(file.line)},
        policy=policy_of(file.policy),
        handoff=handoff_of(file.policy),
        depots={
            depot.name: float(quantity(f"depot.{depot.name}.size", depot.size, parse_size)) for depot in file.depot
        },
        cores={cores.name: cores.count for cores in file.cores},
        faults=tuple(
            Fault(f.instance, quantity("fault.at", f.at, parse_time), quantity("fault.lasts", f.lasts, parse_time))
            for f in file.fault
        ),
        slo=ServiceLevel(*(_limit(f"slo.{name}", getattr(file.slo, name)) for name in ServiceLevel._fields)),
        overlap=file.overlap,
        slices=file.slices or math.inf,
        token_zero=file.index_zero_from == "prefill",
        seed=file.seed,
    )


def handoff_of(settings: PolicySettings) -> Settings:
    """The gateway's handoff settings. Raises ConfigError."""
    longest = quantity("policy.relay_max_time", settings.relay_max_time, parse_time)
    return Settings(settings.handoff, RelayBound(settings.relay_max_tokens, longest), settings.relay_pace)


def load_of(file: ScenarioFile, base: Path, *, skip_bad: bool = False) -> Load:
    """The requests that `file` asks for. Raises ConfigError for a trace that cannot be read."""
    return choose(file.workload, file.requests, file.seed, base, skip_bad=skip_bad)


# ---- profiles ----


def profiles_of(tables: list[ProfileTable], base: Path) -> dict[str, InstanceProfile]:
    """The profiles of a file's tables by name; paths are relative to `base`. Raises ConfigError."""
    profiles: dict[str, InstanceProfile] = {}
    for table in tables:
        profile = _profile(table, profiles, base)
        changes: dict[str, Any] = {"name": table.name}
        changes |= {key: getattr(table, key) for key in ("max_num_seqs", "prefill_chunk") if getattr(table, key)}
        if table.kv_capacity:
            key = f"profile.{table.name}.kv_capacity"
            changes["kv_capacity"] = float(quantity(key, table.kv_capacity, parse_size))
        if table.price >= 0:
            changes["price"] = table.price
        profiles[table.name] = replace(profile, **changes)
    return profiles


def _profile(table: ProfileTable, known: dict[str, InstanceProfile], base: Path) -> InstanceProfile:
    if table.base:
        if table.base not in known:
            raise ConfigError(f"profile.{table.name}.base: found {table.base!r}, expected one above it in the file")
        return _scaled(table, known[table.base])
    if table.published:
        return find_instance(table.published).profile()
    if table.file:
        path = base / table.file
        return from_profile(load(path if path.exists() else shipped(table.file)))
    if table.model and table.chip:
        return _roofline(table)
    raise ConfigError(f"profile.{table.name}: found no source, expected file, published, base, or model and chip")


def _scaled(table: ProfileTable, profile: InstanceProfile) -> InstanceProfile:
    if not table.chip:
        return profile
    chip = find_chip(table.chip)
    if chip.prefill is None or chip.decode is None:
        raise ConfigError(f"profile.{table.name}.chip: found {table.chip}, expected a chip known relative to another")
    scaled = profile.scaled(table.name, chip.prefill.value, chip.decode.value)
    return replace(scaled, price=chip.price.value * table.chips)


def _roofline(table: ProfileTable) -> InstanceProfile:
    model = find_model(table.model)
    kv = model.kv()
    heads = model.config.get("num_attention_heads", 64)
    head = model.config.get("head_dim") or model.config.get("kv_lora_rank") or 128
    full = kv.layers.get("full", 0) + kv.layers.get("compressed", 0) / 4
    weights = Weights(model.total.value, model.active.value, 1.0, 4.0 * heads * head * full)
    efficiency = Efficiency(mfu=table.mfu, mbu=table.mbu)
    return roofline(table.name, kv, weights, find_chip(table.chip), table.chips, efficiency)


# ---- instances and lines ----


def _instances(file: ScenarioFile, profiles: dict[str, InstanceProfile]) -> Iterator[InstanceSpec]:
    seen: set[str] = set()
    cores = {table.name for table in file.cores}
    for table in file.instance:
        if table.profile not in profiles:
            known = ", ".join(profiles)
            raise ConfigError(f"instance.{table.name}.profile: found {table.profile!r}, expected one of {known}")
        if table.cores and table.cores not in cores:
            raise ConfigError(f"instance.{table.name}.cores: found {table.cores!r}, expected one of {sorted(cores)}")
        if table.count < 0 or table.ranks < 1 or not table.roles:
            raise ConfigError(f"instance.{table.name}: found no instance, rank or role, expected one of each")
        for name in _names(table):
            if name in seen:
                raise ConfigError(f"instance.{table.name}: found the name {name!r} twice, expected different names")
            seen.add(name)
            yield InstanceSpec(
                name, table.cluster, frozenset(table.roles), profiles[table.profile], table.ranks, table.depot,
                table.cores,
            )  # fmt: skip


def _names(table: InstanceTable) -> list[str]:
    return [table.name] if table.count == 1 else [f"{table.name}-{number}" for number in range(table.count)]


def _line(index: int, table: LineTable) -> LineSpec:
    def seconds(key: str) -> float:
        return quantity(f"line[{index}].{key}", getattr(table, key), parse_time)

    outages = tuple(
        (quantity(f"line[{index}].outages", start, parse_time), quantity(f"line[{index}].outages", end, parse_time))
        for start, end in table.outages
    )
    if any(start >= end for start, end in outages) or any(a[1] > b[0] for a, b in itertools.pairwise(outages)):
        raise ConfigError(f"line[{index}].outages: found {table.outages}, expected rising pairs of begin and end")
    for key, least in (("connections", 1), ("wire_ratio", 1e-6)):
        if getattr(table, key) < least:
            raise ConfigError(f"line[{index}].{key}: found {getattr(table, key)}, expected at least {least:g}")
    cap = math.inf
    if table.connection_rate:
        cap = quantity(f"line[{index}].connection_rate", table.connection_rate, parse_rate)
    return LineSpec(
        rate=quantity(f"line[{index}].rate", table.rate, parse_rate),
        rtt=seconds("rtt"),
        connections=table.connections,
        connection_rate=cap,
        discipline=table.discipline,
        under_way=seconds("under_way"),
        setup=seconds("setup"),
        fluctuation=table.fluctuation,
        fluctuates_every=seconds("fluctuates_every"),
        loss_every=seconds("loss_every") if table.loss_every else math.inf,
        loss_lasts=seconds("loss_lasts"),
        outages=outages,
        wire_ratio=table.wire_ratio,
    )


def _limit(key: str, text: str) -> float:
    return quantity(key, text, parse_time) if text else math.inf
