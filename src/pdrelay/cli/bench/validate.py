"""`pdrelay bench validate`: the simulator beside the deployment that it simulates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pdrelay.bench.validate import Settings

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("validate")
@click.option("--emulated", is_flag=True, help="Start emulated engines instead of vLLM.")
@click.option("--config", metavar="FILE", type=_FILE,
              help="Use this deployment, which runs, instead of starting one.")  # fmt: skip
@click.option("--base-url", default="http://127.0.0.1:8000", show_default=True, metavar="URL",
              help="With --config: its gateway.")  # fmt: skip
@click.option("--wan-rate", metavar="RATE", default="20mbit", show_default=True, help="Rate of the line.")
@click.option("--wan-rtt", metavar="TIME", default="30ms", show_default=True, help="Its round-trip time.")
@click.option("--trace", metavar="FILE", type=_FILE,
              help="Validate on this trace. Default: requests with skewed hit rates.")  # fmt: skip
@click.option("--length-factor", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              metavar="X", help="Scale the trace's prompts.")  # fmt: skip
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, metavar="X",
              help="Arrivals and think times pass so many times faster.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=4), default=24, show_default=True, metavar="N",
              help="Of the calibration and of the validation, later turns of their sessions not counted.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of both workloads.")
@click.option("--html", "html_path", metavar="FILE", type=_FILE, help="Write a report.")
@click.option("--quick", is_flag=True, help="Few requests and repetitions: shows that everything runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.pass_context
def command(context: click.Context, /, html_path: Path | None, as_json: bool, **options: Any) -> int:
    """Play the same requests on a deployment and in the simulator, and compare them one by one.

    The engines and the line are measured first. What no single engine tells is calibrated on a first workload: how
    many cores the engines share, and the gateway's own time. The second workload is played twice and simulated.

    Exit code 1 when a median error is above 10 % and above 1.5 times the difference of the two real runs.
    """
    from pdrelay.bench import validate, validate_report
    from pdrelay.cli.bench.running import given, measure
    from pdrelay.ui.page import write

    settings = _settings(options)
    report = validate.new_report(f"pdrelay bench {' '.join([context.info_name or '', *given(context)])}", settings)
    try:
        return measure(report, lambda progress: validate.run(settings, report, progress), validate_report.show, as_json)
    finally:
        if html_path is not None:
            write(html_path, validate_report.html(report))


def _settings(options: dict[str, Any]) -> Settings:
    from pdrelay.bench.validate import Settings, sized
    from pdrelay.workload.choice import WorkloadTable

    calibration, validation = sized(emulated=options["emulated"])
    if options["trace"] is not None:
        validation = WorkloadTable(trace=str(options["trace"].resolve()))
    quick = options["quick"]
    return Settings(
        emulated=options["emulated"],
        config=options["config"],
        url=options["base_url"].rstrip("/").removesuffix("/v1"),
        rate=options["wan_rate"],
        rtt=options["wan_rtt"],
        calibration=calibration,
        validation=validation,
        requests=min(options["requests"], 8) if quick else options["requests"],
        seed=options["seed"],
        length=options["length_factor"],
        speed=options["speed"],
        longest=1024 if quick else 2048,
        repetitions=2 if quick else 3,
    )
