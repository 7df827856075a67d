"""What `up` starts: the parts of a deployment in stages, and how to tell that each is ready."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from pdrelay.cluster.config import Deployment
from pdrelay.cluster.topology import Host, Instance
from pdrelay.cluster.units import parse_address
from pdrelay.wan.serve import routes


class SocketAnswers(msgspec.Struct, frozen=True, tag="socket"):
    """Ready when a Unix socket accepts a connection."""

    path: str


class HttpAnswers(msgspec.Struct, frozen=True, tag="http"):
    """Ready when an HTTP address answers, whatever the status."""

    host: str
    port: int
    path: str


class GatewayLists(msgspec.Struct, frozen=True, tag="listed"):
    """Ready when the gateway's /health lists the instance as healthy."""

    host: str
    port: int
    instance: str


Readiness = SocketAnswers | HttpAnswers | GatewayLists


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One process. Parts of a stage start together, once all parts of earlier stages are ready."""

    name: str
    kind: str
    stage: int
    arguments: list[str]
    address: str
    metrics: str = ""  # address of /metrics over plain HTTP
    ready: Readiness
    environment: dict[str, str] = {}
    start_timeout: float = 60.0
    stop_timeout: float = 10.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All parts. `settings` are the options of `up`, to compare with those of a later call."""

    run_directory: str
    temporary: str
    url: str
    settings: dict[str, str]
    parts: list[Part]

    @property
    def stages(self) -> list[list[Part]]:
        """Parts by stage, in order."""
        numbers = sorted({part.stage for part in self.parts})
        return [[part for part in self.parts if part.stage == number] for number in numbers]


def parts_of(deployment: Deployment, config: Path, line_admin: str, line_rate: str | None) -> list[Part]:
    """The parts that serve `deployment`: the line if any address leads through one, depots, engines, gateway.

    `line_admin` is the address of the line's counters; `line_rate` overrides the file's rate for the line alone.
    """
    line = [_line(config, line_admin, line_rate)] if routes(deployment) else []
    depots = [_depot(config, host) for host in deployment.host]
    engines = [_engine(config, instance, deployment.gateway.listen) for instance in deployment.instance]
    return [*line, *depots, *engines, _gateway(config, deployment.gateway.listen)]


def _depot(config: Path, host: Host) -> Part:
    return Part(
        name=host.name,
        kind="depot",
        stage=1,
        arguments=_command("depot", config, "--name", host.name),
        address=host.listen,
        metrics=host.metrics,
        ready=SocketAnswers(host.socket),
    )


def _engine(config: Path, instance: Instance, gateway: str) -> Part:
    return Part(
        name=instance.name,
        kind="engine",
        stage=2,
        arguments=_command("engine", config, "--name", instance.name),
        address=instance.listen,
        ready=GatewayLists(*parse_address(gateway), instance.name),
        start_timeout=60.0 if instance.engine == "emulated" else 600.0,
    )


def _gateway(config: Path, listen: str) -> Part:
    return Part(
        name="gateway",
        kind="gateway",
        stage=2,
        arguments=_command("gateway", config),
        address=listen,
        ready=HttpAnswers(*parse_address(listen), "/health"),
    )


def _line(config: Path, admin: str, rate: str | None) -> Part:
    host, port = parse_address(admin)
    extra = ["--admin", admin, *(["--rate", rate] if rate is not None else [])]
    return Part(
        name="line",
        kind="line",
        stage=0,
        arguments=_command("line", config, *extra),
        address=admin,
        metrics=admin,
        ready=HttpAnswers(host, port, "/metrics"),
    )


def _command(name: str, config: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "pdrelay.cli.main", name, "--config", str(config), *extra]
