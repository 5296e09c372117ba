"""`headrace topic`: list, add, describe, change and remove topics."""

import os
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, yes_option
from headrace.cli.options import broker_client, json_option, url_option
from headrace.errors import AlreadyExists, InvalidInput


@click.group(cls=AliasGroup)
def topic() -> None:
    """List, add, describe, change and remove topics."""


@topic.command("ls")
@click.argument("pattern", required=False)
@click.option("-l", "--long", is_flag=True, help="Also show messages, bytes and segments.")
@json_option
@url_option
def ls(pattern: str | None, long: bool, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List topics, or those that match a shell PATTERN such as 'orders-*'.

    Columns: name, kind, partitions; with -l also messages, bytes and segments.
    """
    from fnmatch import fnmatchcase

    from headrace.cli.output import show_json, show_rows

    with broker_client(url, config_file) as client:
        topics = [t for t in client.topics() if pattern is None or fnmatchcase(t["name"], pattern)]
        if long:
            topics = [{**t, **_totals(client.topic(t["name"]))} for t in topics]
    if as_json:
        show_json({"topics": topics})
        return
    columns = ["name", "kind", "partitions"] + (["messages", "bytes", "segments"] if long else [])
    show_rows(topics, columns, empty="no topics; create one with `headrace topic add NAME`")


@topic.command("add")
@click.argument("name")
@click.option("-p", "--partitions", type=click.IntRange(1), metavar="N", help="Number of partitions.")
@click.option("-c", "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Topic setting. Repeatable.")
@click.option("--if-missing", is_flag=True, help="Succeed if the topic already exists.")
@json_option
@url_option
def add(
    name: str,
    partitions: int | None,
    settings: tuple[str, ...],
    if_missing: bool,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Create topic NAME.

    \b
    headrace topic add orders -p 4 -c retention_ms=30d -c compression=zstd
    """
    with broker_client(url, config_file) as client:
        try:
            described = client.create_topic(name, partitions=partitions, config=_pairs(settings))
        except AlreadyExists:
            if not if_missing:
                raise
            described = client.topic(name)
    _show(described, as_json)


@topic.command("info")
@click.argument("name")
@json_option
@url_option
def info(name: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Describe topic NAME: partitions, offsets and effective settings.

    Columns when piped: partition, start, end, messages, bytes, segments.
    """
    with broker_client(url, config_file) as client:
        _show(client.topic(name), as_json)


@topic.command("get")
@click.argument("name")
@click.argument("key", required=False)
@click.option("--prefix", metavar="TEXT", help="Print the last message of every key that begins with TEXT.")
@click.option("--from", "start", metavar="KEY", help="Print the last message of every key from KEY on.")
@click.option("--to", "stop", metavar="KEY", help="End of the range; KEY is not part of it.")
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Print at most N messages of a range.")
@click.option("-J", "--json", "as_json", is_flag=True, help="Print a JSON object: key, value, headers, offset...")
@url_option
def get(
    name: str,
    key: str | None,
    prefix: str | None,
    start: str | None,
    stop: str | None,
    limit: int | None,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Print the last message with KEY of topic NAME, or the last messages of a range of keys.

    A message of a range is printed as key, tab and value, in the order of the keys' bytes. Exits with 4 if there is no
    message with KEY. The topic needs the setting key_index.

    \b
    headrace topic set customers key_index=true
    headrace topic get customers customer-7
    headrace topic get customers --prefix customer-
    """
    from headrace.client.shapes import message_json
    from headrace.errors import NotFound

    has_range = not (prefix is start is stop is None)
    if (key is None) != has_range or (key is not None and limit is not None):
        raise InvalidInput("give a KEY, or a range with --prefix, --from or --to")
    out = sys.stdout.buffer
    with broker_client(url, config_file) as client:
        if key is None:
            every = client.scan(
                name,
                prefix=os.fsencode(prefix or ""),
                start=os.fsencode(start or ""),
                stop=None if stop is None else os.fsencode(stop),
            )
            for found in islice(every, limit):
                line = (found.key or b"") + b"\t" + (found.value or b"") + b"\n"
                out.write(message_json(found, name) if as_json else line)
        else:
            last = client.last(name, os.fsencode(key))
            if last is None:
                raise NotFound(f"topic {name!r} has no message with key {key!r}")
            out.write(message_json(last, name) if as_json else (last.value or b"") + b"\n")
    out.flush()


@topic.command("set")
@click.argument("name")
@click.argument("settings", nargs=-1, metavar="[SETTING=VALUE]...")
@click.option("-p", "--partitions", type=click.IntRange(1), metavar="N", help="Increase the number of partitions to N.")
@json_option
@url_option
def set_(
    name: str,
    settings: tuple[str, ...],
    partitions: int | None,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Change settings of topic NAME. `SETTING=` without a value resets it to the broker's default.

    \b
    headrace topic set orders retention_ms=1d cleanup_policy=
    """
    if not settings and partitions is None:
        raise InvalidInput("no setting given; write SETTING=VALUE, such as retention_ms=7d")
    with broker_client(url, config_file) as client:
        _show(client.configure_topic(name, _pairs(settings), partitions=partitions), as_json)


@topic.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@yes_option
@json_option
@url_option
def rm(names: tuple[str, ...], yes: bool, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """Remove topics and all their messages."""
    from headrace.cli.output import show_json

    ask(f"Remove topic {', '.join(names)} and all its messages?", yes)

    with broker_client(url, config_file) as client:
        for name in names:
            client.delete_topic(name)
    if as_json:
        show_json({"removed": list(names)})


def _pairs(texts: Iterable[str]) -> dict[str, object]:
    pairs: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(f"{text!r} is not a setting; write NAME=VALUE, such as retention_ms=7d")
        pairs[name] = value or None
    return pairs


def _totals(described: dict[str, Any]) -> dict[str, int]:
    logs = described["logs"]
    return {
        "messages": sum(log["end"] - log["start"] for log in logs),
        "bytes": sum(log["size_bytes"] for log in logs),
        "segments": sum(log["segments"] for log in logs),
    }


def _show(described: dict[str, Any], as_json: bool) -> None:
    from headrace.cli.output import for_people, show_facts, show_json, show_rows

    if as_json:
        show_json(described)
        return
    if for_people():
        show_facts({"name": described["name"], "kind": described["kind"], **_totals(described)})
        click.echo()
        own = described["overrides"]
        show_facts({name: value + (" (set here)" * (name in own)) for name, value in described["config"].items()})
        click.echo()
    rows = [
        {
            "partition": log["partition"],
            "start": log["start"],
            "end": log["end"],
            "messages": log["end"] - log["start"],
            "bytes": log["size_bytes"],
            "segments": log["segments"],
        }
        for log in described["logs"]
    ]
    show_rows(rows, ("partition", "start", "end", "messages", "bytes", "segments"))
