"""`headrace sub`: read messages, with the options of kcat."""

import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headrace.cli.options import living_broker, url_option
from headrace.errors import HeadraceError

if TYPE_CHECKING:  # loaded when the command runs, not when --help lists it
    from headrace.client.consumer import Consumer
    from headrace.client.shapes import Message

FOLLOW_WAIT_S = 2.0  # interval of the check whether the reader of stdout still exists


@click.command()
@click.argument("topic")
@click.option(
    "-o",
    "--offset",
    default="beginning",
    show_default=True,
    metavar="WHERE",
    help="Where to start: beginning, end, an offset, -N for the last N of every partition, or s@TIME; e@TIME is where "
    "to stop. TIME is 1h (ago), 2026-11-15T10:00 or milliseconds since 1970.",
)
@click.option("-p", "--partition", type=click.IntRange(0), metavar="N", help="Read only this partition.")
@click.option("-c", "--count", type=click.IntRange(1), metavar="N", help="Exit after N messages.")
@click.option("-e", "--exit", "until_end", is_flag=True, help="Exit at the current end of the topic.")
@click.option(
    "-f",
    "--format",
    "form",
    metavar="FORMAT",
    help=r"Output format: %s value, %k key, %t topic, %p partition, %o offset, %T timestamp, "
    r"%h headers, %S and %K lengths, \n and \t.",
)
@click.option("-K", "--key-delimiter", metavar="TEXT", help="Print the key and TEXT before the value.")
@click.option(
    "-D", "--delimiter", default=r"\n", show_default=True, metavar="TEXT", help="Print TEXT after each message."
)
@click.option(
    "-J", "--json", "as_json", is_flag=True, help="Print one JSON object per line: key, value, headers, offset..."
)
@url_option
def sub(
    topic: str,
    offset: str,
    partition: int | None,
    count: int | None,
    until_end: bool,
    form: str | None,
    key_delimiter: str | None,
    delimiter: str,
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Print the messages of TOPIC, and follow it until Ctrl-C.

    \b
    headrace sub orders                 all messages, then new ones
    headrace sub orders -o -5 -e        the last five
    headrace sub orders -o s@1h -J      the last hour as JSON, then new ones
    headrace sub orders -f '%o %k: %s\\n'
    """
    import time

    from headrace.cli.messages.formats import parse_range
    from headrace.client.consumer import Consumer

    where = parse_range(offset, time.time_ns() // 1_000_000)
    printed = _printer(topic, form, key_delimiter, delimiter, as_json)
    with Consumer(
        topic,
        living_broker(url, config_file),
        partition=partition,
        start=where.start,
        since_ms=where.since_ms,
        batch_messages=1000 if count is None else min(count, 1000),
    ) as consumer:
        write(printed, consumer, until_end=until_end, until_ms=where.until_ms, count=count)


def _printer(
    topic: str, form: str | None, key_delimiter: str | None, delimiter: str, as_json: bool
) -> "Callable[[Message], bytes]":
    from headrace.cli.messages.formats import compile_format, unescape
    from headrace.client.shapes import message_json

    if as_json:
        return lambda message: message_json(message, topic)
    if form is not None:
        return compile_format(form, topic)
    end = unescape(delimiter).encode()
    if key_delimiter is None:
        return lambda message: (message.value or b"") + end
    middle = unescape(key_delimiter).encode()
    return lambda message: (message.key or b"") + middle + (message.value or b"") + end


def write(
    printed: "Callable[[Message], bytes]",
    consumer: "Consumer",
    *,
    until_end: bool = False,
    until_ms: int | None = None,
    count: int | None = None,
) -> None:
    """Writes messages to stdout, and flushes after every batch."""
    out = sys.stdout.buffer
    left = count
    has_end = until_end or until_ms is not None
    for batch in _batches(consumer, has_end):
        wanted = [m for m in batch if until_ms is None or m.timestamp < until_ms][:left]
        out.write(b"".join([printed(message) for message in wanted]))
        out.flush()
        if not wanted and not has_end and _is_reader_gone(out.fileno()):
            raise BrokenPipeError
        if left is not None:
            left -= len(wanted)
            if left <= 0:
                return


def _is_reader_gone(out: int) -> bool:
    """Whether the pipe has lost its reader: without this check `| head` would end only with the next message."""
    poll = select.poll()
    poll.register(out, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _batches(consumer: "Consumer", until_end: bool) -> "Iterator[list[Message]]":
    if not until_end:
        while True:
            yield consumer.poll(FOLLOW_WAIT_S)
    batch: list[Message] = []
    try:
        for message in consumer.until_end():
            batch.append(message)
            if len(batch) >= 1000:
                yield batch
                batch = []
    except HeadraceError:
        yield batch  # print what has arrived before the error
        raise
    yield batch
