"""`pdrelay simulate`: run a workload through a deployment that need not exist."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pdrelay.sim.running import Job

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("simulate")
@click.argument("scenario", metavar="SCENARIO")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE",
              help="Change the scenario, such as policy.hit_threshold=0.9 or instance.p.count=4.")  # fmt: skip
@click.option("--trace", metavar="FILE", type=_FILE, help="Take requests from this trace.")
@click.option("--requests", type=int, metavar="N", help="Stop after so many requests (0: all of a trace).")
@click.option("--seed", type=int, metavar="N", help="Seed of the workload and of the lines.")
@click.option("--skip-bad", is_flag=True, help="Leave out rows of the trace that cannot be read, and count them.")
@click.option("--sweep", "sweeps", multiple=True, metavar="KEY=V1,V2,...",
              help="Run once for each value; several sweeps make all combinations.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", default=None,
              help="Processes of a sweep. Default: the machine's cores.")  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: the keys of `vllm bench serve`, and ours."
)
@click.option("--records", metavar="FILE", type=_FILE, help="Write what happened to each request, one JSON a line.")
@click.option("--html", metavar="FILE", type=_FILE, help="Write a report.")
@click.option("--perfetto", metavar="FILE", type=_FILE, help="Write a trace for https://ui.perfetto.dev.")
def command(
    scenario: str,
    changes: tuple[str, ...],
    trace: Path | None,
    requests: int | None,
    seed: int | None,
    skip_bad: bool,
    sweeps: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
    records: Path | None,
    html: Path | None,
    perfetto: Path | None,
) -> None:
    """Run a workload through a simulated deployment.

    SCENARIO is a .toml file (see docs/simulator.md) or the name of a shipped one, such as trio or prfaas.
    The same policies run as in the gateway.
    """
    from pdrelay.cli import simulating
    from pdrelay.sim.files import find
    from pdrelay.sim.running import Job

    found: list[str] = list(changes)
    found += [f"{key}={value}" for key, value in (("requests", requests), ("seed", seed)) if value is not None]
    if trace is not None:
        found.append(f"workload.trace='{trace.resolve()}'")
        found += ["requests=0"] if requests is None else []
    job: Job = Job(find(scenario), tuple(found), skip_bad)
    if sweeps:
        files: dict[str, Any] = {"--records": records, "--html": html, "--perfetto": perfetto}
        if given := [name for name, path in files.items() if path is not None]:
            raise click.UsageError(f"{given[0]} is of one run; leave it out with --sweep")
        simulating.sweep(job, list(sweeps), jobs or os.cpu_count() or 1, as_json=as_json)
    else:
        simulating.once(job, simulating.Files(records, html, perfetto), as_json=as_json)
