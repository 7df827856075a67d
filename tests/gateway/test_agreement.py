"""Main decode's predictions against what was made before it took over."""

from __future__ import annotations

import logging

import pytest
import whole
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from pdrelay.engine.messages import Sampling
from pdrelay.gateway.agreement import LEAST, SAMPLED, WINDOW, AgreementMonitor, Pair, Predictions
from pdrelay.gateway.base import Tier
from pdrelay.gateway.splice import Splice
from pdrelay.policy.base import Pipeline

PAIR = Pair("rld-0", "md-0")


def shown(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, {"source": "rld-0", "main": "md-0"} | labels) or 0.0


def test_an_alarm_has_a_threshold_and_a_margin(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    monitor = AgreementMonitor(0.8, registry)

    def compare(agree: bool, times: int) -> None:
        for _ in range(times):
            monitor.compare(PAIR, 1, 1 if agree else 2)

    compare(False, LEAST - 1)
    assert not monitor.alarm("md-0")  # too few to tell
    compare(False, 1)
    assert monitor.alarm("md-0") == f"it agrees with rld-0 on 0% of {LEAST} tokens"
    assert not monitor.alarm("md-1")
    compare(True, 4 * LEAST)  # 0.8: at the threshold, but within the margin
    assert monitor.alarm("md-0")
    compare(True, 2 * LEAST)
    assert not monitor.alarm("md-0")
    compare(False, 1)
    assert not monitor.alarm("md-0")
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert shown(registry, "pdrelay_agreement_total", result="agree") == 6 * LEAST
    assert shown(registry, "pdrelay_agreement_total", result="disagree") == LEAST + 1
    assert shown(registry, "pdrelay_agreement_alarm") == 0
    assert shown(registry, "pdrelay_agreement_rate") == pytest.approx(monitor.rate(PAIR))


def test_the_rate_is_of_the_latest() -> None:
    monitor = AgreementMonitor(0.8)
    for _ in range(WINDOW):
        monitor.compare(PAIR, 1, 2)
    for _ in range(WINDOW):
        monitor.compare(PAIR, 1, 1)
    assert monitor.rate(PAIR) == 1


def test_without_a_threshold_there_is_no_alarm() -> None:
    monitor = AgreementMonitor(0)
    for _ in range(WINDOW):
        monitor.compare(PAIR, 1, 2)
    assert not monitor.alarm("md-0")


class Recorder(AgreementMonitor):
    def __init__(self) -> None:
        super().__init__(0.5)
        self.seen: list[tuple[Pair, int, int]] = []

    def compare(self, pair: Pair, made: int, predicted: int) -> None:
        self.seen.append((pair, made, predicted))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=8), st.lists(st.integers(0, 30), max_size=8), st.randoms())
def test_predictions_are_compared_once_whatever_comes_first(
    batches: list[int], predicted: list[int], random: object
) -> None:
    makers = ["p-0", *["rld-0"] * 4, *["md-0"] * 4]
    recorder = Recorder()
    splice = Splice()
    predictions = Predictions(recorder, splice, comparable=True)
    events = [*(("made", size) for size in batches), *(("predicted", at) for at in predicted)]
    random.shuffle(events)  # type: ignore[attr-defined]  # hypothesis gives a Random
    index, number, made, told = 0, 0, {}, []
    for kind, value in events:
        if kind == "made":
            ids = [1000 + index + i for i in range(value)]
            made |= {index + i: (token, makers[number]) for i, token in enumerate(ids)}
            splice.accept(index, ids, Tier.MAIN, makers[number])
            predictions.made()
            index, number = index + value, number + 1
        elif value not in told:
            told.append(value)
            predictions.predicted(value, value + 1000, "md-0")
    expected = [(Pair(made[at][1], "md-0"), made[at][0], at + 1000) for at in told if at in made]
    assert sorted(recorder.seen) == sorted(item for item in expected if item[0].source != "md-0")


def test_nothing_is_compared_where_engines_may_choose_differently() -> None:
    recorder = Recorder()
    splice = Splice()
    predictions = Predictions(recorder, splice, comparable=False)
    splice.accept(0, [1], Tier.PREFILL, "p-0")
    predictions.made()
    predictions.predicted(0, 2, "md-0")
    assert not recorder.seen
    assert [Sampling(max_tokens=1, temperature=t, seed=s).repeatable for t, s in ((0, None), (1, 3), (1, None))] == [
        True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("pipeline", [Pipeline.P_MD, Pipeline.P_RLD_MD])
async def test_right_pages_agree(pipeline: Pipeline) -> None:
    sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    async with whole.running() as deployment:
        for seed in range(20 * (SAMPLED if pipeline is Pipeline.P_MD else 1)):
            prompt = whole.prompt_of(70, seed)
            mode = "catch_up" if seed % 2 else "one_shot"
            at = 10 if pipeline is Pipeline.P_RLD_MD else None
            request = deployment.request(prompt, sampling, pipeline=pipeline, at=at, mode=at and mode)
            assert await deployment.ids(request) == whole.reference(prompt, sampling)
        assert not any(state.alarm for state in deployment.coordinator.health())
        total = sum(sample.value for metric in deployment.registry.collect() for sample in metric.samples
                    if sample.name == "pdrelay_agreement_total" and sample.labels["result"] == "agree")  # fmt: skip
        wrong = [sample for metric in deployment.registry.collect() for sample in metric.samples
                 if sample.labels.get("result") == "disagree"]  # fmt: skip
        assert total >= 20
        assert not wrong


@pytest.mark.parametrize("pipeline", [Pipeline.P_MD, Pipeline.P_RLD_MD])
async def test_wrong_pages_raise_the_alarm(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
    async with whole.running() as deployment:
        for seed in range(LEAST * (SAMPLED if pipeline is Pipeline.P_MD else 1)):
            prompt = whole.prompt_of(70, seed)
            deployment.plant_wrong_pages(prompt)
            at = 10 if pipeline is Pipeline.P_RLD_MD else None
            await deployment.ids(deployment.request(prompt, sampling, pipeline=pipeline, at=at))
        (alarm,) = [state for state in deployment.coordinator.health() if state.alarm]
        assert alarm.instance == "md-0"
        assert "it agrees with p-0 on 0%" in alarm.alarm
        assert alarm.healthy
    assert any("may be wrong" in record.message for record in caplog.records)
