"""Trace readers: every published form, and everything that can be wrong with a file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pdrelay.errors import ConfigError
from pdrelay.workload.base import Request, prefix_hits
from pdrelay.workload.traces import load

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319600,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
"""


def row(timestamp: float | None = 0, length: int = 1000, output: int = 5, **more: object) -> dict[str, object]:
    row: dict[str, object] = {"input_length": length, "output_length": output, **more}
    return row if timestamp is None else {"timestamp": timestamp, **row}


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_mooncake(path: Path) -> None:
    trace = load(write(path, row(5000, hash_ids=[1, 2]), "", row(2000, 1024, hash_ids=[1, 3]), row(2500)))
    assert [(r.arrival, r.prompt, r.blocks) for r in trace.requests] == [
        (0, 1024, (1, 3)), (0.5, 1000, ()), (3.0, 1000, (1, 2)),
    ]  # fmt: skip
    assert list(prefix_hits(trace.requests)) == [0, 0, 0.512]


def test_sessions_with_delays_are_chained_across_other_rows(path: Path) -> None:
    trace = load(
        write(
            path,
            row(0, session_id="a"), row(100, session_id="b"), row(None, 1200, session_id="a", delay=500),
            row(None, 1300, session_id="b", delay_ms=750), row(None, 1400, session_id="a", delay=900),
            row(9000, 1500, session_id="a"),
        )
    )  # fmt: skip
    turns = [[(t.prompt, t.think) for t in first.turns()] for first in trace.requests]
    assert turns == [[(1000, 0), (1200, 0.5), (1400, 0.9)], [(1000, 0), (1300, 0.75)], [(1500, 0)]]


@pytest.mark.parametrize(("text", "expected"), [
    (AZURE, [Request(0, 374, 44), Request(0.052, 396, 109)]),
    (BURST, [Request(0, 472, 18), Request(40, 1087, 1)]),
])  # fmt: skip
def test_csv_forms_are_recognised_by_their_head(path: Path, text: str, expected: list[Request]) -> None:
    path.write_text(text)
    found = load(path).requests
    assert [(r.prompt, r.output) for r in found] == [(r.prompt, r.output) for r in expected]
    assert [r.arrival for r in found] == pytest.approx([r.arrival for r in expected])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "row: found '{', expected a JSON object"),
        ("[1]", r"row: found '\[1\]', expected a JSON object"),
        (row(length=0), "input_length: found 0, expected a number, at least 1"),
        (row(length=True), "input_length: found True, expected a number"),
        (row(output=2.5), "output_length: found 2.5, expected a whole number"),
        (row(output="many"), "output_length: found 'many', expected a number, at least 1"),
        (row(-1), "timestamp: found -1, expected a number, at least 0"),
        (row(None), "timestamp: found None, expected a number, at least 0"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp: found nan, expected a number"),
        (row(hash_ids=[1, 2, 3]), "hash_ids: found '3 ids', expected 2 for 1000 tokens in blocks of 512"),
        (row(hash_ids=[1, "x"]), "hash_ids: found .*, expected a list of whole numbers"),
        (row(None, session_id="new", delay=5), "timestamp: found None, expected a timestamp in the session's first"),
    ],
)
def test_a_bad_row_is_named_and_can_be_skipped(path: Path, bad: object, message: str) -> None:
    write(path, row(), bad, row(10))
    with pytest.raises(ConfigError, match=f"trace.jsonl:2: {message}.*--skip-bad"):
        load(path)
    trace = load(path, skip_bad=True)
    assert (len(trace.requests), trace.skipped) == (2, 1)
    assert trace.complaints[0].startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("374", "none"), "2: ContextTokens: found 'none', expected a number, at least 1"),
        (AZURE.replace("2023-11-16 18:17:03.9799600", "noon"), "2: TIMESTAMP: found 'noon', expected a time such as"),
        (AZURE.replace(",44", ""), "2: row: found '2 cells', expected 3: TIMESTAMP, ContextTokens"),
        (BURST.replace("472", "-4"), "2: Request tokens: found '-4', expected a number, at least 1"),
    ],
)
def test_a_bad_row_of_a_table(path: Path, text: str, message: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path)
    assert len(load(path, skip_bad=True).requests) == 1


def test_a_gzip_that_ends_early_gives_what_came_before(path: Path) -> None:
    rows = [row(i, hash_ids=[i, i + 1]) for i in range(5000)]
    whole = gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode())
    path.write_bytes(whole)
    assert len(load(path).requests) == 5000
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"expected a whole gzip file \(--skip-bad"):
        load(path)
    trace = load(path, skip_bad=True)
    assert 1000 < len(trace.requests) < 5000
    assert any("whole gzip" in text for text in trace.complaints)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "1: found '', expected a JSON object"),
        (b"hello\n", "1: found 'hello', expected a JSON object"),
        (b"{}\n", "no request could be read; .*input_length"),
    ],
)
def test_files_without_a_request(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load(path, skip_bad=True)


def test_bytes_that_are_no_text_are_one_bad_row(path: Path) -> None:
    path.write_bytes(json.dumps(row()).encode() + b"\n\xff\xfe\n")
    assert load(path, skip_bad=True).skipped == 1


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none: cannot be read: No such file"):
        load(tmp_path / "none")
