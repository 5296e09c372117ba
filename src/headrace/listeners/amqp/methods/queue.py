"""queue.declare, delete, bind, unbind, purge. An empty name means the queue declared last on the channel."""

from typing import TYPE_CHECKING, Any

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.vhosts.declarations import server_name
from headrace.errors import NotFound, QueueNotFound
from headrace.listeners.amqp.access import EXCHANGE, QUEUE
from headrace.listeners.amqp.direct_reply import PREFIX, PSEUDO_QUEUE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.handshake import Stage
from headrace.listeners.amqp.methods.names import check_name
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import NOT_FOUND

if TYPE_CHECKING:
    from headrace.listeners.amqp.channel import Channel
    from headrace.listeners.amqp.connection import Connection


def queue_name(channel: "Channel", name: str) -> str:
    if name:
        return name
    if not channel.last_queue:
        raise ChannelError(NOT_FOUND, "no previously declared queue")
    return channel.last_queue


def find(channel: "Channel", name: str) -> Queue:
    return channel.connection.vhost.queue(queue_name(channel, name), channel.connection)


def find_to_read(channel: "Channel", name: str) -> Queue:
    """Asked before it is looked up: whoever may not read it does not learn whether it is there."""
    channel.connection.access.read(QUEUE, queue_name(channel, name))
    return find(channel, name)


async def declare(channel: "Channel", method: commands.Queue.Declare) -> None:
    connection = channel.connection
    await connection.flushed()
    if not channel.is_open:
        return  # gone while we waited: an exclusive queue made now would be locked for ever
    name = check_name(method.queue)
    if name == PSEUDO_QUEUE or name.startswith(PREFIX):
        _declare_reply(channel, name, method)
        return
    arguments: dict[str, Any] = method.arguments
    if method.passive:
        name = queue_name(channel, name)
        connection.access.look_at(QUEUE, name)
        queue = connection.vhost.queue(name, connection)
        queue.used()
    else:
        is_server_named = not name
        name = name or server_name()
        _check_declare(connection, name, arguments)
        queue = await connection.vhost.declare_queue(
            name,
            durable=method.durable,
            exclusive=method.exclusive,
            auto_delete=method.auto_delete,
            arguments=arguments,
            owner=connection,
            is_server_named=is_server_named,
        )
        if connection.stage is Stage.CLOSED:  # while it was made: its exclusive queues went before this one was there
            if queue.exclusive:
                connection.vhost.forget_queue(queue)
            return
    channel.last_queue = queue.name
    if not method.nowait:
        connection.write(
            frame(
                channel.number,
                commands.Queue.DeclareOk,
                queue=queue.name,
                message_count=queue.ready,
                consumer_count=len(queue.consumers),
            )
        )


def _check_declare(connection: "Connection", name: str, arguments: dict[str, Any]) -> None:
    connection.access.configure(QUEUE, name)
    dead_letters = arguments.get("x-dead-letter-exchange")
    if isinstance(dead_letters, str) and connection.vhost.is_new_queue(name, arguments):
        connection.access.read(QUEUE, name)
        connection.access.write(EXCHANGE, dead_letters)


def _declare_reply(channel: "Channel", name: str, method: commands.Queue.Declare) -> None:
    """Asking whether somebody still waits for an answer."""
    waiting = name == PSEUDO_QUEUE or channel.connection.listener.replies.find(name) is not None
    if not waiting:
        raise QueueNotFound(channel.connection.vhost.name, name)
    if not method.nowait:
        channel.connection.write(
            frame(channel.number, commands.Queue.DeclareOk, queue=name, message_count=0, consumer_count=1)
        )


async def delete(channel: "Channel", method: commands.Queue.Delete) -> None:
    connection = channel.connection
    await connection.flushed()
    name = queue_name(channel, method.queue)
    connection.access.configure(QUEUE, name)
    count = await connection.vhost.delete_queue(name, connection, if_unused=method.if_unused, if_empty=method.if_empty)
    if not method.nowait:
        connection.write(frame(channel.number, commands.Queue.DeleteOk, message_count=count))


def _key(channel: "Channel", method: commands.Queue.Bind | commands.Queue.Unbind) -> str:
    """The abbreviation for the queue declared last goes on to the key, if that is empty, too."""
    return method.routing_key if method.queue or method.routing_key else channel.last_queue


async def bind(channel: "Channel", method: commands.Queue.Bind) -> None:
    key = _key(channel, method)
    _check_bind(channel, method.queue, method.exchange, key)
    queue = find(channel, method.queue)
    arguments: Any = method.arguments
    await channel.connection.vhost.bind(method.exchange, queue, key, arguments)
    if not method.nowait:
        channel.connection.write(frame(channel.number, commands.Queue.BindOk))


def _check_bind(channel: "Channel", queue: str, source: str, key: str) -> None:
    connection = channel.connection
    exchange = connection.vhost.routing.exchanges.get(source)
    connection.access.bind(QUEUE, queue_name(channel, queue), source, exchange, key)


async def unbind(channel: "Channel", method: commands.Queue.Unbind) -> None:
    key = _key(channel, method)
    _check_bind(channel, method.queue, method.exchange, key)
    arguments: Any = method.arguments
    try:
        await channel.connection.vhost.unbind(method.exchange, find(channel, method.queue), key, arguments)
    except NotFound:
        pass  # what is not there is not bound: as RabbitMQ since 3.2, and clients tidy up what is gone already
    channel.connection.write(frame(channel.number, commands.Queue.UnbindOk))


async def purge(channel: "Channel", method: commands.Queue.Purge) -> None:
    await channel.connection.flushed()
    count = await find_to_read(channel, method.queue).purge()
    if not method.nowait:
        channel.connection.write(frame(channel.number, commands.Queue.PurgeOk, message_count=count))
