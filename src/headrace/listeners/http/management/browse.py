"""Browsing of messages without consuming them, and following a stream as messages arrive."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.browse import Gap, browse, contains, find_time, has_key, state_of, unserved
from headrace.broker.streams.key_index import KeyNotFound
from headrace.broker.streams.partition import Partition
from headrace.broker.types.aborted_ranges import NO_ABORTS, Aborts
from headrace.broker.types.message import from_record, properties_of
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import InvalidInput, QueueNotFound
from headrace.listeners.http.management.parameters import JsonObject, encode, flag, json_response, number, query_of
from headrace.listeners.http.management.representations import properties_json
from headrace.listeners.http.management.streams import Row, partition_of, row_of
from headrace.listeners.http.server.context import HttpContext, in_chunks, pieces_response
from headrace.listeners.http.server.event_stream import EventStreamResponse
from headrace.listeners.http.server.requests import whole_number
from headrace.record.layout import (
    AMQP_CLIENT_DEATHS_HEADER,
    AMQP_EXCHANGE_HEADER,
    AMQP_PROPERTIES_HEADER,
    AMQP_RETRIES_HEADER,
)
from headrace.record.types import Record
from headrace.wire.http import events
from headrace.wire.http.bodies import JSON

LIMIT, LIMIT_MAX = 50, 500
BYTES_MAX = 4 << 20
VALUE_BYTES_MAX = 64 * 1024  # of one message; GET /topics returns the whole value
TAIL_INTERVAL_S = 0.25
TAIL_MESSAGES = 100  # in one interval, more than a person can read; the rest is only counted
HEARTBEAT_S = 15.0
HEADRACE_HEADERS = (AMQP_PROPERTIES_HEADER, AMQP_EXCHANGE_HEADER, AMQP_CLIENT_DEATHS_HEADER, AMQP_RETRIES_HEADER)


def text_or_base64(data: bytes | None) -> JsonObject | None:
    if data is None:
        return None
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def record_json(row: Row, partition: int, record: Record) -> JsonObject:
    """A message with at most VALUE_BYTES_MAX of its key, its value and its headers each."""
    value = record.value
    headers, headers_cut = _cut_headers(_other_headers(record))
    shape: JsonObject = {
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": text_or_base64(record.key if record.key is None else record.key[:VALUE_BYTES_MAX]),
        "value": text_or_base64(value if value is None else value[:VALUE_BYTES_MAX]),
        "value_bytes": None if value is None else len(value),
        "truncated": headers_cut or any(len(part or b"") > VALUE_BYTES_MAX for part in (record.key, value)),
        "headers": headers,
        "at_topics": row.stream is not None and row.vhost == DEFAULT,  # whether GET /topics has the whole value
    }
    if any(name in HEADRACE_HEADERS for name, _ in record.headers):
        message = from_record(record)
        shape["amqp"] = {
            "exchange": message.exchange,
            "routing_key": message.routing_key,
            "properties": properties_json(message.properties),
        }
    queue = row.queue
    if queue is not None and not queue.is_stream and partition < len(queue.views):
        shape["state"] = state_of(queue.views[len(queue.views) - 1 - partition], record.offset)
    return shape


def _cut_headers(headers: Sequence[tuple[str, bytes | None]]) -> tuple[list[Any], bool]:
    """(headers as JSON, whether some of them were left out or shortened)."""
    room = VALUE_BYTES_MAX
    shown: list[Any] = []
    for name, value in headers:
        if room <= 0:
            return shown, True
        shown.append([name[:room], text_or_base64(value if value is None else value[:room])])
        is_cut = len(name) > room or len(value or b"") > room
        room -= len(name) + len(value or b"")
        if is_cut:
            return shown, True
    return shown, False


def _other_headers(record: Record) -> Sequence[tuple[str, bytes | None]]:
    """Headers that are not part of the AMQP properties."""
    if properties_of(record) is not None:
        return ()
    return [pair for pair in record.headers if pair[0] not in HEADRACE_HEADERS]


async def messages(context: HttpContext, request: Request) -> Response:
    row, query = row_of(context, request), query_of(request)
    if flag(query.get("last")):
        return await _last_of_key(context, row, query)
    partition = number(query.get("partition"), "partition", 0)
    log = partition_of(row, partition)
    limit = number(query.get("limit"), "limit", LIMIT, least=1, most=LIMIT_MAX)
    wanted = _wanted(query)
    gaps: list[Gap] = []
    offset = await _start(log, query, limit, gaps, newest=wanted is None)
    found = await browse(
        context.broker.pages.decoder,
        log,
        offset,
        limit=limit,
        bytes_max=BYTES_MAX,
        content=wanted,
        aborted=aborted_of(context, row, log),
        gaps=gaps,
    )
    if found.next_offset >= log.end_offset:
        gaps += unserved(log)
    rendered = await _rendered(row, partition, found.records)
    return messages_response(
        rendered,
        {
            "partition": partition,
            "start": log.start_offset,
            "end": log.stable_end,
            "from": offset,
            "next": found.next_offset,
            "scanned": found.scanned,
            "gaps": [gap._asdict() for gap in gaps],
        },
    )


async def _rendered(row: Row, partition: int, records: Sequence[Record]) -> list[bytes]:
    return await YieldEvery().map(lambda record: encode(record_json(row, partition, record)), records, step=1)


def messages_json(rendered: Sequence[bytes], facts: JsonObject) -> list[bytes]:
    """A JSON object with the encoded messages and other fields, in pieces: encoding all at once would hold the GIL."""
    listed = [piece for message in rendered for piece in (b",", message)][1:]
    return [b'{"messages":[', *listed, b"],", encode(facts)[1:]]


def messages_response(rendered: Sequence[bytes], facts: JsonObject) -> Response:
    return pieces_response(messages_json(rendered, facts), {"cache-control": "no-store"}, JSON)


async def _last_of_key(context: HttpContext, row: Row, query: dict[str, str]) -> Response:
    """Finds the last message of a key through the key index, in any partition and without a scan."""
    if row.stream is None or not query.get("key"):
        raise InvalidInput("last requires a key and a topic with the setting key_index")
    try:
        found = await context.broker.keys.find(row.stream, query["key"].encode())
    except KeyNotFound:
        return json_response({"messages": []})
    return json_response({"messages": [record_json(row, found.partition, found.record)]})


def aborted_of(context: HttpContext, row: Row, log: Partition) -> Aborts:
    """Aborted records, which are not shown. A queue without a stream is in memory and takes no transactions."""
    return NO_ABORTS if row.stream is None else context.broker.coordination.producers.aborted(log.log_id)


def _wanted(query: dict[str, str]) -> Callable[[Record], bool] | None:
    tests = []
    if query.get("key"):
        tests.append(has_key(query["key"]))
    if query.get("contains"):
        tests.append(contains(query["contains"]))
    if not tests:
        return None
    return lambda record: all(test(record) for test in tests)


async def _start(log: Partition, query: dict[str, str], limit: int, gaps: list[Gap], *, newest: bool) -> int:
    if query.get("offset"):
        return number(query["offset"], "offset")
    if query.get("timestamp") and log.is_durable:
        return await find_time(log, number(query["timestamp"], "timestamp"), gaps)
    start = log.start_offset
    return max(start, log.stable_end - limit) if newest else start


def _positions(last: str, logs: Sequence[Partition]) -> list[int]:
    """Offsets to continue at: those of the last event id that the client saw, or the ends."""
    offsets = [whole_number(text) for text in last.split(",")]
    ends = [log.stable_end for log in logs]
    if len(offsets) != len(ends):
        return ends
    return [
        end if at is None else min(max(at, log.start_offset), end)
        for at, end, log in zip(offsets, ends, logs, strict=True)
    ]


class TailResponse(EventStreamResponse):
    """Follows all partitions from their ends. A client that is too slow gets the number of messages it missed."""

    def __init__(self, context: HttpContext, request: Request, row: Row) -> None:
        super().__init__(context, request)
        self._row = row
        self._at = _positions(request.headers.get("last-event-id", ""), row.partitions)

    async def send_events(self) -> None:
        self._check_exists()
        for chunk in in_chunks(await self._new_events()):
            await self.send(chunk)
        await asyncio.wait({self._gone, self._context.stopping}, timeout=TAIL_INTERVAL_S)
        if not self._gone.done() and not await self._wait():
            await self.send(events.HEARTBEAT)

    def encode(self, content: Any) -> bytes:
        return encode(content)

    def _check_exists(self) -> None:
        """QueueNotFound after a deletion, even if a queue of the same name was created since."""
        row = self._row
        followed: Any = row.queue if row.stream is None else row.stream
        if followed.is_deleted:
            raise QueueNotFound(row.vhost, row.name)

    def _logs(self) -> list[Partition]:
        logs = self._row.partitions
        self._at += [log.start_offset for log in logs[len(self._at) :]]  # partitions that were added since
        return logs

    async def _wait(self) -> bool:
        """Waits for new messages or the end of the stream; False when it is time for a heartbeat."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        waiters = [
            log.wait(at, lambda: None if ready.done() else ready.set_result(None))
            for log, at in zip(self._logs(), self._at, strict=True)
        ]
        try:
            return await self.wait_for(ready, HEARTBEAT_S)
        finally:
            for waiter in waiters:
                waiter.cancel()

    async def _new_events(self) -> list[bytes]:
        """Events, in pieces."""
        data: list[bytes] = []
        for partition, log in enumerate(self._logs()):
            start, end = self._at[partition], log.stable_end
            if start >= end:
                continue
            first = max(start, end - TAIL_MESSAGES)
            gaps: list[Gap] = []
            found = await browse(
                self._context.broker.pages.decoder,
                log,
                first,
                limit=TAIL_MESSAGES,
                bytes_max=BYTES_MAX,
                aborted=aborted_of(self._context, self._row, log),
                gaps=gaps,
            )
            # Large messages may exceed the size of one event: the next event continues with the rest.
            self._at[partition] = min(end, found.next_offset) if found.next_offset > first else end
            facts = {"skipped": first - start, "partition": partition, "gaps": [gap._asdict() for gap in gaps]}
            rendered = await _rendered(self._row, partition, found.records)
            data += (events.begin(",".join(map(str, self._at))), *messages_json(rendered, facts), events.END)
        return data


async def tail(context: HttpContext, request: Request) -> Response:
    return TailResponse(context, request, row_of(context, request))
