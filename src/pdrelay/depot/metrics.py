"""The depot's counters as Prometheus text, over plain HTTP."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pdrelay.cluster.certs import expiry_of
from pdrelay.cluster.units import parse_address
from pdrelay.depot.base import Use
from pdrelay.depot.hub import Hub
from pdrelay.depot.link_metrics import link_lines
from pdrelay.depot.payload import Coder
from pdrelay.errors import ConfigError, StartError


class Metric(NamedTuple):
    """One line of `DepotStats` as a metric."""

    name: str
    kind: str
    field: str
    text: str


METRICS = (
    Metric("pages", "gauge", "pages", "Pages that have room in the arena."),
    Metric("reserved_pages", "gauge", "reserved", "Pages with a writer."),
    Metric("pinned_pages", "gauge", "pinned", "Complete pages with a lease."),
    Metric("leases", "gauge", "leases", "Owners that hold leases or reservations."),
    Metric("transfers", "gauge", "transfers", "Transfers that live, outgoing and incoming."),
    Metric("used_bytes", "gauge", "used_bytes", "Bytes of the arena that pages take."),
    Metric("capacity_bytes", "gauge", "capacity_bytes", "Bytes of the arena."),
    Metric("sent_bytes_total", "counter", "sent_bytes", "Payload sent to other depots."),
    Metric("sent_wire_bytes_total", "counter", "sent_wire_bytes", "Bytes that the payload sent took on the line."),
    Metric("received_bytes_total", "counter", "received_bytes", "Payload received from other depots."),
    Metric("received_wire_bytes_total", "counter", "received_wire_bytes", "Bytes received on bulk connections."),
    Metric("lossy_pages", "gauge", "lossy_pages", "Pages whose copy here came through a lossy codec."),
    Metric("corrupt_parts_total", "counter", "corrupt_parts", "Received parts whose checksum was wrong."),
    Metric("corrupt_pages_total", "counter", "corrupt_pages", "Pages dropped because their bytes here were wrong."),
    Metric("evicted_pages_total", "counter", "evicted_pages", "Pages evicted for want of room."),
    Metric("reserve_waits_total", "counter", "reserve_waits", "Reservations refused for want of room."),
)

DISK_METRICS = (
    Metric("pages", "gauge", "pages", "Pages on disk."),
    Metric("used_bytes", "gauge", "used_bytes", "Bytes of the disk tier that pages take."),
    Metric("capacity_bytes", "gauge", "capacity_bytes", "Bytes of the disk tier."),
    Metric("written_pages_total", "counter", "written_pages", "Pages written to disk."),
    Metric("restored_pages_total", "counter", "restored_pages", "Pages read back into the arena."),
    Metric("evicted_pages_total", "counter", "evicted_pages", "Pages evicted from disk."),
    Metric("corrupt_pages_total", "counter", "corrupt_pages", "Pages that came back from disk with wrong bytes."),
    Metric("errors_total", "counter", "errors", "Reads and writes that failed."),
)

SOURCES = ("own", "arena", "disk", "computed")
"""Fields of `Use` that share out the tokens of prompts."""

USE_METRICS = (
    ("requests", "requests_total", "Requests of this host's engines."),
    ("reloaded", "reloaded_tokens_total", "Tokens that engines loaded again after a preemption."),
)


def render(hub: Hub, certificate: Path | None = None) -> str:
    """All metrics in Prometheus' text format; `certificate` is the file of the depot's own."""
    lines = [*_lines(hub), *(_certificate_lines(hub, certificate) if certificate is not None else ())]
    return "\n".join(lines) + "\n"


def _certificate_lines(hub: Hub, certificate: Path) -> Iterator[str]:
    yield "# HELP pdrelay_depot_certificate_expiry_seconds Until the depot's certificate ends; negative afterwards."
    yield "# TYPE pdrelay_depot_certificate_expiry_seconds gauge"
    with suppress(ConfigError):  # half-way through being replaced
        yield f'pdrelay_depot_certificate_expiry_seconds{{depot="{hub.name}"}} {expiry_of(certificate).seconds():.0f}'


def _lines(hub: Hub) -> Iterator[str]:
    stats, label = hub.stats(), f'depot="{hub.name}"'
    for metric in METRICS:
        yield f"# HELP pdrelay_depot_{metric.name} {metric.text}"
        yield f"# TYPE pdrelay_depot_{metric.name} {metric.kind}"
        yield f"pdrelay_depot_{metric.name}{{{label}}} {getattr(stats, metric.field)}"
    for metric in DISK_METRICS:
        yield f"# HELP pdrelay_depot_disk_{metric.name} {metric.text}"
        yield f"# TYPE pdrelay_depot_disk_{metric.name} {metric.kind}"
        yield f"pdrelay_depot_disk_{metric.name}{{{label}}} {getattr(stats.disk, metric.field)}"
    yield "# HELP pdrelay_depot_disk_up Whether the disk tier works; 0 also where none is configured."
    yield "# TYPE pdrelay_depot_disk_up gauge"
    yield f"pdrelay_depot_disk_up{{{label}}} {int(stats.disk.state == 'on')}"
    yield from _use_lines(stats.use, label)
    yield "# HELP pdrelay_depot_link_up Whether the link to another depot is up."
    yield "# TYPE pdrelay_depot_link_up gauge"
    for to, up in hub.links.up().items():
        yield f'pdrelay_depot_link_up{{{label},to="{to}"}} {int(up)}'
    yield "# HELP pdrelay_depot_link_info What payload takes on a link that is up."
    yield "# TYPE pdrelay_depot_link_info gauge"
    for to, path in hub.links.paths().items():
        yield f'pdrelay_depot_link_info{{{label},to="{to}",transport="{path.split()[0]}",path="{path}"}} 1'
    yield "# HELP pdrelay_depot_cut_connections_total Control connections that this depot ended, by what was wrong."
    yield "# TYPE pdrelay_depot_cut_connections_total counter"
    for reason, count in sum(hub.cut_connections, Counter[str]()).items():
        yield f'pdrelay_depot_cut_connections_total{{{label},reason="{reason}"}} {count}'
    yield from link_lines(hub.links.estimates, label)
    yield from _codec_lines(hub, label)


CODEC_METRICS = (
    ("payload_bytes_total", "Bytes of parts before encoding."),
    ("wire_bytes_total", "Bytes of parts as they travel."),
    ("seconds_total", "Seconds spent in the codec, over all connections."),
)


def _codec_lines(hub: Hub, label: str) -> Iterator[str]:
    """Payload, wire and codec time of each link. A codec pays while its connections' share of time in it is small."""
    directions: list[tuple[str, str, dict[str, Coder]]] = [
        ("encode", "to", {**hub.codecs.encoders}),
        ("decode", "from", {**hub.codecs.decoders}),
    ]
    for verb, end, coders in directions:
        for at, (name, text) in enumerate(CODEC_METRICS):
            yield f"# HELP pdrelay_depot_link_{verb}_{name} {text}"
            yield f"# TYPE pdrelay_depot_link_{verb}_{name} counter"
            for other, coder in coders.items():
                labels = f'{label},{end}="{other}",codec="{coder.name}"'
                yield f"pdrelay_depot_link_{verb}_{name}{{{labels}}} {coder.traffic[at]}"


