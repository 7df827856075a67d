"""`pdrelay certs`: the fleet's own authority."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("certs")
@click.option("--dir", "directory", required=True, type=click.Path(path_type=Path, file_okay=False),
              help="Directory for the files; made with mode 0700 when missing.")  # fmt: skip
@click.option("--name", "names", multiple=True, required=True, metavar="PART",
              help="Name of a host or instance, or `gateway`; repeat for each part.")  # fmt: skip
@click.option("--host", "hosts", multiple=True, metavar="HOST",
              help="Further host name or IP address that every certificate is valid for; repeatable. "
                   "The part's name, localhost, 127.0.0.1 and ::1 are always included.")  # fmt: skip
@click.option("--rotate", is_flag=True, help="Issue the named certificates anew under the same authority.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(directory: Path, names: tuple[str, ...], hosts: tuple[str, ...], rotate: bool, as_json: bool) -> None:
    """Make a fleet's certificate authority, certificates and key.

    Writes ca.pem, ca.key, fleet.key and, for each part, PART.pem and PART.key. A further run keeps what is there,
    adds what is missing, and replaces certificates that end within 30 days or lack a host.

    Give each machine ca.pem, fleet.key and the files of its own parts; ca.key stays where certificates are made.
    """
    from pdrelay.cluster import certs

    written = certs.ensure(directory, names, hosts, rotate)
    if as_json:
        click.echo(json.dumps({"directory": str(directory), "created": written.created, "kept": written.kept}))
        return
    for verb, done in (("created", written.created), ("kept", written.kept)):
        if done:
            click.echo(f"{verb}: {', '.join(done)}")
    click.echo(f"certificates are in {directory}")
