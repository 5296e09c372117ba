"""`headrace vhost`: list, add and remove virtual hosts."""

from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.manage import ask, manage, yes_option
from headrace.cli.options import json_answer, json_option, url_option

COLUMNS = ("name", "messages_ready", "messages_unacknowledged")


@click.group(cls=AliasGroup)
def vhost() -> None:
    """List, add and remove virtual hosts."""


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
    """Add virtual host NAME; it is fine if it is there. `headrace user grant` lets users in."""
    with manage(url, config_file) as client:
        client.call("PUT", "vhosts", name, body={})
    return {"added": [name]}


@vhost.command("rm")
@click.argument("name")
@yes_option
@url_option
@json_answer
def rm(name: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove virtual host NAME with its queues, exchanges and permissions, and every message in it."""
    ask(f"Remove virtual host {name} with every queue and message in it?", yes)
    with manage(url, config_file) as client:
        client.call("DELETE", "vhosts", name)
    return {"removed": [name]}