def _use_lines(use: Mapping[str, Use], label: str) -> Iterator[str]:
    yield "# HELP pdrelay_depot_prompt_tokens_total Prompt tokens of this host's engines, by where their KV came from."
    yield "# TYPE pdrelay_depot_prompt_tokens_total counter"
    for instance, of in use.items():
        for source in SOURCES:
            sample = f'{label},instance="{instance}",source="{source}"'
            yield f"pdrelay_depot_prompt_tokens_total{{{sample}}} {getattr(of, source)}"
    for field, name, text in USE_METRICS:
        yield f"# HELP pdrelay_depot_{name} {text}"
        yield f"# TYPE pdrelay_depot_{name} counter"
        for instance, of in use.items():
            yield f'pdrelay_depot_{name}{{{label},instance="{instance}"}} {getattr(of, field)}'


async def serve_metrics(address: str, render_text: Callable[[], str]) -> asyncio.Server:
    """Answers `GET /metrics`. Raises StartError when the address cannot be had."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(request, render_text))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            writer.close()

    try:
        return await asyncio.start_server(answer, *parse_address(address))
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from error


def _response(request: bytes, render_text: Callable[[], str]) -> bytes:
    if request.startswith((b"GET /metrics ", b"GET /metrics?")):
        status, body = "200 OK", render_text().encode()
    else:
        status, body = "404 Not Found", b"this depot serves /metrics only\n"
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
