"""Runs scenario files: one, or many with changed parameters in parallel processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pdrelay.errors import ConfigError
from pdrelay.sim.build import load_of, scenario_of
from pdrelay.sim.files import read
from pdrelay.sim.simulation import OnProgress, OnRecord, Outcome, Simulation
from pdrelay.workload.choice import Load
from pdrelay.workload.summary import Comparison, compare

OnLoad = Callable[[Load], None]


class Job(NamedTuple):
    """One run of a scenario file."""

    path: Path
    changes: tuple[str, ...] = ()
    skip_bad: bool = False


class Run(NamedTuple):
    """A run that has ended."""

    outcome: Outcome
    load: Load
    comparisons: list[Comparison]  # of the generator with what its paper prints


def run(
    job: Job,
    on_record: OnRecord | None = None,
    on_progress: OnProgress | None = None,
    on_load: OnLoad | None = None,
) -> Run:
    """Runs one job. Raises ConfigError."""
    file = read(job.path, list(job.changes))
    base = job.path.resolve().parent
    load = load_of(file, base, skip_bad=job.skip_bad)
    if on_load is not None:
        on_load(load)
    simulation = Simulation(scenario_of(file, base), on_record)
    outcome = simulation.run(load.requests, load.number, on_progress)
    comparisons = compare(load.workload, file.seed, min(load.number, 20_000)) if load.workload else []
    return Run(outcome, load, comparisons)


class Sweep(NamedTuple):
    """A parameter and its values, as text."""

    key: str
    values: tuple[str, ...]


def parse_sweep(text: str) -> Sweep:
    """`KEY=V1,V2,...`. Raises ConfigError."""
    key, equals, values = text.partition("=")
    found = tuple(value.strip() for value in values.split(",") if value.strip())
    if not key or not equals or not found:
        raise ConfigError(f"--sweep: found {text!r}, expected KEY=VALUE,VALUE,... such as line.0.rate=10gbit,20gbit")
    return Sweep(key.strip(), found)


def combinations(job: Job, sweeps: Sequence[Sweep]) -> list[tuple[dict[str, str], Job]]:
    """Every combination of the swept values, with its job."""
    points = [dict(zip([s.key for s in sweeps], values, strict=True)) for values in
              itertools.product(*(sweep.values for sweep in sweeps))]  # fmt: skip
    return [
        (point, job._replace(changes=(*job.changes, *(f"{key}={value}" for key, value in point.items()))))
        for point in points
    ]


def run_all(jobs: Sequence[Job], processes: int) -> Iterator[dict[str, Any]]:
    """The figures of each job, in the order of the jobs."""
    if processes <= 1:
        yield from map(_figures, jobs)
        return
    with ProcessPoolExecutor(max_workers=min(processes, len(jobs))) as pool:
        yield from pool.map(_figures, jobs)


def _figures(job: Job) -> dict[str, Any]:
    return run(job).outcome.as_dict()
