"""What the coordinator says before anything has been reached."""

import asyncio
import time

import msgspec
import pytest
from scripted import ScriptedEngine

from pdrelay.cluster.config import Deployment
from pdrelay.depot.base import Stalled
from pdrelay.engine.base import EngineStatus
from pdrelay.engine.messages import Hello, Load, Sampling
from pdrelay.errors import DepotUnavailableError, PlacementError
from pdrelay.gateway.base import GenerationRequest
from pdrelay.gateway.coordinator import Coordinator
from pdrelay.gateway.legs import Notice
from pdrelay.kv.contract import KVContract, KVGroup

DEPLOYMENT = msgspec.convert(
    {
        "fleet_key_file": "k", "model": {"name": "m", "path": "."}, "gateway": {"cluster": "a"},
        "tls": {"directory": "."}, "cluster": [{"name": "a"}],
        "host": [{"name": name, "cluster": "a", "socket": "s", "listen": "127.0.0.1:1"} for name in ("h-0", "h-1")],
        "instance": [{"name": "e", "cluster": "a", "roles": ["prefill", "decode"], "ranks": [{"host": "h-1"}],
                      "listen": "127.0.0.1:2"}],
    },
    Deployment,
)  # fmt: skip
GROUP = KVGroup(layers=1, heads=1, head_size=1, dtype="int8", part_bytes=64, codec="c")
CONTRACT = KVContract(model="m", revision="", page_tokens=16, block_tokens=16, groups=(GROUP,))
HELLO = Hello(instance="e", epoch="1", model="m", max_model_len=99, max_num_seqs=1, contract=CONTRACT)
REQUEST = GenerationRequest("r", time.monotonic(), [1, 2, 3], Sampling(max_tokens=1))


class Engine(ScriptedEngine):
    status = EngineStatus(True, 0.0, "", HELLO, None)

    async def aclose(self):
        pass


class Depot:
    def __init__(self, key):
        self.key, self.trouble = key, "" if key else "connection refused"
        self.happened = asyncio.Queue()

    @property
    def fleet_key(self):
        if self.key is None:
            raise DepotUnavailableError(self.trouble)
        return self.key

    async def events(self):
        while True:
            yield await self.happened.get()

    async def aclose(self):
        pass


async def test_any_depot_tells_the_key_of_names_and_none_is_told_by_name():
    depots = {"h-0": Depot(None), "h-1": Depot(None)}
    coordinator = Coordinator(DEPLOYMENT, {"e": Engine("e")}, depots)
    with pytest.raises(PlacementError, match=r"no depot has been reached yet .*h-1: connection refused"):
        coordinator.generate(REQUEST)
    depots["h-1"].key, depots["h-1"].trouble = b"k", ""
    run = coordinator.generate(REQUEST)
    await run.aclose()
    await coordinator.aclose()


@pytest.mark.parametrize("xfer", ["r", "r/relay"])
async def test_a_request_hears_of_pages_lost_on_their_way_to_main_decode_or_relay(xfer):
    depots = {name: Depot(b"k") for name in ("h-0", "h-1")}
    coordinator = Coordinator(DEPLOYMENT, {"e": Engine("e")}, depots)
    run, told = coordinator.generate(REQUEST), asyncio.Queue()
    run.notify = told.put_nowait
    for lost in ("another", xfer):
        depots["h-1"].happened.put_nowait(Stalled(lost, [b"page"]))
    async with asyncio.timeout(5):
        assert await told.get() is Notice.PAGES_LOST
    assert told.empty()
    await run.aclose()
    await coordinator.aclose()


def twins():
    """Instances "e" and "f", alike."""
    instances = [msgspec.structs.replace(DEPLOYMENT.instance[0], name=name) for name in ("e", "f")]
    engines, depots = {name: Engine(name) for name in ("e", "f")}, {name: Depot(b"k") for name in ("h-0", "h-1")}
    return Coordinator(msgspec.structs.replace(DEPLOYMENT, instance=instances), engines, depots), engines


async def test_requests_between_two_reports_of_load_are_spread():
    coordinator, engines = twins()

    def place(number):
        run = coordinator.generate(REQUEST._replace(request_id=f"r-{number}"))
        return run, run.route.placement.prefill

    runs, placed = zip(*map(place, range(4)), strict=True)
    assert placed == ("e", "f", "e", "f")
    await runs[1].aclose()
    runs = [*runs, last := place(4)[0]]
    assert last.route.placement.prefill == "f"
    # Half of what "e" reports is ours; the rest is another gateway's, and counts, too.
    load = Load(running=8, waiting=0, kv_usage=0.1)
    engines["e"].status = EngineStatus(True, 0.0, "", HELLO, load, counted=4)
    assert [place(number)[1] for number in (5, 6)] == ["f", "f"]
    await coordinator.aclose()
    assert not coordinator._occupancy.requests.total()


async def test_among_instances_with_as_many_requests_the_one_with_less_to_prefill_is_next():
    coordinator, _ = twins()

    def place(number, prompt):
        return coordinator.generate(REQUEST._replace(request_id=f"r-{number}", prompt=list(range(prompt))))

    runs = [place(0, 900), place(1, 100), place(2, 30)]
    assert [run.route.placement.prefill for run in runs] == ["e", "f", "f"]
    await runs[1].aclose()
    runs.append(place(3, 10))
    assert runs[-1].route.placement.prefill == "f"
    for run in runs:
        await run.aclose()
    await coordinator.aclose()
    assert not coordinator._occupancy.backlog.total()
