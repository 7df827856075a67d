"""PrfaaS's tables: the bounds that the reproduction must keep."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from pdrelay.cli.main import main
from pdrelay.reproduce.prfaas import figures, reproduce, whole_grid


@pytest.fixture(scope="module")
def rows() -> dict[str, float]:
    return {f"{row.table}: {row.quantity}": row.obtained for row in reproduce().rows}


@pytest.mark.parametrize(
    ("row", "published", "within"),
    [
        ("Table 6: PrfaaS-PD: t", 19_400, 0.03),
        ("Table 6: PrfaaS-PD: Lambda_max", 3.24, 0.02),
        ("Table 6: PrfaaS-PD by homogeneous", 1.54, 0.02),
        ("Table 6: naive by homogeneous", 1.16, 0.02),
        ("Table 6: naive: Lambda_max", 2.45, 0.01),
        ("Section 4.3: offloaded share", 0.496, 0.01 / 0.496),
        ("Section 4.3: gain at equal cost", 1.15, 0.02),
        ("Section 4.3: gain over 16 homogeneous instances, which cost as much", 1.15, 0.02),
        ("Table 6: PrfaaS-PD: mean TTFT", 2.22, 0.02),
        ("Table 6: PrfaaS-PD: P90 TTFT", 3.51, 0.02),
        ("Table 6: naive: mean TTFT", 1.74, 0.02),
        ("Table 6: naive: P90 TTFT", 3.51, 0.02),
    ],
)
def test_figures_are_within_their_bounds(rows: dict[str, float], row: str, published: float, within: float) -> None:
    assert rows[row] == pytest.approx(published, rel=within)


def test_the_optimal_instances_are_the_printed_ones(rows: dict[str, float]) -> None:
    names = ("PrfaaS-PD: prefill", "PrfaaS-PD: decode", "homogeneous: prefill", "homogeneous: decode")
    assert [rows[f"Table 6: {name} instances"] for name in names] == [3, 5, 9, 3]


def test_egress_is_throughput_times_share_times_size(rows: dict[str, float]) -> None:
    assert 11.9 <= rows["Section 4.3: egress"] <= 13.0


def test_waiting_makes_first_tokens_later(rows: dict[str, float]) -> None:
    for name in ("PrfaaS-PD", "homogeneous", "naive"):
        for figure in ("mean", "P90"):
            idle, used = (rows[f"Table 6: {name}: {figure} TTFT{more}"]
                          for more in ("", " with waiting, at 80% of its rate"))  # fmt: skip
            assert used > idle


def test_every_predicted_row_is_close_or_says_why() -> None:
    for row in reproduce().rows:
        if row.kind == "predicted" and row.error is not None:
            assert row.reason or abs(row.error) <= 0.10, row
        if row.kind == "calibrated" and row.error is not None:
            assert abs(row.error) <= 0.02, row


@pytest.mark.full
def test_the_benchmark_prints_its_times_beside_their_limits() -> None:
    result = CliRunner().invoke(main, ["bench", "planner", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["points"], found["instances"]) == (whole_grid().total.size, 1000)
    assert found["ratio"] > 1
    assert {"grid", "grid_limit", "plan", "plan_limit"} <= set(found)


def test_figure_5_has_its_crossing_at_the_optimum() -> None:
    grid = reproduce().grid
    row, column = grid.best
    offload, local, total = grid.by_threshold(row)
    assert offload[column] == pytest.approx(local[column], rel=0.02)  # equation (7)
    assert total[column] == total.max()
    for _, svg in figures(grid):
        assert len(list(ElementTree.fromstring(svg).iter("polyline"))) == 3


def test_the_command_prints_rows_like_those_of_pdd_and_writes_a_page(tmp_path) -> None:
    page = tmp_path / "prfaas.html"
    result = CliRunner().invoke(main, ["reproduce", "prfaas", "--json", "--html", str(page)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"rows", "assumptions"}
    expected = {"table", "quantity", "unit", "published", "obtained", "error", "kind", "reason"}
    assert all(set(row) == expected for row in found["rows"])
    assert page.read_text().count("<svg") == 2
