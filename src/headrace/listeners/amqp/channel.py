"""An AMQP channel: its consumers, its unacknowledged deliveries and its mode (confirm, transactional or neither)."""

import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.types.message import Message
from headrace.errors import HeadraceError
from headrace.listeners.amqp.confirms import ChannelConfirms
from headrace.listeners.amqp.consumer import AmqpConsumer, DeliverySource
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.counts import ChannelCounts
from headrace.listeners.amqp.errors import ChannelError
from headrace.listeners.amqp.session import Session
from headrace.listeners.amqp.transaction import Transaction
from headrace.listeners.amqp.transport import AmqpTransport
from headrace.wire.amqp.methods import content_frames, frame
from headrace.wire.amqp.protocol import PRECONDITION_FAILED
from headrace.wire.amqp.scan import ChannelState

logger = logging.getLogger("headrace.amqp")


class ChannelConnection(Protocol):
    """The connection as its channels and their method handlers see it."""

    @property
    def transport(self) -> AmqpTransport: ...

    def after_feed(self) -> None:
        """Applies the acks and publishes that were read before this method."""

    async def flushed(self) -> None:
        """Waits until everything that this connection has published is visible in the queues."""

    def fail(self, error: HeadraceError, channel: "Channel", class_id: int, method_id: int) -> None:
        """Closes the channel, or the connection where the error calls for that."""


class ReplyConsumer(NamedTuple):
    """The consumer of direct reply-to."""

    token: str
    tag: str


