"""`pdrelay bench compare`: the papers' policies side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_FILE = click.Path(path_type=Path, dir_okay=False)
POLICIES = ("idc_pd", "cdc_pd", "pdd_one_shot", "pdd_catch_up", "pdd")
QUICK_REQUESTS = 24


@click.command("compare")
@click.option("--policy", "policies", multiple=True, type=click.Choice(POLICIES),
              help="Only this one; repeatable. Default: all. `pdd` chooses the handoff for each request.")  # fmt: skip
@click.option("--requests", type=click.IntRange(10), default=200, show_default=True, help="Requests of each policy.")
@click.option("--line-load", type=click.FloatRange(0.05, 3), default=0.9, show_default=True,
              help="Load of the line by the requests' KV: its rate follows from it.")  # fmt: skip
@click.option("--rtt", default="30ms", show_default=True, metavar="TIME", help="Round trip of the line.")
@click.option("--speed", type=click.FloatRange(0.1, 50), default=5.0, show_default=True,
              help="So many times faster than the evaluation's times.")  # fmt: skip
@click.option("--output", type=click.FloatRange(2), default=1000.0, show_default=True, metavar="TOKENS",
              help="Mean length of outputs.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of requests and prompts.")
@click.option("--line", type=click.Choice(["namespaces", "user"]),
              help="Between two network namespaces (root, iproute2), or in user space. Default: namespaces if they can "
              "be had.")  # fmt: skip
@click.option("--real", is_flag=True,
              help="Real vLLM engines, as `pdrelay up` starts them, in place of emulated ones: confirms the ranking. "
              "Its line is in user space.")  # fmt: skip
@click.option("--peer", "peers", multiple=True, type=click.Choice(["stock_pd"]),
              help="With --real: stock vLLM with NixlConnector and vllm-router plays the same requests, between two "
              "network namespaces (root, iproute2).")  # fmt: skip
@click.option("--peers", "peers_at", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Directory of the peers' scripts. Default: benchmarks/peers here or in the checkout.")  # fmt: skip
@click.option("--html", "html_path", metavar="FILE", type=_FILE, help="Write a report with figures.")
@click.option("--quick", is_flag=True, help="Few requests: shows that everything runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(context: click.Context, /, html_path: Path | None, as_json: bool, **options: Any) -> int:
    """Serve the same agentic requests at the same moments under each policy, over depots and a shaped line.

    idc_pd decodes beside prefill: what one datacenter would give. cdc_pd decodes across the line and waits for it. pdd
    relays meanwhile. Engines are emulated with the times of PDD's evaluation, sped up; all else is real. Every run is
    simulated as well, and the two are set side by side. With --real the engines are vLLM on this machine's CPU, and
    --speed, --output and --line do not count.

    Exit code 1 when a policy failed; what the others showed is printed all the same.
    """
    from pdrelay.bench.compare import real, text
    from pdrelay.bench.compare import run as bench
    from pdrelay.bench.compare.experiment import Experiment
    from pdrelay.bench.compare.real import Real
    from pdrelay.bench.compare.stock import Peer
    from pdrelay.cli.bench.options import parsed
    from pdrelay.cli.bench.running import default_peers, given, measure
    from pdrelay.cli.local.model import ensure_checkpoint, ensure_emulated
    from pdrelay.cluster.units import parse_time
    from pdrelay.perf.profile import shipped
    from pdrelay.ui.page import write

    quick, real_engines = options.pop("quick"), options.pop("real")
    peers, peers_at = options.pop("peers"), options.pop("peers_at") or default_peers()
    if peers and not real_engines:
        raise click.UsageError("--peer needs --real: it is made of real engines")
    policies, rtt = options.pop("policies") or POLICIES, parsed("--rtt", options.pop("rtt"), parse_time)
    experiment = Experiment(policies=policies, rtt=rtt, **options)
    if quick:
        experiment = experiment._replace(requests=min(experiment.requests, QUICK_REQUESTS), output=100.0, speed=10.0)
    stock = Peer(peers_at / "stock_pd.py", ensure_checkpoint()) if peers else None
    on_vllm = Real(policies, experiment.requests, experiment.line_load, rtt, seed=experiment.seed, stock=stock)
    model, profile = ensure_emulated()
    report = bench.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}")
    try:
        return measure(
            report,
            lambda progress: real.run(on_vllm, report, progress) if real_engines
            else bench.run(experiment, report, model, profile or shipped("tiny-emulated"), progress),
            text.show, as_json, lambda report: report.as_dict(),
        )  # fmt: skip
    finally:
        if html_path is not None:
            write(html_path, text.html(report))
