"""`headrace vhost`: list, add, limit and remove virtual hosts."""

from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, yes_option
from headrace.cli.options import json_answer, json_option, url_option

COLUMNS = ("name", "messages_ready", "messages_unacknowledged")


@click.group(cls=AliasGroup)
def vhost() -> None:
    """List, add, limit and remove virtual hosts."""


@vhost.command("ls")
@json_option
@url_option
def ls(as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List virtual hosts.

    Columns: name, messages_ready, messages_unacknowledged.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = client.call("GET", "vhosts")
    if as_json:
        show_json({"vhosts": found})
    else:
        show_rows(found, COLUMNS, empty="no virtual hosts")


@vhost.command("add")
@click.argument("name")
@url_option
@json_answer
def add(name: str, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Add virtual host NAME. Has no effect if it exists. Give users access with `headrace user grant`."""
    with manage(url, config_file) as client:
        client.call("PUT", "vhosts", name, body={})
    return {"added": [name]}


@vhost.command("limit")
@click.argument("name")
@click.option(
    "--max-connections", type=int, metavar="N", help="Maximum number of AMQP connections; -1 removes the limit."
)
@click.option("--max-queues", type=int, metavar="N", help="Maximum number of queues; -1 removes the limit.")
@json_option
@url_option
def limit(
    name: str,
    max_connections: int | None,
    max_queues: int | None,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Show or set the limits of virtual host NAME.

    Columns: limit, value.

    \b
    headrace vhost limit team --max-connections 100 --max-queues 500
    headrace vhost limit team --max-queues -1
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        for one, value in (("max-connections", max_connections), ("max-queues", max_queues)):
            if value is not None and value < 0:
                client.call("DELETE", "vhost-limits", name, one)
            elif value is not None:
                client.call("PUT", "vhost-limits", name, one, body={"value": value})
        found = client.call("GET", "vhost-limits", name)
    limits = found[0]["value"] if found else {}
    if as_json:
        show_json({"name": name, "limits": limits})
    else:
        show_rows([{"limit": one, "value": limits[one]} for one in limits], ("limit", "value"), empty="no limits")


@vhost.command("rm")
@click.argument("name")
@yes_option
@url_option
@json_answer
def rm(name: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove virtual host NAME with all its queues, messages, exchanges and permissions."""
    ask(f"Remove virtual host {name} with all its queues and messages?", yes)
    with manage(url, config_file) as client:
        client.call("DELETE", "vhosts", name)
    return {"removed": [name]}
