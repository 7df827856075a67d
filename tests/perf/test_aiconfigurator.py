"""The optional provider, against a stand-in for its engine."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pdrelay.errors import ConfigError
from pdrelay.perf.aiconfigurator import Query, from_aiconfigurator
from pdrelay.perf.catalog import find_chip, find_model
from pdrelay.perf.instance import InstanceProfile

QUERY = Query("Qwen/Qwen3-235B-A22B", "h200_sxm", tensor=8)


class Engine:
    """Predicts in milliseconds, `isl` with the prefix in it, as aiconfigurator's EngineHandle does."""

    def __init__(self, model: str) -> None:
        if model != QUERY.model:
            raise RuntimeError("no such model")

    @classmethod
    def compile(cls, model: str, *_: str, **__: int) -> Engine:
        return cls(model)

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        return 10 + 0.05 * (isl - prefix) + 1e-6 * (isl - prefix) * prefix

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        return 12 + 0.2 * bs + 1e-6 * bs * isl


def predict(query: Query, monkeypatch: pytest.MonkeyPatch) -> InstanceProfile:
    module = ModuleType("aiconfigurator_core.sdk.engine")
    module.EngineHandle = Engine  # type: ignore[attr-defined]  # a module made by hand
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return from_aiconfigurator(query, find_model("Qwen3-235B").kv(), find_chip("H200"), 8, 235e9)


def test_predictions_become_the_same_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = predict(QUERY, monkeypatch)
    assert profile.decode_step_seconds(8, 80_000) == pytest.approx(0.012 + 0.0016 + 8e-5)
    assert profile.prefill_seconds(2048) == pytest.approx(0.1124)
    assert profile.prefill_seconds(2048, 10_000) == pytest.approx(0.1124 + 0.02048)
    assert profile.kv_capacity == pytest.approx(8 * 141e9 * 0.9 - 235e9)
    assert "within 0%" in profile.notes[0]


def test_an_unknown_engine_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"aiconfigurator cannot model.*no such model"):
        predict(QUERY._replace(model="x"), monkeypatch)


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="run `pip install aiconfigurator`"):
        from_aiconfigurator(QUERY, find_model("Qwen3-235B").kv(), find_chip("H200"), 8, 0)
