"""A consumer of an AMQP channel: encodes the messages that its queue passes to it, within its prefetch limits."""

from typing import Any, Protocol

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.types.message import Message
from headrace.errors import HeadraceError
from headrace.listeners.amqp.consumer_timeouts import WatchedDeliveries
from headrace.listeners.amqp.counts import ChannelCounts
from headrace.listeners.amqp.session import Session
from headrace.listeners.amqp.transport import AmqpTransport
from headrace.record.types import Buffer
from headrace.wire.amqp.deliver import DeliveryEncoder, Encoded
from headrace.wire.amqp.methods import content_pieces, frame
from headrace.wire.amqp.scan import ChannelState

UNLIMITED = 1 << 30
UNACKED_MAX = 1 << 20  # for a consumer without a prefetch: a tag takes 16 bytes, and memory must have a bound
DELIVER_BYTES_MAX = 256 * 1024


class DeliverySource:
    """The origin of a delivery. Each unacknowledged tag in the channel's ring refers to one by its number."""

    __slots__ = ("number", "queue", "view")

    def __init__(self, number: int, queue: Queue, view: View) -> None:
        self.number, self.queue, self.view = number, queue, view


class ConsumerChannel(Protocol):
    """The channel as its consumers see it."""

    number: int
    state: ChannelState
    counts: ChannelCounts
    session: Session
    transport: AmqpTransport
    prefetch_global: int
    is_open: bool

    @property
    def can_deliver(self) -> bool: ...
    @property
    def unacked_by_consumers(self) -> int: ...
    def add_source(self, queue: Queue, view: View) -> DeliverySource: ...
    def is_consumer(self, consumer: "AmqpConsumer") -> bool: ...
    def remove_consumer(self, tag: str) -> object: ...
    def fail(self, error: HeadraceError) -> None: ...


class AmqpConsumer:
    def __init__(
        self,
        channel: ConsumerChannel,
        queue: Queue,
        tag: str,
        *,
        no_ack: bool,
        exclusive: bool,
        priority: int,
        prefetch: int,
        arguments: dict[str, Any],
    ) -> None:
        self.queue = queue
        self.tag = tag
        self.tags = channel.state.tags
        self.channel_number = channel.number
        self.no_ack, self.exclusive, self.priority = no_ack, exclusive, priority
        self.prefetch = prefetch
        self.arguments = arguments
        self.is_active = True
        self.watched: WatchedDeliveries | None = None  # set if it has a timeout
        self._channel = channel
        self._transport = channel.transport
        self._frame_max = channel.session.frame_max
        self._encode = DeliveryEncoder(
            channel.state.tags,
            channel.number,
            tag.encode("utf-8", "surrogateescape"),
            no_ack=no_ack,
            frame_max=channel.session.frame_max,
            bytes_max=DELIVER_BYTES_MAX,
        ).encode
        self._sources: dict[View, DeliverySource] = {}

    def _source(self, view: View) -> DeliverySource:
        found = self._sources.get(view)
        if found is None:
            found = self._sources[view] = self._channel.add_source(self.queue, view)
        return found

    @property
    def sources(self) -> list[int]:
        return [source.number for source in self._sources.values()]

    @property
    def in_flight(self) -> int:
        tags = self.tags
        total = 0
        for source in self._sources.values():  # read for every delivery: sum() with a generator is slower
            total += tags.in_flight(source.number)
        return total

    def credit(self) -> int:
        channel = self._channel
        if not channel.can_deliver:
            return 0
        room = channel.prefetch_global - channel.unacked_by_consumers if channel.prefetch_global else UNLIMITED
        if self.no_ack:  # does not use up the channel's prefetch, but waits for it, as in RabbitMQ
            return UNLIMITED if room > 0 else 0
        return min((self.prefetch or UNACKED_MAX) - self.in_flight, room)

    def deliver(
        self, view: View, data: Buffer, start: int, end: int, count_max: int, redelivered_below: int, expired_until: int
    ) -> Encoded:
        encoded = self._encode(data, start, end, self._source(view).number, count_max, redelivered_below, expired_until)
        count = encoded.count
        if count:
            self._transport.deliver(encoded.frames, count, encoded.body_bytes)
            self._count(count, encoded.redelivered)
            if self.watched is not None:
                next_tag = self.tags.next_tag
                self.watched.delivered(next_tag - count, next_tag)
        return encoded

    def _count(self, count: int, redelivered: int) -> None:
        counts = self._channel.counts
        if self.no_ack:
            counts.deliver_no_ack += count
        else:
            counts.deliver += count
        counts.redeliver += redelivered

    def deliver_message(self, view: View, offset: int, message: Message, redelivered: bool) -> None:
        tag = self.tags.add(-1 if self.no_ack else self._source(view).number, offset)
        pieces = content_pieces(
            self.channel_number,
            commands.Basic.Deliver,
            message.properties,
            message.body,
            self._frame_max,
            consumer_tag=self.tag,
            delivery_tag=tag,
            redelivered=redelivered,
            exchange=message.exchange,
            routing_key=message.routing_key,
        )
        self._transport.deliver_message(pieces, len(message.body))
        self._count(1, int(redelivered))
        if self.watched is not None:
            self.watched.delivered(tag, tag + 1)

    def cancelled(self) -> None:
        """The queue is deleted: notifies the client if it supports consumer_cancel_notify."""
        channel = self._channel
        channel.remove_consumer(self.tag)
        if channel.session.supports("consumer_cancel_notify") and channel.is_open:
            self._transport.write_after_method(
                frame(channel.number, commands.Basic.Cancel, consumer_tag=self.tag, nowait=True)
            )

    def activated(self, active: bool) -> None:
        self.is_active = active

    # For consumer_timeouts.

    @property
    def is_open(self) -> bool:
        return self._channel.is_open

    @property
    def is_subscribed(self) -> bool:
        return self._channel.is_consumer(self)

    def fail_channel(self, error: HeadraceError) -> None:
        self._channel.fail(error)
