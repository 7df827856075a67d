"""`pdrelay certs`: the fleet's own authority."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("certs")
@click.option("--dir", "directory", required=True, type=click.Path(path_type=Path, file_okay=False),
              help="Directory for the files; made with mode 0700 when missing.")  # fmt: skip
@click.option("--name", "names", multiple=True, metavar="PART",
              help="Name of a host or instance, or `gateway`; repeat for each part.")  # fmt: skip
@click.option("--host", "hosts", multiple=True, metavar="HOST",
              help="Further host name or IP address that every certificate is valid for; repeatable. "
                   "The part's name, localhost, 127.0.0.1 and ::1 are always included.")  # fmt: skip
@click.option("--rotate", is_flag=True, help="Issue the named certificates anew under the same authority.")
@click.option("--new-authority", is_flag=True, help="Add a new authority, which issues from now on; both are trusted.")
@click.option("--retire-authority", is_flag=True, help="Trust the issuing authority only.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    directory: Path,
    names: tuple[str, ...],
    hosts: tuple[str, ...],
    rotate: bool,
    new_authority: bool,
    retire_authority: bool,
    as_json: bool,
) -> None:
    """Make a fleet's certificate authority, certificates and key, and show when they end.

    Writes ca.pem, ca.key, fleet.key and, for each part, PART.pem and PART.key. A further run keeps what is there,
    adds what is missing, and replaces certificates that end within 30 days or lack a host.

    Give each machine ca.pem, fleet.key and the files of its own parts; ca.key stays where certificates are made. Parts
    that run take new files for new connections without a restart. To change the authority: --new-authority, give all
    machines ca.pem; --rotate with all names, give all their files; --retire-authority, give all machines ca.pem.
    """
    from pdrelay.cluster import certs
    from pdrelay.errors import ConfigError

    if rotate and not names:
        raise ConfigError("--name: found none, expected the parts whose certificates --rotate shall issue anew")
    if new_authority:
        certs.renew_authority(directory)
    written = certs.ensure(directory, names, hosts, rotate) if names else certs.Written([], [])
    retired = certs.retire_authorities(directory) if retire_authority else []
    ends = certs.expiries(directory)
    if as_json:
        shown = [
            {"name": e.name, "ends": e.ends.isoformat(), "seconds": e.seconds(), "issuer": e.authority} for e in ends
        ]
        result = {"directory": str(directory), "created": written.created, "kept": written.kept, "retired": retired}
        click.echo(json.dumps(result | {"certificates": shown}))
        return
    for verb, done in (("created", written.created), ("kept", written.kept), ("retired", retired)):
        if done:
            click.echo(f"{verb}: {', '.join(done)}")
    for end in ends:
        click.echo(
            f"{end.name}: ends {end.ends:%Y-%m-%d}, in {end.seconds() / 86400:.0f} days, issued by {end.authority}"
        )
    click.echo(f"certificates are in {directory}")
