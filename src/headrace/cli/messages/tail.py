"""`headrace tail`: the last messages of a topic and new ones, in a readable form."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli.options import living_broker, url_option

if TYPE_CHECKING:
    from headrace.client.shapes import Message


@click.command()
@click.argument("topic")
@click.option(
    "-n",
    "--lines",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="Start with the last N messages of every partition.",
)
@click.option("-p", "--partition", type=click.IntRange(0), metavar="N", help="Read only this partition.")
@click.option("--no-follow", is_flag=True, help="Exit at the current end of the topic.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@url_option
def tail(
    topic: str,
    lines: int,
    partition: int | None,
    no_follow: bool,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Print the last messages of TOPIC in a readable form, and follow it until Ctrl-C.

    Prints one message per line: time, partition:offset, key and value.
    """
    from headrace.cli.messages.sub import write
    from headrace.client.consumer import Consumer
    from headrace.client.shapes import message_json

    def as_line(message: "Message") -> bytes:
        return message_json(message, topic) if as_json else readable(message).encode() + b"\n"

    with Consumer(
        topic,
        living_broker(url, config_file),
        partition=partition,
        start=-lines if lines else "latest",
        on_lost="earliest",
    ) as consumer:
        write(as_line, consumer, until_end=no_follow)


def readable(message: "Message", place: str | None = None) -> str:
    from datetime import datetime

    from headrace.cli.messages.formats import printable

    try:
        moment = datetime.fromtimestamp(message.timestamp / 1000)
        when = moment.strftime("%Y-%m-%d %H:%M:%S.") + f"{message.timestamp % 1000:03d}"
    except (ValueError, OverflowError, OSError):  # clients may set any number as the timestamp
        when = str(message.timestamp)
    parts = [when, place or f"{message.partition}:{message.offset}"]
    if message.key is not None:
        parts.append(printable(message.key) + ":")
    parts.append(printable(message.value))
    if message.headers:
        parts.append(" ".join(f"[{printable(n.encode())}={printable(v)}]" for n, v in message.headers))
    return "  ".join(parts)
