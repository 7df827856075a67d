"""Hardware pairing and break-even lines: consistent with themselves and with what the papers conclude."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdrelay.cli.main import main
from pdrelay.reproduce import distance, pairing


def test_the_winning_pair_is_made_of_the_winners_of_each_role() -> None:
    for assumed in (False, True):
        found = pairing.study(assumed=assumed)
        best = found.pairs[0]
        for role, chip in (("prefill", best.prefill), ("decode", best.decode)):
            assert found.cost(chip, role) == min(each.cost for each in found.roles if each.role == role)
        assert best.prefill != best.decode  # no chip is the best at both
        assert best.cost < found.homogeneous().cost


def test_at_its_break_even_price_a_chip_costs_what_the_best_other_costs() -> None:
    found = pairing.study()
    for each in found.roles:
        others = min(o.cost for o in found.roles if o.role == each.role and o.chip != each.chip)
        assert each.cost * each.break_even / each.price == pytest.approx(others)


def test_chip_e_decodes_better_than_h100_and_worse_prefills_as_table_1_says() -> None:
    def hours(chip: str, role: str) -> float:
        each = next(e for e in pairing.study().roles if (e.chip, e.role) == (chip, role))
        return each.cost / each.price

    # Prefill is a single forward: its rate is Table 1's share exactly. Decode's includes the batch that memory allows.
    assert hours("H100", "prefill") / hours("E", "prefill") == pytest.approx(0.81)
    assert hours("H100", "decode") / hours("E", "decode") == pytest.approx(2.10)


@pytest.fixture(scope="module")
def found() -> dict[str, distance.BreakEven]:
    return {model: distance.break_even(model) for model in ("PrfaaS-1T", "Ring-2.5-1T", "MiniMax-M2.5")}


def test_less_kv_pays_over_thinner_and_longer_lines(found: dict[str, distance.BreakEven]) -> None:
    ring, paper, dense = found["Ring-2.5-1T"], found["PrfaaS-1T"], found["MiniMax-M2.5"]
    assert ring.line < paper.line < dense.line
    assert ring.full < paper.full < dense.full
    assert ring.distance >= dense.distance
    assert ring.price > dense.price


def test_the_papers_model_has_its_gain_with_a_tenth_of_the_line(found: dict[str, distance.BreakEven]) -> None:
    paper = found["PrfaaS-1T"]
    assert paper.gain == pytest.approx(1.15, rel=0.03)
    assert paper.full < distance.LINE * 0.13
    assert distance.gain_at("PrfaaS-1T", paper.line * 1.05) >= 1
    assert distance.gain_at("PrfaaS-1T", paper.line * 0.9) < 1


@pytest.mark.parametrize("name", ["pairing", "lines"])
def test_the_commands_print_json_and_write_charts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distance, "MODELS", ("PrfaaS-1T", "Ring-2.5-1T"))
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["study", name, "--json", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["assumptions"]
    assert page.read_text().count("<svg") == 2
