"""What an open load measured, in the keys of `vllm bench serve` and ours. Latencies count from the due moment."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pdrelay.bench.open_load import Sent
from pdrelay.errors import ConfigError

TIMES = ("ttft", "ttst", "tpot", "itl", "e2el", "largest_gap", "lag")
PERCENTILES = (50, 90, 95, 99)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds; `due` and `sent` from the load's start, all else from `due`. nan: did not happen."""

    number: int
    session: str
    turn: int
    due: float
    sent: float
    lag: float
    ttft: float
    ttst: float
    tpot: float
    e2el: float
    largest_gap: float
    wanted_prompt: int
    wanted_output: int
    prompt_tokens: int  # as the server counts them, else as asked
    output_tokens: int
    cached_tokens: int
    itls: list[float]
    finish_reason: str
    error: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what did not happen is None."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {key: None if isinstance(value, float) and isnan(value) else value for key, value in fields.items()}


def timing(sent: Sent, started: float) -> Timing:
    """The times of a request that has ended, or of the part of it that came."""
    answer, due = sent.answer, sent.due
    count = answer.output_tokens
    first, last = (answer.moments[0], answer.moments[-1]) if answer.moments else (nan, nan)
    gaps = answer.gaps
    return Timing(
        number=sent.number, session=sent.request.session, turn=sent.turn, due=due - started,
        sent=answer.sent - started if answer.sent else nan, lag=sent.lag, ttft=first - due,
        ttst=answer.moment_of(1) - due, tpot=(last - first) / (count - 1) if count > 1 else nan, e2el=last - due,
        largest_gap=max(gaps, default=nan), wanted_prompt=sent.request.prompt, wanted_output=sent.request.output,
        prompt_tokens=answer.prompt_tokens or sent.request.prompt, output_tokens=count,
        cached_tokens=answer.cached_tokens, itls=gaps, finish_reason=answer.finish_reason, error=answer.error,
    )  # fmt: skip


class Goals(NamedTuple):
    """What makes a request good: the most of each, in seconds."""

    limits: Mapping[str, float] = {}

    def met(self, timing: Timing) -> bool:
        """Whether a request that was answered is good; a time that it does not have breaks no goal."""
        return not any(getattr(timing, name) > most for name, most in self.limits.items())


def figures(timings: Sequence[Timing], duration: float, goals: Goals) -> dict[str, Any]:
    """The keys of `vllm bench serve` (times in ms), then ours. Failed requests count as such and nowhere else."""
    done = [timing for timing in timings if not timing.error]
    seconds = max(duration, 1e-9)
    inputs, outputs = sum(t.prompt_tokens for t in done), sum(t.output_tokens for t in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(timings) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(goals.met(timing) for timing in done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
    }
    for name in TIMES:
        result |= _times(name, values(done, name))
    return result | {
        "cached_tokens": sum(timing.cached_tokens for timing in done),
        "goodput_limits": {name: most * 1e3 for name, most in goals.limits.items()},
    }


def write_records(path: Path, timings: Sequence[Timing]) -> None:
    """One JSON object a line. Raises ConfigError."""
    try:
        path.write_text("".join(json.dumps(timing.as_dict()) + "\n" for timing in timings))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def per_request(timings: Sequence[Timing]) -> dict[str, Any]:
    """The lists of `vllm bench serve --save-detailed`, one element for each request that was due."""
    return {
        "input_lens": [timing.prompt_tokens for timing in timings],
        "output_lens": [timing.output_tokens for timing in timings],
        "ttfts": [_known(timing.ttft) for timing in timings],
        "itls": [timing.itls for timing in timings],
        "latencies": [_known(timing.e2el) for timing in timings],
        "start_times": [timing.due for timing in timings],
        "errors": [timing.error for timing in timings],
    }


def values(timings: Sequence[Timing], name: str) -> list[float]:
    """All finite values of a time; `itl` is of every gap."""
    if name == "itl":
        return [gap for timing in timings for gap in timing.itls]
    return [value for timing in timings if math.isfinite(value := getattr(timing, name))]


def _times(name: str, found: Sequence[float]) -> dict[str, float]:
    array = np.array(found or [0.0]) * 1e3
    percentiles = np.percentile(array, PERCENTILES)
    result = {"mean": float(array.mean()), "median": float(np.median(array)), "std": float(array.std())}
    result |= {f"p{percent}": float(value) for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {f"{figure}_{name}_ms": value for figure, value in result.items()}


def _known(value: float) -> float:
    return 0.0 if isnan(value) else value
