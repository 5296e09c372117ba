"""Queues: list, declare, describe, delete, purge, and get messages."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message, from_record
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.http.management import message_stats, parameters, representations
from headrace.listeners.http.management.parameters import (
    JsonObject,
    body_of,
    flag,
    json_response,
    listing,
    name_of,
    number,
    object_response,
    table,
)
from headrace.listeners.http.management.representations import message_json, payload_json_bytes, payload_pieces
from headrace.listeners.http.management.visibility import visible_hosts
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, pieces_response
from headrace.listeners.http.server.rendering import in_read_thread
from headrace.wire.http.bodies import JSON
from headrace.wire.http.messages import LARGE_BYTES

GET_COUNT_MAX = 1000
GET_BYTES_MAX = 16 << 20
ACK_MODES = ("ack_requeue_true", "reject_requeue_true", "ack_requeue_false", "reject_requeue_false")


def host_of(context: HttpContext, request: Request) -> VirtualHost:
    return context.broker.vhosts.get(name_of(request, "vhost"))


def queue_of(context: HttpContext, request: Request) -> Queue:
    host, name = host_of(context, request), name_of(request, "name")
    found = host.queues.get(name)
    return host.queue(name, found.owner if found is not None else None)


def all_queues(context: HttpContext, hosts: Iterable[VirtualHost]) -> list[Queue]:
    """All queues by name, including topics with one partition: AMQP clients see those as queues."""
    found: list[Queue] = []
    for host in hosts:
        for stream in context.broker.streams:
            if stream.kind == "topic" and stream.vhost == host.name:
                host.find_topic(stream.name)
        found += map(host.queues.__getitem__, sorted(host.queues))
    return found


async def list_all(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, all_queues(context, visible_hosts(context, request)))


async def list_in_vhost(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, all_queues(context, [host_of(context, request)]))


async def _list(context: HttpContext, request: Request, queues: Iterable[Queue]) -> Response:
    with_samples = _wants_samples(request)
    return await listing(
        context,
        request,
        queues,
        lambda queue: representations.queue_json(context, queue, with_samples=with_samples),
        name=lambda queue: queue.name,
        quick=representations.QUEUE_COLUMNS,
    )


def _wants_samples(request: Request) -> bool:
    query = parameters.query_of(request)
    return "lengths_age" in query and "lengths_incr" in query


async def get(context: HttpContext, request: Request) -> Response:
    queue = queue_of(context, request)
    await message_stats.load_head(queue)
    shape = representations.queue_json(context, queue, with_samples=_wants_samples(request))
    shape["consumer_details"] = [
        consumer
        for client in context.broker.clients.all()
        for consumer in client.describe_consumers()
        if consumer["queue"] == {"name": queue.name, "vhost": queue.vhost.name}
    ]
    shape["incoming"], shape["deliveries"] = [], []
    shape["garbage_collection"] = {}
    return object_response(request, shape)


async def put(context: HttpContext, request: Request) -> Response:
    host, name = host_of(context, request), name_of(request, "name")
    fields = await body_of(request)
    known = name in host.queues
    arguments = table(fields.get("arguments"), "arguments")
    if fields.get("queue_type"):
        arguments.setdefault("x-queue-type", fields["queue_type"])
    dead_letter_exchange = arguments.get("x-dead-letter-exchange")
    if isinstance(dead_letter_exchange, str) and not known:
        # Dead-lettering moves messages from the queue to that exchange, so as in AMQP it needs both permissions.
        caller_of(request).read(name, host.name)
        caller_of(request).write(dead_letter_exchange, host.name)
    await host.declare_queue(
        name,
        durable=flag(fields.get("durable"), True),
        exclusive=False,
        auto_delete=flag(fields.get("auto_delete")),
        arguments=arguments,
        owner=None,
    )
    return parameters.created(new=not known)


async def delete(context: HttpContext, request: Request) -> Response:
    queue, query = queue_of(context, request), parameters.query_of(request)
    await context.broker.vhosts.get(queue.vhost.name).delete_queue(
        queue.name,
        queue.owner,
        if_unused=flag(query.get("if-unused")),
        if_empty=flag(query.get("if-empty")),
    )
    return parameters.no_content()


async def purge(context: HttpContext, request: Request) -> Response:
    queue = queue_of(context, request)
    await queue.purge()
    return parameters.no_content()


async def bindings(context: HttpContext, request: Request) -> Response:
    queue = queue_of(context, request)
    return json_response(queue_bindings(context.broker.vhosts.get(queue.vhost.name), queue))


def queue_bindings(host: VirtualHost, queue: Queue) -> list[JsonObject]:
    return [
        representations.default_binding_json(host.name, queue.name),
        *(representations.binding_json(host.name, binding) for binding in host.routing.bindings_to(queue)),
    ]


async def actions(context: HttpContext, request: Request) -> Response:
    """Accepts sync and cancel_sync, which have no effect without mirrored queues."""
    queue_of(context, request)
    return parameters.no_content()


async def get_messages(context: HttpContext, request: Request) -> Response:
    queue = queue_of(context, request)
    fields = await body_of(request)
    count = number(fields.get("count"), "count", 1, least=1, most=GET_COUNT_MAX)
    mode = fields.get("ackmode")
    if mode is None:
        mode = "ack_requeue_true" if flag(fields.get("requeue"), True) else "ack_requeue_false"
    if mode not in ACK_MODES:
        raise InvalidInput(f"ackmode must be one of {', '.join(ACK_MODES)}")
    encoding = fields.get("encoding") or "auto"
    if encoding not in ("auto", "base64"):
        raise InvalidInput("encoding must be auto or base64")
    truncate = number(fields.get("truncate"), "truncate", GET_BYTES_MAX)
    taken = await _peek_stream(context, queue, count) if queue.is_stream else await _take(queue, count, mode, truncate)
    always_base64 = encoding == "base64"
    pieces, turns = [b"["], YieldEvery()
    for message, redelivered, remaining in taken:
        shape = message_json(message, redelivered=redelivered, remaining=remaining)
        payload = memoryview(message.body)[:truncate]
        if len(payload) <= LARGE_BYTES:
            pieces += payload_pieces(shape, payload, always_base64=always_base64)
        else:
            pieces += await in_read_thread(partial(payload_pieces, shape, payload, always_base64=always_base64))
        pieces.append(b",")
        await turns.maybe_yield()
    pieces[-1:] = [b"]"] if taken else [b"[]"]
    return pieces_response(pieces, {"cache-control": "no-store"}, JSON)


async def _take(queue: Queue, count: int, mode: str, payload_bytes_max: int) -> list[tuple[Message, bool, int]]:
    """Takes messages; each with its redelivered flag and the number of messages still ready after it."""
    taken: list[Any] = []
    size = 0
    queue.vhost.flushes.flush_memory()
    try:
        while len(taken) < count and size < GET_BYTES_MAX:
            await queue.prepare_get()
            found = queue.get()
            if found is None:
                break
            taken.append((*found, queue.ready))
            size += payload_json_bytes(memoryview(found[2].body)[:payload_bytes_max])
    except HeadraceError:
        if not taken:
            raise
        # Finish the taken ones first: nothing else would return them to the queue.
    except BaseException:  # the client is gone
        for view, offset, *_ in taken:
            queue.give_back(view, offset, counts=False)
        raise
    for view, offset, _, _, _ in taken:
        if mode.endswith("requeue_true"):
            # Getting a message through this API does not count towards the delivery limit.
            queue.give_back(view, offset, counts=False)
        elif mode == "ack_requeue_false":
            queue.settle(view, offset, offset + 1)
        else:
            queue.reject(view, offset)
    await queue.rejects_moved()
    # Even if other parts of the flush failed, these messages are taken and must be returned to the caller.
    await queue.vhost.flushes.wait_flushed()
    return [(message, redelivered, remaining) for _, _, message, redelivered, remaining in taken]


async def _peek_stream(context: HttpContext, queue: Queue, count: int) -> list[tuple[Message, bool, int]]:
    """The first messages of a stream, which are not consumed."""
    stream = context.broker.streams.get(queue.name, queue.vhost.name)
    partition = stream.partitions[0]
    start = partition.start_offset
    page = await context.broker.read(stream, partition, start, limit=count, bytes_max=GET_BYTES_MAX)
    end = partition.end_offset
    return [(from_record(record), False, end - record.offset - 1) for record in page.records]
