"""`headrace queue`: list, add, describe, purge and remove queues, and show their messages."""

import sys
from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, pairs, purge_queue, vhost_option, yes_option
from headrace.cli.options import json_answer, json_option, url_option
from headrace.errors import InvalidInput

COLUMNS = ("name", "type", "messages_ready", "messages_unacknowledged", "consumers", "message_bytes", "policy")


@click.group(cls=AliasGroup)
def queue() -> None:
    """List, add, describe, purge and remove queues, and show their messages."""


@queue.command("ls")
@click.argument("pattern", required=False)
@click.option("--sort", default="name", show_default=True, help="Column to sort by; -COLUMN sorts in descending order.")
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Maximum number of queues.")
@vhost_option
@json_option
@url_option
def ls(
    pattern: str | None,
    sort: str,
    limit: int | None,
    vhost: str,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """List queues whose name contains PATTERN.

    Columns: name, type, messages_ready, messages_unacknowledged, consumers, message_bytes, policy.
    """
    from itertools import islice

    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        order = {"sort": sort.lstrip("-"), "sort_reverse": "true" if sort.startswith("-") else "false"}
        found = list(islice(client.pages("queues", vhost, name=pattern, **order), limit and min(limit, sys.maxsize)))
    if found and order["sort"].partition(".")[0] not in found[0]:
        raise InvalidInput(f"queues have no column {order['sort']!r}; sort by {', '.join(COLUMNS)}, or another field")
    if as_json:
        show_json({"queues": found})
    else:
        show_rows(found, COLUMNS, empty="no queues; create one with `headrace queue add NAME`")


@click.command("list_queues")
@click.argument("columns", nargs=-1)
@vhost_option
@json_option
@url_option
def list_queues(columns: tuple[str, ...], vhost: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List queues as rabbitmqctl does. COLUMNS default to name and messages."""
    from headrace.cli.output import show_json, show_rows

    wanted = columns or ("name", "messages")
    with manage(url, config_file) as client:
        found = list(client.pages("queues", vhost))
    for column in wanted:
        if found and column not in found[0]:
            raise InvalidInput(f"queues have no column {column!r}; use {', '.join(COLUMNS)}, or another field")
    rows = [{column: one[column] for column in wanted} for one in found]
    show_json({"queues": rows}) if as_json else show_rows(rows, wanted)


@queue.command("info")
@click.argument("name")
@vhost_option
@json_option
@url_option
def info(name: str, vhost: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Describe queue NAME: its messages, rates, consumers, arguments, policy and bindings."""
    from headrace.cli.output import show_facts, show_json

    with manage(url, config_file) as client:
        found = client.call("GET", "queues", vhost, name)
        bindings = client.call("GET", "queues", vhost, name, "bindings")
    if as_json:
        show_json({**found, "bindings": bindings})
        return
    stats = found["message_stats"]
    show_facts(
        {
            "name": found["name"],
            "type": found["type"],
            "durable": found["durable"],
            "ready": found["messages_ready"],
            "unacked": found["messages_unacknowledged"],
            "consumers": found["consumers"],
            "bytes": found["message_bytes"],
            "published_per_second": stats["publish_details"]["rate"],
            "acked_per_second": stats["ack_details"]["rate"],
            "dead_lettered": found["headrace"]["dead_lettered"],
            "policy": found["policy"],
            **{f"argument_{key}": str(value) for key, value in found["arguments"].items()},
            **{f"policy_{key}": str(value) for key, value in found["effective_policy_definition"].items()},
            "bound_to": ", ".join(f"{b['source']} {b['routing_key']}" for b in bindings if b["source"]),
        }
    )


@queue.command("add")
@click.argument("name")
@click.option(
    "--type", "kind", type=click.Choice(["classic", "quorum", "stream"]), help="Queue type.  [default: classic]"
)
@click.option("--transient", is_flag=True, help="Keep the queue in memory only; it does not survive a restart.")
@click.option("--auto-delete", is_flag=True, help="Delete the queue when its last consumer is gone.")
@click.option("-a", "--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="Queue argument. Repeatable.")
@vhost_option
@url_option
@json_answer
def add(
    name: str,
    kind: str | None,
    transient: bool,
    auto_delete: bool,
    arguments: tuple[str, ...],
    vhost: str,
    url: str | None,
    config_file: Path | None,
) -> dict[str, object]:
    """Declare queue NAME. Has no effect if it exists with the same arguments.

    \b
    headrace queue add orders -a x-max-length=10000 -a x-dead-letter-exchange=dead
    """
    given = pairs(arguments) | ({"x-queue-type": kind} if kind else {})
    body = {"durable": not transient, "auto_delete": auto_delete, "arguments": given}
    with manage(url, config_file) as client:
        client.call("PUT", "queues", vhost, name, body=body)
    return {"added": [name]}


@queue.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--if-empty", is_flag=True, help="Only if it has no messages.")
@click.option("--if-unused", is_flag=True, help="Only if it has no consumers.")
@vhost_option
@yes_option
@url_option
@json_answer
def rm(
    names: tuple[str, ...],
    if_empty: bool,
    if_unused: bool,
    vhost: str,
    yes: bool,
    url: str | None,
    config_file: Path | None,
) -> dict[str, object]:
    """Remove queues and all their messages."""
    ask(f"Remove queue {', '.join(names)} and all its messages?", yes)
    query = {"if-empty": "true" if if_empty else None, "if-unused": "true" if if_unused else None}
    with manage(url, config_file) as client:
        for name in names:
            client.call("DELETE", "queues", vhost, name, query=query)
    return {"removed": list(names)}


@queue.command("purge")
@click.argument("name")
@vhost_option
@yes_option
@url_option
@json_answer
def purge(name: str, vhost: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove all ready messages of queue NAME. Unacknowledged messages stay with their consumers."""
    with manage(url, config_file) as client:
        return purge_queue(client, vhost, name, "messages", yes)


@queue.command("peek")
@click.argument("name")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 500), default=10, show_default=True, help="Maximum number of messages."
)
@click.option("-o", "--offset", type=click.IntRange(0), help="Start at this offset.  [default: the newest messages]")
@click.option("-p", "--partition", type=click.IntRange(0), default=0, show_default=True, help="Partition.")
@click.option("--contains", metavar="TEXT", help="Only messages with TEXT in the key, the value or a header.")
@click.option("-V", "--vhost", default="/", show_default=True, help="Virtual host.")
@json_option
@url_option
def peek(
    name: str,
    limit: int,
    offset: int | None,
    partition: int,
    contains: str | None,
    vhost: str,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Show messages of queue or topic NAME without consuming them or marking them as delivered.

    Columns: offset, time, state, key, value.
    """
    from headrace.cli.output import show_json, show_rows

    query = {"limit": limit, "offset": offset, "partition": partition, "contains": contains}
    with manage(url, config_file) as client:
        answer = client.call("GET", "headrace", "streams", vhost, name, "messages", query=query)
        # The broker scans a limited number of messages per request. Stop at the end seen first, so that a busy queue
        # does not keep this loop running for ever.
        while len(answer["messages"]) < limit and answer["next"] < answer["end"]:
            rest = {**query, "limit": limit - len(answer["messages"]), "offset": answer["next"]}
            more = client.call("GET", "headrace", "streams", vhost, name, "messages", query=rest)
            if more["next"] <= answer["next"]:
                break
            answer["messages"] += more["messages"]
            answer["scanned"] += more["scanned"]
            answer["next"] = more["next"]
    if as_json:
        show_json(answer)
        return
    show_rows([message_row(message) for message in answer["messages"]], ("offset", "time", "state", "key", "value"))


def message_row(message: dict[str, object]) -> dict[str, str | int | None]:
    from datetime import datetime

    def text(part: object) -> str:
        if not isinstance(part, dict):
            return ""
        return str(part["text"]) if "text" in part else f"base64:{part['base64']}"

    stamp = message["timestamp"]
    assert isinstance(stamp, int)
    when = datetime.fromtimestamp(stamp / 1000).isoformat(" ", "milliseconds") if stamp >= 0 else ""
    return {
        "offset": str(message["offset"]),
        "time": when,
        "state": str(message.get("state") or ""),
        "key": text(message["key"]),
        "value": text(message["value"])[:200],
    }
