"""Real vLLM, float32: every row of the semantics table at 20 forced seams gives what one stock server gives.

`PDRELAY_SEMANTICS_SEAMS` is another number of seams, `PDRELAY_SEMANTICS_RESULT` a file for the table in the docs.
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

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(3600)]

SEAMS = int(os.environ.get("PDRELAY_SEMANTICS_SEAMS", "20"))
TOOLS, THINKS = "hermes", "deepseek_r1"

Tried = dict[str, tuple[seams.Expected, list[seams.Result]]]


def _tried(tmp_path_factory, rows: dict, reasoning: str) -> Tried:
    model = real.with_tools(ensure_checkpoint(), tmp_path_factory.mktemp("model") / "smol")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    parsers = {"tools": TOOLS, "reasoning": reasoning}
    log, run = tmp_path_factory.mktemp("stock") / "log", tmp_path_factory.mktemp("run")
    with real.stock(model, log, **parsers) as address:
        stock = seams.of_stock(address(), tokenizer, SEAMS, rows)
    with real.trio(run, model, **parsers) as up:
        found = seams.of_deployment(up.url, stock, direct=True)
    return {name: (stock[name], found[name]) for name in rows}


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Tried:
    """All rows at all seams, through a deployment of a model that reasons and one that does not."""
    found: Tried = {}
    for rows, reasoning in ((PLAIN, ""), (REASONING, THINKS)):
        found |= _tried(tmp_path_factory, rows, reasoning)
        if path := os.environ.get("PDRELAY_SEMANTICS_RESULT"):
            Path(path).write_text(json.dumps({name: seams.summary(name, *each) for name, each in found.items()}))
    return found


@pytest.mark.parametrize("name", ROWS)
def test_a_parameter_means_the_same_across_the_seam(tried: Tried, name: str) -> None:
    seams.check(name, *tried[name])
