"""`pdrelay plan`: what it prints and writes, and what it says of wrong files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdrelay.cli.main import main
from pdrelay.cluster import config
from pdrelay.engine.vllm import launch
from pdrelay.plan.files import find, load
from pdrelay.policy.named import policy_of
from pdrelay.policy.prfaas import Prfaas


def plan(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *args])
    assert result.exit_code == code, result.output
    return result.output


def test_the_plan_is_printed_with_a_plot_and_written_as_a_deployment_that_loads(tmp_path: Path) -> None:
    page, written = tmp_path / "plan.html", tmp_path / "pdrelay.toml"
    output = plan("prfaas", "--html", str(page), "--config", str(written), "--commands", "--seconds", "1")
    assert "4 h200 prefill" in output
    assert "full first: remote prefill" in output
    assert "*" in output
    assert "--max-num-seqs 20" in output
    assert page.read_text().count("<svg") == 4  # Pareto front, Figures 5a and 5b of this case, sensitivity
    deployment = config.load(written)
    assert len(deployment.instance) == 12
    policy = policy_of(deployment.policy)
    assert isinstance(policy, Prfaas)
    assert policy.threshold == pytest.approx(19_641, rel=0.01)
    for instance in deployment.instance:
        assert "--tensor-parallel-size" in launch.command(deployment, instance.name).argv


@pytest.mark.full
def test_json_has_everything_and_a_verification_beside_it() -> None:
    found = json.loads(plan("prfaas", "--json", "--verify", "--seconds", "1", "--set", "promise.ttft=8s",
                            "--set", "pool.h200.count=2", "--set", "pool.h20.count=4"))  # fmt: skip
    assert found["feasible"]
    assert found["best"]["goodput"] <= found["best"]["rates"]["total"]
    assert found["front"]
    assert found["neighbours"]
    assert found["sensitivity"]
    figures = {each["figure"]: each for each in found["verified"][0]["figures"]}
    assert abs(figures["highest rate, requests/s"]["difference"]) < 0.05
    assert "[[instance]]" in found["deployment"]


def test_what_is_not_feasible_ends_with_1_and_says_what_is() -> None:
    output = plan("prfaas", "--set", "aim=cost", "--set", "rate=50.0", "--seconds", "1", code=1)
    assert "the rate of 50 requests/s cannot be kept" in " ".join(output.split())
    assert "nearest feasible one is 3.1" in " ".join(output.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("pool.h20.profile=b200", "pool.h20.profile: found 'b200', expected one of h200, h20"),
        ("line.0.target=mars", "cluster: found 'mars', expected one of local, remote"),
        ("line.0.rate=fast", "line[0].rate: found 'fast', expected a rate such as 20mbit or 10gbit"),
        ("promise.share=2.0", "promise.share: found 2.0, expected a number between 0 and 1"),
        ("promise.ttft=soon", "promise.ttft: found 'soon', expected a time such as 30ms or 2s"),
        ("cache.local=3.0", "cache.local: found 3.0, expected a number from 0 to 1"),
        ("aim=best", "aim: found 'best'"),
    ],
)
def test_wrong_files_are_one_clear_line(change: str, message: str) -> None:
    output = plan("prfaas", "--set", change, code=2)
    assert message in output


def test_an_unknown_plan_names_the_shipped_ones() -> None:
    assert "expected a .toml file or one of prfaas, trio" in plan("nothing", code=2)


def test_generators_and_hit_rates_become_lengths() -> None:
    lengths = load(find("trio")).problem.lengths
    assert lengths.mean(lengths.cached) / lengths.mean(lengths.prompt) == pytest.approx(0.90, abs=0.01)
    assert lengths.mean(lengths.output) == pytest.approx(1000, rel=0.06)
