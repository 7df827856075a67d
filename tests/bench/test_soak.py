"""Transfers leave nothing behind: objects are counted in this process, and the verdict on memory is checked."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from pdrelay.bench import fleet, soak
from pdrelay.bench.producer import Producer, template_of
from pdrelay.bench.settings import Place
from pdrelay.cluster.config import load
from pdrelay.cluster.ports import free_addresses
from pdrelay.depot.control_client import control_over_unix
from pdrelay.depot.process import running
from pdrelay.depot.sending import Senders

ROUND = 77  # transfers: each kind comes as often in every round
SAMPLE = soak.Memory(20_000_000, 90_000_000)


class Here(NamedTuple):
    """Two depots on the test's own event loop."""

    load: soak.Load
    depots: list[object]


@pytest.fixture
async def here() -> AsyncIterator[Here]:
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="b")))  # short: sockets' names are limited
        sender, receiver = free_addresses(2)
        route = fleet.Route(sender, receiver, receiver, receiver)
        config = fleet.write_config(home, fleet.make_certificates(home), route, fleet.LinkOptions(), soak.ARENA)
        deployment = load(config)
        contract = soak.SHAPE.contract
        template, sites = template_of(contract), []
        for host in (fleet.RECEIVER, fleet.SENDER):
            await stack.enter_async_context(running(deployment, host))
            control = control_over_unix(str(home / f"{host}.sock"))
            stack.push_async_callback(control.aclose)
            await control.ready(10)
            engine = await asyncio.to_thread(Producer, home / f"{host}.sock", f"engine-{host}", contract, template)
            stack.callback(engine.close)
            sites.append(fleet.Site(None, control, engine))  # type: ignore[arg-type]  # there is no process
        yield Here(soak.Load(fleet.Fleet(sites[1], sites[0]), 0, lambda _: None), [])


async def objects_after(here: Here, numbers: range) -> int:
    for number in numbers:
        await here.load.one(number)
    gc.collect()
    return len(gc.get_objects())


async def growth(here: Here) -> float:
    """Objects a transfer, after a first round in which caches find their size."""
    await objects_after(here, range(1, ROUND * 2 + 1))
    before = await objects_after(here, range(ROUND * 2 + 1, ROUND * 3 + 1))
    after = await objects_after(here, range(ROUND * 3 + 1, ROUND * 5 + 1))
    return (after - before) / (ROUND * 2)


async def test_no_object_stays_of_a_transfer(here: Here) -> None:
    assert abs(await growth(here)) < 0.5


async def test_one_forgotten_object_a_transfer_is_seen(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[str]] = []
    end: Callable[..., object] = Senders.end

    def leaky(self: Senders, xfer: str) -> object:
        kept.append([xfer])
        return end(self, xfer)

    monkeypatch.setattr(Senders, "end", leaky)
    assert await growth(here) > 0.5


async def test_memory_of_real_depots_is_sampled_and_nothing_is_left(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="b") as name:
        place = Place(Path(name), fleet.make_certificates(tmp_path))
        found = await soak.soak(100, place, lambda _: None)
    assert found.left_behind == {}
    assert [sample.transfers for sample in found.samples] == list(range(1, 101))
    for sample in found.samples:
        for memory in (sample.sender, sample.receiver):
            assert 1 << 20 < memory.anonymous < memory.resident < 1 << 30


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_memory_is_flat_over_ten_thousand_transfers(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="b") as name:
        found = await soak.soak(10_000, Place(Path(name), fleet.make_certificates(tmp_path)), lambda _: None)
    assert found.flat, (found.sender, found.receiver, found.left_behind)


def samples(grown: float) -> list[soak.Sample]:
    """100 samples in 10,000 transfers; the sender fills its caches, then grows by `grown` bytes a transfer."""
    found = []
    for at in range(1, 101):
        noise = 4096 * (at * 7 % 5)
        warm = min(at, 20) * 100_000
        sender = soak.Memory(SAMPLE.anonymous + warm + noise + int(grown * at * 100), SAMPLE.resident)
        found.append(soak.Sample(at * 100, sender, soak.Memory(SAMPLE.anonymous + noise, SAMPLE.resident)))
    return found


@pytest.mark.parametrize("grown", [0.0, 64.0, 1000.0])
def test_the_slope_is_that_of_the_leak(grown: float) -> None:
    sender, receiver = (soak.slope_of(samples(grown), side) for side in ("sender", "receiver"))
    assert sender.value == pytest.approx(grown, abs=3)
    assert sender.low <= sender.value <= sender.high
    assert (sender.value > soak.LIMIT) == (grown > soak.LIMIT)
    assert receiver.value == pytest.approx(0, abs=3)
