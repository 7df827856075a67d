"""From the options of `up` to a plan: model, deployment file, certificates, free ports."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from pdrelay.cli.local import model
from pdrelay.cli.local.layout import Demo, Settings, choose_places, deployment_text
from pdrelay.cli.local.plan import Part, Plan, parts_of
from pdrelay.cli.local.rundir import RunDirectory
from pdrelay.cluster import certs, config
from pdrelay.cluster.config import Deployment
from pdrelay.cluster.ports import free_addresses, require_free
from pdrelay.cluster.units import parse_address

Tell = Callable[[str], None]


def prepare(run: RunDirectory, wanted: Settings | Path, tell: Tell) -> Plan:
    """Writes the files of a deployment and plans its parts; `tell` hears of what takes long.

    Raises ConfigError, StartError; leaves no process.
    """
    for log in run.logs.glob("*.log"):
        log.unlink()
    # Unix sockets need a short path, and vLLM makes some in TMPDIR, so they are not below the run directory.
    temporary = Path(tempfile.mkdtemp(prefix="pdrelay-"))
    try:
        if isinstance(wanted, Settings):
            deployment, parts = _demo(run, wanted, temporary, tell)
        else:
            deployment, parts = _given(wanted)
        _certify(deployment)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return Plan(
        run_directory=str(run.path),
        temporary=str(temporary),
        url=f"http://{deployment.gateway.listen}/v1",
        settings=describe(wanted),
        parts=parts,
    )


def _demo(run: RunDirectory, settings: Settings, temporary: Path, tell: Tell) -> tuple[Deployment, list[Part]]:
    require_free("127.0.0.1", settings.port, "choose another with --port")
    places = choose_places(temporary, run.certificates)
    run.config.write_text(deployment_text(settings, _model(settings, tell), places))
    deployment = config.load(run.config)
    return deployment, parts_of(deployment, run.config, places.line_admin, settings.line_rate)


def _given(path: Path) -> tuple[Deployment, list[Part]]:
    deployment = config.load(path)
    host, port = parse_address(deployment.gateway.listen)
    require_free(host, port, f"change gateway.listen in {path}")
    return deployment, parts_of(deployment, path, free_addresses(1)[0], None)


def describe(wanted: Settings | Path) -> dict[str, str]:
    """What identifies a deployment: equal for equal options."""
    return wanted.as_text() if isinstance(wanted, Settings) else {"config": str(wanted)}


def _model(settings: Settings, tell: Tell) -> Demo:
    if settings.emulated:
        path, profile = model.ensure_emulated()
        return Demo(model.EMULATED_NAME, path, profile)
    if not model.has_checkpoint():
        tell("building the model's checkpoint, once, about a minute ...")
    return Demo(model.NAME, model.ensure_checkpoint())


def _certify(deployment: Deployment) -> None:
    """Certificates where there are none; those of a given file stay as they are when they are good."""
    names = [*(h.name for h in deployment.host), *(i.name for i in deployment.instance), config.GATEWAY]
    certs.ensure(Path(deployment.tls.directory), names)
