"""The deployment file, `pdrelay.toml`: read, check, say clearly what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from pdrelay.cluster import toml
from pdrelay.cluster.topology import AUTO, Cluster, Host, Instance, Link, Role
from pdrelay.cluster.units import parse_address, parse_rate, parse_size, parse_time
from pdrelay.errors import ConfigError

GATEWAY = "gateway"
"""Name of the gateway's certificate in the fleet's TLS directory."""


MAX_RANK = 512
"""Of a LoRA adapter, in vLLM."""


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that the fleet serves. `path` holds tokenizer and weights."""

    name: str
    path: str
    revision: str = ""
    max_model_len: int = 8192
    dtype: str = "auto"
    tool_parser: str = ""  # vLLM's name of the parser of the model's tool calls; empty for none
    reasoning_parser: str = ""  # the same of its reasoning
    chat_template: str = ""  # a file instead of the template that comes with the model


class Adapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter that is served as a model of its own. `path` holds PEFT's files, on every engine's host."""

    name: str
    path: str
    revision: str = ""  # pages of one revision are never used for another
    rank: int = 16

    @property
    def identity(self) -> str:
        """What tells its KV from that of others, in the names of pages."""
        return f"{self.name}@{self.revision}"


class Gateway(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The OpenAI front end. `cluster` is where it runs."""

    cluster: str
    listen: str = "127.0.0.1:8000"
    debug: bool = False  # honour the debug controls of requests
    workers: int = 1  # processes on the one address


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which placement policy runs, and its parameters."""

    name: Literal["pdd", "cdc_pd", "idc_pd", "prfaas", "unified"] = "pdd"
    threshold: float = 16_384.0  # t of prfaas and unified: longer uncached prompts are prefilled in another cluster
    bandwidth: Literal["scarce", "abundant"] = (
        "scarce"  # whose caches count: main decode's cluster's, or the best of all
    )
    hit_threshold: float = 0.95  # H: at or above it a request skips the relay ...
    wan_budget: str = "0s"  # ... and when the line is predicted to carry what is missing in this time
    recompute: bool = False  # prefill beside main decode, where an instance with a profile is sooner than the line
    handoff: Literal["one_shot", "catch_up", "dynamic"] = "dynamic"
    relay_max_tokens: int = 1024  # a relayed request is pressed to move on after this many tokens ...
    relay_max_time: str = "120s"  # ... or this time; both shrink as the relay fills up
    agreement_alarm: float = 0.8  # rate of agreement between relay and main decode below which it is raised; 0 never
    relay_pace: float = 1.25  # Catch-Up shows tokens so many times slower until the pause of the switch is covered


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Directory made by `pdrelay certs`: `ca.pem` and `<part>.pem`, `<part>.key` for each part."""

    directory: str


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole deployment. Relative paths are relative to the file."""

    model: Model
    gateway: Gateway
    tls: Tls
    fleet_key_file: str
    policy: PolicySettings = PolicySettings()
    cluster: list[Cluster]
    host: list[Host]
    instance: list[Instance]
    link: list[Link] = []
    adapter: list[Adapter] = []

    def host_named(self, name: str) -> Host:
        """The host called `name`. Raises ConfigError."""
        return _named(self.host, name, "host")

    def instance_named(self, name: str) -> Instance:
        """The instance called `name`. Raises ConfigError."""
        return _named(self.instance, name, "instance")

    def link_between(self, source: str, target: str) -> Link | None:
        """The link from cluster `source` to cluster `target`."""
        return next((link for link in self.link if (link.source, link.target) == (source, target)), None)


def load(path: Path) -> Deployment:
    """Reads and checks a deployment file. Raises ConfigError naming file, key, what was found and what is expected."""
    raw = toml.read(path)
    deployment = toml.convert(path, raw, Deployment)
    for key, found, expected in _problems(deployment):
        raise ConfigError(f"{path}: {key}: found {found}, expected {expected}")
    return msgspec.convert(_absolute(raw, path.resolve().parent), Deployment)


_PATH_KEYS = {
    ("model", "path"),
    ("model", "chat_template"),
    ("adapter", "path"),
    ("tls", "directory"),
    ("host", "socket"),
    ("host.disk", "path"),
    ("instance", "profile"),
}


def _absolute(raw: dict[str, object], base: Path) -> dict[str, object]:
    def fix(table: str, entry: dict[str, object]) -> dict[str, object]:
        return {
            key: fix(f"{table}.{key}", value)
            if isinstance(value, dict)
            else str(base / str(value))
            if (table, key) in _PATH_KEYS and value
            else value
            for key, value in entry.items()
        }

    fixed: dict[str, object] = {}
    for table, value in raw.items():
        if isinstance(value, dict):
            fixed[table] = fix(table, value)
        elif isinstance(value, list):
            fixed[table] = [fix(table, entry) for entry in value]
        else:
            fixed[table] = str(base / str(value)) if table == "fleet_key_file" else value
    return fixed


Problem = tuple[str, object, str]


def _problems(deployment: Deployment) -> Iterable[Problem]:
    """Everything that types alone do not say, first come first told."""
    clusters = {cluster.name for cluster in deployment.cluster}
    hosts = {host.name: host for host in deployment.host}
    yield from _duplicates("cluster", [c.name for c in deployment.cluster])
    yield from _duplicates("host", [h.name for h in deployment.host])
    yield from _duplicates("instance", [i.name for i in deployment.instance])
    yield from _adapters(deployment)
    yield from _shared_names(deployment, set(hosts))
    yield from _references(deployment, clusters, set(hosts))
    yield from _quantities(deployment)
    for index, instance in enumerate(deployment.instance):
        if not instance.roles:
            yield f"instance[{index}].roles", "[]", f"some of {', '.join(role.value for role in Role)}"
        if not instance.ranks:
            yield f"instance[{index}].ranks", "[]", "at least one rank"
        if instance.ranks and hosts[instance.host].cluster != instance.cluster:
            yield f"instance[{index}].ranks[0].host", repr(instance.host), f"a host of {instance.cluster}"
        if instance.engine == "emulated" and not instance.profile:
            yield f"instance[{index}].profile", "nothing", "the profile file of an emulated engine"
    for index, link in enumerate(deployment.link):
        if link.connections < 1:
            yield f"link[{index}].connections", link.connections, "at least 1"
        if not 0 <= link.connections_per_transfer <= link.connections:
            key, most = f"link[{index}].connections_per_transfer", link.connections
            yield key, link.connections_per_transfer, f"0 (all) to {most}, the link's connections"
        yield from _unused(f"link[{index}]", link)
    if deployment.gateway.workers < 1:
        yield "gateway.workers", deployment.gateway.workers, "at least 1"
    yield from _policy_problems(deployment.policy)


def _policy_problems(policy: PolicySettings) -> Iterable[Problem]:
    if not policy.threshold >= 0:
        yield "policy.threshold", policy.threshold, "a number of tokens, at least 0"
    if not 0 <= policy.hit_threshold <= 1:
        yield "policy.hit_threshold", policy.hit_threshold, "a number from 0 to 1"
    if not 0 <= policy.agreement_alarm < 1:
        yield "policy.agreement_alarm", policy.agreement_alarm, "a number from 0 (no alarm) to below 1"
    if not 1 <= policy.relay_pace <= 4:
        yield "policy.relay_pace", policy.relay_pace, "a number from 1 (nothing is held back) to 4"


def _unused(key: str, link: Link) -> Iterable[Problem]:
    """What is set and has no effect with the transport."""
    of_tcp, of_nixl = ("bulk", "congestion", "connections_per_transfer"), ("nixl_params", "nixl_env")
    idle = of_tcp if link.transport == "nixl" else of_nixl
    for field in idle:
        if value := getattr(link, field):
            yield f"{key}.{field}", value, f"nothing with transport = {link.transport!r}"
    if link.transport == "nixl" and link.codec != "none":
        yield f"{key}.codec", repr(link.codec), "'none' with transport = 'nixl', which writes pages as they are"
    if link.transport == "nixl" and link.encryption != "tls":
        yield f"{key}.encryption", repr(link.encryption), "'tls' with transport = 'nixl', which never encrypts payload"


def _duplicates(table: str, names: list[str]) -> Iterable[Problem]:
    for index, name in enumerate(names):
        if name in names[:index]:
            yield f"{table}[{index}].name", repr(name), "a name that no other has"


def _adapters(deployment: Deployment) -> Iterable[Problem]:
    yield from _duplicates("adapter", [adapter.name for adapter in deployment.adapter])
    for index, adapter in enumerate(deployment.adapter):
        if adapter.name in ("", deployment.model.name):
            yield f"adapter[{index}].name", repr(adapter.name), "a name, and not the model's"
        if not adapter.path:
            yield f"adapter[{index}].path", "''", "a directory with PEFT's adapter_config.json"
        if not 1 <= adapter.rank <= MAX_RANK:
            yield f"adapter[{index}].rank", adapter.rank, f"a number from 1 to {MAX_RANK}"


def _shared_names(deployment: Deployment, hosts: set[str]) -> Iterable[Problem]:
    """Certificates and the holders of pages are told apart by name alone."""
    for index, instance in enumerate(deployment.instance):
        if instance.name in hosts:
            yield f"instance[{index}].name", repr(instance.name), "a name that no host has"
    tables = {"host": [h.name for h in deployment.host], "instance": [i.name for i in deployment.instance]}
    for table, names in tables.items():
        for index, name in enumerate(names):
            if name in (GATEWAY, "ca"):
                yield f"{table}[{index}].name", repr(name), f"another name than {GATEWAY!r} and 'ca'"


def _references(deployment: Deployment, clusters: set[str], hosts: set[str]) -> Iterable[Problem]:
    named = [("gateway.cluster", deployment.gateway.cluster, clusters)]
    named += [(f"host[{i}].cluster", host.cluster, clusters) for i, host in enumerate(deployment.host)]
    for i, instance in enumerate(deployment.instance):
        named.append((f"instance[{i}].cluster", instance.cluster, clusters))
        named += [(f"instance[{i}].ranks[{j}].host", r.host, hosts) for j, r in enumerate(instance.ranks)]
    for i, link in enumerate(deployment.link):
        named += [(f"link[{i}].source", link.source, clusters), (f"link[{i}].target", link.target, clusters)]
        named += [(f"link[{i}].{kind}.{host}", host, hosts) for kind in ("control", "bulk")
                  for host in getattr(link, kind)]  # fmt: skip
    for key, value, known in named:
        if value not in known:
            yield key, repr(value), f"one of {', '.join(sorted(known)) or '(none is defined)'}"


def _rate(text: str) -> float:
    rate = 1.0 if text == AUTO else parse_rate(text)
    if not rate:
        raise ValueError(f"expected a rate above 0, or {AUTO}, got {text!r}")
    return rate


def _quantities(deployment: Deployment) -> Iterable[Problem]:
    checks: list[tuple[str, str, Callable[[str], object]]] = [
        ("gateway.listen", deployment.gateway.listen, parse_address),
        ("policy.relay_max_time", deployment.policy.relay_max_time, parse_time),
        ("policy.wan_budget", deployment.policy.wan_budget, parse_time),
    ]
    for i, host in enumerate(deployment.host):
        checks += [(f"host[{i}].listen", host.listen, parse_address), (f"host[{i}].arena", host.arena, parse_size)]
        if host.disk is not None:
            checks.append((f"host[{i}].disk.size", host.disk.size, parse_size))
        checks += [(f"host[{i}].{key}", getattr(host, key), parse_address) for key in ("address", "metrics")
                   if getattr(host, key)]  # fmt: skip
    for i, instance in enumerate(deployment.instance):
        checks.append((f"instance[{i}].listen", instance.listen, parse_address))
        if instance.address:
            checks.append((f"instance[{i}].address", instance.address, parse_address))
    for i, link in enumerate(deployment.link):
        checks += [(f"link[{i}].rate", link.rate, _rate), (f"link[{i}].rtt", link.rtt, parse_time)]
        checks += [(f"link[{i}].{kind}.{host}", address, parse_address) for kind in ("control", "bulk")
                   for host, address in getattr(link, kind).items()]  # fmt: skip
    for key, value, parse in checks:
        try:
            parse(value)
        except ValueError as error:
            expected, _, found = str(error).removeprefix("expected ").rpartition(", got ")
            yield key, found, expected


Named = TypeVar("Named", Host, Instance)


def _named(items: list[Named], name: str, kind: str) -> Named:
    for item in items:
        if item.name == name:
            return item
    raise ConfigError(f"{kind}: found {name!r}, expected one of {', '.join(item.name for item in items)}")
