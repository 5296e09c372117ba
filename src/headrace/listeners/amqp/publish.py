"""Publishing: the route of a key for the fast path, and the careful way for messages that need a look."""

from typing import TYPE_CHECKING

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.types.message import Message, expiration_fault, to_text
from headrace.listeners.amqp.direct_reply import PREFIX, PSEUDO_QUEUE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.tx_state import Publish
from headrace.record.amqp.properties import edit, property_of
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import content_frames
from headrace.wire.amqp.protocol import ProtocolError
from headrace.wire.amqp.scan import Target

if TYPE_CHECKING:
    from headrace.listeners.amqp.channel import Channel
    from headrace.listeners.amqp.connection import Connection

MANDATORY, IMMEDIATE = 1, 2
TX_BYTES_MAX = 16 << 20  # a group must fit half a journal file
TX_MESSAGE_BYTES = 256  # what is kept of one beside its bytes
REPLY_KEY = PREFIX.encode()
NOWHERE = Target((), slow=True, durable=False)  # that could refuse it


def _exchange(connection: "Connection", name: str) -> Exchange:
    exchange = connection.vhost.routing.exchange(name)
    if exchange.internal:
        raise ChannelError(
            protocol.ACCESS_REFUSED,
            f"cannot publish to internal exchange '{name}' in vhost '{connection.vhost.name}'",
        )
    return exchange


def _allowed_exchange(connection: "Connection", name: str, key: str) -> Exchange:
    is_bounded = connection.access.publish(name)
    exchange = _exchange(connection, name)
    if is_bounded:
        connection.access.write_topic(exchange, key)
    return exchange


def target(connection: "Connection", exchange_name: bytes, key: bytes, bits: int) -> Target:
    """Where a publish goes, if its user may send it there. Slow when a message has to be looked at; errors end
    the channel. The scanner asks once for each exchange and key, and again when routes or rights have changed."""
    if bits & IMMEDIATE:
        raise ProtocolError(protocol.NOT_IMPLEMENTED, "immediate=true", 60, 40)
    vhost = connection.vhost
    text = to_text(key)
    exchange = _allowed_exchange(connection, to_text(exchange_name), text)
    route = vhost.routing.route(exchange, text, vhost.queues)
    if not route.queues and not exchange.name and vhost.find_topic(text):
        route = vhost.routing.route(exchange, text, vhost.queues)
    slow, durable = route.needs_headers, False
    for queue in route.queues:
        slow = slow or queue.needs_python
        durable = durable or is_disk(queue)
    if not route.queues:
        slow = slow or bool(bits & MANDATORY) or key.startswith(REPLY_KEY)
    return Target(route.queues, slow, durable)


def is_disk(queue: Queue) -> bool:
    return queue.durable and not queue.exclusive


def message(channel: "Channel", method: bytes, properties: bytes, body: bytes) -> None:
    """A message that came whole to Python: kept for tx.commit, or routed now."""
    if channel.tx is not None:
        channel.tx.publishes.append(Publish(method, properties, body))
        channel.tx.size_bytes += len(body) + len(properties) + len(method) + TX_MESSAGE_BYTES
        if channel.tx.size_bytes > TX_BYTES_MAX:
            raise ChannelError(
                protocol.PRECONDITION_FAILED, f"a transaction of more than {TX_BYTES_MAX} bytes is not kept"
            )
        return
    route_message(channel, method, properties, body)


def split_method(method: bytes) -> tuple[str, str, int]:
    """(exchange, routing key, bits); the scanner has checked the lengths."""
    size = method[6]
    return to_text(method[7 : 7 + size]), to_text(method[8 + size : -1]), method[-1]


def check(channel: "Channel", method: bytes, properties: bytes, body: bytes) -> None:
    """Raises what route_message would, before anything has happened; and once more whether it is allowed, since
    a transaction may last."""
    exchange_name, key, _ = split_method(method)
    exchange = _allowed_exchange(channel.connection, exchange_name, key)
    found = Message(exchange_name, key, properties, body)
    _check(channel.connection, found)
    _receivers(channel.connection, exchange, found)
    _reply_address(channel, found)


def route_message(channel: "Channel", method: bytes, properties: bytes, body: bytes) -> bool:
    """False when a queue that it was for has refused it."""
    connection = channel.connection
    exchange_name, key, bits = split_method(method)
    exchange = _exchange(connection, exchange_name)
    found = Message(exchange_name, key, properties, body)
    _check(connection, found)
    keys = _receivers(connection, exchange, found)
    _reply_address(channel, found)
    now_ms = connection.broker.clock.now_ms()
    vhost = connection.vhost
    if not exchange_name and key.startswith(PREFIX):
        channel.state.went_to(NOWHERE)
        if not connection.listener.replies.deliver(found) and bits & MANDATORY:
            _return(channel, found)
        return True
    queues, waits_in = vhost.delays.route(exchange, found, now_ms, keys)
    if not waits_in:
        channel.state.went_to(Target(queues, slow=True, durable=False))
    if any(delaying.durable for delaying in waits_in) or any(is_disk(queue) for queue in queues):
        channel.state.touched_disk = True
    if not queues:
        if bits & MANDATORY and not waits_in:
            _return(channel, found)
        return True
    accepted = [queue.publish(found, now_ms) for queue in queues]
    if not all(accepted):
        channel.refuse(channel.state.sequence)
    connection.listener.stats.messages_in += 1
    connection.listener.stats.bytes_in += len(body)
    return all(accepted)


def _check(connection: "Connection", found: Message) -> None:
    if found.has_expiration:
        text = found.expiration()
        if fault := expiration_fault(text):
            raise ChannelError(protocol.PRECONDITION_FAILED, f"invalid expiration '{text}': {fault}")
    if found.has_user_id:
        claimed = property_of(found.properties, "user_id")
        if not connection.access.may_claim(str(claimed)):
            raise ChannelError(
                protocol.PRECONDITION_FAILED,
                f"user_id property set to '{claimed!s:.60}' but authenticated user was '{connection.user}'",
            )


def _receivers(connection: "Connection", exchange: Exchange, found: Message) -> list[str]:
    keys = found.take_receivers()
    for key in keys[1:]:  # the first was asked for with the route
        connection.access.write_topic(exchange, key)
    return keys


def _reply_address(channel: "Channel", found: Message) -> None:
    if not found.properties[0] & 0x02 or property_of(found.properties, "reply_to") != PSEUDO_QUEUE:
        return
    if channel.reply_token is None:
        raise ChannelError(protocol.PRECONDITION_FAILED, "fast reply consumer does not exist")
    found.properties = edit(found.properties, {"reply_to": PREFIX + channel.reply_token})


def _return(channel: "Channel", found: Message) -> None:
    connection = channel.connection
    connection.listener.stats.count("returned")
    connection.write(
        content_frames(
            channel.number,
            commands.Basic.Return,
            found.properties,
            found.body,
            connection.frame_max,
            reply_code=protocol.NO_ROUTE,
            reply_text="NO_ROUTE",
            exchange=found.exchange,
            routing_key=found.routing_key,
        )
    )
