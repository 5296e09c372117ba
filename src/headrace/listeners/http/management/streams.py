"""Streams (topics and queues in one list) and their readers, under /api/headrace: not part of RabbitMQ's API."""

from collections.abc import Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.queue import Queue
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.streams import Stream
from headrace.broker.types.vhost_names import DEFAULT
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.config import stream_settings_text
from headrace.errors import NotFound, QueueNotFound
from headrace.listeners.http.management import representations
from headrace.listeners.http.management.parameters import (
    JsonObject,
    json_response,
    listing,
    name_of,
    object_response,
    query_of,
)
from headrace.listeners.http.management.queues import queue_bindings
from headrace.listeners.http.management.visibility import visible_hosts
from headrace.listeners.http.server.context import HttpContext


class Row:
    """One row of the list: a stream, a queue, or a queue with its stream."""

    __slots__ = ("name", "queue", "stream", "vhost")

    def __init__(self, vhost: str, name: str, stream: Stream | None, queue: Queue | None) -> None:
        self.vhost, self.name, self.stream, self.queue = vhost, name, stream, queue

    @property
    def kind(self) -> str:
        if self.stream is not None and self.stream.kind == "topic":
            return "topic"
        return "queue"

    @property
    def partitions(self) -> list[Partition]:
        if self.stream is not None:
            return self.stream.partitions
        assert self.queue is not None
        return [view.partition for view in reversed(self.queue.views)]

    @property
    def size_bytes(self) -> int:
        return sum(partition.size_bytes for partition in self.partitions)

    @property
    def records(self) -> int:
        return sum(partition.end_offset - partition.start_offset for partition in self.partitions)

    @property
    def ready(self) -> int:
        return self.queue.ready if self.queue is not None and not self.queue.is_stream else 0

    @property
    def unacked(self) -> int:
        return self.queue.unacked if self.queue is not None else 0

    @property
    def consumers(self) -> int:
        return len(self.queue.consumers) if self.queue is not None else 0


SORT_COLUMNS = {
    "name": lambda row: row.name,
    "kind": lambda row: row.kind,
    "vhost": lambda row: row.vhost,
    "size_bytes": lambda row: row.size_bytes,
    "records": lambda row: row.records,
    "ready": lambda row: row.ready,
    "unacked": lambda row: row.unacked,
    "consumers": lambda row: row.consumers,
    "partitions": lambda row: len(row.partitions),
}


async def rows(context: HttpContext, hosts: Iterable[VirtualHost]) -> list[Row]:
    yielding = YieldEvery()
    seen = {host.name: host for host in hosts}
    streams = [stream for stream in context.broker.streams if stream.vhost in seen]
    queues = [(vhost, name, queue) for vhost, host in seen.items() for name, queue in host.queues.items()]
    found: dict[str, dict[str, Row]] = {}
    async for stream in yielding.each(streams):
        found.setdefault(stream.vhost, {})[stream.name] = Row(stream.vhost, stream.name, stream, None)
    async for vhost, name, queue in yielding.each(queues):
        in_vhost = found.setdefault(vhost, {})
        row = in_vhost.get(name)
        if row is None:
            in_vhost[name] = Row(vhost, name, None, queue)
        else:
            row.queue = queue
    ordered: list[Row] = []
    for _, in_vhost in sorted(found.items()):
        await yielding.maybe_yield()
        ordered += map(in_vhost.__getitem__, sorted(in_vhost))
    return ordered


def row_json(context: HttpContext, row: Row) -> JsonObject:
    queue, stream = row.queue, row.stream
    end = sum(partition.end_offset for partition in row.partitions)
    counters = {"publish": float(end)}
    if queue is not None:
        counters |= {"deliver": float(queue.counts.deliver_get), "ack": float(queue.counts.ack)}
    rates = context.rates.of(("row", row.vhost, row.name), context.broker.clock.monotonic(), counters)
    settings = stream_settings_text(stream.settings) if stream is not None else {}
    return {
        "name": row.name,
        "vhost": row.vhost,
        "kind": row.kind,
        "type": queue.policy.kind if queue is not None else "stream",
        "durable": stream is not None,
        "exclusive": queue.exclusive if queue is not None else False,
        "partitions": len(row.partitions),
        "size_bytes": row.size_bytes,
        "records": row.records,
        "ready": row.ready,
        "unacked": row.unacked,
        "consumers": row.consumers,
        "retention": settings.get("retention") or settings.get("retention_ms"),
        "policy": queue.policy_name if queue is not None else None,
        "rates": {name: round(value, 2) for name, value in rates.items()},
    }


