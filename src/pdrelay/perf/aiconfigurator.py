"""Instance profiles from aiconfigurator's database of measured kernels (optional: `pip install aiconfigurator`).

Its predictions are fitted to the same linear costs as every other profile by least squares over relative errors, and
the largest error of the fit is kept in the profile's notes.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np

from pdrelay.errors import ConfigError
from pdrelay.perf.hardware import Chip
from pdrelay.perf.instance import InstanceProfile, PrefillTable
from pdrelay.perf.model import ModelKv
from pdrelay.perf.profile import DecodeCost, ForwardCost

LENGTHS = (128, 512, 2048, 8192, 32_768, 131_072)
BATCHES = (1, 4, 16, 64)
CONTEXTS = (1024, 8192, 32_768)


class Query(NamedTuple):
    """What aiconfigurator is asked: its names of model, system and backend, and the parallelism."""

    model: str  # such as Qwen/Qwen3-32B-FP8
    system: str  # such as h200_sxm
    backend: str = "vllm"
    tensor: int = 1
    data: int = 1
    expert: int = 1


def from_aiconfigurator(query: Query, kv: ModelKv, chip: Chip, chips: int, weight_bytes: float) -> InstanceProfile:
    """A replica as aiconfigurator predicts it. Raises ConfigError when it is not installed or knows no such engine."""
    engine = _engine(query)
    per_pair = _pair_seconds(engine)
    seconds = tuple(float(engine.predict_prefill_latency(1, n, 0)) / 1e3 for n in LENGTHS)
    decode, error = _decode(engine)
    memory = (chip.memory.value if chip.memory else 0.0) * chips * 0.9
    return InstanceProfile(
        name=f"{query.model} on {chips} {chip.name}",
        prefill=PrefillTable(tokens=tuple(map(float, LENGTHS)), seconds=seconds, per_pair=per_pair),
        decode=decode,
        extend=ForwardCost(fixed=decode.fixed, per_token=(seconds[3] - seconds[2]) / 6144, per_pair=per_pair),
        kv_per_token=kv.per_token,
        kv_fixed=kv.fixed,
        kv_capacity=max(0.0, memory - weight_bytes),
        max_num_seqs=256,
        prefill_chunk=8192,
        price=chip.price.value * chips,
        notes=(f"aiconfigurator, {query.system}, {query.backend}; decode fitted within {error:.0%}",),
    )


def _engine(query: Query) -> Any:
    try:
        module = importlib.import_module("aiconfigurator_core.sdk.engine")
    except ImportError as error:
        raise ConfigError(
            "profile: aiconfigurator is not installed; run `pip install aiconfigurator`, or use a measured profile or "
            "a roofline"
        ) from error
    try:
        return module.EngineHandle.compile(
            query.model, query.system, query.backend, tp_size=query.tensor, attention_dp_size=query.data,
            moe_ep_size=query.expert,
        )  # fmt: skip
    except Exception as error:  # its errors have no common class
        raise ConfigError(f"profile: aiconfigurator cannot model {query}: {error}") from error


def _pair_seconds(engine: Any) -> float:
    """What a cached prefix of 32K adds to 2,048 uncached tokens, for each pair."""
    bare = engine.predict_prefill_latency(1, 2048, 0)
    behind = engine.predict_prefill_latency(1, 2048 + 32_768, 32_768)
    return max(0.0, float(behind - bare)) / 1e3 / (2048 * 32_768)


def _decode(engine: Any) -> tuple[DecodeCost, float]:
    """The step's linear cost, and its largest relative error over the grid."""
    points = [(b, c) for b in BATCHES for c in CONTEXTS]
    times = np.array([engine.predict_decode_latency(b, c, 2) / 1e3 for b, c in points])
    terms = np.array([[1.0, b, b * c] for b, c in points])
    solution = np.linalg.lstsq(terms / times[:, None], np.ones(len(times)), rcond=None)[0].clip(min=0.0)
    error = float(np.max(np.abs(terms @ solution / times - 1)))
    fixed, per_sequence, per_context_token = map(float, solution)
    return DecodeCost(fixed=fixed, per_sequence=per_sequence, per_context_token=per_context_token), error
