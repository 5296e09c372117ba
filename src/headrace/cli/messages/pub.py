"""`headrace pub`: publish messages from arguments, files or stdin."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from headrace.cli.options import json_option, living_broker, url_option
from headrace.errors import InvalidInput

if TYPE_CHECKING:
    from concurrent.futures import Future

    from headrace.client.producer import Producer
    from headrace.client.shapes import Published

READ_BYTES = 1 << 16
MESSAGE_BYTES_MAX = 64 << 20  # brokers accept less; bounds memory if stdin has no delimiter


@click.command()
@click.argument("topic")
@click.argument("values", nargs=-1)
@click.option("-k", "--key", help="Key of every message.")
@click.option("-K", "--key-delimiter", metavar="TEXT", help="Split each message at the first TEXT into key and value.")
@click.option(
    "-H",
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Header of every message. Repeatable.",
)
@click.option(
    "-p", "--partition", type=click.IntRange(0), metavar="N", help="Partition.  [default: by key, or round-robin]"
)
@click.option(
    "-D",
    "--delimiter",
    default=r"\n",
    show_default=True,
    metavar="TEXT",
    help="End of a message on stdin.",
)
@click.option("-Z", "--null", is_flag=True, help="Publish an empty value as null, a tombstone.")
@click.option(
    "-J",
    "--input-json",
    is_flag=True,
    help="Read each message as a JSON object, as printed by `headrace sub -J`: key, value, headers...",
)
@click.option(
    "-F",
    "--file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Publish the contents of a file as one message. Repeatable.",
)
@json_option
@url_option
def pub(
    topic: str,
    values: tuple[str, ...],
    key: str | None,
    key_delimiter: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    delimiter: str,
    null: bool,
    input_json: bool,
    files: tuple[Path, ...],
    as_json: bool,
    url: str | None,
    config_file: Path | None,
) -> None:
    """Publish VALUES to TOPIC, one message each. Without VALUES, publish each line of stdin.

    Exits when all messages are confirmed. Columns: topic, partition, first_offset, last_offset, messages.

    \b
    headrace pub orders 'a message' -k customer-7
    headrace pub orders < lines.txt
    headrace sub orders -J -e | headrace pub copy -J
    """
    from headrace.client.producer import Producer

    builder = _MessageBuilder(key, key_delimiter, headers, partition, null, input_json)
    with Producer(topic, living_broker(url, config_file)) as producer:
        tally = _Tally()
        for data in _sources(values, files, delimiter):
            tally.add(builder.send(producer, data))
        producer.flush()
        tally.close()
    _show(topic, tally, as_json)


class _MessageBuilder:
    """Turns a piece of input into a message, according to the options."""

    def __init__(
        self,
        key: str | None,
        key_delimiter: str | None,
        headers: tuple[str, ...],
        partition: int | None,
        null: bool,
        input_json: bool,
    ) -> None:
        from headrace.cli.messages.formats import unescape

        if input_json and (key is not None or key_delimiter is not None or headers):
            raise InvalidInput("-J cannot be combined with -k, -K or -H: each JSON message has its own key and headers")
        if key is not None and key_delimiter is not None:
            raise InvalidInput("-k cannot be combined with -K: give one key for all messages, or read it from each")
        self._key = None if key is None else key.encode(errors="surrogateescape")
        self._split = None if key_delimiter is None else unescape(key_delimiter).encode(errors="surrogateescape")
        self._headers = [_header(text) for text in headers]
        self._partition = partition
        self._null = null
        self._input_json = input_json

    def send(self, producer: "Producer", data: bytes) -> "Future[Published]":
        if self._input_json:
            return self._send_json(producer, data)
        key: bytes | None = self._key
        value: bytes | None = data
        if self._split is not None and self._split in data:
            key, _, value = data.partition(self._split)
        if self._null and not value:
            value = None
        return producer.send(value, key=key, headers=self._headers, partition=self._partition)

    def _send_json(self, producer: "Producer", data: bytes) -> "Future[Published]":
        from headrace.client.shapes import parse_draft

        message = parse_draft(data)
        partition = message.partition if self._partition is None else self._partition
        return producer.send(
            message.value,
            key=message.key,
            headers=message.headers,
            partition=partition,
            timestamp=message.timestamp,
        )


def _header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidInput(f"{text!r} is not a header; write NAME=VALUE")
    return name, value.encode(errors="surrogateescape")


def _sources(values: tuple[str, ...], files: tuple[Path, ...], delimiter: str) -> Iterator[bytes]:
    from headrace.cli.messages.formats import unescape

    yield from (value.encode(errors="surrogateescape") for value in values)
    for file in files:
        yield file.read_bytes()
    if not values and not files:
        end = unescape(delimiter).encode(errors="surrogateescape")
        if not end:
            raise InvalidInput("-D: the delimiter must not be empty")
        yield from _with_progress(split(sys.stdin.buffer, end), sys.stdin.buffer)


def split(stream: IO[bytes], end: bytes) -> Iterator[bytes]:
    """Yields the pieces of a stream between delimiters as they arrive. The last piece needs no delimiter."""
    read = getattr(stream, "read1", stream.read)  # returns what is available instead of waiting for a full buffer
    rest = b""
    while data := read(READ_BYTES):
        *pieces, rest = (rest + data).split(end)
        yield from pieces
        if len(rest) > MESSAGE_BYTES_MAX:
            raise InvalidInput(
                f"a message on stdin is longer than {MESSAGE_BYTES_MAX:,} bytes; check the delimiter (-D)"
            )
    if rest:
        yield rest


def _with_progress(pieces: Iterator[bytes], stream: IO[bytes]) -> Iterator[bytes]:
    """Shows a progress bar if stdin is a large file and stderr a terminal."""
    import os
    import stat

    status = os.fstat(stream.fileno())
    if not sys.stderr.isatty() or not stat.S_ISREG(status.st_mode) or status.st_size < (1 << 20):
        yield from pieces
        return
    from headrace.cli.progress import bar

    with bar("publishing", status.st_size) as moved:
        for piece in pieces:
            yield piece
            moved(len(piece) + 1)


class _Tally:
    """First offset, last offset and count per partition. Drops results as they arrive, to bound memory."""

    def __init__(self) -> None:
        self.ranges: dict[int, list[int]] = {}  # partition -> first, last, count
        self._open: list[Future[Published]] = []

    def add(self, future: "Future[Published]") -> None:
        self._open.append(future)
        if len(self._open) >= 50_000:
            self._settle(keep_waiting=True)

    def close(self) -> None:
        self._settle(keep_waiting=False)

    def _settle(self, *, keep_waiting: bool) -> None:
        still = []
        for future in self._open:
            if keep_waiting and not future.done():
                still.append(future)
                continue
            stored = future.result()
            known = self.ranges.setdefault(stored.partition, [stored.offset, stored.offset, 0])
            known[0], known[1] = min(known[0], stored.offset), max(known[1], stored.offset)
            known[2] += 1
        self._open = still


def _show(topic: str, tally: _Tally, as_json: bool) -> None:
    from headrace.cli.output import Row, show_json, show_rows

    rows: list[Row] = [
        {
            "topic": topic,
            "partition": partition,
            "first_offset": first,
            "last_offset": last,
            "messages": count,
        }
        for partition, (first, last, count) in sorted(tally.ranges.items())
    ]
    if as_json:
        show_json(rows)
    else:
        columns = ("topic", "partition", "first_offset", "last_offset", "messages")
        show_rows(rows, columns, empty="no messages to publish")
