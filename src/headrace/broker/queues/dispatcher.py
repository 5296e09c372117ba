"""Delivers a queue's messages to its consumers.

Acks, new messages and new consumers of one event-loop iteration are handled together, by one call of `dispatch`.
"""

from typing import Any

from headrace.broker.queues.backlog import Backlog
from headrace.broker.queues.consumers import Consumer
from headrace.broker.queues.dispatch_schedule import DispatchSchedule
from headrace.broker.queues.limits import QueueLimits
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.view import View
from headrace.broker.queues.view_reader import Run
from headrace.broker.types.message import Message, properties_of
from headrace.record.amqp.properties import Int64

# One dispatch delivers at most this before other queues and connections get their turn.
TURN_MESSAGES = 2000
TURN_BYTES = 1 << 20
SHARE_MAX = 512  # messages for one consumer at once
FRAME_BYTES = 200  # estimate of what a message sent alone takes beside its body


class Dispatcher:
    """Owned by one Queue; used on the event-loop thread."""

    def __init__(
        self, policy: QueueArguments, backlog: Backlog, limits: QueueLimits, schedule: DispatchSchedule
    ) -> None:
        self.policy = policy
        self._backlog = backlog
        self._limits = limits
        self._schedule = schedule
        self._waiters: dict[View, Any] = {}  # for more messages
        self.delivered = self.redelivered = self.acked = 0

    def dispatch(self) -> None:
        """Deliver ready messages, a share to each consumer with credit."""
        self._schedule.begin()
        consumers, backlog = self._schedule.consumers, self._backlog
        if backlog.is_closed or not consumers:
            return
        left, left_bytes = TURN_MESSAGES, TURN_BYTES
        while left > 0 and left_bytes > 0:
            ready = backlog.ready
            chosen = consumers.in_turn(max(1, ready))
            if not chosen:
                return  # new credit wakes the queue
            # Divide the ready messages once, instead of choosing a consumer for every message.
            share = SHARE_MAX if len(chosen) == 1 else max(1, min(SHARE_MAX, -(-ready // len(chosen))))
            for consumer in chosen:
                found = backlog.next_run()
                if found is None:
                    self._wait_for_more()
                    return
                view, run = found
                if not backlog.is_loaded(view, run, self._schedule.wake):
                    return
                credit = consumer.credit()  # again: the others of its channel may have used it up meanwhile
                if credit <= 0:
                    continue
                count, size = self._deliver(consumer, view, run, min(credit, share))
                consumers.served(consumer)
                left -= count + 1
                left_bytes -= size
        self._schedule.wake()

    def _wait_for_more(self) -> None:
        for view in self._backlog.views:
            if view not in self._waiters and view.next >= view.log.stable_end:
                self._waiters[view] = view.log.wait(view.next, lambda v=view: self._arrived(v))

    def _arrived(self, view: View) -> None:
        self._waiters.pop(view, None)
        self._schedule.wake()

    def stop_waiting(self) -> None:
        """The last consumer has been removed."""
        for waiter in self._waiters.values():
            waiter.cancel()
        self._waiters.clear()
        self._backlog.release_chunks()

    def _deliver(self, consumer: Consumer, view: View, run: Run, share: int) -> tuple[int, int]:
        """(number of messages, bytes). Whole batches go to the consumer without becoming Message objects; a record
        that needs to be examined is delivered alone."""
        limits = self._limits
        chunk = view.reader.chunk(run)
        if not chunk.data:
            self._backlog.skip(view, run, min(run.end, chunk.next_offset))
            return 0, 0
        decoded = view.reader.decoded(run.start)
        if decoded is not None and properties_of(decoded) is None:  # saves the consumer the walk to this record
            limits.head_changed()
            return self._deliver_one(consumer, view, run)
        if view.counts and self.policy.counts_deliveries:
            if run.start in view.counts:
                limits.head_changed()
                return self._deliver_one(consumer, view, run)
            run = run._replace(end=view.counts.next_in(run.start, run.end))
        if limits.bytes is not None:
            run = run._replace(end=limits.bytes.up_to(view, run.start, run.end))
        delivered = consumer.deliver(
            view,
            chunk.data,
            run.start,
            min(run.end, chunk.next_offset),
            share,
            run.redelivered_below,
            limits.expired_until(run),
        )
        next_offset, count, size = delivered.next_offset, delivered.count, delivered.body_bytes
        limits.head_changed()
        if next_offset > run.start:
            view.advance(run, next_offset)
            for start, end in delivered.gaps:
                view.settle(start, end)
            if consumer.no_ack and count:
                self._settle_sent(view, run.start, next_offset)
            self._count(view, run, count, size)
        if delivered.needs_message:
            rest = run._replace(start=next_offset)
            if rest.start < rest.end and count < share:
                more, more_size = self._deliver_one(consumer, view, rest)
                return count + more, size + more_size
        return count, size

    def _deliver_one(self, consumer: Consumer, view: View, run: Run) -> tuple[int, int]:
        """Deliver the record at the start of the run as a Message."""
        message = self._backlog.read(view, run)
        if message is None:
            return 0, 0
        offset = run.start
        view.advance(run, offset + 1)
        if self._limits.drop_if_expired(view, run, message, to_consumer=True):
            return 0, 0
        message = self._with_delivery_count(view, offset, message)
        consumer.deliver_message(view, offset, message, offset < run.redelivered_below)
        self._count(view, run, 1, len(message.body))
        if consumer.no_ack:
            self._settle_sent(view, offset, offset + 1)
        return 1, len(message.body) + FRAME_BYTES

    def _with_delivery_count(self, view: View, offset: int, message: Message) -> Message:
        count = view.counts.get(offset)
        if count and self.policy.counts_deliveries:
            return message.with_headers(**{"x-delivery-count": Int64(count)})
        return message

    def _settle_sent(self, view: View, start: int, end: int) -> None:
        """Messages for a consumer without acks are settled when they are sent."""
        if not self._backlog.is_closed:
            view.settle(start, end)
            self.acked += end - start

    def _count(self, view: View, run: Run, count: int, size: int) -> None:
        self.delivered += count
        if run.returned:
            self.redelivered += count
        if self._limits.bytes is not None:
            self._limits.bytes.taken(view, run.start, size)

    def get(self) -> tuple[View, int, Message, bool] | None:
        """The next message for basic.get, whether or not it was delivered before; it is in flight until it is settled
        or returned."""
        while not self._backlog.is_closed:
            taken = self._backlog.take_head()
            if taken is None:
                return None
            view, run, message = taken
            view.reserve_past(run.start)
            if self._limits.drop_if_expired(view, run, message, to_consumer=False):
                continue
            self._limits.forget_bytes(view, run.start, message)
            message = self._with_delivery_count(view, run.start, message)
            self.delivered += 1
            self._limits.head_changed()
            return view, run.start, message, run.redelivered_below > run.start
        return None
