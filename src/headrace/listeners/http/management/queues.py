"""Queues: list, declare, look at, delete, purge, get."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message, from_record
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.http.management import parameters, representations
from headrace.listeners.http.management.messages import message_shape
from headrace.listeners.http.management.parameters import (
    Shape,
    answer,
    body_of,
    flag,
    listing,
    name_of,
    number,
    one,
    table,
)
from headrace.listeners.http.management.visibility import hosts_seen
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext

GET_COUNT_MAX = 1000
GET_BYTES_MAX = 16 << 20
ACK_MODES = ("ack_requeue_true", "reject_requeue_true", "ack_requeue_false", "reject_requeue_false")


def host_of(site: HttpContext, request: Request) -> VirtualHost:
    return site.broker.vhosts.get(name_of(request, "vhost"))


def queue_of(site: HttpContext, request: Request) -> Queue:
    host, name = host_of(site, request), name_of(request, "name")
    found = host.queues.get(name)
    return host.queue(name, found.owner if found is not None else None)


def all_queues(site: HttpContext, hosts: Iterable[VirtualHost]) -> list[Queue]:
    """In the order of their names, topics of one partition among them: each is a queue to AMQP clients."""
    found: list[Queue] = []
    for host in hosts:
        for stream in site.broker.streams:
            if stream.kind == "topic" and stream.vhost == host.name:
                host.find_topic(stream.name)
        found += map(host.queues.__getitem__, sorted(host.queues))
    return found


async def list_all(site: HttpContext, request: Request) -> Response:
    return await _list(site, request, all_queues(site, hosts_seen(site, request)))


async def list_in_vhost(site: HttpContext, request: Request) -> Response:
    return await _list(site, request, all_queues(site, [host_of(site, request)]))


async def _list(site: HttpContext, request: Request, queues: Iterable[Queue]) -> Response:
    return await listing(
        site,
        request,
        queues,
        lambda queue: representations.queue_shape(site, queue),
        name=lambda queue: queue.name,
        quick=representations.QUEUE_COLUMNS,
    )


async def get(site: HttpContext, request: Request) -> Response:
    queue = queue_of(site, request)
    shape = representations.queue_shape(site, queue)
    shape["consumer_details"] = [
        consumer
        for client in site.broker.clients.all()
        for consumer in client.describe_consumers()
        if consumer["queue"] == {"name": queue.name, "vhost": queue.vhost.name}
    ]
    shape["incoming"], shape["deliveries"] = [], []
    shape["garbage_collection"] = {}
    return one(request, shape)


async def put(site: HttpContext, request: Request) -> Response:
    host, name = host_of(site, request), name_of(request, "name")
    fields = await body_of(request)
    known = name in host.queues
    arguments = table(fields.get("arguments"), "arguments")
    if fields.get("queue_type"):
        arguments.setdefault("x-queue-type", fields["queue_type"])
    dead_letters_to = arguments.get("x-dead-letter-exchange")
    if isinstance(dead_letters_to, str) and not known:
        # What the queue takes leaves it by that exchange: as in AMQP, whoever wants that may do both.
        caller_of(request).read(name, host.name)
        caller_of(request).write(dead_letters_to, host.name)
    await host.declare_queue(
        name,
        durable=flag(fields.get("durable"), True),
        exclusive=False,
        auto_delete=flag(fields.get("auto_delete")),
        arguments=arguments,
        owner=None,
    )
    return parameters.created(new=not known)


async def delete(site: HttpContext, request: Request) -> Response:
    queue, query = queue_of(site, request), parameters.query_of(request)
    await site.broker.vhosts.get(queue.vhost.name).delete_queue(
        queue.name,
        queue.owner,
        if_unused=flag(query.get("if-unused")),
        if_empty=flag(query.get("if-empty")),
    )
    return parameters.no_content()


async def purge(site: HttpContext, request: Request) -> Response:
    queue = queue_of(site, request)
    await queue.purge()
    return parameters.no_content()


async def bindings(site: HttpContext, request: Request) -> Response:
    queue = queue_of(site, request)
    return answer(queue_bindings(site.broker.vhosts.get(queue.vhost.name), queue))


def queue_bindings(host: VirtualHost, queue: Queue) -> list[Shape]:
    return [
        representations.default_binding_shape(host.name, queue.name),
        *(representations.binding_shape(host.name, binding) for binding in host.routing.bindings_to(queue)),
    ]


async def actions(site: HttpContext, request: Request) -> Response:
    """sync and cancel_sync mean mirrors, which there are none of."""
    queue_of(site, request)
    return parameters.no_content()


async def get_messages(site: HttpContext, request: Request) -> Response:
    queue = queue_of(site, request)
    fields = await body_of(request)
    count = number(fields.get("count"), "count", 1, least=1, most=GET_COUNT_MAX)
    mode = fields.get("ackmode")
    if mode is None:
        mode = "ack_requeue_true" if flag(fields.get("requeue"), True) else "ack_requeue_false"
    if mode not in ACK_MODES:
        raise InvalidInput(f"ackmode is one of {', '.join(ACK_MODES)}")
    encoding = fields.get("encoding") or "auto"
    if encoding not in ("auto", "base64"):
        raise InvalidInput("encoding is auto or base64")
    truncate = number(fields.get("truncate"), "truncate", GET_BYTES_MAX)
    taken = await _peek_stream(site, queue, count) if queue.is_stream else await _take(queue, count, mode)
    return answer(
        [
            message_shape(message, redelivered=redelivered, left=left, base64_always=encoding == "base64", cut=truncate)
            for message, redelivered, left in taken
        ]
    )


async def _take(queue: Queue, count: int, mode: str) -> list[tuple[Message, bool, int]]:
    """Messages, whether they were delivered before, and how many are ready behind each."""
    taken: list[Any] = []
    size = 0
    queue.vhost.flushes.flush_memory()
    while len(taken) < count and size < GET_BYTES_MAX:
        try:
            found = queue.get()
        except HeadraceError:
            if not taken:
                raise
            break  # these first: they are out, and nobody else would ever give them back
        if found is None:
            break
        taken.append((*found, queue.ready))
        size += len(found[2].body)
    for view, offset, _, _, _ in taken:
        if mode.endswith("requeue_true"):
            # Looking at a message through this API is no delivery: it counts towards no limit.
            queue.give_back(view, offset, counts=False)
        elif mode == "ack_requeue_false":
            queue.settle(view, offset, offset + 1)
        else:
            queue.reject(view, offset)
    await queue.rejects_moved()
    await queue.vhost.flushes.wait_flushed()  # even if it fails: these are out, and nobody else would see them
    return [(message, redelivered, left) for _, _, message, redelivered, left in taken]


async def _peek_stream(site: HttpContext, queue: Queue, count: int) -> list[tuple[Message, bool, int]]:
    """A stream is not consumed: its first messages, and they stay."""
    stream = site.broker.streams.get(queue.name, queue.vhost.name)
    partition = stream.partitions[0]
    start = partition.start_offset
    page = await site.broker.read(stream, partition, start, limit=count, bytes_max=GET_BYTES_MAX)
    end = partition.end_offset
    return [(from_record(record), False, end - record.offset - 1) for record in page.records]
