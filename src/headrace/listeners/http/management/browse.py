"""Messages looked at without being touched, and followed as they come."""

import asyncio
import base64
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.streams.browse import Gap, browse, contains, find_time, has_key, state_of, unserved
from headrace.broker.streams.key_index import KeyNotFound
from headrace.broker.types.aborted_ranges import NO_ABORTS, Aborts
from headrace.broker.types.message import from_record, properties_of
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import HeadraceError, InvalidInput, QueueNotFound
from headrace.listeners.http.management.messages import properties_shape
from headrace.listeners.http.management.parameters import Shape, answer, encode, flag, number, query_of
from headrace.listeners.http.management.streams import Row, partition_log, row_of
from headrace.listeners.http.server.authorization import Allowance
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.requests import hung_up, whole_number
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER
from headrace.record.types import Record
from headrace.wire.http import bodies, events

LIMIT, LIMIT_MAX = 50, 500
BYTES_MAX = 4 << 20
VALUE_BYTES_MAX = 64 * 1024  # of one message; the whole one is at /topics
TAIL_INTERVAL_S = 0.25
TAIL_MESSAGES = 100  # of one interval: more cannot be read by anybody, the rest is counted
HEARTBEAT_S = 15.0
OURS = (AMQP_PROPERTIES_HEADER, AMQP_EXCHANGE_HEADER)


def text_or_base64(data: bytes | None) -> Shape | None:
    if data is None:
        return None
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def record_shape(row: Row, partition: int, record: Record, *, value_bytes_max: int = VALUE_BYTES_MAX) -> Shape:
    value = record.value
    shape: Shape = {
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": text_or_base64(record.key),
        "value": text_or_base64(value if value is None else value[:value_bytes_max]),
        "value_bytes": None if value is None else len(value),
        "truncated": value is not None and len(value) > value_bytes_max,
        "headers": [[name, text_or_base64(held)] for name, held in _further_headers(record)],
        "at_topics": row.stream is not None and row.vhost == DEFAULT,  # where all of the value is
    }
    if any(name in OURS for name, _ in record.headers):
        message = from_record(record)
        shape["amqp"] = {
            "exchange": message.exchange,
            "routing_key": message.routing_key,
            "properties": properties_shape(message.properties),
        }
    queue = row.queue
    if queue is not None and not queue.is_stream and partition < len(queue.views):
        shape["state"] = state_of(queue.views[len(queue.views) - 1 - partition], record.offset)
    return shape


def _further_headers(record: Record) -> Sequence[tuple[str, bytes | None]]:
    """What is not in the AMQP properties anyway."""
    if properties_of(record) is not None:
        return ()
    return [pair for pair in record.headers if pair[0] not in OURS]


async def messages(site: HttpContext, request: Request) -> Response:
    row, query = row_of(site, request), query_of(request)
    if flag(query.get("last")):
        return await _last_of_key(site, row, query)
    partition = number(query.get("partition"), "partition", 0)
    log = partition_log(row, partition)
    limit = number(query.get("limit"), "limit", LIMIT, least=1, most=LIMIT_MAX)
    wanted = _wanted(query)
    gaps: list[Gap] = []
    offset = await _start(log, query, limit, gaps, newest=wanted is None)
    found = await browse(
        log,
        offset,
        limit=limit,
        bytes_max=BYTES_MAX,
        decompressed_bytes_max=site.config.decompressed_bytes_max,
        wanted=wanted,
        aborted=aborted_of(site, row, log),
        gaps=gaps,
    )
    if found.next_offset >= log.visible_end:
        gaps += unserved(log)
    return answer(
        {
            "messages": [record_shape(row, partition, record) for record in found.records],
            "partition": partition,
            "start": log.start_offset,
            "end": log.stable_end,
            "from": offset,
            "next": found.next_offset,
            "scanned": found.scanned,
            "gaps": [gap._asdict() for gap in gaps],
        }
    )


async def _last_of_key(site: HttpContext, row: Row, query: dict[str, str]) -> Response:
    """By the index of keys: in whatever partition it is, without looking through any."""
    if row.stream is None or not query.get("key"):
        raise InvalidInput("last goes with a key, and with a topic that has an index of keys (key_index)")
    try:
        found = await site.broker.keys.find(row.stream, query["key"].encode())
    except KeyNotFound:
        return answer({"messages": []})
    return answer({"messages": [record_shape(row, found.partition, found.record)]})


