"""basic.qos, consume, cancel."""

from collections.abc import Coroutine
from functools import partial
from typing import Any

from pamqp import commands

from headrace.broker.queues.stream_filter import StreamFilter
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.streams.partition import when_loaded
from headrace.broker.vhosts.declarations import server_name
from headrace.errors import LimitReached, QueueNotFound
from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.consumer import AmqpConsumer
from headrace.listeners.amqp.direct_reply import PSEUDO_QUEUE
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.methods.queue import find_to_read
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import NOT_ALLOWED, NOT_IMPLEMENTED, PRECONDITION_FAILED, ProtocolError


def qos(channel: Channel, method: commands.Basic.Qos) -> None:
    """In RabbitMQ, a prefetch without the global flag applies to consumers that are added later. Here it applies to
    existing consumers too, unless the broker announces itself as RabbitMQ: kombu then sets the global flag. Without
    one of the two, tasks with an ETA would fill Celery's prefetch window for good."""
    if method.prefetch_size:
        raise ProtocolError(NOT_IMPLEMENTED, f"prefetch_size!=0 ({method.prefetch_size})", 60, 10)
    if method.global_:
        channel.prefetch_global = method.prefetch_count
    else:
        channel.prefetch = method.prefetch_count
        if channel.context.config.amqp_product != "rabbitmq":
            for consumer in channel.consumers.values():
                consumer.prefetch = method.prefetch_count
    channel.write(frame(channel.number, commands.Basic.QosOk))
    channel.wake()


def consume(channel: Channel, method: commands.Basic.Consume) -> Coroutine[Any, Any, None] | None:
    arguments: dict[str, Any] = method.arguments
    tag = method.consumer_tag or server_name("amq.ctag-")
    if tag in channel.consumers:
        raise ProtocolError(NOT_ALLOWED, f"attempt to reuse consumer tag '{tag}'", 60, 20)
    if method.queue == PSEUDO_QUEUE:
        _consume_replies(channel, method, tag)
        return None
    context = channel.context
    if context.consumers_count >= context.config.amqp_consumers_max:
        raise LimitReached(f"the limit of {context.config.amqp_consumers_max:,} consumers is reached")
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
        return _consume_stream(channel, consumer, queue, method)
    _begin(channel, consumer, method)
    return None


async def _consume_stream(
    channel: Channel, consumer: AmqpConsumer, queue: StreamQueue, method: commands.Basic.Consume
) -> None:
    place = f"queue '{queue.name}' in vhost '{queue.vhost.name}'"
    if not channel.prefetch and not channel.prefetch_global:
        raise ChannelError(PRECONDITION_FAILED, f"consumer prefetch count is not set for stream {place}")
    if method.no_ack:
        text = f"automatic acknowledgement not supported by stream {place}"
        raise ProtocolError(NOT_IMPLEMENTED, text, 60, 20)
    wanted, now_ms = consumer.arguments.get("x-stream-offset"), queue.vhost.clock.now_ms()
    offset = await when_loaded(partial(queue.start_offset, wanted, now_ms))
    if not channel.is_open:
        return  # closed while it waited
    if queue.is_deleted:
        raise QueueNotFound(queue.vhost.name, queue.name)
    _begin(channel, consumer, method)
    queue.attach(consumer, offset, StreamFilter.of(consumer.arguments))


def _begin(channel: Channel, consumer: AmqpConsumer, method: commands.Basic.Consume) -> None:
    """Deliveries start in the next event-loop iteration, so that the client receives consume-ok first."""
    queue = consumer.queue
    queue.add_consumer(consumer)
    channel.add_consumer(consumer)
    limit_ms = consumer.arguments.get("x-consumer-timeout", queue.policy.consumer_timeout_ms)
    if isinstance(limit_ms, int) and limit_ms > 0 and not method.no_ack:
        channel.context.timeouts.watch(consumer, limit_ms)
    if not method.nowait:
        channel.write(frame(channel.number, commands.Basic.ConsumeOk, consumer_tag=consumer.tag))


def _consume_replies(channel: Channel, method: commands.Basic.Consume, tag: str) -> None:
    if not method.no_ack:
        raise ChannelError(PRECONDITION_FAILED, "reply consumer cannot acknowledge")
    if channel.reply_token is not None:
        raise ChannelError(PRECONDITION_FAILED, "reply consumer already set")
    channel.reply_token = channel.context.replies.add(channel)
    channel.reply_tag = tag
    if not method.nowait:
        channel.write(frame(channel.number, commands.Basic.ConsumeOk, consumer_tag=tag))


async def cancel(channel: Channel, method: commands.Basic.Cancel) -> None:
    """Stops new deliveries; earlier ones can still be acknowledged. cancel-ok is sent after an auto-delete queue is
    deleted, as in RabbitMQ: the client may rely on that."""
    consumer = channel.remove_consumer(str(method.consumer_tag))
    if consumer is not None:
        deletion = consumer.queue.remove_consumer(consumer)
        if deletion is not None:
            await deletion
    elif channel.reply_token is not None and channel.reply_tag == method.consumer_tag:
        channel.context.replies.remove(channel.reply_token)
        channel.reply_token = None
    if not method.nowait:
        channel.write(frame(channel.number, commands.Basic.CancelOk, consumer_tag=method.consumer_tag))
