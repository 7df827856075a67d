"""Profile files and the equations over them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrelay.errors import ConfigError
from pdrelay.perf.equations import decode_step_seconds, extend_seconds, prefill_seconds, transfer_seconds
from pdrelay.perf.profile import ForwardCost, load, shipped

SMOL = load(shipped("smollm2-135m-cpu"))
TOKENS = st.integers(1, 4000)


def test_smollm2_kv_is_the_models() -> None:
    assert SMOL.kv.bytes_per_token == 23_040
    contract = SMOL.contract("m", "r")
    assert [(layout.parts, layout.part_bytes) for layout in contract.layouts] == [(30, 24_576)]
    assert contract.page_bytes == 737_280
    assert contract.bytes_per_token == 23_040


def test_smollm2_times_are_those_measured() -> None:
    assert 350 < 8000 / prefill_seconds(SMOL.prefill, 8000) < 400
    assert 600 < 300 / prefill_seconds(SMOL.prefill, 300) < 700
    assert decode_step_seconds(SMOL.decode, 1, 1000) == pytest.approx(0.033, abs=5e-4)
    assert extend_seconds(SMOL.extend, 20, 300) == pytest.approx(0.051, abs=5e-4)


def test_nothing_takes_no_time() -> None:
    assert prefill_seconds(SMOL.prefill, 0, 500) == 0
    assert extend_seconds(SMOL.extend, 0, 500) == 0
    assert decode_step_seconds(SMOL.decode, 0, 0) == 0


def test_transfer_of_a_cold_prompt() -> None:
    assert transfer_seconds(1500 * 23_040, 20e6 / 8, 0.030) == pytest.approx(13.84, abs=0.01)


@given(first=TOKENS, second=TOKENS, cached=st.integers(0, 4000))
def test_prefill_in_two_parts_costs_one_more_start(first: int, second: int, cached: int) -> None:
    cost = ForwardCost(fixed=0.01, per_token=1e-3, per_pair=1e-7)
    whole = prefill_seconds(cost, first + second, cached)
    parts = prefill_seconds(cost, first, cached) + prefill_seconds(cost, second, cached + first)
    assert parts == pytest.approx(whole + cost.fixed)


@pytest.mark.parametrize("name", ["smollm2-135m-cpu", "tiny-emulated"])
def test_shipped_profiles_load(name: str) -> None:
    assert load(shipped(name)).kv.capacity_pages > 100


def test_unknown_profile_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"found 'h100', expected one of smollm2-135m-cpu, tiny-emulated"):
        shipped("h100")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 4", "layers = 0", "kv.layers: found 0, expected at least 1"),
        ("layers = 4", 'layers = "four"', "kv.layers: found 'four', expected int"),
        ("layers = 4", "layerz = 4", "kv.*layer"),
        ("page_tokens = 16", "page_tokens = 24", "kv.page_tokens: found 24, expected a multiple of 16"),
        ('dtype = "bfloat16"', 'dtype = "int3"', "kv.dtype: found 'int3', expected one of .*bfloat16"),
        ('capacity = "64MiB"', 'capacity = "lots"', "kv.capacity: found 'lots', expected a size such as"),
        ('capacity = "64MiB"', 'capacity = "64"', "kv.capacity: found '64', expected a size such as"),
        ('capacity = "64MiB"', 'capacity = "1KiB"', "kv.capacity: found '1KiB', expected room for one page"),
        ("per_sequence = 5e-4", "per_sequence = -1.0", "decode.per_sequence: found -1.0, expected seconds, at least 0"),
        ("last = 40000", "last = 1000", "vocabulary.last: found 1000, expected a token id above 1000"),
        ("eos = 2", "eos = 2000", "vocabulary.eos: found 2000, expected a token id outside"),
        ("eos_probability = 0.005", "eos_probability = 1.5", "vocabulary.eos_probability: found 1.5"),
        ("max_num_seqs = 64", "", "limits.max_num_seqs: found nothing, expected a value"),
        ("[kv]", "[kv", "not valid TOML"),
    ],
)
def test_a_bad_profile_is_one_clear_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = shipped("tiny-emulated").read_text()
    assert old in text
    path = tmp_path / "bad.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.toml")
