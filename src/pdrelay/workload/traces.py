"""Readers of published traces: Mooncake JSONL (with sessions), Azure and BurstGPT CSV; gzip or plain.

Mooncake's rows have `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. Sessions, as others extended the
form: `session_id`, and in place of a timestamp `delay` or `delay_ms` (ms after the end of the session's turn before).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pdrelay.errors import ConfigError
from pdrelay.workload.base import BLOCK_TOKENS, Request, Trace
from pdrelay.workload.rows import Complaints, RowError, count_of, lines, number_of

Format = Literal["auto", "mooncake", "azure", "burstgpt"]
Parse = Callable[[dict[str, object]], Request]


def load(path: Path, form: Format = "auto", *, skip_bad: bool = False, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Reads a trace. Rows need not be sorted; arrivals count from the first.

    Raises ConfigError naming file, line, field, what was found and what is expected; with `skip_bad` only when
    nothing at all can be read.
    """
    complaints = Complaints(path, skip_bad)
    numbered = list(lines(path, complaints))
    chosen = _sniff(path, numbered) if form == "auto" else form
    if chosen == "mooncake":
        requests = _sessions(list(_mooncake(numbered, complaints, block_tokens)), complaints)
    else:
        requests = list(_csv(numbered, complaints, _azure if chosen == "azure" else _burstgpt))
    if not requests:
        raise ConfigError(f"{path}: no request could be read" + "".join(f"; {text}" for text in complaints.first))
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    shifted = [request._replace(arrival=request.arrival - start) for request in requests]
    return Trace(shifted, complaints.count, tuple(complaints.first))


def _sniff(path: Path, numbered: list[tuple[int, str]]) -> Format:
    first = numbered[0][1] if numbered else ""
    if first.startswith("{"):
        return "mooncake"
    if "ContextTokens" in first:
        return "azure"
    if "Request tokens" in first:
        return "burstgpt"
    raise ConfigError(
        f"{path}:1: found {first[:60]!r}, expected a JSON object (Mooncake), or a CSV head with ContextTokens "
        "(Azure) or Request tokens (BurstGPT)"
    )


# ---- Mooncake ----


def _mooncake(
    numbered: list[tuple[int, str]], complaints: Complaints, block_tokens: int
) -> Iterator[tuple[int, Request, bool]]:
    """Line, request, and whether it waits for the session's turn before."""
    for number, text in numbered:
        try:
            yield number, *_mooncake_row(text, block_tokens)
        except RowError as error:
            complaints.add(number, error)


def _mooncake_row(text: str, block_tokens: int) -> tuple[Request, bool]:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise RowError("", text[:60], f"a JSON object ({error})") from error
    if not isinstance(row, dict):
        raise RowError("", text[:60], "a JSON object")
    delay = next((name for name in ("delay", "delay_ms") if row.get(name) is not None), None)
    follows = delay is not None and row.get("timestamp") is None
    prompt = count_of(row, "input_length")
    return Request(
        arrival=0.0 if follows else number_of(row, "timestamp", 1e-3),
        prompt=prompt,
        output=count_of(row, "output_length"),
        blocks=_blocks(row, prompt, block_tokens),
        session=str(row.get("session_id") or ""),
        think=number_of(row, delay, 1e-3) if delay else 0.0,
        block_tokens=block_tokens,
    ), follows


def _blocks(row: dict[str, object], prompt: int, block_tokens: int) -> tuple[int, ...]:
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RowError("hash_ids", str(ids)[:60], "a list of whole numbers")
    least, most = prompt // block_tokens, -(-prompt // block_tokens)
    if ids and not least <= len(ids) <= most:
        raise RowError("hash_ids", f"{len(ids)} ids", f"{most} for {prompt} tokens in blocks of {block_tokens}")
    return tuple(ids)


def _sessions(rows: list[tuple[int, Request, bool]], complaints: Complaints) -> list[Request]:
    """Chains the turns that wait for one another; turns with a timestamp of their own arrive then."""
    chains: list[list[Request]] = []
    current: dict[str, list[Request]] = {}
    for number, request, follows in rows:
        if not follows:
            chain = [request]
            chains.append(chain)
            if request.session:
                current[request.session] = chain
        elif request.session in current:
            current[request.session].append(request)
        else:
            complaints.add(number, RowError("timestamp", None, "a timestamp in the session's first turn"))
    return [_chained(chain) for chain in chains]


def _chained(chain: list[Request]) -> Request:
    head = chain[-1]
    for turn in reversed(chain[:-1]):
        head = turn._replace(then=head)
    return head


# ---- CSV ----


def _csv(numbered: list[tuple[int, str]], complaints: Complaints, parse: Parse) -> Iterator[Request]:
    head = next(csv.reader([numbered[0][1]])) if numbered else []
    for number, text in numbered[1:]:
        try:
            cells = next(csv.reader([text]))
            if len(cells) != len(head):
                raise RowError("", f"{len(cells)} cells", f"{len(head)}: {', '.join(head)}")
            yield parse(dict(zip(head, cells, strict=True)))
        except RowError as error:
            complaints.add(number, error)


def _azure(row: dict[str, object]) -> Request:
    text = str(row.get("TIMESTAMP"))
    try:
        # Seven digits of a second are more than fromisoformat takes.
        moment = datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise RowError("TIMESTAMP", text, "a time such as 2023-11-16 18:17:03.9799600") from error
    return Request(moment, count_of(row, "ContextTokens"), count_of(row, "GeneratedTokens"))


def _burstgpt(row: dict[str, object]) -> Request:
    """Rows of failed requests have no response tokens; they ask for one."""
    return Request(
        number_of(row, "Timestamp"), count_of(row, "Request tokens"), max(1, count_of(row, "Response tokens", 0))
    )
