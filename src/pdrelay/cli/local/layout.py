"""The deployment of `up`: two datacenters on one machine, a shaped line between them.

dc-a: gateway, host-a with prefill p-0 and relay rld-0      dc-b: host-b with main decode md-0
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pdrelay.cluster import toml
from pdrelay.cluster.ports import free_addresses
from pdrelay.cluster.units import parse_time
from pdrelay.engine.vllm.launch import STEADY_WORKER, STEP_SECONDS
from pdrelay.errors import ConfigError
from pdrelay.perf.profile import shipped
from pdrelay.wan.admin import UNLIMITED, parse_line_rate

UNSHAPED_RATE = "10gbit"
"""What the policy is told of a line without limit."""


class Settings(NamedTuple):
    """The options of `up` that shape the deployment."""

    emulated: bool = False
    debug: bool = False
    wan_rate: str = "20mbit"
    wan_rtt: str = "30ms"
    wan_codec: str = "none"
    port: int = 8000
    policy: str = "pdd"
    dtype: str = "bfloat16"
    step_time: str = "0s"

    def check(self) -> None:
        """Raises ConfigError naming the option that is wrong."""
        for option, value, parse in (
            ("--wan-rate", self.wan_rate, parse_line_rate),
            ("--wan-rtt", self.wan_rtt, parse_time),
            ("--step-time", self.step_time, parse_time),
        ):
            try:
                parse(value)
            except ValueError as error:
                raise ConfigError(f"{option}: {error}") from error
        if self.emulated and parse_time(self.step_time):
            raise ConfigError("--step-time: found with --emulated, expected vLLM's engines: a profile times the others")

    @property
    def line_rate(self) -> str:
        """Rate of the line itself."""
        return "unlimited" if self.wan_rate.strip().lower() in UNLIMITED else self.wan_rate

    def as_text(self) -> dict[str, str]:
        """For comparing and printing."""
        return {name: str(value).lower() for name, value in self._asdict().items()}


class Demo(NamedTuple):
    """The model that the deployment serves."""

    name: str
    path: Path
    profile: Path | None = None  # emulated engines: None for the shipped one


class Places(NamedTuple):
    """Everything that must be free on this machine; addresses as `host:port`."""

    sockets: Path  # directory
    certificates: Path
    depot_a: str
    depot_b: str
    depot_a_metrics: str
    depot_b_metrics: str
    prefill: str
    relay: str
    main: str
    depot_b_control: str  # of the line, as the three below
    depot_b_bulk: str
    main_control: str
    line_admin: str


def choose_places(sockets: Path, certificates: Path) -> Places:
    """Picks free addresses."""
    return Places(sockets, certificates, *free_addresses(len(Places._fields) - 2))


def deployment_text(settings: Settings, model: Demo, places: Places) -> str:
    """The deployment file."""
    return "\n".join(_lines(settings, model, places)) + "\n"


def _lines(settings: Settings, model: Demo, places: Places) -> Iterable[str]:
    yield f"fleet_key_file = {toml.text_of(str(places.certificates / 'fleet.key'))}"
    yield from toml.table("[model]", {
        "name": model.name, "path": str(model.path),
        "max_model_len": 8192, "dtype": settings.dtype,
    })  # fmt: skip
    yield from toml.table("[gateway]", {
        "cluster": "dc-a", "listen": f"127.0.0.1:{settings.port}", "debug": settings.debug,
    })  # fmt: skip
    yield from toml.table("[tls]", {"directory": str(places.certificates)})
    yield from toml.table("[policy]", {"name": settings.policy})
    for cluster in ("dc-a", "dc-b"):
        yield from toml.table("[[cluster]]", {"name": cluster})
    yield from toml.table("[[host]]", {
        "name": "host-a", "cluster": "dc-a", "socket": str(places.sockets / "host-a.sock"),
        "listen": places.depot_a, "metrics": places.depot_a_metrics,
    })  # fmt: skip
    yield from toml.table("[[host]]", {
        "name": "host-b", "cluster": "dc-b", "socket": str(places.sockets / "host-b.sock"),
        "listen": places.depot_b, "address": places.depot_b_control, "metrics": places.depot_b_metrics,
    })  # fmt: skip
    for instance in _instances(settings, places):
        yield from toml.table("[[instance]]", {**instance, **_engine(settings, model)})
    yield from toml.table("[[link]]", {
        "source": "dc-a", "target": "dc-b",
        "rate": UNSHAPED_RATE if settings.line_rate == "unlimited" else settings.wan_rate, "rtt": settings.wan_rtt,
        "codec": settings.wan_codec,
        "control": {"host-b": places.depot_b_control}, "bulk": {"host-b": places.depot_b_bulk},
    })  # fmt: skip


def _instances(settings: Settings, places: Places) -> list[toml.Table]:
    # The baseline that decodes beside prefill uses the relay's engine as its decoder.
    beside_prefill = ["relay", "decode"] if settings.policy == "idc_pd" else ["relay"]
    return [
        _instance("p-0", "dc-a", ["prefill"], "host-a", listen=places.prefill),
        _instance("rld-0", "dc-a", beside_prefill, "host-a", listen=places.relay),
        _instance("md-0", "dc-b", ["decode"], "host-b", listen=places.main, address=places.main_control),
    ]


def _instance(name: str, cluster: str, roles: list[str], host: str, **addresses: str) -> toml.Table:
    return {"name": name, "cluster": cluster, "roles": roles, "ranks": [{"host": host}], **addresses}


def _engine(settings: Settings, model: Demo) -> toml.Table:
    if not settings.emulated:
        # Three engines share this machine; more threads than cores would spin against each other.
        env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 3))}
        if not (step := parse_time(settings.step_time)):
            return {"engine": "vllm", "env": env}
        return {"engine": "vllm", "args": ["--worker-cls", STEADY_WORKER], "env": {**env, STEP_SECONDS: str(step)}}
    return {"engine": "emulated", "profile": str(model.profile or shipped("tiny-emulated"))}
