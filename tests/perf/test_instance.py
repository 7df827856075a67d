"""Instance profiles from files, tables and rooflines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.errors import ConfigError
from pdrelay.perf.catalog import chips, find_chip, find_instance, find_model
from pdrelay.perf.instance import PrefillTable, from_profile
from pdrelay.perf.profile import load, shipped
from pdrelay.perf.roofline import Efficiency, Weights, roofline

TINY = from_profile(load(shipped("tiny-emulated")), price=2.0)
DENSE = Weights(total=70e9, active=70e9, bytes_per_parameter=1, pair_flops=4 * 64 * 128 * 80)
QWEN = find_model("Qwen3-235B").kv()


def test_a_profile_file_becomes_an_instance() -> None:
    assert TINY.prefill_seconds(1000, 24) == pytest.approx(0.005 + 0.05 + 1e-9 * (24_000 + 500_500))
    assert TINY.decode_step_seconds(4, 4000) == pytest.approx(0.0145 + 4 * 5e-4 + 4e-5)
    assert TINY.decode_step_seconds(0, 0) == 0
    assert (TINY.kv_per_token, TINY.capacity_tokens, TINY.price) == (1024, 65_536, 2.0)
    assert TINY.kv_bytes(10) == 10_240
    assert TINY.kv_bytes(0) == 0


def test_the_published_instance_reproduces_its_own_table() -> None:
    h200 = find_instance("prfaas-1t-h200").profile()
    for tokens, seconds in ((1024, 0.44), (8192, 0.72), (32_768, 1.84), (131_072, 7.40)):
        assert h200.prefill_seconds(tokens) == pytest.approx(seconds)
    assert h200.max_num_seqs == 20
    h20 = find_instance("prfaas-1t-h20").profile()
    for tokens, seconds in ((10_224, 1.829), (27_486, 4.265), (62_410, 9.73)):
        assert h20.prefill_seconds(tokens) == pytest.approx(seconds, rel=2e-3)


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_prefill_by_table_rises_between_and_beyond_its_points(first: float, second: float) -> None:
    table = PrefillTable(tokens=(1024, 8192, 32_768), seconds=(0.44, 0.72, 1.84))
    low, high = sorted((first, second))
    assert table.seconds_for(low) <= table.seconds_for(high) * (1 + 1e-12)
    assert table.seconds_for(0) == 0


@pytest.mark.parametrize("points", [((1.0,), (1.0,)), ((1.0, 2.0), (1.0,)), ((2.0, 1.0), (1.0, 2.0))])
def test_a_table_needs_rising_points(points: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
    with pytest.raises(ConfigError, match="prefill table"):
        PrefillTable(tokens=points[0], seconds=points[1])


def test_a_chip_known_by_its_rates_scales_prefill_and_decode_apart() -> None:
    chip = find_chip("E")
    assert chip.prefill is not None
    assert chip.decode is not None
    scaled = TINY.scaled("E", chip.prefill.value, chip.decode.value)
    assert scaled.prefill_seconds(1000) == pytest.approx(TINY.prefill_seconds(1000) / 0.81)
    assert scaled.decode_step_seconds(8, 8000) == pytest.approx(TINY.decode_step_seconds(8, 8000) / 2.10)
    assert scaled.extend_seconds(100, 0) == pytest.approx(TINY.extend_seconds(100, 0) / 2.10)
    table = find_instance("prfaas-1t-h200").profile()
    assert table.scaled("half", 0.5).prefill_seconds(8192) == pytest.approx(1.44)


def test_the_roofline_bounds_what_is_measured() -> None:
    perfect = Efficiency(mfu=1, mbu=1, step_overhead=0)
    h100 = roofline("70B on 8 H100", QWEN, DENSE, find_chip("H100"), 8, perfect)
    # Nobody prefills 70B faster than 2 FLOP a parameter and token at peak, nor steps faster than reading the weights.
    assert 8192 / h100.prefill_seconds(8192) < 8 * 1979e12 / (2 * 70e9)
    assert h100.decode_step_seconds(1, 0) > 70e9 / (8 * 3.35e12)
    h200 = roofline("70B on 8 H200", QWEN, DENSE, find_chip("H200"), 8, perfect)
    assert h200.decode_step_seconds(32, 10**6) < h100.decode_step_seconds(32, 10**6)
    assert h200.prefill_seconds(65_536) == pytest.approx(h100.prefill_seconds(65_536), rel=0.02)
    assert h200.capacity_tokens > 1.5 * h100.capacity_tokens
    assert h200.price == pytest.approx(8 * 1.26)


def test_weights_that_do_not_fit_are_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"1600 GB of weights do not fit into 576 GB of 8 H100; use more chips"):
        roofline("x", QWEN, Weights(1.6e12, 49e9, 1, 1e6), find_chip("H100"), 8)


def test_a_chip_without_rates_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"chip A: flops_fp8: found nothing.*relative to H100"):
        roofline("x", QWEN, DENSE, find_chip("A"), 8)


def test_every_chip_says_where_its_numbers_come_from() -> None:
    assert [chip.name for chip in chips()] == ["H100", "H200", "H20", "A", "B", "C", "D", "E"]
    for chip in chips():
        numbers = [n for n in (chip.price, chip.flops_bf16, chip.bandwidth, chip.prefill, chip.decode) if n]
        assert all(number.source and number.value > 0 for number in numbers)


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"chip: found 'H300', expected one of H100, H200, H20, A"):
        find_chip("H300")
    with pytest.raises(ConfigError, match=r"model: found 'GPT', expected one of DeepSeek-V4-pro"):
        find_model("GPT")
