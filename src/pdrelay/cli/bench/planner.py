"""`pdrelay bench planner`: how long planning takes."""

from __future__ import annotations

import json

import click


@click.command("planner")
@click.option("--quick", is_flag=True, help="Time everything once.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def command(quick: bool, as_json: bool) -> None:
    """Time the grid of PrfaaS's Table 6 beside the same search as nested loops, and a plan over 1,000 instances."""
    from pdrelay.bench.planner import GRID_LIMIT, PLAN_LIMIT, measure

    found = measure(quick=quick)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    click.echo(
        f"grid of Table 6: {found.points:,} points in {found.grid * 1e3:.1f} ms (limit {GRID_LIMIT * 1e3:.0f} ms); as "
        f"nested loops over the same equations {found.looped:.2f} s, {found.looped / found.grid:,.0f} times as long"
    )
    click.echo(
        f"plan over 3 clusters, 4 chips, {found.instances:,} instances: {found.plan:.1f} s (limit {PLAN_LIMIT:.0f} s), "
        f"{found.method}"
    )
