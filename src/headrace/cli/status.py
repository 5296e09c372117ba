"""`headrace status`: state and settings of a running broker."""

from pathlib import Path
from typing import Any

import click

from headrace.cli.options import broker_client, json_option, url_option

NOT_READY = 1


@click.command()
@click.option(
    "-s",
    "--settings",
    "with_settings",
    is_flag=True,
    help="Show all settings and their origin, not only those changed.",
)
@json_option
@url_option
def status(with_settings: bool, as_json: bool, url: str | None, config_file: Path | None) -> int:
    """Show the state and the changed settings of the broker.

    Shows version, listeners, topics, recovery, and the settings that differ from their defaults. Exits with 0 if the
    broker accepts messages, with 1 if it runs but does not accept them, and with 3 if it cannot be reached.
    """
    from headrace.cli.output import show_json

    with broker_client(url, config_file) as client:
        answer = client.get("/status")
    if as_json:
        show_json(answer)
    else:
        _show(answer, with_settings)
    return 0 if answer["ready"] else NOT_READY


def _show(answer: dict[str, Any], with_settings: bool) -> None:
    from headrace.cli.output import for_people, show_facts, show_rows
    from headrace.config import format_duration

    uptime_ms = answer["uptime_ms"] // 1000 * 1000
    facts = {
        "state": "ready" if answer["ready"] else f"not ready: {answer['reason']}",
        "version": answer["version"],
        "pid": str(answer["pid"]),
        "uptime": format_duration(uptime_ms) if uptime_ms < 60_000 else _long(uptime_ms),
        "data_dir": answer["data_dir"],
    }
    if answer["archived_segments"]:
        facts |= {name: str(answer[name]) for name in ("tier_dir", "archived_segments", "archived_bytes")}
    for listener, addresses in answer["listeners"].items():
        facts[listener] = ", ".join(addresses) or "off"
    for one in answer.get("standbys", {}).get("standbys", ()):
        behind = f"{one['bytes_behind']:,} bytes and {one['seconds_behind']:.1f} s behind"
        facts[f"standby_{one['name']}"] = f"{one['state']}, {behind} ({one['address']})"
    facts["topics"] = answer["topics"]
    facts["partitions"] = answer["partitions"]
    for name, value in answer["recovery"].items():
        if value or name == "clean" or not for_people():  # hide zeros on a terminal
            facts[f"recovery_{name}"] = _short(value)
    show_facts(facts)
    settings = [s for s in answer["settings"] if with_settings or s["origin"] != "default"]
    if settings and (with_settings or for_people()):
        click.echo()
        show_rows(settings, ("name", "value", "default", "origin"))


def _long(duration_ms: int) -> str:
    days, rest = divmod(duration_ms // 1000, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    clock = f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{days}d {clock}" if days else clock


def _short(value: object) -> str | int | float | None:
    if isinstance(value, list | dict):
        return len(value)
    return value if isinstance(value, str | int | float) else str(value)
