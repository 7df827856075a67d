"""Log probabilities survive packing, and slices of them are slices of their rows."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrelay.engine.emulated.tokens import Output, prompt_rows
from pdrelay.engine.logprobs import Logprobs, Row, pack
from pdrelay.engine.messages import Sampling
from pdrelay.perf.profile import load, shipped

VOCABULARY = load(shipped("tiny-emulated")).vocabulary


def rows_of(width: int) -> st.SearchStrategy[list[Row]]:
    ids = st.lists(st.integers(0, 2**32 - 1), min_size=width, max_size=width)
    values = st.lists(st.floats(width=32, allow_nan=False), min_size=width, max_size=width)
    return st.lists(st.builds(Row, ids, values, st.integers(0, 2**31)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4).flatmap(rows_of), st.integers(0, 9), st.integers(0, 9))
def test_rows_are_what_was_packed(rows: list[Row], start: int, stop: int) -> None:
    packed = pack(rows)
    assert len(packed) == len(rows)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=Logprobs)
    assert [Row(list(row.ids), list(row.values), row.rank) for row in wire.rows()] == rows
    assert wire[start:stop].rows() == wire.rows()[start:stop]


def test_emulated_log_probabilities_depend_on_all_that_came_before() -> None:
    sampling = Sampling(max_tokens=9, logprobs=2, ignore_eos=True)

    def told(prompt: list[int], drift: bytes = b"") -> list[Row | None]:
        output, rows = Output(VOCABULARY, prompt, sampling, 100), []
        for _ in range(5):
            rows.append(output.row(drift))
            assert output.generate(drift)[0] == rows[-1].ids[0]
        return rows

    assert told([1, 2, 3]) == told([1, 2, 3])
    assert all(row is not None and len(row.ids) == 3 for row in told([1]))
    assert not {str(row) for row in told([1, 2, 3])} & {str(row) for row in told([1, 2, 3], b"wrong page")}
    first, second = prompt_rows([1, 2, 3, 4], VOCABULARY, 1), prompt_rows([9, 2, 3, 4], VOCABULARY, 1)
    assert [row.ids[0] for row in first] == [2, 3, 4]
    assert [row.values for row in first] != [row.values for row in second]


def test_an_emulated_engine_tells_none_unless_asked() -> None:
    assert Output(VOCABULARY, [1], Sampling(max_tokens=1), 100).row(b"") is None
    assert len(pack([])) == 0
