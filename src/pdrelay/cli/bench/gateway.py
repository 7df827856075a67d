"""`pdrelay bench gateway`: what relaying token streams costs."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("gateway")
@click.option("--rounds", type=click.IntRange(1, 100), default=9, show_default=True,
              help="Launches of each gateway, in turn.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0.2, 60), default=3.0, show_default=True,
              help="Length of each of four measurements.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(16, 2000), default=512, show_default=True,
              help="Output tokens of a stream in lockstep: what a request costs is spread over them.")  # fmt: skip
@click.option("--peer", "peers", multiple=True, type=click.Choice(["vllm_router", "smg", "sglang_router", "none"]),
              help="Measure this gateway beside ours; repeatable. Default: all that are installed.")  # fmt: skip
@click.option("--peers", "peers_at", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Directory of the peers' scripts. Default: benchmarks/peers here or in the checkout.")  # fmt: skip
@click.option("--quick", is_flag=True, help="One short round: shows that everything runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(
    context: click.Context, rounds: int, seconds: float, tokens: int, peers: tuple[str, ...], peers_at: Path | None,
    quick: bool, as_json: bool,
) -> int:  # fmt: skip
    """Relay token streams through our gateway and through others, on one core, from identical engines.

    Each gateway is launched anew in every round and measured alone: 64 and 256 streams in lockstep (tokens/s, CPU per
    token), 32 streams that start at random (time to first token), 256 streams of 50 tokens/s (share of a core, delay of
    a token).
    """
    from pdrelay.bench.relay import run as bench
    from pdrelay.bench.relay import text
    from pdrelay.cli.bench.running import default_peers, given, measure
    from pdrelay.cli.local.model import ensure_emulated
    from pdrelay.perf.profile import shipped

    model, profile = ensure_emulated()
    chosen = tuple(name for name in peers if name != "none") if peers else bench.PEERS
    settings = bench.Settings(
        model, profile or shipped("tiny-emulated"), peers_at or default_peers(), chosen, rounds, seconds,
        tokens=tokens,
    )  # fmt: skip
    if quick:
        settings = settings._replace(rounds=1, seconds=min(seconds, 0.5), warm_up=0.3)
    report = bench.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}")
    return measure(report, lambda progress: bench.run(settings, report, progress), text.show, as_json)