def aborted_of(site: HttpContext, row: Row, log: Any) -> Aborts:
    """What not to show. A queue without a stream is in memory, where no transactions go."""
    return NO_ABORTS if row.stream is None else site.broker.coordination.producers.aborted(log)


def _wanted(query: dict[str, str]) -> Callable[[Record], bool] | None:
    tests = []
    if query.get("key"):
        tests.append(has_key(query["key"]))
    if query.get("contains"):
        tests.append(contains(query["contains"]))
    if not tests:
        return None
    return lambda record: all(test(record) for test in tests)


async def _start(log: Any, query: dict[str, str], limit: int, gaps: list[Gap], *, newest: bool) -> int:
    if query.get("offset"):
        return number(query["offset"], "offset")
    if query.get("timestamp") and hasattr(log, "offset_for_timestamp_now"):
        return await find_time(log, number(query["timestamp"], "timestamp"), gaps)
    start = int(log.start_offset)
    return max(start, int(log.stable_end) - limit) if newest else start


def _places(last: str, logs: Sequence[Any]) -> list[int]:
    """Where to go on: at the ends, or where an earlier answer got to, as its last event said."""
    said = [whole_number(text) for text in last.split(",")]
    ends = [int(log.stable_end) for log in logs]
    if len(said) != len(ends):
        return ends
    return [
        end if at is None else min(max(at, int(log.start_offset)), end)
        for at, end, log in zip(said, ends, logs, strict=True)
    ]


class Tail(Response):
    """What comes from now on, of all partitions. Whoever cannot keep up is told how much was left out."""

    def __init__(self, site: HttpContext, request: Request, row: Row) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, media_type=bodies.EVENTS)
        del self.headers["content-length"]
        self._site, self._row = site, row
        self._allowance = Allowance(site, request)
        self._at = _places(request.headers.get("last-event-id", ""), row.logs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        gone = asyncio.ensure_future(hung_up(receive))
        stopping = self._site.stopping
        try:
            await send({"type": "http.response.body", "body": events.HEARTBEAT, "more_body": True})
            while not (gone.done() or stopping.done()):
                self._allowance.check()
                self._check_there()
                for data in await self._news():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await asyncio.wait({gone, stopping}, timeout=TAIL_INTERVAL_S)
                if not gone.done() and not await self._wait(gone):
                    await send({"type": "http.response.body", "body": events.HEARTBEAT, "more_body": True})
        except HeadraceError as error:
            data = events.event(encode({"detail": str(error)}), "", "error")
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _check_there(self) -> None:
        """QueueNotFound when it was deleted: one of the same name that is made afterwards is another one."""
        row = self._row
        followed: Any = row.queue if row.stream is None else row.stream
        if followed.is_deleted:
            raise QueueNotFound(row.vhost, row.name)

    def _logs(self) -> list[Any]:
        logs = self._row.logs
        self._at += [log.start_offset for log in logs[len(self._at) :]]  # partitions that were added meanwhile
        return logs

    async def _wait(self, gone: "asyncio.Future[None]") -> bool:
        """True when there is something new or an end to it, False after a while without."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        waiters = [
            log.wait(at, lambda: None if ready.done() else ready.set_result(None))
            for log, at in zip(self._logs(), self._at, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(
                {ready, gone, self._site.stopping}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
            )
            return bool(done)
        finally:
            for waiter in waiters:
                waiter.cancel()

    async def _news(self) -> list[bytes]:
        data = []
        for partition, log in enumerate(self._logs()):
            start, end = self._at[partition], log.stable_end
            if start >= end:
                continue
            first = max(start, end - TAIL_MESSAGES)
            gaps: list[Gap] = []
            found = await browse(
                log,
                first,
                limit=TAIL_MESSAGES,
                bytes_max=BYTES_MAX,
                decompressed_bytes_max=self._site.config.decompressed_bytes_max,
                aborted=aborted_of(self._site, self._row, log),
                gaps=gaps,
            )
            # Large messages are more than one answer may hold: the rest of them is the next one's.
            self._at[partition] = min(end, found.next_offset) if found.next_offset > first else end
            content = {
                "messages": [record_shape(self._row, partition, record) for record in found.records],
                "skipped": first - start,
                "partition": partition,
                "gaps": [gap._asdict() for gap in gaps],
            }
            data.append(events.event(encode(content), ",".join(map(str, self._at))))
        return data


async def tail(site: HttpContext, request: Request) -> Response:
    return Tail(site, request, row_of(site, request))
