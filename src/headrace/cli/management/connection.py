"""`headrace connection`: client connections."""

from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, yes_option
from headrace.cli.options import json_answer, json_option, url_option


@click.group(cls=AliasGroup)
def connection() -> None:
    """List and close client connections."""


@connection.command("ls")
@click.argument("pattern", required=False)
@json_option
@url_option
def ls(pattern: str | None, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List connections whose name contains PATTERN.

    Columns: name, protocol, user, vhost, state, channels.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = list(client.pages("connections", name=pattern))
    if as_json:
        show_json({"connections": found})
    else:
        show_rows(found, ("name", "protocol", "user", "vhost", "state", "channels"), empty="no connections")


@connection.command("rm")
@click.argument("name")
@click.option("--reason", default="closed by an operator", show_default=True, help="Reason for the client and the log.")
@yes_option
@url_option
@json_answer
def rm(name: str, reason: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Close connection NAME. Its unacknowledged messages return to their queues."""
    ask(f"Close connection {name} ({reason})?", yes)
    with manage(url, config_file) as client:
        client.call("DELETE", "connections", name)
    return {"removed": [name]}
