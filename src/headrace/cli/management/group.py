"""`headrace group`: consumer groups and cursors, their lag, and resetting their offsets."""

from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, yes_option
from headrace.cli.options import json_answer, json_option, url_option
from headrace.errors import InvalidInput, NotFound

TO_HELP = "New position: earliest, latest, an offset, +N or -N from the current one, or a time (2026-11-15T08:00)."
MOVES = ("partition", "from", "to", "again", "skipped")


@click.group(cls=AliasGroup)
def group() -> None:
    """List, describe, reset and remove consumer groups and cursors."""


@group.command("ls")
@click.argument("pattern", required=False)
@json_option
@url_option
def ls(pattern: str | None, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List groups and cursors whose name contains PATTERN.

    Columns: name, kind, state, members, lag, topics.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = list(client.pages("headrace", "readers", name=pattern))
    if as_json:
        show_json({"groups": found})
        return
    rows = [{**one, "topics": ", ".join(one["topics"])} for one in found]
    show_rows(rows, ("name", "kind", "state", "members", "lag", "topics"), empty="no groups or cursors")


def _kind(client: Any, name: str) -> str:
    """The kind of the reader with that name: group or cursor."""
    for found in client.pages("headrace", "readers", name=name):
        if found["name"] == name:
            return str(found["kind"])
    raise NotFound(f"no group or cursor is called {name!r}")


@group.command("info")
@click.argument("name")
@json_option
@url_option
def info(name: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Show the offsets and lag of group or cursor NAME in each partition.

    Columns: topic, partition, offset, end, lag.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = client.call("GET", "headrace", "readers", _kind(client, name), name)
    if as_json:
        show_json(found)
    else:
        show_rows(found["positions"], ("topic", "partition", "offset", "end", "lag"), empty="no committed offsets")


@group.command("reset")
@click.argument("name")
@click.option("-t", "--topic", required=True, help="Topic to move in.")
@click.option("--to", default="earliest", show_default=True, metavar="WHERE", help=TO_HELP)
@click.option(
    "-p", "--partition", "partitions", type=click.IntRange(0), multiple=True, help="Only this partition. Repeatable."
)
@click.option("--execute", is_flag=True, help="Change the offsets. Without this option, only print the changes.")
@json_option
@url_option
def reset(
    name: str,
    topic: str,
    to: str,
    partitions: tuple[int, ...],
    execute: bool,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Reset the offsets of group or cursor NAME in a topic. A dry run without --execute.

    \b
    headrace group reset billing -t orders --to -100
    headrace group reset billing -t orders --to 2026-11-15T08:00 --execute

    Columns: partition, from, to, again (messages read again), skipped.
    """
    from headrace.cli.output import say, show_json, show_rows

    body = {"topic": topic, **_target(to), "dry_run": not execute}
    if partitions:
        body["partitions"] = list(partitions)
    with manage(url, config_file) as client:
        answer = client.call("POST", "headrace", "readers", _kind(client, name), name, "reset", body=body)
    if as_json:
        show_json(answer)
        return
    show_rows(answer["moves"], MOVES)
    if not execute:
        say("dry run: nothing was changed; add --execute to apply it")


def _target(to: str) -> dict[str, Any]:
    from datetime import datetime

    if to in ("earliest", "latest"):
        return {"to": to}
    if to[:1] in "+-" and to[1:].isdecimal():
        return {"to": "shift", "shift": int(to)}
    if to.isdecimal():
        return {"to": "offset", "offset": int(to)}
    try:
        return {"to": "timestamp", "timestamp": int(datetime.fromisoformat(to).timestamp() * 1000)}
    except ValueError:
        raise InvalidInput(f"--to must be earliest, latest, an offset, +N, -N or a time, not {to!r}") from None


@group.command("rm")
@click.argument("name")
@yes_option
@url_option
@json_answer
def rm(name: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove group or cursor NAME and its offsets. A group must have no members."""
    ask(f"Remove {name} and its offsets?", yes)
    with manage(url, config_file) as client:
        client.call("DELETE", "headrace", "readers", _kind(client, name), name)
    return {"removed": [name]}
