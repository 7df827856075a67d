"""`pdrelay bench serve`: an open load on any OpenAI endpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pdrelay.bench.serve import Settings

_FILE = click.Path(path_type=Path, dir_okay=False)
QUICK_REQUESTS = 10


@click.command("serve")
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, metavar="URL",
              help="The server, without /v1.")  # fmt: skip
@click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True,
              help="/v1/chat/completions or /v1/completions.")  # fmt: skip
@click.option("--model", default="", metavar="NAME", help="Default: the first that the server lists.")
@click.option("--api-key", default="", metavar="KEY", help="Default: $OPENAI_API_KEY.")
@click.option("--trace", metavar="FILE", type=_FILE,
              help="Play this trace: Mooncake JSONL, Azure or BurstGPT CSV.")  # fmt: skip
@click.option("--skip-bad", is_flag=True, help="Leave out rows of the trace that cannot be read, and count them.")
@click.option("--generator", type=click.Choice(["pdd", "pdd-even", "prfaas", "agent"]), default="agent",
              show_default=True, help="Make requests, when no trace is given.")  # fmt: skip
@click.option("--rate", type=float, default=1.0, show_default=True, metavar="N",
              help="Of a generator: requests, or sessions, a second.")  # fmt: skip
@click.option("--process", type=click.Choice(["poisson", "constant", "bursty", "diurnal"]), default="poisson",
              show_default=True, help="Of a generator: how they arrive.")  # fmt: skip
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE",
              help="Of a generator: another key of a scenario's [workload], such as prompt=2000.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=0), metavar="N",
              help="Stop after so many, later turns of their sessions not counted. Default: all of a trace, 100 of a "
              "generator.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of requests and prompts.")
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, metavar="X",
              help="Arrivals and think times pass so many times faster.")  # fmt: skip
@click.option("--length-factor", type=click.FloatRange(min=0), default=0.0, metavar="X",
              help="Scale prompts. Default: 1, or what makes the longest fit into the model's context.")  # fmt: skip
@click.option("--output-factor", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              metavar="X", help="Scale outputs.")  # fmt: skip
@click.option("--max-concurrency", type=click.IntRange(min=0), default=0, metavar="N",
              help="Most requests at a time; waiting for a turn counts as latency. Default: no limit.")  # fmt: skip
@click.option("--goodput", "goals", multiple=True, metavar="NAME:MS",
              help="A good request takes at most so long: ttft, ttst, tpot, e2el or largest_gap.")  # fmt: skip
@click.option("--words", is_flag=True, help="Send text to /v1/completions instead of token ids.")
@click.option("--extra-body", default="{}", metavar="JSON", help="Further parameters of every request.")
@click.option("--records", metavar="FILE", type=_FILE, help="Write what happened to each request, one JSON a line.")
@click.option("--html", "html_path", metavar="FILE", type=_FILE, help="Write a report.")
@click.option("--save-detailed", is_flag=True, help="Lists with an element for each request in the JSON, too.")
@click.option("--quick", is_flag=True, help=f"At most {QUICK_REQUESTS} requests: shows that everything runs.")
@click.option("--json", "as_json", is_flag=True,
              help="Print one JSON object: the keys of `vllm bench serve`, and ours.")  # fmt: skip
@click.pass_context
def command(
    context: click.Context, /, records: Path | None, html_path: Path | None, save_detailed: bool, as_json: bool,
    **options: Any,
) -> int:  # fmt: skip
    """Play a workload on an OpenAI endpoint, ours or another.

    Requests are sent when they are due, and latencies count from then, whatever became of those before. Prompts share
    prefixes exactly as the trace says; lengths are scaled by a factor that the result names.

    Exit code 1 when a request failed; what was measured is printed all the same.
    """
    from pdrelay.bench import serve, serve_report
    from pdrelay.bench.load_metrics import write_records
    from pdrelay.cli.bench.running import given, measure
    from pdrelay.ui.page import write

    settings = _settings(options)
    report = serve.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}")
    try:
        return measure(
            report, lambda progress: serve.run(settings, report, progress), serve_report.show, as_json,
            lambda report: report.as_dict(detailed=save_detailed),
        )  # fmt: skip
    finally:
        if records is not None:
            write_records(records, report.timings)
        if html_path is not None:
            write(html_path, serve_report.html(report))


def _settings(options: dict[str, Any]) -> Settings:
    """Checks what click cannot. Raises ConfigError."""
    from pdrelay.bench.load_metrics import Goals
    from pdrelay.bench.open_load import Pace
    from pdrelay.bench.serve import Settings
    from pdrelay.cli.bench.options import json_object, limits

    trace, requests = options["trace"], options["requests"]
    if requests is None:
        requests = 0 if trace else 100
    if options["quick"]:
        requests = min(requests or QUICK_REQUESTS, QUICK_REQUESTS)
    return Settings(
        url=options["base_url"].rstrip("/").removesuffix("/v1"),
        kind=options["endpoint"],
        model=options["model"],
        api_key=options["api_key"] or os.environ.get("OPENAI_API_KEY", ""),
        workload=_workload(options),
        requests=requests,
        seed=options["seed"],
        skip_bad=options["skip_bad"],
        pace=Pace(options["speed"], options["max_concurrency"]),
        length=options["length_factor"],
        output=options["output_factor"],
        goals=Goals(limits("--goodput", options["goals"])),
        words=options["words"],
        extra=json_object("--extra-body", options["extra_body"]),
    )


def _workload(options: dict[str, Any]) -> Any:
    from pdrelay.cli.bench.options import changed
    from pdrelay.workload.choice import WorkloadTable

    if options["trace"]:
        return WorkloadTable(trace=str(options["trace"].resolve()))
    values = {key: options[key] for key in ("generator", "rate", "process")}
    return changed("--set", WorkloadTable, values, options["changes"])
