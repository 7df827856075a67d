"""`pdrelay bench gateway`: the source that paces it, and one short run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pdrelay.bench.relay.source import GROUPS, Running, Source

ABSENT = """
import json, sys
print(json.dumps({"peer": "smg", "missing": "install it so"}))
sys.exit(3)
"""


class Reader:
    """A stream whose client reads when it is told to."""

    def __init__(self, source: Source, key: int, limit: int) -> None:
        self.source, self.key, self.got, self.read = source, key, 0, 0
        source.start(Running(key, 0, limit, self._emit))

    def _emit(self, index: int) -> None:
        assert index == self.got
        assert self.read == self.got, "a token was made before the one before it was read"
        self.got += 1

    def take(self) -> None:
        self.read = self.got
        self.source.read(self.key, self.read)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 4))
def test_in_lockstep_no_token_is_made_before_all_of_the_group_have_read(order: list[int], limit: int) -> None:
    async def play() -> None:
        source = Source()
        readers = [Reader(source, key, limit) for key in range(6)]
        await asyncio.sleep(0)
        for number in order:
            readers[number].take()
            await asyncio.sleep(0)
            for group in range(GROUPS):
                counts = [reader.got for reader in readers if reader.key % GROUPS == group]
                assert max(counts) - min(counts) == 0
        for _ in range(limit):
            for reader in readers:
                reader.take()
            await asyncio.sleep(0)
        assert [reader.got for reader in readers] == [limit] * 6

    asyncio.run(play())


async def test_a_stream_takes_the_place_of_an_older_one_with_its_key() -> None:
    source, made = Source(), []
    old = Running(1, 0, 9, lambda index: made.append(("old", index)))
    source.start(old)
    source.start(Running(1, 0, 2, lambda index: made.append(("new", index))))
    source.stop(1, old)  # the older one's end is no longer that of the key
    for read in (0, 1):
        source.read(1, read)
        await asyncio.sleep(0)
    assert made == [("new", 0), ("new", 1)]


async def test_nobody_waits_for_a_stream_whose_client_left_before_it_began() -> None:
    source, late, fresh = Source(), [], []
    old = source.next_key()
    source.set_interval(0.0)
    source.start(Running(old, 0, 3, late.append))
    source.start(Running(source.next_key() + GROUPS - 1, 0, 3, fresh.append))  # of the same group
    await asyncio.sleep(0)
    assert (late, fresh) == ([], [0])


def test_a_short_run_with_a_peer_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "smg.py").write_text(ABSENT)
    arguments = ["--quick", "--seconds", "0.6", "--tokens", "64", "--peer", "smg", "--peers", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "pdrelay.cli.main", "bench", "gateway", *arguments], capture_output=True, text=True,
        timeout=110, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["failures"] == {"smg": "not installed: install it so"}, done.stderr
    assert done.returncode == 1
    rows = {row["name"]: row["medians"] for row in found["rows"]}
    assert rows.keys() == {"no gateway", "pdrelay"}
    assert all(value > 0 for value in rows["pdrelay"].values()), rows
