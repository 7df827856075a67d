"""`pdrelay bench all`: the short form of everything."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("all")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("benchmarks/results"),
              show_default=True, metavar="DIR", help="Where results go: JSON and index.html.")  # fmt: skip
@click.option("--only", "chosen", multiple=True, metavar="NAME", help="This one alone; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print how each ended as one JSON object.")
@click.pass_context
def command(context: click.Context, out: Path, chosen: tuple[str, ...], as_json: bool) -> int:
    """Run the short form of every benchmark, in under half an hour, and write what they showed.

    Those on real engines run where vLLM is installed. Exit code 1 when one failed; the others' results are kept.
    """
    from rich.console import Console

    from pdrelay.bench import everything
    from pdrelay.cli.bench.running import given, measure
    from pdrelay.errors import ConfigError

    names = [entry.name for entry in everything.ENTRIES]
    if unknown := set(chosen) - set(names):
        raise ConfigError(f"--only: found {min(unknown)!r}, expected one of {', '.join(names)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror}") from error
    report = everything.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}")

    def show(report: everything.Report, console: Console) -> None:
        for name, ran in report.results.items():
            console.print(f"{name}: {ran.seconds:.0f} s, {ran.failure or 'complete'}", markup=False, highlight=False)
        for name in report.failures.keys() - report.results.keys():
            console.print(f"{name}: {report.failures[name]}", markup=False, highlight=False)
        console.print(f"results: {out / 'index.html'}")

    def work(progress: everything.Progress) -> everything.Work:
        return everything.run(out, chosen, report, progress)

    return measure(report, work, show, as_json, lambda report: report.summary())
