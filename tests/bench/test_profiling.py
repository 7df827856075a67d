"""`pdrelay profile` on an emulated engine in modelled time: it must find the profile that the engine was given."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdrelay.bench.profile_file import fit, text
from pdrelay.bench.profiling import Plan, measure
from pdrelay.depot.memory import MemoryDepot
from pdrelay.engine.emulated.backend import EmulatedBackend
from pdrelay.engine.emulated.host_depot import HostDepot
from pdrelay.engine.memory import LocalEngine
from pdrelay.errors import ConfigError
from pdrelay.perf.fit import Sample, fit_decode, fit_forward
from pdrelay.perf.profile import load, shipped

TINY = load(shipped("tiny-emulated"))


class ModelledClock:
    """Time that passes only when the engine computes."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
async def engine():
    clock, depot = ModelledClock(), MemoryDepot("d", 64 << 20)
    control = depot.control()

    def connect():
        return depot.engine("e", TINY.contract("m"))

    backend = EmulatedBackend(
        instance="e", model="m", max_model_len=8192, profile=TINY, control=control,
        depot=HostDepot(connect(), connect), publish_decode=False, clock=clock,
    )  # fmt: skip
    local = LocalEngine(backend)
    yield local, clock
    await local.aclose()
    await backend.aclose()
    await control.aclose()


async def test_the_profile_that_the_engine_has_is_found(engine, tmp_path: Path) -> None:
    local, clock = engine
    plan = Plan(
        prompts=(128, 1024, 4096), extends=(1, 32), contexts=(128, 2048), batches=(1, 4), repetitions=2, remote=False
    )
    measured = await measure(local, plan, now=lambda: clock.now)
    fitted = fit(measured)
    assert fitted.prefill.per_token == pytest.approx(TINY.prefill.per_token, rel=0.05)
    assert fitted.extend.fixed == pytest.approx(TINY.extend.fixed, rel=0.05)
    assert fitted.decode.fixed == pytest.approx(TINY.decode.fixed, rel=0.05)
    assert fitted.decode.per_sequence == pytest.approx(TINY.decode.per_sequence, rel=0.1)
    assert max(fitted.errors.values()) < 0.05
    assert measured.kv_tokens == pytest.approx(65_536, rel=0.2)
    path = tmp_path / "measured.toml"
    path.write_text(text(measured, fitted, "64MiB", 512))
    written = load(path)
    assert (written.kv, written.decode) == (TINY.kv, fitted.decode)


async def test_an_engine_that_is_not_there_is_one_clear_error(engine) -> None:
    local, _ = engine
    with pytest.raises(ConfigError, match="expected room for"):
        await measure(local, Plan(prompts=(9000, 10_000)))


def test_costs_below_zero_are_left_out() -> None:
    cost, _ = fit_forward([Sample(100, 0, (0.1, 0.1)), Sample(200, 0, (0.19, 0.19)), Sample(400, 0, (0.36, 0.36))])
    assert min(cost.fixed, cost.per_token, cost.per_pair) >= 0
    with pytest.raises(ConfigError, match="fewer than 2 different lengths"):
        fit_decode([Sample(1, 100, (0.1,))] * 3)


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from pdrelay.cli.main import main

    result = CliRunner().invoke(main, ["profile", "p", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "cannot be read" in result.output
