"""Real vLLM, float32: every row of the semantics table at 20 forced seams gives what one stock server gives."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import real
import seams
from semantics_rows import ROWS
from tokenizers import Tokenizer

from pdrelay.cli.local.model import ensure_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(3600)]

SEAMS = 20
TOOLS = "hermes"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return real.with_tools(ensure_checkpoint(), tmp_path_factory.mktemp("model") / "smol")


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory) -> dict[str, seams.Expected]:
    """What one stock instance says to every row."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with (
        real.stock(model, tmp_path_factory.mktemp("stock") / "log", tools=TOOLS) as url,
        ThreadPoolExecutor(12) as pool,
    ):
        return dict(zip(ROWS, pool.map(partial(seams.expected, url, tokenizer, SEAMS), ROWS), strict=True))


@pytest.fixture(scope="module")
def answers(stock, model, tmp_path_factory) -> dict[str, list[seams.Result]]:
    """All rows through the deployment at all seams, many at once."""
    wanted = [(name, trial) for name, expected in stock.items() for trial in seams.trials(name, expected, direct=True)]
    with (
        real.trio(tmp_path_factory.mktemp("run"), model, tools=TOOLS) as up,
        ThreadPoolExecutor(16) as pool,
    ):
        results = list(pool.map(lambda each: seams.run(up.url, *each), wanted))
    found: dict[str, list[seams.Result]] = {}
    for (name, _), result in zip(wanted, results, strict=True):
        found.setdefault(name, []).append(result)
    if path := os.environ.get("PDRELAY_SEMANTICS_RESULT"):
        rows = {name: seams.summary(name, stock[name], results) for name, results in found.items()}
        Path(path).write_text(json.dumps(rows))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_parameter_means_the_same_across_the_seam(answers, stock, name):
    for result in answers[name]:
        wrong = seams.wrong(stock[name], result)
        assert not wrong, f"{name}, {result.trial}: {wrong}, trace {result.answer.get('trace')}"
        assert result.reached, f"{name}, {result.trial}: the seam was not where it was forced"
