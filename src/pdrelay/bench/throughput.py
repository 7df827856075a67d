"""Rounds in which every contestant moves the same bytes once, so that what slows the machine slows them alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from typing import Literal, NamedTuple

import msgspec

from pdrelay.bench.contestants import Contestant, MissingPeerError, Peer, Sample
from pdrelay.bench.stats import Estimate, estimate, median_of, median_ratio
from pdrelay.errors import BenchError, PdrelayError

GB = 1e9


class Entry(NamedTuple):
    """A contestant of a comparison: how it is made, and the name of the one that it is measured against."""

    name: str
    make: Callable[[], AbstractAsyncContextManager[Contestant]]
    beside: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one contestant reached. Medians over the rounds; ratios are of the same round."""

    name: str
    status: Literal["ok", "missing", "failed"]
    detail: str = ""  # why it has no figures, or fewer rounds, and what to do about it
    beside: str = ""
    bytes_per_second: Estimate | None = None
    ratio: Estimate | None = None  # to `beside`
    cpu_seconds_per_gb: float | None = None  # both ends
    samples: list[Sample] = []
    peer: dict[str, object] = {}  # what the peer's script told last


@asynccontextmanager
async def ready(contestant: Contestant) -> AsyncIterator[Contestant]:
    """A contestant that needs no setting up."""
    yield contestant


class _Runner:
    """One contestant through all rounds."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.contestant: Contestant | None = None
        self.samples: dict[int, Sample] = {}
        self.trouble: PdrelayError | None = None

    async def prepare(self, stack: AsyncExitStack) -> None:
        """Makes it ready; `stack` ends it."""
        with self._noting_trouble():
            self.contestant = await stack.enter_async_context(self.entry.make())

    async def measure(self, number: int) -> None:
        """Takes part in round `number`, unless something went wrong before. Round 0 does not count."""
        if self.contestant is None:
            return
        with self._noting_trouble():
            sample = await self.contestant.measure()
            if number:
                self.samples[number] = sample

    @contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        """What is raised ends this contestant's rounds, not the others'."""
        try:
            yield
        except (PdrelayError, OSError, TimeoutError) as error:
            self.trouble = error if isinstance(error, PdrelayError) else BenchError(f"{type(error).__name__}: {error}")
            self.contestant = None


async def compare(entries: Sequence[Entry], rounds: int, progress: Callable[[str], None]) -> list[Row]:
    """Measures all entries `rounds` times in turn, after one round that does not count."""
    runners = [_Runner(entry) for entry in entries]
    async with AsyncExitStack() as stack:
        for runner in runners:
            progress(f"start {runner.entry.name}")
            await runner.prepare(stack)
        for number in range(rounds + 1):
            for runner in runners:
                progress(f"round {number} of {rounds}: {runner.entry.name}")
                await runner.measure(number)
    by_name = {runner.entry.name: runner for runner in runners}
    return [_row(runner, by_name.get(runner.entry.beside)) for runner in runners]


def _row(runner: _Runner, yardstick: _Runner | None) -> Row:
    entry, samples = runner.entry, list(runner.samples.values())
    report = runner.contestant.report if isinstance(runner.contestant, Peer) else {}
    if not samples:
        missing = isinstance(runner.trouble, MissingPeerError)
        return Row(name=entry.name, status="missing" if missing else "failed", detail=str(runner.trouble))
    paired = [number for number in runner.samples if yardstick is not None and number in yardstick.samples]
    ratio = None
    if yardstick is not None and yardstick is not runner and paired:
        ours, theirs = ([side.samples[number].rate for number in paired] for side in (runner, yardstick))
        ratio = estimate(median_ratio, ours, theirs)
    return Row(
        name=entry.name,
        status="failed" if runner.trouble is not None else "ok",
        detail=f"ended after {len(samples)} rounds: {runner.trouble}" if runner.trouble is not None else "",
        beside=entry.beside if ratio is not None else "",
        bytes_per_second=estimate(median_of, [sample.rate for sample in samples]),
        ratio=ratio,
        cpu_seconds_per_gb=sum(sample.cpu_seconds for sample in samples) / sum(sample.bytes for sample in samples) * GB,
        samples=samples,
        peer=report,
    )
