"""What a deployment is made of: clusters, hosts, instances with ranks, links.

A cluster is one datacenter or pool of like hardware. A host is one machine with one depot. An instance is one model
replica; it may span hosts and has ranks. Every rank talks to its host's depot. A data-parallel rank has a scheduler
and prefix cache of its own and is the unit that requests are placed on.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from pdrelay.cluster.units import parse_rate

CodecName = Literal["none", "zstd", "fp8", "int8"]
Encryption = Literal["tls", "control"]
AUTO = "auto"
FIRST_RATE = 12.5e6
"""Bytes per second that a line is taken for before anything is known of it."""

ScheduleName = Literal["srpt", "fair"]
"""How KV is encoded on a link; see docs/codecs.md."""


class Role(enum.Enum):
    """What the gateway routes to an instance; an instance may serve several roles."""

    PREFILL = "prefill"
    RELAY = "relay"
    DECODE = "decode"


class Rank(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of an instance: the process that holds one shard on one host."""

    host: str
    tensor: int = 0
    pipeline: int = 0
    data: int = 0


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One datacenter or pool of like hardware."""

    name: str


HugePages = Literal["off", "transparent", "2MiB", "1GiB"]


class Disk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier below a depot's arena: a file of `size` at `path` that the depot makes, and that goes with it."""

    path: str
    size: str


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine and its depot.

    `listen` is the depot's TLS address for other depots and for the gateway; `address` is where the gateway reaches
    it (default: `listen`); `metrics` serves Prometheus text over plain HTTP.
    """

    name: str
    cluster: str
    socket: str  # Unix socket for the engines of this host
    listen: str
    address: str = ""
    metrics: str = ""
    arena: str = "1GiB"  # budget of the arena
    huge_pages: HugePages = "off"  # of the arena: see docs/tiers.md
    disk: Disk | None = None  # where pages go that the arena has no room for


class Instance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model replica. `listen` is where its API server listens, `address` where the gateway reaches it."""

    name: str
    cluster: str
    roles: list[Role]
    ranks: list[Rank]
    listen: str
    address: str = ""
    engine: Literal["vllm", "emulated"] = "vllm"
    device: Literal["", "cpu", "cuda"] = ""  # of a vLLM engine; empty: cpu where the CPU build of vLLM is installed
    profile: str = ""  # emulated engines: path of the profile file
    args: list[str] = []  # further arguments of the engine's command line
    env: dict[str, str] = {}

    @property
    def host(self) -> str:
        """The host of rank 0, whose API server the gateway talks to."""
        return self.ranks[0].host


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The line from cluster `source` to cluster `target`.

    `control` and `bulk` say where hosts of `source` reach each host of `target`, by host name, when that is not its
    `listen` address; control connections carry token ids, offers and answers ahead of the bulk connections' KV.
    `rate` is the pace at most, and what is planned with before anything was measured; "auto" sets no pace. `schedule`
    says whose turn it is (docs/transport.md); `connections_per_transfer` bounds a transfer's share of the connections,
    0 for all. `congestion` is one of the kernel's TCP congestion controls, empty for its default. `encryption =
    "control"` sends KV in clear, for lines that are encrypted below: who is let in is still decided over TLS.
    `codec` spends cores to save line; `fp8` and `int8` change the KV.
    `transport = "nixl"` writes KV straight into the far arena instead, inside a datacenter (docs/fast-path.md);
    `connections` then says how many batches are written at once.
    """

    source: str
    target: str
    rate: str = "10gbit"
    rtt: str = "1ms"
    connections: int = 4
    connections_per_transfer: int = 0
    schedule: ScheduleName = "srpt"
    congestion: str = ""
    encryption: Encryption = "tls"
    codec: CodecName = "none"
    control: dict[str, str] = {}
    bulk: dict[str, str] = {}
    transport: Literal["tcp", "nixl"] = "tcp"
    nixl_backend: str = "UCX"
    nixl_params: dict[str, str] = {}  # of the backend
    nixl_env: dict[str, str] = {}  # of the agents' processes, such as UCX_TLS

    @property
    def known_rate(self) -> float | None:
        """`rate` in bytes per second; None when it is to be measured."""
        return None if self.rate == AUTO else parse_rate(self.rate)

    @property
    def first_rate(self) -> float:
        """Bytes per second to plan with until the line was measured."""
        return self.known_rate or FIRST_RATE
