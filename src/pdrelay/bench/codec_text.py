"""A codec report as text."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pdrelay.bench.codec import Effect, Report, Speed
from pdrelay.bench.failures import failed


def show(report: Report, console: Console) -> None:
    """Prints all that was measured, and what failed."""
    machine = report.machine
    console.print(
        f"{report.command}: {machine.date}, {machine.cores} cores of {machine.processor}, Linux {machine.kernel}, "
        f"Python {machine.python}, load before {machine.load_before}"
    )
    if report.rows:
        console.print(
            f"\n{report.model} in {report.dtype}: {report.prompts} prompts of {report.prompt_tokens} tokens in all, "
            f"{report.kv_bytes / 1e6:.0f} MB of KV, {report.tokens} greedy tokens each"
        )
        _rows(report, console)
    for line in failed(report.failures):
        console.print(line, markup=False)


def _rows(report: Report, console: Console) -> None:
    cost = Table("codec", "ratio", "encode MB/s", "decode MB/s", "full gain to", "pays up to", box=None, pad_edge=False)
    effect = Table(
        "codec", "greedy agree", "unchanged", "first other", "logprob error", "worst", box=None, pad_edge=False
    )
    for row in report.rows:
        if row.speed is not None:
            cost.add_row(row.name, *_cost(row.speed))
        effect.add_row(row.name, *_effect(row.effect, report.prompts))
    console.print("\nPayload MB of 10^6 bytes a second of one core; line rates for one core at each end")
    console.print(cost)
    console.print("\nDecoding from what arrives, against decoding from what was sent")
    console.print(effect)


def _cost(speed: Speed) -> list[str]:
    rates = [f"{rate / 1e6:.0f}" for rate in (speed.encode_rate, speed.decode_rate)]
    lines = [f"{rate * 8 / 1e9:.1f} Gbit/s" for rate in (speed.full_gain, speed.break_even)]
    return [f"{speed.ratio:.3f}", *rates, *lines]


def _effect(effect: Effect, prompts: int) -> list[str]:
    first = "" if effect.first_divergence is None else f"token {effect.first_divergence:g}"
    return [
        f"{effect.agreement:.2%}", f"{effect.unchanged} of {prompts}", first,
        f"{effect.logprob_error:.4f}", f"{effect.worst_logprob_error:.3f}",
    ]  # fmt: skip
