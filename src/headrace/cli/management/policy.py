"""`headrace policy`: limits and options for all queues or exchanges whose name matches a pattern."""

from pathlib import Path

import click

from headrace.cli.lazy import AliasGroup
from headrace.cli.management.common import ask, json_object, manage, vhost_option, yes_option
from headrace.cli.options import json_answer, json_option, url_option

APPLY_TO = ("queues", "classic_queues", "quorum_queues", "streams", "exchanges", "all")


@click.group(cls=AliasGroup)
def policy() -> None:
    """List, set and remove policies."""


@policy.command("ls")
@vhost_option
@json_option
@url_option
def ls(vhost: str, as_json: bool, url: str | None, config_file: Path | None) -> None:
    """List policies.

    Columns: name, pattern, apply_to, priority, definition.
    """
    import msgspec

    from headrace.cli.output import show_json, show_rows

    with manage(url, config_file) as client:
        found = client.call("GET", "policies", vhost)
    if as_json:
        show_json({"policies": found})
        return
    rows = [
        {**p, "apply_to": p["apply-to"], "definition": msgspec.json.encode(p["definition"]).decode()} for p in found
    ]
    show_rows(rows, ("name", "pattern", "apply_to", "priority", "definition"), empty="no policies")


@policy.command("set")
@click.argument("name")
@click.argument("pattern")
@click.argument("definition")
@click.option("--apply-to", type=click.Choice(APPLY_TO), default="queues", show_default=True, help="Kind of objects.")
@click.option(
    "--priority", type=int, default=0, show_default=True, help="Of all matching policies, the highest applies."
)
@vhost_option
@url_option
@json_answer
def set_(
    name: str,
    pattern: str,
    definition: str,
    apply_to: str,
    priority: int,
    vhost: str,
    url: str | None,
    config_file: Path | None,
) -> dict[str, object]:
    """Create or replace policy NAME for all queues whose name matches PATTERN. DEFINITION is a JSON object.

    \b
    headrace policy set short '^logs\\.' '{"max-length": 10000, "message-ttl": 3600000}'
    headrace policy set dead '^orders$' '{"dead-letter-exchange": "", "dead-letter-routing-key": "orders.dead"}'
    """
    body = {
        "pattern": pattern,
        "definition": json_object(definition, "DEFINITION"),
        "apply-to": apply_to,
        "priority": priority,
    }
    with manage(url, config_file) as client:
        client.call("PUT", "policies", vhost, name, body=body)
    return {"added": [name]}


@policy.command("rm")
@click.argument("name")
@vhost_option
@yes_option
@url_option
@json_answer
def rm(name: str, vhost: str, yes: bool, url: str | None, config_file: Path | None) -> dict[str, object]:
    """Remove policy NAME."""
    ask(f"Remove policy {name}?", yes)
    with manage(url, config_file) as client:
        client.call("DELETE", "policies", vhost, name)
    return {"removed": [name]}
