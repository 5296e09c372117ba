"""`headrace binding`: bindings between exchanges and queues."""

from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import manage, pairs, vhost_option
from headrace.cli.options import json_answer, json_option, url_option
from headrace.errors import NotFound


@click.group(cls=AliasGroup)
def binding() -> None:
    """List, add and remove bindings."""


@binding.command("ls")
@vhost_option
@json_option
@url_option
def ls(vhost: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List bindings, except those of the default exchange.

    Columns: source, destination_type, destination, routing_key, arguments.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = [b for b in client.pages("bindings", vhost) if b["source"]]
    if as_json:
        show_json({"bindings": found})
        return
    rows = [{**b, "arguments": str(b["arguments"] or "")} for b in found]
    show_rows(rows, ("source", "destination_type", "destination", "routing_key", "arguments"), empty="no bindings")


def _to_exchange(command: click.decorators.FC) -> click.decorators.FC:
    return click.option("--to-exchange", is_flag=True, help="DESTINATION is an exchange, not a queue.")(command)


@binding.command("add")
@click.argument("source")
@click.argument("destination")
@click.argument("routing_key", default="")
@click.option(
    "-a", "--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="Binding argument. Repeatable."
)
@_to_exchange
@vhost_option
@url_option
@json_answer
def add(
    source: str,
    destination: str,
    routing_key: str,
    arguments: tuple[str, ...],
    to_exchange: bool,
    vhost: str,
    url: str | None,
    config_file: Path | None,
) -> dict[str, object]:
    """Bind queue DESTINATION to exchange SOURCE with ROUTING_KEY."""
    body = {"routing_key": routing_key, "arguments": pairs(arguments)}
    kind = "e" if to_exchange else "q"
    with manage(url, config_file) as client:
        client.call("POST", "bindings", vhost, "e", source, kind, destination, body=body)
    return {"added": [{"source": source, "destination": destination, "routing_key": routing_key}]}


@binding.command("rm")
@click.argument("source")
@click.argument("destination")
@click.argument("routing_key", default="")
@_to_exchange
@vhost_option
@url_option
@json_answer
def rm(
    source: str,
    destination: str,
    routing_key: str,
    to_exchange: bool,
    vhost: str,
    url: str | None,
    config_file: Path | None,
) -> dict[str, object]:
    """Remove the bindings of DESTINATION to exchange SOURCE with ROUTING_KEY."""
    path = ("bindings", vhost, "e", source, "e" if to_exchange else "q", destination)
    with manage(url, config_file) as client:
        found = [b for b in client.call("GET", *path) if b["routing_key"] == routing_key]
        if not found:
            raise NotFound(f"{destination!r} is not bound to exchange {source!r} with routing key {routing_key!r}")
        for one in found:
            client.call("DELETE", *path, one["properties_key"])
    return {"removed": [{"source": source, "destination": destination, "routing_key": routing_key}]}
