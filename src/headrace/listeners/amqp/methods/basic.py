"""basic.get, ack, nack, reject, recover; channel.flow; access.request."""

from typing import Any

from pamqp import commands

from headrace.errors import QueueNotFound
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.queue import find_to_read
from headrace.listeners.amqp.transaction import Settle
from headrace.wire.amqp.methods import AccessRequest, AccessRequestOk, content_pieces, frame
from headrace.wire.amqp.protocol import NOT_IMPLEMENTED, PRECONDITION_FAILED, ProtocolError


async def get(channel: Channel, method: commands.Basic.Get) -> None:
    await channel.connection.flushed()
    queue = find_to_read(channel, method.queue)
    queue.serve()
    await queue.prepare_get()
    if not channel.is_open:
        return  # closed while it waited: a message delivered now would stay unacknowledged for ever
    if queue.is_deleted:
        raise QueueNotFound(channel.session.vhost.name, queue.name)
    found = queue.get(no_ack=method.no_ack)
    counts = channel.counts
    if found is None:
        counts.get_empty += 1
        channel.write(frame(channel.number, commands.Basic.GetEmpty))
        return
    view, offset, message, redelivered = found
    source = channel.getter(queue, view)
    tag = channel.state.tags.add(-1 if method.no_ack else source.number, offset)
    counts.redeliver += redelivered
    if method.no_ack:
        counts.get_no_ack += 1
    else:
        counts.get += 1
    pieces = content_pieces(
        channel.number,
        commands.Basic.GetOk,
        message.properties,
        message.body,
        channel.session.frame_max,
        delivery_tag=tag,
        redelivered=redelivered,
        exchange=message.exchange,
        routing_key=message.routing_key,
        message_count=queue.ready,
    )
    channel.transport.deliver_message(pieces, len(message.body))


def ack(channel: Channel, method: Any) -> None:
    """Only of transactional channels: the scanner handles all other acks."""
    _settle(channel, method.delivery_tag, method.multiple, "ack")


def nack(channel: Channel, method: Any) -> None:
    _settle(channel, method.delivery_tag, method.multiple, "requeue" if method.requeue else "reject")


def reject(channel: Channel, method: Any) -> None:
    _settle(channel, method.delivery_tag, False, "requeue" if method.requeue else "reject")


def _settle(channel: Channel, tag: int, multiple: bool, kind: str) -> None:
    if channel.tx is not None:
        covered = channel.state.tags.peek(tag, multiple)
        if covered is None or tag in channel.tx.settled_tags:
            raise ChannelError(PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        if covered:  # tag 0 means all deliveries up to now, not all up to the commit
            channel.tx.add_settle(covered, Settle(covered[-1], multiple, kind))
        return
    apply(channel, Settle(tag, multiple, kind))


def apply(channel: Channel, settle: Settle) -> None:
    if settle.kind == "ack":
        channel.state.tags.settle(settle.tag, settle.multiple)
        channel.settle()
    else:
        channel.reject(channel.take(settle.tag, settle.multiple), requeue=settle.kind == "requeue")


def recover(channel: Channel, method: commands.Basic.Recover) -> None:
    recover_async(channel, method)
    channel.write(frame(channel.number, commands.Basic.RecoverOk))


def recover_async(channel: Channel, method: Any) -> None:
    if not method.requeue:
        raise ProtocolError(NOT_IMPLEMENTED, "requeue=false", 60, 110)
    settled_tags = channel.tx.settled_tags if channel.tx is not None else None
    if not settled_tags:
        channel.reject(channel.take(0, True), requeue=True)
        return
    # The commit decides about the deliveries that the transaction settles.
    others = [tag for tag in channel.state.tags.peek(0, True) or () if tag not in settled_tags]
    channel.reject([run for tag in others for run in channel.take(tag, False)], requeue=True)


def flow(channel: Channel, method: Any) -> None:
    """RabbitMQ refuses active=false. Here it stops deliveries, as the specification says."""
    channel.is_flowing = method.active
    channel.write(frame(channel.number, commands.Channel.FlowOk, active=method.active))
    if method.active:
        channel.wake()


def access(channel: Channel, method: AccessRequest) -> None:
    """Grants a ticket to every client, as RabbitMQ does, and ignores it: permissions belong to users."""
    channel.write(frame(channel.number, AccessRequestOk, ticket=1))
