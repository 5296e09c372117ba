"""`headrace dlq`: dead letters: what died of what, and the way back."""

import time
from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, vhost_option, yes_option
from headrace.cli.options import json_answer, json_option, url_option

POLL_S = 0.2
FAILED = 1


@click.group(cls=AliasGroup)
def dlq() -> None:
    """List, look at, replay and purge dead letters."""


@dlq.command("ls")
@json_option
@url_option
def ls(as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List the queues that others send their dead letters to.

    Columns: name, messages, consumers, sources.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = client.call("GET", "headrace", "dead-letters")
    if as_json:
        show_json({"queues": found})
        return
    rows = [{**one, "sources": ", ".join(one["sources"])} for one in found]
    show_rows(rows, ("name", "messages", "consumers", "sources"), empty="no queue sends its dead letters anywhere")


def _wanted(command: Any) -> Any:
    command = click.option("--contains", metavar="TEXT", help="Only messages with this text in them.")(command)
    command = click.option("--origin", metavar="QUEUE", help="Only messages that died in this queue.")(command)
    return click.option("--reason", help="Only those: rejected, expired, maxlen or delivery_limit.")(command)


@dlq.command("peek")
@click.argument("name")
@click.option("-n", "--limit", type=click.IntRange(1, 200), default=10, show_default=True, help="So many messages.")
@_wanted
@vhost_option
@json_option
@url_option
def peek(
    name: str,
    limit: int,
    reason: str | None,
    origin: str | None,
    contains: str | None,
    vhost: str,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Look at the dead letters in queue NAME: why, where from, how often. They stay.

    Columns: offset, time, reason, origin, deaths, value.
    """
    from headrace.cli.management.queue import message_row
    from headrace.cli.output import show_json, show_rows

    query = {"limit": limit, "reason": reason, "origin": origin, "contains": contains}
    with manage(url, config_file) as client:
        answer = client.call("GET", "headrace", "dead-letters", vhost, name, "messages", query=query)
        # The broker looks at so much for one question.
        while answer.get("next") is not None and len(answer["messages"]) < limit:
            rest = {**query, **answer["next"], "limit": limit - len(answer["messages"])}
            more = client.call("GET", "headrace", "dead-letters", vhost, name, "messages", query=rest)
            answer = {**more, **{both: answer[both] + more[both] for both in ("messages", "gaps")}}
    if as_json:
        show_json(answer)
        return
    _say_gaps(answer)
    rows = []
    for message in answer["messages"]:
        death = message["death"] or {}
        facts = {"reason": death.get("reason"), "origin": death.get("queue"), "deaths": death.get("deaths")}
        rows.append({**message_row(message), **facts})
    show_rows(rows, ("offset", "time", "reason", "origin", "deaths", "value"), empty="no dead letters")


@dlq.command("replay")
@click.argument("name")
@_wanted
@click.option("-n", "--count", type=click.IntRange(1), metavar="N", help="So many at most.")
@click.option("--rate", type=click.IntRange(1), metavar="N", help="Messages a second; otherwise as fast as the disk.")
@click.option("--to", metavar="QUEUE", help="To this queue; otherwise each to where it died.")
@click.option("--dry-run", is_flag=True, help="Only say what would go where.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the end: the broker goes on by itself.")
@vhost_option
@yes_option
@json_option
@url_option
def replay(
    name: str,
    reason: str | None,
    origin: str | None,
    contains: str | None,
    count: int | None,
    rate: int | None,
    to: str | None,
    dry_run: bool,
    no_wait: bool,
    vhost: str,
    yes: bool,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> int:
    """Send the dead letters in queue NAME back to where they died.

    A replay outlives a restart of the broker: it goes on where it was, and no message is lost or doubled.
    """
    from headrace.cli.output import say_in_place, show_json

    wish = {"reason": reason, "origin": origin, "contains": contains, "count": count, "rate": rate, "to": to}
    body = {key: value for key, value in wish.items() if value is not None}
    path = ("headrace", "dead-letters", vhost, name, "replay")
    with manage(url, config_file) as client:
        plan = client.call("POST", *path, body={**body, "dry_run": True})
        if dry_run or not plan["matched"]:
            show_json(plan) if as_json else click.echo(_spell(plan))
            _say_gaps(plan)
            return 0
        _say_gaps(plan)
        ask(f"{_spell(plan)} Go on?", yes)
        begun = client.call("POST", *path, body={**body, "dry_run": False})
        while begun["state"] == "running" and not no_wait:
            time.sleep(POLL_S)
            begun = client.call("GET", "headrace", "replays", begun["id"])
            say_in_place(f"{begun['moved']:,} of {begun['matched']:,}")
        say_in_place("")
    if as_json:
        show_json(begun)
    else:
        stayed = f", {begun['skipped']:,} stayed" if begun["skipped"] else ""
        why = f"; {begun['error']}" if begun["error"] else ""
        click.echo(f"{begun['state']}: {begun['moved']:,} moved{stayed}{why}")
    return FAILED if begun["state"] == "failed" else 0


def _say_gaps(answer: dict[str, Any]) -> None:
    for gap in answer.get("gaps", ()):
        until = "on" if gap["end"] is None else f"to {gap['end'] - 1}"
        click.echo(f"from offset {gap['start']} {until} nothing can be read: {gap['reason']}", err=True)


def _spell(plan: dict[str, Any]) -> str:
    if not plan["matched"] and not plan["missing"]:
        return "No dead letters fit."
    parts = [f"{number:,} to {target}" for target, number in plan["targets"].items()]
    for target, number in plan["missing"].items():
        why = f"{target} is not there" if target else "they came from no queue"
        parts.append(f"{number:,} stay ({why})")
    return ", ".join(parts) + "."


@dlq.command("purge")
@click.argument("name")
@vhost_option
@yes_option
@url_option
@json_answer
def purge(name: str, vhost: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove every dead letter in queue NAME, for good."""
    with manage(url, config_file) as client:
        ready = client.call("GET", "queues", vhost, name)["messages_ready"]
        ask(f"Remove {ready:,} dead letters of {name} for good?", yes)
        client.call("DELETE", "queues", vhost, name, "contents")
    return {"purged": [name], "messages": ready}
