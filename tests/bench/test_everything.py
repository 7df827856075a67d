"""`pdrelay bench all`: what one benchmark cannot do loses no other's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from pdrelay.bench import everything
from pdrelay.bench.everything import ENTRIES, Entry, Text
from pdrelay.bench.machine import describe


def _show(report: dict[str, Any], console: Console) -> None:
    console.print(f"completed <all>: {report['completed'] >= 5}")


async def test_results_of_all_that_ran_are_kept_beside_what_failed(tmp_path: Path) -> None:
    text = Text(dict[str, Any], _show)
    entries = (
        Entry("good", ("simulate", "trio", "--set", "requests=5"), 60.0, text),
        Entry("bad", ("simulate", "nowhere"), 60.0, text),
        Entry("slow", ("simulate", "trio", "--set", "requests=5"), 0.0, text),
    )
    report = everything.new_report("pdrelay bench all")
    await everything.run(tmp_path, (), report, lambda _: None, entries)
    assert report.failures.keys() == {"bad", "slow"}
    assert "scenario: found 'nowhere'" in report.failures["bad"]
    assert "no end after 0 s" in report.failures["slow"]
    assert json.loads((tmp_path / "good.json").read_text())["completed"] >= 5
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["results"]["good"]["exit_code"] == 0
    page = (tmp_path / "index.html").read_text()
    assert "scenario: found" in page
    assert "<pre>completed &lt;all&gt;: True\n</pre>" in page


def test_a_page_that_a_benchmark_made_is_part_of_the_page(tmp_path: Path) -> None:
    report = everything.new_report("pdrelay bench all")
    report.results["compare"] = everything.Ran(command="c", seconds=1.0, exit_code=0, report={})
    (tmp_path / "compare.html").write_text("<html><body><p>its own</p></body></html>")
    text = everything.html(report, tmp_path)
    assert text.count("</body>") == 1
    assert "<p>its own</p></body>" in text


def test_every_report_that_is_shown_as_text_can_be_read_from_its_json() -> None:
    shown = [entry for entry in ENTRIES if entry.text is not None]
    assert shown
    for entry in shown:
        assert entry.text is not None
        report = {
            "command": f"pdrelay {entry.name}", "machine": msgspec.to_builtins(describe()), "engine": "", "line": "",
            "failures": {"part": "broke"},
        }  # fmt: skip
        text = entry.text.of(report)
        assert f"pdrelay {entry.name}" in text
        assert "broke" in text
