"""`headrace queue`: list, add, look at, empty and remove queues, and look into them."""

import sys
from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, pairs, vhost_option, yes_option
from headrace.cli.options import json_answer, json_option, url_option
from headrace.errors import InvalidInput

COLUMNS = ("name", "type", "messages_ready", "messages_unacknowledged", "consumers", "message_bytes", "policy")


@click.group(cls=AliasGroup)
def queue() -> None:
    """List, add, describe, look into, purge and remove queues."""


@queue.command("ls")
@click.argument("pattern", required=False)
@click.option("--sort", default="name", show_default=True, help="Column to sort by; -COLUMN for the largest first.")
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Show so many at most.")
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
        raise InvalidInput(f"queues have no {order['sort']!r} to sort by; they have {', '.join(COLUMNS)} and more")
    if as_json:
        show_json({"queues": found})
    else:
        show_rows(found, COLUMNS, empty="no queues: `headrace queue add NAME` makes one")


@click.command("list_queues")
@click.argument("columns", nargs=-1)
@vhost_option
@json_option
@url_option
def list_queues(columns: tuple[str, ...], vhost: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List queues as rabbitmqctl does: these COLUMNS, or name and messages."""
    from headrace.cli.output import show_json, show_rows

    wanted = columns or ("name", "messages")
    with manage(url, config_file) as client:
        found = list(client.pages("queues", vhost))
    for column in wanted:
        if found and column not in found[0]:
            raise InvalidInput(f"queues have no {column!r}; they have {', '.join(COLUMNS)} and more")
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
@click.option("--type", "kind", type=click.Choice(["classic", "quorum", "stream"]), help="classic unless said.")
@click.option("--transient", is_flag=True, help="In memory only: gone on restart.")
@click.option("--auto-delete", is_flag=True, help="Removed with its last consumer.")
@click.option("-a", "--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="An argument; repeat it.")
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
    """Declare queue NAME; it is fine if it is there and the same.

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
@click.option("--if-empty", is_flag=True, help="Only when no message is in it.")
@click.option("--if-unused", is_flag=True, help="Only when nobody consumes from it.")
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
    """Remove queues and every message in them."""
    ask(f"Remove {', '.join(names)} and every message in it?", yes)
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
    """Remove every message of queue NAME that is ready; what consumers have stays."""
    with manage(url, config_file) as client:
        ready = client.call("GET", "queues", vhost, name)["messages_ready"]
        ask(f"Remove {ready:,} messages of {name}?", yes)
        client.call("DELETE", "queues", vhost, name, "contents")
    return {"purged": [name], "messages": ready}


@queue.command("peek")
@click.argument("name")
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=10, show_default=True, help="So many messages.")
@click.option("-o", "--offset", type=click.IntRange(0), help="From this offset on; otherwise the newest.")
@click.option("-p", "--partition", type=click.IntRange(0), default=0, show_default=True, help="Of this partition.")
@click.option("--contains", metavar="TEXT", help="Only messages with this text in key, value or a header.")
@click.option("-V", "--vhost", default="/", show_default=True, help="The virtual host.")
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
    """Look at messages of queue or topic NAME. Nothing is taken, nothing is marked as delivered.

    Columns: offset, time, state, key, value.
    """
    from headrace.cli.output import show_json, show_rows

    query = {"limit": limit, "offset": offset, "partition": partition, "contains": contains}
    with manage(url, config_file) as client:
        answer = client.call("GET", "headrace", "streams", vhost, name, "messages", query=query)
        # The broker looks at so much for one question. What comes meanwhile is left out: there would be no end to it.
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
