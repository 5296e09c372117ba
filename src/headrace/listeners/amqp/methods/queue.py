"""queue.declare, delete, bind, unbind, purge. An empty name means the last queue declared on the channel."""

from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from pamqp import commands

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.queue import Queue
from headrace.broker.vhosts.declarations import NewQueue, QueueDeclared, server_name
from headrace.errors import HeadraceError, NotFound, QueueNotFound
from headrace.listeners.amqp.access import EXCHANGE, QUEUE
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.direct_reply import PREFIX, PSEUDO_QUEUE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.session import Session
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import NOT_FOUND, PRECONDITION_FAILED


def check_name(name: str) -> str:
    """Accepts any name without a NUL character, which would end it for many tools. The decoder checks the UTF-8."""
    if "\0" in name:
        raise ChannelError(PRECONDITION_FAILED, "a name cannot contain a NUL character")
    # RabbitMQ removes line breaks from names, so that they cannot forge lines of its log.
    return name.replace("\r", "").replace("\n", "")


def queue_name(channel: Channel, name: str) -> str:
    if name:
        return name
    if not channel.last_queue:
        raise ChannelError(NOT_FOUND, "no previously declared queue")
    return channel.last_queue


def find(channel: Channel, name: str) -> Queue:
    return channel.session.vhost.queue(queue_name(channel, name), channel.session)


def find_to_read(channel: Channel, name: str) -> Queue:
    """Checks the permission before the lookup, so that a user without it does not learn whether the queue exists."""
    channel.session.access.read(QUEUE, queue_name(channel, name))
    return find(channel, name)


async def declare(channel: Channel, method: commands.Queue.Declare) -> None:
    session = channel.session
    await channel.connection.flushed()
    if not channel.is_open:
        return  # closed while it waited: an exclusive queue created now would be locked for ever
    name = check_name(method.queue)
    if name == PSEUDO_QUEUE or name.startswith(PREFIX):
        _declare_reply(channel, name, method)
        return
    arguments: dict[str, Any] = method.arguments
    if method.passive:
        name = queue_name(channel, name)
        session.access.look_at(QUEUE, name)
        queue = session.vhost.queue(name, session)
        queue.used()
    else:
        is_server_named = not name
        name = name or server_name()
        _check_declare(session, name, arguments)
        queue = await session.vhost.declare_queue(
            name,
            durable=method.durable,
            exclusive=method.exclusive,
            auto_delete=method.auto_delete,
            arguments=arguments,
            owner=session,
            is_server_named=is_server_named,
        )
        if session.is_closed:  # its exclusive queues were deleted before this one existed
            if queue.exclusive:
                session.vhost.forget_queue(queue)
            return
    channel.last_queue = queue.name
    if not method.nowait:
        channel.write(
            frame(
                channel.number,
                commands.Queue.DeclareOk,
                queue=queue.name,
                message_count=queue.ready,
                consumer_count=len(queue.consumers),
            )
        )


def declare_together(
    channel: Channel, methods: Iterable[commands.Queue.Declare]
) -> tuple[int, Coroutine[Any, Any, None] | None]:
    """Declares the durable queues that the first of these methods create, with few syncs. Returns the number of those
    methods; the others, and those that are refused, must be run one by one."""
    chosen: list[commands.Queue.Declare] = []
    new: dict[str, NewQueue] = {}
    for method in methods:
        declared = _new_queue(channel.session, method)
        if declared is None or method.queue in new:
            break
        new[method.queue] = declared
        chosen.append(method)
    if len(chosen) < 2:
        return 0, None
    return len(chosen), _declare_all(channel, chosen, new)


def _new_queue(session: Session, method: commands.Queue.Declare) -> NewQueue | None:
    name = method.queue
    try:
        if method.passive or not name or check_name(name) != name:
            return None
        _check_declare(session, name, method.arguments)
        declared = QueueDeclared(method.durable, method.exclusive, method.auto_delete, method.arguments)
        return session.vhost.check_new(name, declared)
    except HeadraceError:  # raised again, and reported, when the method is run
        return None


async def _declare_all(channel: Channel, methods: list[commands.Queue.Declare], new: Mapping[str, NewQueue]) -> None:
    await channel.connection.flushed()
    if channel.is_open:
        await channel.session.vhost.declare_new(new)
    async for method in YieldEvery().each(methods):
        await declare(channel, method)


def _check_declare(session: Session, name: str, arguments: dict[str, Any]) -> None:
    session.access.configure(QUEUE, name)
    dead_letters = arguments.get("x-dead-letter-exchange")
    if isinstance(dead_letters, str) and session.vhost.is_new_queue(name, arguments):
        session.access.read(QUEUE, name)
        session.access.write(EXCHANGE, dead_letters)


def _declare_reply(channel: Channel, name: str, method: commands.Queue.Declare) -> None:
    """Tells a responder whether the requester still expects a reply."""
    waiting = name == PSEUDO_QUEUE or channel.context.replies.find(name) is not None
    if not waiting:
        raise QueueNotFound(channel.session.vhost.name, name)
    if not method.nowait:
        channel.write(frame(channel.number, commands.Queue.DeclareOk, queue=name, message_count=0, consumer_count=1))


async def delete(channel: Channel, method: commands.Queue.Delete) -> None:
    session = channel.session
    await channel.connection.flushed()
    name = queue_name(channel, method.queue)
    session.access.configure(QUEUE, name)
    count = await session.vhost.delete_queue(name, session, if_unused=method.if_unused, if_empty=method.if_empty)
    if not method.nowait:
        channel.write(frame(channel.number, commands.Queue.DeleteOk, message_count=count))


def _key(channel: Channel, method: commands.Queue.Bind | commands.Queue.Unbind) -> str:
    """The abbreviation for the last declared queue extends to the key if both names are empty."""
    return method.routing_key if method.queue or method.routing_key else channel.last_queue


async def bind(channel: Channel, method: commands.Queue.Bind) -> None:
    key = _key(channel, method)
    _check_bind(channel, method.queue, method.exchange, key)
    queue = find(channel, method.queue)
    arguments: Any = method.arguments
    await channel.session.vhost.bind(method.exchange, queue, key, arguments)
    if not method.nowait:
        channel.write(frame(channel.number, commands.Queue.BindOk))


def _check_bind(channel: Channel, queue: str, source: str, key: str) -> None:
    session = channel.session
    exchange = session.vhost.routing.exchanges.get(source)
    session.access.bind(QUEUE, queue_name(channel, queue), source, exchange, key)


async def unbind(channel: Channel, method: commands.Queue.Unbind) -> None:
    key = _key(channel, method)
    _check_bind(channel, method.queue, method.exchange, key)
    arguments: Any = method.arguments
    try:
        await channel.session.vhost.unbind(method.exchange, find(channel, method.queue), key, arguments)
    except NotFound:
        pass  # not an error, as in RabbitMQ since 3.2: clients clean up bindings that are already gone
    channel.write(frame(channel.number, commands.Queue.UnbindOk))


async def purge(channel: Channel, method: commands.Queue.Purge) -> None:
    await channel.connection.flushed()
    count = await find_to_read(channel, method.queue).purge()
    if not method.nowait:
        channel.write(frame(channel.number, commands.Queue.PurgeOk, message_count=count))
