"""Publishing: finds the target of a routing key for the scanner's fast path, and routes the messages that need a
decision of their own (headers exchanges, full queues, CC, expiration, direct reply-to, transactions)."""

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.types.message import Message, expiration_fault, to_text
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.direct_reply import PREFIX, PSEUDO_QUEUE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.session import Session
from headrace.record.amqp.properties import edit, property_of
from headrace.wire.amqp import protocol
from headrace.wire.amqp.methods import content_frames
from headrace.wire.amqp.protocol import ProtocolError
from headrace.wire.amqp.scan import Target

MANDATORY, IMMEDIATE = 1, 2
REPLY_KEY = PREFIX.encode()


def _exchange(session: Session, name: str) -> Exchange:
    exchange = session.vhost.routing.exchange(name)
    if exchange.internal:
        raise ChannelError(
            protocol.ACCESS_REFUSED,
            f"cannot publish to internal exchange '{name}' in vhost '{session.vhost.name}'",
        )
    return exchange


def _allowed_exchange(session: Session, name: str, key: str) -> Exchange:
    has_topic_rule = session.access.publish(name)
    exchange = _exchange(session, name)
    if has_topic_rule:
        session.access.write_topic(exchange, key)
    return exchange


def target(session: Session, exchange_name: bytes, key: bytes, bits: int) -> Target:
    """The queues of a routing key, if the user may publish there. `slow` if each message needs a decision. Errors
    close the channel. The scanner caches the result until routes or permissions change."""
    if bits & IMMEDIATE:
        raise ProtocolError(protocol.NOT_IMPLEMENTED, "immediate=true", 60, 40)
    vhost = session.vhost
    text = to_text(key)
    exchange = _allowed_exchange(session, to_text(exchange_name), text)
    route = vhost.routing.route(exchange, text, vhost.queues)
    if not route.queues and not exchange.name and vhost.find_topic(text):
        route = vhost.routing.route(exchange, text, vhost.queues)
    slow, durable = route.needs_headers, False
    for queue in route.queues:
        slow = slow or queue.needs_python
        durable = durable or is_disk(queue)
    if not route.queues:
        slow = slow or bool(bits & MANDATORY) or key.startswith(REPLY_KEY)
    return Target(route.queues, slow, durable, exchange.counts)


def is_disk(queue: Queue) -> bool:
    return queue.durable and not queue.exclusive


def message(channel: Channel, method: bytes, properties: bytes, body: bytes) -> None:
    """A message that the scanner did not append itself: kept for tx.commit, or routed now."""
    if channel.tx is not None:
        channel.tx.add_publish(method, properties, body)
    else:
        route_message(channel, method, properties, body)


def split_method(method: bytes) -> tuple[str, str, int]:
    """(exchange, routing key, bits). The scanner has checked the lengths."""
    size = method[6]
    return to_text(method[7 : 7 + size]), to_text(method[8 + size : -1]), method[-1]


def check(channel: Channel, method: bytes, properties: bytes, body: bytes) -> None:
    """Raises the errors of route_message before anything has changed. Checks permissions again, because they may
    have changed since the message was sent."""
    session = channel.session
    exchange_name, key, _ = split_method(method)
    exchange = _allowed_exchange(session, exchange_name, key)
    found = Message(exchange_name, key, properties, body)
    _check(session, found)
    _receivers(session, exchange, found)
    _reply_address(channel, found)


def route_message(channel: Channel, method: bytes, properties: bytes, body: bytes) -> bool:
    """False if any of its queues has refused the message."""
    session, context = channel.session, channel.context
    exchange_name, key, bits = split_method(method)
    exchange = _exchange(session, exchange_name)
    found = Message(exchange_name, key, properties, body)
    _check(session, found)
    keys = _receivers(session, exchange, found)
    _reply_address(channel, found)
    now_ms = context.clock.now_ms()
    if not exchange_name and key.startswith(PREFIX):
        channel.state.went_to(())
        exchange.counts.published += 1
        if not context.replies.deliver(found):
            _unroutable(channel, exchange, found, is_mandatory=bool(bits & MANDATORY))
        return True
    flushes = context.flushes
    outer = flushes.opened
    if channel.confirms is not None:
        flushes.opened = set()
    try:
        queues, waits_in = session.vhost.delays.route(exchange, found, now_ms, keys)
        accepted = [queue.publish(found, now_ms) for queue in queues]
        if channel.confirms is not None and flushes.opened is not None:
            channel.state.went_to(flushes.opened)
    finally:
        flushes.opened = outer
    if any(delaying.durable for delaying in waits_in) or any(is_disk(queue) for queue in queues):
        channel.state.touched_disk = True
    exchange.counts.published += 1
    exchange.counts.routed += len(queues)
    if not queues:
        if not waits_in:
            _unroutable(channel, exchange, found, is_mandatory=bool(bits & MANDATORY))
        return True
    if not all(accepted) and channel.confirms is not None:
        channel.confirms.nack(channel.state.sequence)
    context.stats.messages_in += 1
    context.stats.bytes_in += len(body)
    return all(accepted)


def _check(session: Session, found: Message) -> None:
    if found.has_expiration:
        text = found.expiration()
        if fault := expiration_fault(text):
            raise ChannelError(protocol.PRECONDITION_FAILED, f"invalid expiration '{text}': {fault}")
    if found.has_user_id:
        claimed = property_of(found.properties, "user_id")
        if not session.access.may_claim(str(claimed)):
            raise ChannelError(
                protocol.PRECONDITION_FAILED,
                f"user_id property set to '{claimed!s:.60}' but authenticated user was '{session.user}'",
            )


def _receivers(session: Session, exchange: Exchange, found: Message) -> list[str]:
    keys = found.take_receivers()
    for key in keys[1:]:  # the first was checked with the route
        session.access.write_topic(exchange, key)
    return keys


def _reply_address(channel: Channel, found: Message) -> None:
    if not found.properties[0] & 0x02 or property_of(found.properties, "reply_to") != PSEUDO_QUEUE:
        return
    if channel.reply_consumer is None:
        raise ChannelError(protocol.PRECONDITION_FAILED, "fast reply consumer does not exist")
    found.properties = edit(found.properties, {"reply_to": PREFIX + channel.reply_consumer.token})


def _unroutable(channel: Channel, exchange: Exchange, found: Message, *, is_mandatory: bool) -> None:
    channel.counts.unroutable(exchange.counts, is_returned=is_mandatory)
    if not is_mandatory:
        return
    channel.context.stats.count("returned")
    channel.write(
        content_frames(
            channel.number,
            commands.Basic.Return,
            found.properties,
            found.body,
            channel.session.frame_max,
            reply_code=protocol.NO_ROUTE,
            reply_text="NO_ROUTE",
            exchange=found.exchange,
            routing_key=found.routing_key,
        )
    )
