"""`headrace exchange`: list, add and remove exchanges, and publish to one."""

from pathlib import Path

import click

from headrace.broker.routing.exchanges import KIND_NAMES
from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, json_object, manage, pairs, vhost_option, yes_option
from headrace.cli.options import json_answer, json_option, url_option

NOT_ROUTED = 1
DEFAULT = "amq.default"  # name of the default exchange in paths; its real name is empty


@click.group(cls=AliasGroup)
def exchange() -> None:
    """List, add and remove exchanges, and publish to one."""


@exchange.command("ls")
@click.argument("pattern", required=False)
@vhost_option
@json_option
@url_option
def ls(pattern: str | None, vhost: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List exchanges whose name contains PATTERN.

    Columns: name, type, durable, auto_delete, internal, policy.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = list(client.pages("exchanges", vhost, name=pattern))
    if as_json:
        show_json({"exchanges": found})
    else:
        show_rows(found, ("name", "type", "durable", "auto_delete", "internal", "policy"))


@exchange.command("add")
@click.argument("name")
@click.option("-t", "--type", "kind", type=click.Choice(KIND_NAMES), default="topic", show_default=True, help="Type.")
@click.option("--transient", is_flag=True, help="Do not keep the exchange across restarts.")
@click.option("-a", "--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="Argument. Repeatable.")
@vhost_option
@url_option
@json_answer
def add(
    name: str,
    kind: str,
    transient: bool,
    arguments: tuple[str, ...],
    vhost: str,
    url: str | None,
    config_file: Path | None,
) -> dict[str, object]:
    """Declare exchange NAME. Has no effect if it exists with the same type and arguments."""
    body = {"type": kind, "durable": not transient, "arguments": pairs(arguments)}
    with manage(url, config_file) as client:
        client.call("PUT", "exchanges", vhost, name, body=body)
    return {"added": [name]}


@exchange.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@vhost_option
@yes_option
@url_option
@json_answer
def rm(names: tuple[str, ...], vhost: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove exchanges and their bindings."""
    ask(f"Remove exchange {', '.join(names)} and all its bindings?", yes)
    with manage(url, config_file) as client:
        for name in names:
            client.call("DELETE", "exchanges", vhost, name)
    return {"removed": list(names)}


@exchange.command("pub")
@click.argument("name")
@click.argument("routing_key")
@click.argument("message")
@click.option("--properties", default="{}", metavar="JSON", help='AMQP properties, such as {"priority": 5}.')
@vhost_option
@json_option
@url_option
def pub(
    name: str,
    routing_key: str,
    message: str,
    properties: str,
    vhost: str,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> int:
    """Publish MESSAGE with ROUTING_KEY to exchange NAME. amq.default routes to the queue named ROUTING_KEY.

    Exits with 1 if the message was not routed to any queue.
    """
    given = {"delivery_mode": 2, **json_object(properties, "--properties")}
    body = {"routing_key": routing_key, "payload": message, "payload_encoding": "string", "properties": given}
    with manage(url, config_file) as client:
        routed = client.call("POST", "exchanges", vhost, name or DEFAULT, "publish", body=body)["routed"]
    if as_json:
        from headrace.cli.output import show_json

        show_json({"routed": routed})
    elif not routed:
        click.echo("headrace: the message was not routed to any queue", err=True)
    return 0 if routed else NOT_ROUTED