class Channel:
    def __init__(self, connection: ChannelConnection, session: Session, context: ListenerContext, number: int) -> None:
        self.connection = connection
        self.session = session
        self.context = context
        self.transport = connection.transport
        self.write = connection.transport.write
        self.number = number
        self.state = ChannelState(number)
        self.consumers: dict[str, AmqpConsumer] = {}
        self.sources: list[DeliverySource] = []
        self.prefetch = 0  # for consumers that are added later, see methods.consume.qos
        self.prefetch_global = 0
        self.is_flowing = True
        self.is_open = True
        self.confirms: ChannelConfirms | None = None
        self.tx: Transaction | None = None
        self.last_queue = ""
        self.reply_consumer: ReplyConsumer | None = None
        self.counts = ChannelCounts()
        self._getters: dict[View, DeliverySource] = {}
        self._unused_sources: list[int] = []  # numbers of sources that deliver nothing more

    @property
    def can_deliver(self) -> bool:
        return self.is_flowing and self.is_open and self.transport.is_writable

    # Deliveries and acknowledgements.

    @property
    def unacked_by_consumers(self) -> int:
        """The deliveries that the channel's prefetch limits: those of basic.get do not count."""
        tags = self.state.tags
        if not self._getters:
            return tags.unacked
        return tags.unacked - sum(tags.in_flight(source.number) for source in self._getters.values())

    def add_source(self, queue: Queue, view: View) -> DeliverySource:
        """Reuses the number of a source that has nothing in flight and delivers nothing more: a long-lived channel
        may create a consumer for every request it makes."""
        tags = self.state.tags
        if self._unused_sources:
            self.settle()  # acks that are not applied yet refer to the old source by its number
        number = next((number for number in self._unused_sources if not tags.in_flight(number)), None)
        if number is not None:
            self._unused_sources.remove(number)
            source = self.sources[number] = DeliverySource(number, queue, view)
            return source
        source = DeliverySource(tags.add_source(), queue, view)
        self.sources.append(source)
        return source

    def getter(self, queue: Queue, view: View) -> DeliverySource:
        """The source of basic.get on a queue."""
        found = self._getters.get(view)
        if found is None or found.queue is not queue:
            stale = [known for known, source in self._getters.items() if source.queue.is_deleted or known is view]
            self._unused_sources += [self._getters.pop(known).number for known in stale]
            found = self._getters[view] = self.add_source(queue, view)
        return found

    def deliver_reply(self, message: Message) -> bool:
        """Delivers a direct reply; see direct_reply.Requester."""
        if self.reply_consumer is None or not self.is_open or self.transport.is_flooded:
            return False
        frames = content_frames(
            self.number,
            commands.Basic.Deliver,
            message.properties,
            message.body,
            self.session.frame_max,
            consumer_tag=self.reply_consumer.tag,
            delivery_tag=self.state.tags.add(-1, 0),
            redelivered=False,
            exchange=message.exchange,
            routing_key=message.routing_key,
        )
        self.transport.deliver(frames, 1, len(message.body))
        self.counts.deliver_no_ack += 1
        return True

    def settle(self) -> None:
        """Applies the acks that the scanner has collected."""
        settled: set[Queue] = set()
        for number, start, end in self.state.tags.acked():
            source = self.sources[number]
            source.queue.settle(source.view, start, end)
            settled.add(source.queue)
            self.counts.ack += end - start
        self._wake_for_credit(settled)

    def _wake_for_credit(self, settled: set[Queue]) -> None:
        if self.prefetch_global and settled:
            # Credit of one consumer is credit of all. Those that had it last move to the end.
            for tag in [tag for tag, consumer in self.consumers.items() if consumer.queue in settled]:
                self.consumers[tag] = self.consumers.pop(tag)
            self.wake()
        for queue in settled:
            queue.wake()

    def take(self, tag: int, multiple: bool) -> list[tuple[DeliverySource, int, int]]:
        """Removes deliveries from the ring and returns them as (source, start, end) ranges of offsets: a client
        without a prefetch may have a million of them when it disconnects."""
        found = self.state.tags.take(tag, multiple)
        if found is None:
            raise ChannelError(PRECONDITION_FAILED, f"unknown delivery tag {tag}")
        ranges: list[tuple[DeliverySource, int, int]] = []
        last = start = end = -1
        for number, offset in found:
            if number != last or offset != end:
                if last >= 0:
                    ranges.append((self.sources[last], start, end))
                last, start = number, offset
            end = offset + 1
        if last >= 0:
            ranges.append((self.sources[last], start, end))
        return ranges

    def reject(self, taken: Iterable[tuple[DeliverySource, int, int]], *, requeue: bool) -> None:
        settled: set[Queue] = set()
        failed: Exception | None = None
        for source, start, end in taken:
            queue, view = source.queue, source.view
            settled.add(queue)
            if requeue and queue.gives_back_runs:
                queue.give_back_run(view, start, end)
                continue
            for offset in range(start, end):
                try:
                    (queue.give_back if requeue else queue.reject)(view, offset)
                except Exception as error:  # noqa: BLE001 - such as an unreadable record: the others must not wait
                    view.give_back(offset, offset + 1)
                    failed = failed or error
        self._wake_for_credit(settled)
        if failed is not None:
            raise failed

    def wake(self) -> None:
        for consumer in self.consumers.values():
            consumer.queue.wake()

    # Consumers.

    def add_consumer(self, consumer: AmqpConsumer) -> None:
        self.consumers[consumer.tag] = consumer
        self.context.consumers_count += 1

    def remove_consumer(self, tag: str) -> AmqpConsumer | None:
        consumer = self.consumers.pop(tag, None)
        if consumer is not None:
            self.context.consumers_count -= 1
            self._unused_sources += consumer.sources
        return consumer

    def is_consumer(self, consumer: AmqpConsumer) -> bool:
        return self.consumers.get(consumer.tag) is consumer

    # Closing.

    def fail(self, error: HeadraceError) -> None:
        """Closes the channel for a reason that no method of the client caused."""
        self.connection.fail(error, self, 0, 0)

    def release(self) -> None:
        """Removes the consumers from their queues and returns unacknowledged messages to their old positions."""
        if not self.is_open:
            return
        self.is_open = False
        if self.confirms is not None:
            self.confirms.close()
        self.state.drop_content()
        self.settle()
        for tag, consumer in list(self.consumers.items()):
            self.remove_consumer(tag)
            consumer.queue.remove_consumer(consumer)
        if self.reply_consumer is not None:
            self.context.replies.remove(self.reply_consumer.token)
        try:
            self.reject(self.take(0, True), requeue=True)
        except Exception as error:  # the connection's other channels must still be released
            logger.error(
                "a message that channel %d had not acknowledged is still in its queue, but cannot be delivered: %s",
                self.number,
                error,
                exc_info=error,
            )

    def send_close(self, code: int, text: str, class_id: int, method_id: int) -> None:
        """Closes the channel after an error. Everything the client sends before close-ok is ignored."""
        self.release()
        self.state.closing = True
        self.write(
            frame(
                self.number,
                commands.Channel.Close,
                reply_code=code,
                reply_text=text,
                class_id=class_id,
                method_id=method_id,
            )
        )
