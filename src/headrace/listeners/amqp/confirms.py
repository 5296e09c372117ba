"""Publisher confirms: which publishes a flush has stored, and the acks and nacks that say so.

Publishes are not awaited one by one. All that a connection has received at once is registered with the next
flush, and confirmed when that flush is on stable storage.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.listeners.amqp.context import ListenerContext
from headrace.listeners.amqp.counts import ChannelCounts
from headrace.listeners.amqp.transport import DISK, AmqpTransport
from headrace.publish_counts import PublishCounts
from headrace.wire.amqp.methods import confirm
from headrace.wire.amqp.scan import ChannelState, Runs, Scanner

QUICK_ACK_BYTES_MAX = 4096  # more than this fills a TCP segment, and Nagle's algorithm sends full segments at once


class ChannelConfirms:
    """The confirm mode of one channel, from confirm.select on."""

    __slots__ = (
        "_channel",
        "_counts",
        "_is_open",
        "_nacked",
        "_vhost_counts",
        "_write",
        "flushes_pending",
        "last_answered",
    )

    def __init__(
        self, channel: int, write: Callable[[bytes], None], counts: ChannelCounts, vhost_counts: PublishCounts
    ) -> None:
        self.last_answered = 0  # sequence number of the last publish that was acked or nacked
        self.flushes_pending = 0
        self._channel = channel
        self._write = write
        self._counts = counts
        self._vhost_counts = vhost_counts
        self._nacked: set[int] = set()  # sequence numbers after last_answered
        self._is_open = True

    def close(self) -> None:
        self._is_open = False

    def failed(self, sequence: int, runs: Runs) -> None:
        """A flush in which something was refused. Each of the unanswered publishes up to this one was stored if none
        of its batches was refused."""
        for last, batches in runs.ends(sequence):
            is_stored = batches is not None and all(batch.error is None for batch in batches)
            (self.ack_to if is_stored else self._nack_to)(last)

    def ack_to(self, sequence: int) -> None:
        """Acks every unanswered publish up to this one."""
        if sequence <= self.last_answered or not self._is_open:
            return
        first = self.last_answered + 1
        self.last_answered = sequence
        acked = sequence - first + 1
        if self._nacked:
            nacked = self._nacked
            acked -= sum(first <= number <= sequence for number in nacked)
            self._nacked = {number for number in nacked if number > sequence}
            while sequence >= first and sequence in nacked:  # a tag is answered once
                sequence -= 1
            if sequence < first:
                return
        self._counts.confirm += acked
        self._vhost_counts.confirmed += acked
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


# Publishes of one channel that wait for a flush: up to which sequence number, and which batches they went to.
Unconfirmed = tuple[ChannelConfirms, int, Runs]


class PublisherConfirms:
    """The publishes of one connection on their way to stable storage."""

    def __init__(
        self,
        scanner: Scanner,
        channels: Mapping[int, HasConfirms],
        transport: AmqpTransport,
        context: ListenerContext,
    ) -> None:
        self.flushes_pending = 0
        self._pressure = context.broker.pressure
        self._flushes = context.flushes
        self._stats = context.stats
        self._scanner = scanner
        self._channels = channels
        self._transport = transport
        self._messages_seen = self._bytes_seen = 0

    def after_publishes(self, published: list[ChannelState]) -> None:
        """Registers what the scanner has read with the next flush. Called once per buffer from the socket."""
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
                else:  # nothing goes to disk, and no earlier confirm is pending
                    confirms.ack_to(state.sequence)
                    state.take_runs()
            if touched_disk:
                is_durable = True
                state.touched_disk = False
        scanner, stats = self._scanner, self._stats
        size = scanner.bytes - self._bytes_seen
        stats.messages_in += scanner.messages - self._messages_seen
        stats.bytes_in += size
        self._messages_seen, self._bytes_seen = scanner.messages, scanner.bytes
        if is_durable or unconfirmed:
            self.flushes_pending += 1
            self._flushes.after(partial(self._flushed, unconfirmed))
            if self._pressure.must_pause_reading:
                self._transport.set_reading_paused(DISK, True)
                self._pressure.on_drain(partial(self._transport.set_reading_paused, DISK, False))
        if not has_reply and size < QUICK_ACK_BYTES_MAX:
            self._transport.acknowledge_now()

    def _flushed(self, unconfirmed: list[Unconfirmed], error: HeadraceError | None) -> None:
        self.flushes_pending -= 1
        for confirms, sequence, runs in unconfirmed:
            confirms.flushes_pending -= 1
            if error is None:
                confirms.ack_to(sequence)
            else:
                confirms.failed(sequence, runs)