async def list_streams(context: HttpContext, request: Request) -> Response:
    kind = query_of(request).get("kind")
    found = [row for row in await rows(context, visible_hosts(context, request)) if not kind or row.kind == kind]
    return await listing(
        context, request, found, lambda row: row_json(context, row), name=lambda row: row.name, quick=SORT_COLUMNS
    )


def row_of(context: HttpContext, request: Request) -> Row:
    vhost, name = name_of(request, "vhost"), name_of(request, "name")
    host = context.broker.vhosts.get(vhost)
    stream, queue = context.broker.streams.find(name, vhost), host.queues.get(name)
    if queue is None and host.find_topic(name):
        queue = host.queues.get(name)
    if stream is None and queue is None:
        raise QueueNotFound(vhost, name)
    return Row(vhost, name, stream, queue)


async def get_stream(context: HttpContext, request: Request) -> Response:
    row = row_of(context, request)
    stream, queue = row.stream, row.queue
    shape = row_json(context, row)
    shape["settings"] = stream_settings_text(stream.settings) if stream is not None else {}
    shape["overrides"] = dict(stream.document.config) if stream is not None else {}
    shape["created"] = stream.document.created_ms if stream is not None else None
    shape["logs"] = [
        {
            "partition": number_,
            "start": partition.start_offset,
            "end": partition.end_offset,
            "size_bytes": partition.size_bytes,
            "segments": partition.segment_count,
        }
        for number_, partition in enumerate(row.partitions)
    ]
    shape["views"] = views_of(context, row)
    shape["queue"] = representations.queue_json(context, queue) if queue is not None else None
    shape["bindings"] = queue_bindings(context.broker.vhosts.get(queue.vhost.name), queue) if queue is not None else []
    shape["consumer_details"] = []
    if queue is not None:
        shape["consumer_details"] = [
            consumer
            for client in context.broker.clients.all()
            for consumer in client.describe_consumers()
            if consumer["queue"] == {"name": row.name, "vhost": row.vhost}
        ]
    return object_response(request, shape)


def views_of(context: HttpContext, row: Row) -> list[JsonObject]:
    """All readers of the stream and their lag: the queue itself, consumer groups and cursors."""
    found: list[JsonObject] = []
    queue = row.queue
    if queue is not None and not queue.is_stream:
        found.append({"kind": "queue", "name": queue.name, "lag": queue.ready + queue.unacked, "pin": True})
    if row.vhost == DEFAULT and row.stream is not None:
        groups = context.broker.coordination.groups
        for listed in groups.listing():
            lags = [
                max(0, row.stream.partitions[p].end_offset - one_.offset)
                for (topic, p), one_ in groups.offsets.of(listed.group_id).items()
                if topic == row.name and p < len(row.stream.partitions)
            ]
            if lags:
                found.append({"kind": "group", "name": listed.group_id, "lag": sum(lags), "pin": False})
    for name in context.broker.cursors.names():
        positions = [p for p in context.broker.cursors.positions(name) if p.stream is row.stream]
        if positions:
            pin = context.broker.cursors.get(name).pin
            found.append({"kind": "cursor", "name": name, "lag": sum(p.lag for p in positions), "pin": pin})
    return found


async def settings(context: HttpContext, request: Request) -> Response:
    from headrace.config import in_force

    return json_response([msgspec.to_builtins(setting) for setting in in_force(context.config)])


def partition_of(row: Row, number_: int) -> Partition:
    if not 0 <= number_ < len(row.partitions):
        raise NotFound(f"{row.name!r} has no partition {number_}; it has {len(row.partitions)}")
    return row.partitions[number_]
