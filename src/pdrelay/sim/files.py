"""Scenario files: what `pdrelay simulate` runs. See `docs/simulator.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from pdrelay.cluster import toml
from pdrelay.cluster.config import PolicySettings
from pdrelay.cluster.topology import Role
from pdrelay.errors import ConfigError
from pdrelay.sim.line import Discipline
from pdrelay.workload.choice import WorkloadTable


class ServiceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes a request good; empty is no limit."""

    ttft: str = ""
    tpot: str = ""
    e2el: str = ""


class ProfileTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named instance profile: from a file, a published table, a roofline, or another one scaled to a chip."""

    name: str
    file: str = ""  # a profile file, or the name of a shipped one
    published: str = ""  # a name of perf/data/instances.toml
    model: str = ""  # roofline: a name of perf/data/models.toml ...
    chip: str = ""  # ... and of perf/data/chips.toml; with `base` the chip that it is scaled to
    chips: int = 8
    mfu: float = 0.4
    mbu: float = 0.6
    base: str = ""  # another profile
    max_num_seqs: int = 0  # overrides
    prefill_chunk: int = 0
    kv_capacity: str = ""
    price: float = -1.0


class InstanceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal instances. With more than one, their names get numbers."""

    name: str
    cluster: str
    roles: list[Role]
    profile: str
    count: int = 1
    ranks: int = 1
    depot: str = ""
    cores: str = ""


class LineTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line between two clusters, or a cluster's own network."""

    source: str
    target: str
    rate: str
    rtt: str = "1ms"
    connections: int = 64
    connection_rate: str = ""  # no cap when empty
    discipline: Discipline = "fair"
    under_way: str = "0s"
    setup: str = "0s"
    fluctuation: float = 0.0
    fluctuates_every: str = "1s"
    loss_every: str = ""
    loss_lasts: str = "0s"
    outages: list[tuple[str, str]] = []
    wire_ratio: float = 1.0


class DepotTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host's arena."""

    name: str
    size: str


class CoresTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Processor cores that instances share."""

    name: str
    count: float


class FaultTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An instance that dies and comes back."""

    instance: str
    at: str
    lasts: str


class ScenarioFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file."""

    description: str = ""
    requests: int = 2000
    seed: int = 0
    overlap: bool = True
    slices: int = 0
    index_zero_from: Literal["prefill", "decode"] = "prefill"
    workload: WorkloadTable = WorkloadTable()
    policy: PolicySettings = PolicySettings()
    slo: ServiceTable = ServiceTable()
    profile: list[ProfileTable]
    instance: list[InstanceTable]
    line: list[LineTable] = []
    depot: list[DepotTable] = []
    cores: list[CoresTable] = []
    fault: list[FaultTable] = []


Raw = dict[str, Any]


def find(name: str) -> Path:
    """The path of a scenario: a file, or the name of one that is shipped. Raises ConfigError naming those there are."""
    return toml.find("scenario", name, "pdrelay.sim", "scenarios")


def read(path: Path, changes: list[str] | None = None) -> ScenarioFile:
    """Reads and checks a scenario; `changes` such as `line.0.rate=1gbit` are made before. Raises ConfigError."""
    return toml.convert(path, changed(toml.read(path), changes or []), ScenarioFile)


def changed(raw: Raw, changes: Sequence[str]) -> Raw:
    """`raw` with each `KEY=VALUE` made in it. Raises ConfigError."""
    for change in changes:
        _change(raw, change)
    return raw


def _change(raw: Raw, text: str) -> None:
    """`table.key=value`; entries of a list are named by number or by their `name`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"change: found {text!r}, expected KEY=VALUE such as policy.hit_threshold=0.9")
    *path, last = key.strip().split(".")
    place: Any = raw
    for step in path:
        place = _step(place, step, key)
    if not isinstance(place, dict):
        raise ConfigError(f"change: {key}: found no table, expected one of the scenario's")
    place[last] = toml.value(value.strip())


def _step(place: Any, step: str, key: str) -> Any:
    if isinstance(place, list):
        for number, entry in enumerate(place):
            if step in (str(number), entry.get("name")):
                return entry
        names = ", ".join(str(entry.get("name", number)) for number, entry in enumerate(place))
        raise ConfigError(f"change: {key}: found {step!r}, expected one of {names}")
    return place.setdefault(step, {})
