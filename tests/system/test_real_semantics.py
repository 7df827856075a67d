"""Real vLLM, float32: every row of the semantics table at 20 forced seams gives what one stock server gives.

The rows with reasoning need a deployment of their own; at 5 seams they are in every run, as the others are in
test_real_exact.py. `PDRELAY_SEMANTICS_SEAMS` is another number of seams, `PDRELAY_SEMANTICS_RESULT` a file for
the table in the docs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import real
import seams
from semantics_rows import PLAIN, REASONING, ROWS
from tokenizers import Tokenizer

from pdrelay.cli.local.model import ensure_checkpoint

pytestmark = pytest.mark.vllm

SEAMS = int(os.environ.get("PDRELAY_SEMANTICS_SEAMS", "20"))
TOOLS, THINKS = "hermes", "deepseek_r1"

Tried = dict[str, tuple[seams.Expected, list[seams.Result]]]


def _tried(tmp_path_factory, rows: dict, reasoning: str, count: int, *, direct: bool) -> Tried:
    model = real.with_tools(ensure_checkpoint(), tmp_path_factory.mktemp("model") / "smol")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    parsers = {"tools": TOOLS, "reasoning": reasoning}
    log, run = tmp_path_factory.mktemp("stock") / "log", tmp_path_factory.mktemp("run")
    with real.stock(model, log, **parsers) as address, real.trio(run, model, **parsers) as up:
        stock = seams.of_stock(address(), tokenizer, count, rows)
        found = seams.of_deployment(up.url, stock, direct=direct)
    return {name: (stock[name], found[name]) for name in rows}


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Tried:
    """All rows at all seams, through a deployment of a model that reasons and one that does not."""
    found: Tried = {}
    for rows, reasoning in ((PLAIN, ""), (REASONING, THINKS)):
        found |= _tried(tmp_path_factory, rows, reasoning, SEAMS, direct=True)
        if path := os.environ.get("PDRELAY_SEMANTICS_RESULT"):
            Path(path).write_text(json.dumps({name: seams.summary(name, *each) for name, each in found.items()}))
    return found


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ROWS)
def test_a_parameter_means_the_same_across_the_seam(tried: Tried, name: str) -> None:
    seams.check(name, *tried[name])


@pytest.fixture(scope="module")
def reasoned(tmp_path_factory) -> Tried:
    """The rows with reasoning at a few seams."""
    return _tried(tmp_path_factory, REASONING, THINKS, 5, direct=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_means_the_same_across_the_seam(reasoned: Tried, name: str) -> None:
    seams.check(name, *reasoned[name])
