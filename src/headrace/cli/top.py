"""`headrace top`: live rates and depths in the terminal."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.management.common import manage
from headrace.cli.options import json_option, url_option

if TYPE_CHECKING:
    from rich.console import Group

    from headrace.client.management import Management

COLUMNS = ("name", "kind", "ready", "unacked", "consumers", "in_per_s", "ack_per_s", "size_bytes")
SORT_KEYS = {"in_per_s": "rates.publish", "ack_per_s": "rates.ack"}  # columns that the broker calls differently


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 500), default=20, show_default=True, help="Number of streams.")
@click.option(
    "--sort",
    type=click.Choice(COLUMNS),
    metavar="COLUMN",
    default="ready",
    show_default=True,
    help="Sort by this column, largest first; names in alphabetical order.",
)
@click.option(
    "-i", "--interval", type=click.FloatRange(0.2), default=1.0, show_default=True, help="Seconds between updates."
)
@click.option("--once", is_flag=True, help="Print once and exit. This is the default in a pipe.")
@json_option
@url_option
def top(
    limit: int, sort: str, interval: float, once: bool, as_json: bool, url: str | None, config_file: Path | None
) -> None:
    """Show rates, depths and the busiest streams, and update them until Ctrl-C.

    Columns when piped: name, kind, ready, unacked, consumers, in_per_s, ack_per_s, size_bytes.
    """
    from headrace.cli.output import for_people, show_json, show_rows

    with manage(url, config_file) as client:
        now, rows = _sample(client, limit, sort)
        if as_json or once or not for_people():
            time.sleep(1.1)  # a rate needs two samples
            now, rows = _sample(client, limit, sort)
            show_json({"overview": now, "streams": rows}) if as_json else show_rows(rows, COLUMNS)
            return
        from rich.live import Live

        with Live(_screen(now, rows), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_screen(*_sample(client, limit, sort)), refresh=True)


def _sample(client: "Management", limit: int, sort: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    now = client.call("GET", "headrace", "overview", query={"step": 60})
    reverse = "false" if sort == "name" else "true"
    column = SORT_KEYS.get(sort, sort)
    query: dict[str, str | int | None] = {"page": 1, "page_size": limit, "sort": column, "sort_reverse": reverse}
    found = client.call("GET", "headrace", "streams", query=query)["items"]
    rows = [{**one, "in_per_s": one["rates"]["publish"], "ack_per_s": one["rates"].get("ack", 0.0)} for one in found]
    return now, rows


def _screen(now: dict[str, Any], rows: list[dict[str, Any]]) -> "Group":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rates, sync = now["rates"], now["sync_ms"]
    head = Text.assemble(
        (f"{now['node']}  ", "bold"),
        f"in {rates['published']:,.0f}/s  out {rates['sent']:,.0f}/s  ack {rates['acked']:,.0f}/s  ",
        f"ready {now['ready']:,}  unacked {now['unacked']:,}  connections {now['connections']:,}\n",
        f"sync p50 {_ms(sync['p50'])}  p99 {_ms(sync['p99'])}  memory {now['memory_bytes'] >> 20:,} MB  ",
        f"disk free {(now['disk_free_bytes'] or 0) >> 30:,} GB",
    )
    for alarm in now["alarms"]:
        head.append(f"\n{alarm['text']}", "bold red")
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column.replace("_", " "), justify="left" if column in ("name", "kind") else "right")
    for row in rows:
        table.add_row(*(Text(_cell(row[column])) for column in COLUMNS))
    return Group(head, Text(), table)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:g} ms"


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)
