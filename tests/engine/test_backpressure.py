"""More prompts than the arenas have room for: all wait, none fails, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from emulated_kit import (
    CONTRACT,
    Site,
    decode,
    decode_request,
    drain,
    ids_of,
    pages_of,
    prompt_of,
    reference,
    sampling_of,
)

from pdrelay.depot.base import Transfer
from pdrelay.depot.memory import link
from pdrelay.engine.messages import Open

PAGES = 24
"""Of each arena; a prompt has 10."""


@contextlib.asynccontextmanager
async def joined(**options: int) -> AsyncIterator[tuple[Site, Site]]:
    near, far = (
        Site(name, depot=depot, arena=PAGES * CONTRACT.page_bytes, **options)
        for name, depot in (("P", "p"), ("MD", "d"))
    )
    link(near.depot, far.depot)

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.05)
            near.depot.tick()
            far.depot.tick()

    ticking = asyncio.create_task(tick())
    try:
        yield near, far
    finally:
        ticking.cancel()
        await near.aclose()
        await far.aclose()


async def serve(near: Site, far: Site, number: int, prompt: list[int]) -> None:
    """One request P-MD, as the gateway runs it."""
    sampling, pages, xfer = sampling_of(8, ignore_eos=True), pages_of(prompt), f"x{number}"
    tails = int(pages.tail is not None)
    await near.control.transfer(Transfer(xfer=xfer, names=list(pages.names), tails=tails, to="d", addressee="MD"))
    prefilling = near.engines["P"].open(Open(sid=f"p{number}", mode="prefill", prompt=prompt, sampling=sampling))
    run, first = await asyncio.gather(
        decode(far.engines["MD"], decode_request(prompt, sampling, sid=f"d{number}")), drain(prefilling)
    )
    expected, _ = reference(prompt, sampling)
    assert ids_of(first) == expected[:1]
    assert ids_of(run) == expected
    await near.control.end(xfer)


@pytest.mark.parametrize("disk", [0, 200])
async def test_prompts_wait_for_room_and_none_fails(disk: int, eventually: Callable[..., Awaitable[None]]) -> None:
    prefixes = [prompt_of(5 * 16, seed=seed) for seed in range(4)]
    prompts = [prefixes[number % 4] + prompt_of(5 * 16 - 7, seed=100 + number) for number in range(32)]
    async with joined(disk=disk * CONTRACT.page_bytes) as (near, far):
        async with asyncio.timeout(60):
            await asyncio.gather(*(serve(near, far, number, prompt) for number, prompt in enumerate(prompts)))
        for site in (near, far):
            assert site.depot.hub.stats().reserve_waits > 0
            await eventually(lambda at=site: nothing_is_held(at))


def nothing_is_held(site: Site) -> bool:
    stats = site.depot.hub.stats()
    return (stats.reserved, stats.leases, stats.transfers) == (0, 0, 0)
