"""A consumer of one channel: turns what its queue hands it into frames, within its credit."""

from typing import TYPE_CHECKING, Any

from pamqp import commands

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.types.message import Message
from headrace.listeners.amqp.consumer_timeouts import Watched
from headrace.wire.amqp.deliver import FOREIGN, encode_deliveries
from headrace.wire.amqp.methods import content_frames, frame

if TYPE_CHECKING:
    from headrace.listeners.amqp.channel import Channel

UNLIMITED = 1 << 30
UNACKED_MAX = 1 << 20  # of a consumer without a prefetch: a tag takes 16 bytes, and a bound is a bound
DELIVER_BYTES_MAX = 256 * 1024


class Source:
    """Where a delivery came from: what a tag's number in the ring stands for."""

    __slots__ = ("consumer", "number", "queue", "view")

    def __init__(self, number: int, queue: Queue, view: View, consumer: "AmqpConsumer | None") -> None:
        self.number, self.queue, self.view, self.consumer = number, queue, view, consumer


class AmqpConsumer:
    def __init__(
        self,
        channel: "Channel",
        queue: Queue,
        tag: str,
        *,
        no_ack: bool,
        exclusive: bool,
        priority: int,
        prefetch: int,
        arguments: dict[str, Any],
    ) -> None:
        self.channel = channel
        self.queue = queue
        self.tag = tag
        self.no_ack, self.exclusive, self.priority = no_ack, exclusive, priority
        self.prefetch = prefetch
        self.arguments = arguments
        self.is_active = True
        self.watched: Watched | None = None  # where it has a time limit
        self._tag = tag.encode("utf-8", "surrogateescape")
        self._sources: dict[View, Source] = {}

    def source(self, view: View) -> Source:
        found = self._sources.get(view)
        if found is None:
            found = self._sources[view] = self.channel.add_source(self.queue, view, self)
        return found

    @property
    def sources(self) -> list[int]:
        return [source.number for source in self._sources.values()]

    @property
    def in_flight(self) -> int:
        tags = self.channel.state.tags
        total = 0
        for source in self._sources.values():  # asked for every delivery: a generator costs more than the sum
            total += tags.in_flight(source.number)
        return total

    def credit(self) -> int:
        channel = self.channel
        if not channel.can_deliver:
            return 0
        room = channel.prefetch_global - channel.out_to_consumers if channel.prefetch_global else UNLIMITED
        if self.no_ack:  # takes nothing of the channel's prefetch, and waits for it all the same, as in RabbitMQ
            return UNLIMITED if room > 0 else 0
        return min((self.prefetch or UNACKED_MAX) - self.in_flight, room)

    def deliver(
        self, view: View, data: Any, start: int, end: int, count_max: int, redelivered_below: int, expired_until: int
    ) -> tuple[int, int, bool, Any, int]:
        channel = self.channel
        frames, next_offset, count, why, gaps, size = encode_deliveries(
            data,
            start,
            end,
            channel.state.tags,
            self.source(view).number,
            self.no_ack,
            channel.number,
            self._tag,
            count_max,
            DELIVER_BYTES_MAX,
            channel.connection.frame_max,
            redelivered_below,
            expired_until,
        )
        if frames:
            channel.connection.deliver(frames, count, size)
            if self.watched is not None:
                next_tag = channel.state.tags.next_tag
                self.watched.delivered(next_tag - count, next_tag)
        return next_offset, count, why == FOREIGN, gaps, size

    def deliver_message(self, view: View, offset: int, message: Message, redelivered: bool) -> None:
        channel = self.channel
        tag = channel.state.tags.add(-1 if self.no_ack else self.source(view).number, offset)
        frames = content_frames(
            channel.number,
            commands.Basic.Deliver,
            message.properties,
            message.body,
            channel.connection.frame_max,
            consumer_tag=self.tag,
            delivery_tag=tag,
            redelivered=redelivered,
            exchange=message.exchange,
            routing_key=message.routing_key,
        )
        channel.connection.deliver(frames, 1, len(message.body))
        if self.watched is not None:
            self.watched.delivered(tag, tag + 1)

    def cancelled(self) -> None:
        """The queue is gone: tell the client, if it wants to know."""
        channel = self.channel
        channel.remove_consumer(self.tag)
        if channel.connection.wants("consumer_cancel_notify") and channel.is_open:
            channel.connection.write_after_method(
                frame(channel.number, commands.Basic.Cancel, consumer_tag=self.tag, nowait=True)
            )

    def activated(self, active: bool) -> None:
        self.is_active = active
