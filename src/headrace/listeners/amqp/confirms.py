"""Publisher confirms: which publishes a flush has stored, and the acks and nacks that say so.

Publishes are not awaited one by one. All that a connection has received at once is registered with the next
flush, and confirmed when that flush is on stable storage.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, cast

from headrace.broker.queues.queue import Queue
from headrace.broker.types.publish_tracker import PartialFlush, PublishTracker
from headrace.errors import HeadraceError
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.transport import DISK, AmqpTransport
from headrace.wire.amqp.methods import confirm
from headrace.wire.amqp.scan import ChannelState, Runs, Scanner

QUICK_ACK_BYTES_MAX = 4096  # more than this fills a TCP segment, and Nagle's algorithm sends full segments at once


class ChannelConfirms:
    """The confirm mode of one channel, from confirm.select on."""

    __slots__ = ("_channel", "_is_open", "_nacked", "_write", "flushes_pending", "last_answered")

    def __init__(self, channel: int, write: Callable[[bytes], None]) -> None:
        self.last_answered = 0  # sequence number of the last publish that was acked or nacked
        self.flushes_pending = 0
        self._channel = channel
        self._write = write
        self._nacked: set[int] = set()  # sequence numbers after last_answered
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def stored(self, sequence: int) -> None:
        """A flush is stored that holds every publish up to this one."""
        self.flushes_pending -= 1
        self.ack_to(sequence)

    def failed(self, sequence: int, runs: Runs, error: HeadraceError) -> None:
        """A flush failed. Of the unanswered publishes up to this one none was stored, or only those of some queues."""
        self.flushes_pending -= 1
        if not isinstance(error, PartialFlush):
            self._nack_to(sequence)
            return
        for last, target in runs.ends(sequence):
            is_stored = target is not None and error.is_stored_in(cast("list[Queue]", target.owners))
            (self.ack_to if is_stored else self._nack_to)(last)

    def ack_to(self, sequence: int) -> None:
        """Acks every unanswered publish up to this one."""
        if sequence <= self.last_answered or not self._is_open:
            return
        first = self.last_answered + 1
        self.last_answered = sequence
        if self._nacked:
            nacked = self._nacked
            self._nacked = {number for number in nacked if number > sequence}
            while sequence >= first and sequence in nacked:  # a tag is answered once
                sequence -= 1
            if sequence < first:
                return
        self._write(confirm(self._channel, sequence, multiple=sequence > first))

    def nack(self, sequence: int) -> None:
        """Nacks this publish alone."""
        self._nacked.add(sequence)
        self._write(confirm(self._channel, sequence, multiple=False, positive=False))

    def _nack_to(self, sequence: int) -> None:
        if sequence > self.last_answered and self._is_open:
            self.last_answered = sequence
            self._write(confirm(self._channel, sequence, multiple=True, positive=False))


class HasConfirms(Protocol):
    """A channel as PublisherConfirms sees it."""

    @property
    def confirms(self) -> ChannelConfirms | None: ...


# Publishes of one channel that wait for a flush: up to which sequence number, and which targets they went to.
Unconfirmed = tuple[ChannelConfirms, int, Runs]


class PublisherConfirms:
    """The publishes of one connection on their way to stable storage.

    The connection sets `flushes.tracker` to `tracker` while it reads, so that the outcome of a flush for its own
    publishes can be told from that of all others. A tracker is replaced whenever a confirm depends on its outcome.
    """

    def __init__(
        self,
        scanner: Scanner,
        channels: Mapping[int, HasConfirms],
        transport: AmqpTransport,
        context: ListenerContext,
    ) -> None:
        self.tracker = PublishTracker()
        self.flushes_pending = 0
        self.broker = context.broker
        self._tracker_flush = 0  # value of flush_count when the tracker was made
        self._flushes = context.flushes
        self._stats = context.stats
        self._scanner = scanner
        self._channels = channels
        self._transport = transport
        self._messages_seen = self._bytes_seen = 0

    def after_publishes(self, published: list[ChannelState]) -> None:
        """Registers what the scanner has read with the next flush. Called once per buffer from the socket."""
        size = self._count()
        unconfirmed, is_durable, has_reply = self._collect(published)
        if is_durable or unconfirmed:
            self._await_flush(unconfirmed, is_durable)
        if not has_reply and size < QUICK_ACK_BYTES_MAX:
            self._transport.acknowledge_now()
        # Where no confirm depends on it, one tracker per flush is enough.
        if unconfirmed or self._tracker_flush != self._flushes.flush_count:
            self._replace_tracker()

    def _count(self) -> int:
        """Updates the statistics; returns the size of the bodies since the last call."""
        scanner, stats = self._scanner, self._stats
        messages, size = scanner.messages, scanner.bytes
        stats.messages_in += messages - self._messages_seen
        stats.bytes_in += size - self._bytes_seen
        grown, self._messages_seen, self._bytes_seen = size - self._bytes_seen, messages, size
        return grown

    def _collect(self, published: list[ChannelState]) -> tuple[list[Unconfirmed], bool, bool]:
        """(publishes that wait for a flush, whether any goes to disk, whether any is answered by a confirm).
        Confirms at once where nothing goes to disk and no earlier confirm is pending."""
        unconfirmed: list[Unconfirmed] = []
        is_durable = has_reply = False
        for state in published:
            channel = self._channels.get(state.number)
            if channel is None:
                continue
            confirms = channel.confirms
            touched_disk = state.touched_disk
            if confirms is not None:
                has_reply = True
                if touched_disk or confirms.flushes_pending:
                    confirms.flushes_pending += 1
                    unconfirmed.append((confirms, state.sequence, state.take_runs()))
                else:
                    confirms.ack_to(state.sequence)
                    state.take_runs()
            if touched_disk:
                is_durable = True
                state.touched_disk = False
        return unconfirmed, is_durable, has_reply

    def _await_flush(self, unconfirmed: list[Unconfirmed], is_durable: bool) -> None:
        self.flushes_pending += 1
        self.tracker.stores |= is_durable
        self._flushes.after(partial(self._flushed, unconfirmed, self.tracker if is_durable else None))
        if self.broker.pressure.must_pause_reading:
            self._transport.set_reading_paused(DISK, True)
            self.broker.pressure.on_drain(partial(self._transport.set_reading_paused, DISK, False))

    def _flushed(
        self, unconfirmed: list[Unconfirmed], tracker: PublishTracker | None, error: HeadraceError | None
    ) -> None:
        """Without a tracker these publishes went to memory only and waited for earlier confirms of their channels,
        which have had their own outcome."""
        self.flushes_pending -= 1
        failure = tracker.outcome(error) if tracker is not None else None
        for confirms, sequence, runs in unconfirmed:
            if failure is not None:
                confirms.failed(sequence, runs, failure)
            else:
                confirms.stored(sequence)

    def _replace_tracker(self) -> None:
        """Later publishes get an outcome of their own."""
        tracker, self.tracker, self._tracker_flush = self.tracker, PublishTracker(), self._flushes.flush_count
        tracker.detach()
        if self._flushes.tracker is tracker:
            self._flushes.tracker = self.tracker
