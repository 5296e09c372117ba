"""basic.qos, consume, cancel."""

from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from pamqp import commands

from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.streams.partition import when_loaded
from headrace.broker.vhosts.declarations import server_name
from headrace.errors import LimitReached, QueueNotFound
from headrace.listeners.amqp.consumer import AmqpConsumer
from headrace.listeners.amqp.direct_reply import PSEUDO_QUEUE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.queue import find_to_read
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import NOT_ALLOWED, NOT_IMPLEMENTED, PRECONDITION_FAILED, ProtocolError

if TYPE_CHECKING:
    from headrace.listeners.amqp.channel import Channel


def qos(channel: "Channel", method: commands.Basic.Qos) -> None:
    """With RabbitMQ, a prefetch without global holds for consumers to come. Here it also reaches those that are
    there, unless we announce ourselves as RabbitMQ: kombu then asks for global instead. Without one of
    the two, tasks with an ETA fill Celery's prefetch window for good."""
    if method.prefetch_size:
        raise ProtocolError(NOT_IMPLEMENTED, f"prefetch_size!=0 ({method.prefetch_size})", 60, 10)
    if method.global_:
        channel.prefetch_global = method.prefetch_count
    else:
        channel.prefetch = method.prefetch_count
        if channel.connection.listener.config.amqp_product != "rabbitmq":
            for consumer in channel.consumers.values():
                consumer.prefetch = method.prefetch_count
    channel.connection.write(frame(channel.number, commands.Basic.QosOk))
    channel.wake()


def consume(channel: "Channel", method: commands.Basic.Consume) -> Coroutine[Any, Any, None] | None:
    arguments: dict[str, Any] = method.arguments
    tag = method.consumer_tag or server_name("amq.ctag-")
    if tag in channel.consumers:
        raise ProtocolError(NOT_ALLOWED, f"attempt to reuse consumer tag '{tag}'", 60, 20)
    if method.queue == PSEUDO_QUEUE:
        _consume_replies(channel, method, tag)
        return None
    listener = channel.connection.listener
    if listener.consumers_count >= listener.config.amqp_consumers_max:
        raise LimitReached(f"there are {listener.config.amqp_consumers_max:,} consumers, which is the limit")
    priority = arguments.get("x-priority", 0)
    if not isinstance(priority, int):
        raise ChannelError(PRECONDITION_FAILED, f"invalid arg 'x-priority': {priority!r}")
    queue = find_to_read(channel, method.queue)
    consumer = AmqpConsumer(
        channel,
        queue,
        tag,
        no_ack=method.no_ack,
        exclusive=method.exclusive,
        priority=priority,
        prefetch=channel.prefetch,
        arguments=arguments,
    )
    if isinstance(queue, StreamQueue):
        return _consume_stream(consumer, queue, method)
    _begin(consumer, method)
    return None


async def _consume_stream(consumer: AmqpConsumer, queue: StreamQueue, method: commands.Basic.Consume) -> None:
    channel = consumer.channel
    if not channel.prefetch and not channel.prefetch_global and not method.no_ack:
        raise ChannelError(
            PRECONDITION_FAILED,
            f"consumer prefetch count is not set for 'queue '{queue.name}' in vhost '{queue.vhost.name}''",
        )
    wanted, now_ms = consumer.arguments.get("x-stream-offset"), queue.vhost.clock.now_ms()
    offset = await when_loaded(partial(queue.start_offset, wanted, now_ms))
    if not channel.is_open:
        return  # gone while we waited
    if queue.is_deleted:
        raise QueueNotFound(queue.vhost.name, queue.name)
    _begin(consumer, method)
    queue.attach(consumer, offset)


def _begin(consumer: AmqpConsumer, method: commands.Basic.Consume) -> None:
    """Deliveries start in the next turn of the loop, so the client hears consume-ok first."""
    channel, queue = consumer.channel, consumer.queue
    queue.add_consumer(consumer)
    channel.add_consumer(consumer)
    limit_ms = consumer.arguments.get("x-consumer-timeout", queue.policy.consumer_timeout_ms)
    if isinstance(limit_ms, int) and limit_ms > 0 and not method.no_ack:
        channel.connection.listener.timeouts.watch(consumer, limit_ms)
    if not method.nowait:
        channel.connection.write(frame(channel.number, commands.Basic.ConsumeOk, consumer_tag=consumer.tag))


def _consume_replies(channel: "Channel", method: commands.Basic.Consume, tag: str) -> None:
    if not method.no_ack:
        raise ChannelError(PRECONDITION_FAILED, "reply consumer cannot acknowledge")
    if channel.reply_token is not None:
        raise ChannelError(PRECONDITION_FAILED, "reply consumer already set")
    channel.reply_token = channel.connection.listener.replies.add(channel)
    channel.reply_tag = tag
    if not method.nowait:
        channel.connection.write(frame(channel.number, commands.Basic.ConsumeOk, consumer_tag=tag))


async def cancel(channel: "Channel", method: commands.Basic.Cancel) -> None:
    """What was delivered stays out until it is settled; only new deliveries stop. The answer comes when a queue that
    goes with its last consumer is gone: as in RabbitMQ, whoever has it may count on that."""
    consumer = channel.remove_consumer(str(method.consumer_tag))
    if consumer is not None:
        deletion = consumer.queue.remove_consumer(consumer)
        if deletion is not None:
            await deletion
    elif channel.reply_token is not None and channel.reply_tag == method.consumer_tag:
        channel.connection.listener.replies.remove(channel.reply_token)
        channel.reply_token = None
    if not method.nowait:
        channel.connection.write(frame(channel.number, commands.Basic.CancelOk, consumer_tag=method.consumer_tag))
