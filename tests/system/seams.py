"""Runs the rows of the semantics table with the handoff forced, and beside it on one server without any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import httpx
from deployment import plain_client
from real import STOCK_NAME
from semantics_rows import ROWS, Json, ask, differences
from tokenizers import Tokenizer

AT_ONCE = 12
"""A step takes about as long for so many sequences as for one."""


class Trial(NamedTuple):
    """One request: where the seam is (None: P-MD), and how it is asked."""

    seam: int | None
    stream: bool
    mode: str
    key: str  # of the answer that one server gave


@dataclass(frozen=True)
class Expected:
    """What one server says to a row."""

    seams: list[int]
    answers: dict[str, Json]
    requests: dict[str, Json]


@dataclass(frozen=True)
class Result:
    """What the deployment says to a trial."""

    trial: Trial
    answer: Json
    reached: bool  # the handoff was where it was forced, or the answer had ended


PAGE = 32
"""Tokens of a KV page."""


def tokens_for(count: int) -> int:
    """Output tokens of most rows when they are tried at `count` seams."""
    return max(14, count + 4)


def pick(length: int, prompt: int, count: int) -> list[int]:
    """At most `count` of the indices from 1 to `length - 1`.

    Those first where mistakes show: main decode makes all but token 0, or the last token alone; a page ends; half-way.
    """
    last = length - 1
    even = [1 + (last - 1) * i // (count - 1) for i in range(count)]
    wanted = [1, last, PAGE - prompt % PAGE, (1 + last) // 2, 2, *even, *range(1, length)]
    return sorted(list(dict.fromkeys(index for index in wanted if 1 <= index <= last))[:count])


Asked = Callable[[str, dict[str, tuple[Json, bool]]], dict[str, Json]]
"""Puts requests to a path of one server, each to be streamed or not, all at once; the answers by the same keys."""


def expected(asked: Asked, tokenizer: Tokenizer, count: int, name: str) -> Expected:
    """What the trials of a row will be compared with, at `count` seams."""
    row = ROWS[name]
    plain = row.request(tokens_for(count))
    streamed = (False, True) if row.stream is None else (row.stream,)
    kinds = streamed if row.for_seam is None else streamed[:1]
    answers = asked(row.path, {f"{name}/{stream}": (plain, stream) for stream in kinds})
    first = next(iter(answers.values()))
    assert "error" not in first, f"{name}: {first}"
    ids: list[int] = first["choices"][0]["token_ids"]
    length = len(ids) or first["usage"][1]
    seams = [1] if row.first_only else pick(length, first["usage"][0], count)
    requests = dict.fromkeys(map(str, seams), plain)
    if row.for_seam is not None:
        for seam in seams:
            requests[str(seam)] = plain | row.for_seam(ids, seam, lambda part: tokenizer.decode(part))
        wanted = {trial.key: (requests[str(trial.seam)], trial.stream) for trial in _relayed(name, seams)}
        answers = asked(row.path, wanted)
    return Expected(seams, answers, requests)


def _relayed(name: str, seams: list[int]) -> list[Trial]:
    """The trials of a row: half streamed, half by each mode."""
    row, found = ROWS[name], []
    turn = list(ROWS).index(name)  # so that each seam is tried in every way by some row
    for number, seam in enumerate(seams, turn):
        stream = bool(number % 2) if row.stream is None else row.stream
        key = name if row.for_seam is None else f"{name}-{seam}"
        mode = "catch_up" if number // 2 % 2 else "one_shot"
        found.append(Trial(seam, stream, mode, f"{key}/{stream}"))
    return found


def trials(name: str, wanted: Expected, *, direct: bool) -> list[tuple[Trial, Json]]:
    """The trials of a row and their requests; if `direct` one without a relay."""
    found = [(trial, wanted.requests[str(trial.seam)]) for trial in _relayed(name, wanted.seams)]
    if direct:
        last, request = found[-1]
        found.append((last._replace(seam=None, mode=""), request))
    return found


def of_stock(url: str, tokenizer: Tokenizer, count: int, names: Iterable[str]) -> dict[str, Expected]:
    """The same for many rows, as many requests at once as one server batches."""
    names = sorted(names, key=lambda name: ROWS[name].for_seam is None)  # first those that ask twice
    with (
        plain_client(url) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
        ThreadPoolExecutor(len(names)) as rows,
    ):

        def asked(path: str, requests: dict[str, tuple[Json, bool]]) -> dict[str, Json]:
            def one(key: str, request: Json, stream: bool) -> Json:
                salted = request | {"cache_salt": key.replace(" ", "-").replace("/", "-")}
                return ask(client, STOCK_NAME, path, salted, stream=stream)

            answers = [pool.submit(one, key, *request) for key, request in requests.items()]
            return {key: answer.result() for key, answer in zip(requests, answers, strict=True)}

        return dict(zip(names, rows.map(partial(expected, asked, tokenizer, count), names), strict=True))


def of_deployment(url: str, stock: dict[str, Expected], *, direct: bool) -> dict[str, list[Result]]:
    """All trials of all rows, many at once."""
    wanted = [(name, trial) for name, expected in stock.items() for trial in trials(name, expected, direct=direct)]
    with plain_client(url) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(lambda each: run(client, *each), wanted))
    found: dict[str, list[Result]] = {}
    for (name, _), result in zip(wanted, results, strict=True):
        found.setdefault(name, []).append(result)
    return found


def check(name: str, wanted: Expected, results: list[Result]) -> None:
    """Fails where an answer differs from that of one server."""
    for result in results:
        lines = wrong(wanted, result)
        assert not lines, f"{name}, {result.trial}: {lines}, trace {result.answer.get('trace')}"
        trace = result.answer.get("trace")
        assert result.reached, f"{name}, {result.trial}: the seam was not where it was forced, trace {trace}"


def run(client: httpx.Client, name: str, trial_and_request: tuple[Trial, Json]) -> Result:
    """Puts one trial to the deployment."""
    trial, request = trial_and_request
    forced: dict[str, Any] = {"trace": True, "pipeline": "p_md"}
    if trial.seam is not None:
        forced |= {"pipeline": "p_rld_md", "handoff_at": trial.seam, "handoff_mode": trial.mode}
    salt = f"{name}-{trial.seam}-{trial.stream}".replace(" ", "-")
    body = request | {"pdrelay": forced, "cache_salt": salt}
    answer = ask(client, STOCK_NAME, ROWS[name].path, body, stream=trial.stream)
    return Result(trial, answer, _reached(trial, answer))


def _reached(trial: Trial, answer: Json) -> bool:
    traces = (answer.get("trace") or {}).get("choices") or [answer.get("trace") or {}]
    if trial.seam is None:
        return all(trace.get("relay_tokens") == 0 for trace in traces)
    return all(
        trace.get("handoff_index") == trial.seam or len(trace.get("token_ids", ())) <= trial.seam for trace in traces
    )


def wrong(wanted: Expected, result: Result) -> list[str]:
    """Where an answer differs from that of one server."""
    return differences(wanted.answers[result.trial.key], result.answer)


def summary(name: str, wanted: Expected, results: list[Result]) -> Json:
    """For the table in the docs."""
    return {
        "shows": ROWS[name].shows,
        "seams": [result.trial.seam for result in results if result.trial.seam is not None],
        "streamed": sum(result.trial.stream for result in results),
        "catch_up": sum(result.trial.mode == "catch_up" for result in results),
        "differ": sum(bool(wrong(wanted, result)) for result in results),
        "elsewhere": sum(not result.reached for result in results),  # the seam was not where it was forced
    }
