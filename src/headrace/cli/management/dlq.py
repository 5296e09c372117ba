"""`headrace dlq`: inspect, replay and purge dead letters."""

import time
from pathlib import Path
from typing import Any

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, manage, purge_queue, vhost_option, yes_option
from headrace.cli.options import json_answer, json_option, url_option

POLL_S = 0.2
FAILED = 1


@click.group(cls=AliasGroup)
def dlq() -> None:
    """List, show, replay and purge dead letters."""


@dlq.command("ls")
@json_option
@url_option
def ls(as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List dead-letter queues: the queues that other queues send their dead letters to.

    Columns: name, messages, consumers, sources.
    """
    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = client.call("GET", "headrace", "dead-letters")
    if as_json:
        show_json({"queues": found})
        return
    rows = [{**one, "sources": ", ".join(one["sources"])} for one in found]
    show_rows(rows, ("name", "messages", "consumers", "sources"), empty="no dead-letter queues")


def _filter_options(command: Any) -> Any:
    command = click.option("--contains", metavar="TEXT", help="Only messages that contain TEXT.")(command)
    command = click.option("--origin", metavar="QUEUE", help="Only messages that were dead-lettered by QUEUE.")(command)
    reasons = "Only messages dead-lettered for this reason: rejected, expired, maxlen or delivery_limit."
    return click.option("--reason", help=reasons)(command)


@dlq.command("peek")
@click.argument("name")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 200), default=10, show_default=True, help="Maximum number of messages."
)
@_filter_options
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
    """Show the dead letters in queue NAME without removing them: reason, original queue, number of deaths.

    Columns: offset, time, reason, origin, deaths, value.
    """
    from headrace.cli.management.queue import message_row
    from headrace.cli.output import show_json, show_rows

    query = {"limit": limit, "reason": reason, "origin": origin, "contains": contains}
    with manage(url, config_file) as client:
        answer = client.call("GET", "headrace", "dead-letters", vhost, name, "messages", query=query)
        # The broker scans a limited number of messages per request.
        while answer.get("next") is not None and len(answer["messages"]) < limit:
            rest = {**query, **answer["next"], "limit": limit - len(answer["messages"])}
            more = client.call("GET", "headrace", "dead-letters", vhost, name, "messages", query=rest)
            answer = {**more, **{both: answer[both] + more[both] for both in ("messages", "gaps")}}
    if as_json:
        show_json(answer)
        return
    _report_gaps(answer)
    rows = []
    for message in answer["messages"]:
        death = message["death"] or {}
        facts = {"reason": death.get("reason"), "origin": death.get("queue"), "deaths": death.get("deaths")}
        rows.append({**message_row(message), **facts})
    show_rows(rows, ("offset", "time", "reason", "origin", "deaths", "value"), empty="no dead letters")


@dlq.command("replay")
@click.argument("name")
@_filter_options
@click.option("-n", "--count", type=click.IntRange(1), metavar="N", help="Maximum number of messages.")
@click.option("--rate", type=click.IntRange(1), metavar="N", help="Maximum messages per second.  [default: unlimited]")
@click.option("--to", metavar="QUEUE", help="Target queue.  [default: the original queue of each message]")
@click.option("--dry-run", is_flag=True, help="Only print what would be sent where.")
@click.option("--no-wait", is_flag=True, help="Exit at once; the broker continues the replay in the background.")
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
    """Send the dead letters in queue NAME back to their original queues.

    A replay continues after a restart of the broker; no message is lost or duplicated.
    """
    from headrace.cli.output import say_in_place, show_json

    given = {"reason": reason, "origin": origin, "contains": contains, "count": count, "rate": rate, "to": to}
    body = {key: value for key, value in given.items() if value is not None}
    path = ("headrace", "dead-letters", vhost, name, "replay")
    with manage(url, config_file) as client:
        plan = client.call("POST", *path, body={**body, "dry_run": True})
        if dry_run or not plan["matched"]:
            show_json(plan) if as_json else click.echo(_describe(plan))
            _report_gaps(plan)
            return 0
        _report_gaps(plan)
        ask(f"{_describe(plan)} Continue?", yes)
        replay = client.call("POST", *path, body={**body, "dry_run": False})
        while replay["state"] == "running" and not no_wait:
            time.sleep(POLL_S)
            replay = client.call("GET", "headrace", "replays", replay["id"])
            say_in_place(f"{replay['moved']:,} of {replay['matched']:,}")
        say_in_place("")
    if as_json:
        show_json(replay)
    else:
        skipped = f", {replay['skipped']:,} skipped" if replay["skipped"] else ""
        why = f"; {replay['error']}" if replay["error"] else ""
        click.echo(f"{replay['state']}: {replay['moved']:,} moved{skipped}{why}")
    return FAILED if replay["state"] == "failed" else 0


def _report_gaps(answer: dict[str, Any]) -> None:
    for gap in answer.get("gaps", ()):
        last = "the end" if gap["end"] is None else gap["end"] - 1
        click.echo(f"offsets {gap['start']} to {last} cannot be read: {gap['reason']}", err=True)


def _describe(plan: dict[str, Any]) -> str:
    if not plan["matched"] and not plan["missing"]:
        return "No matching dead letters."
    parts = [f"{number:,} to {target}" for target, number in plan["targets"].items()]
    for target, number in plan["missing"].items():
        why = f"{target} does not exist" if target else "their original queue is unknown"
        parts.append(f"{number:,} not moved ({why})")
    return ", ".join(parts) + "."


@dlq.command("purge")
@click.argument("name")
@vhost_option
@yes_option
@url_option
@json_answer
def purge(name: str, vhost: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Permanently remove all dead letters in queue NAME."""
    with manage(url, config_file) as client:
        return purge_queue(client, vhost, name, "dead letters", yes)
