"""A queue: its declaration, its messages (backlog), their limits, and the consumers they are delivered to (dispatcher).

The AMQP and HTTP listeners use queues through this class only. Everything runs on the event-loop thread.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.broker.queues.backlog import Backlog
from headrace.broker.queues.consumers import Consumer, Consumers
from headrace.broker.queues.dead_letter_outbox import DeadLetterOutbox
from headrace.broker.queues.dispatch_schedule import DispatchSchedule
from headrace.broker.queues.dispatcher import Dispatcher
from headrace.broker.queues.lifetime import Lifetime
from headrace.broker.queues.limits import QueueLimits
from headrace.broker.queues.publish_batch import CachedRoute, PublishBatch
from headrace.broker.queues.queue_arguments import REJECT_DLX, STREAM, QueueArguments
from headrace.broker.queues.queue_counts import QueueCounts
from headrace.broker.queues.vhost_services import VhostServices
from headrace.broker.queues.view import View, ViewEvents
from headrace.broker.types.message import Message
from headrace.broker.types.range_set import RangeSet
from headrace.errors import ExclusiveUse
from headrace.record.layout import SEAL_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class QueueServices(VhostServices):
    """The parts of a vhost that its queues use."""

    delete_unused: "Callable[[Queue], asyncio.Task[None] | None]"  # of auto-delete and x-expires


class Queue:
    """A classic or quorum queue. `open_views` makes its views, one for each priority level, highest first."""

    def __init__(
        self,
        vhost: QueueServices,
        name: str,
        policy: QueueArguments,
        open_views: Callable[[ViewEvents], list[View]],
        *,
        durable: bool,
        auto_delete: bool = False,
        owner: object | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.vhost = vhost
        self.name = name
        self.policy = policy  # in force: the declared one, limited by the operator's policies
        self.declared_policy = policy
        self.policy_name: str | None = None
        self.operator_policy_name: str | None = None
        self.durable, self.auto_delete = durable, auto_delete
        self.owner = owner  # the connection of an exclusive queue
        self.arguments = arguments or {}
        self.is_deleted = False
        self.consumers = Consumers(single_active=policy.single_active)
        self._schedule = DispatchSchedule(self.consumers, vhost.loop, self._dispatch)
        self.wake = self._schedule.wake  # called for every batch of acks: saves a call
        self.views = open_views(ViewEvents(self.wake, self._records_lost, self._moves_failed))
        self.backlog = Backlog(self.views)
        self.outbox = DeadLetterOutbox(
            self, self.backlog, vhost, on_returned=self._returned, on_retry=self._moves_failed
        )
        self.limits = QueueLimits(policy, self.backlog, self.outbox, self._schedule, vhost)
        self.dispatcher = self._make_dispatcher()
        self.lifetime = Lifetime(
            self.consumers,
            vhost.clock,
            vhost.loop,
            auto_delete=auto_delete,
            expires_ms=policy.expires_ms,
            delete=self._delete_unused,
        )

    def _make_dispatcher(self) -> Dispatcher:
        return Dispatcher(self.policy, self.backlog, self.limits, self._schedule)

    # Facts.

    @property
    def exclusive(self) -> bool:
        return self.owner is not None

    @property
    def is_stream(self) -> bool:
        return self.policy.kind == STREAM

    @property
    def needs_python(self) -> bool:
        """Whether messages must be published one by one, not appended to the writer by the scanner."""
        return self.policy.decides_per_message

    @property
    def view(self) -> View:
        """The view of the lowest priority; the only one of most queues."""
        return self.views[-1]

    @property
    def ready(self) -> int:
        return sum(view.ready for view in self.views)

    @property
    def unacked(self) -> int:
        return sum(view.out for view in self.views)

    @property
    def most_returns(self) -> int:
        """The highest return count of an unsettled message."""
        return max(view.counts.highest for view in self.views)

    @property
    def counts(self) -> QueueCounts:
        return self.dispatcher.counts

    @property
    def published(self) -> int:
        return self.dispatcher.published

    @property
    def dead_lettered(self) -> int:
        return self.outbox.moved

    # Publishing.

    def open_batch(self, target: CachedRoute | None = None) -> PublishBatch:
        """For the fast path: the scanner appends messages to the batch's writer without examining them."""
        policy = self.policy
        if policy.length_max is not None or policy.ttl_ms is not None:
            self.limits.check_after_flush()
        return self.views[-1].open_batch(target)

    def publish(self, message: Message, timestamp_ms: int) -> bool:
        """Append one message; False if the queue is full and refuses it."""
        if self.limits.refuses(len(message.body)):
            if self.policy.overflow == REJECT_DLX:
                self.vhost.dead_letters.publish_copy(self, message, "maxlen", timestamp_ms)
            return False
        batch = self.backlog.view_for(message).open_batch()
        writer = batch.writer
        if writer.size > SEAL_BYTES:
            batch.seal()
        writer.append(message.key, message.body, message.record_headers(), timestamp_ms)
        self.limits.published(message)
        return True

    def refuses(self, size: int) -> bool:
        """Whether the queue would refuse a message with a body of this size."""
        return self.limits.refuses(size)

    # Settling.

    def settle(self, view: View, start: int, end: int) -> None:
        if self.is_deleted:
            return  # its settles have been deleted with it and must not reappear
        view.settle(start, end)
        self.dispatcher.counts.ack += end - start

    def give_back(self, view: View, offset: int, *, counts: bool = True) -> None:
        """Return a message in flight to be delivered again. Beyond the delivery limit it is dead-lettered."""
        if self.is_deleted or offset < view.log.start_offset:
            return  # it was deleted while it was in flight
        limit = self.policy.returns_max
        if counts and self.policy.counts_deliveries:
            count = view.count_return(offset)
            if limit is not None and count > limit:
                self.reject(view, offset, "delivery_limit")
                return
        view.give_back(offset, offset + 1)
        if self.limits.bytes is not None:
            self.limits.bytes.returned(view, offset)
        self.limits.returned()

    @property
    def gives_back_runs(self) -> bool:
        """Whether messages can be returned as ranges: neither their size nor their return count is needed."""
        return self.limits.bytes is None and not self.policy.counts_deliveries

    def give_back_run(self, view: View, start: int, end: int) -> None:
        start = max(start, view.log.start_offset)
        if start < end and not self.is_deleted:
            view.give_back(start, end)
            self.limits.returned()

    def reject(self, view: View, offset: int, reason: str = "rejected") -> None:
        """Retry or dead-letter a message in flight; drop it if the queue does neither."""
        if self.is_deleted or offset < view.log.start_offset:
            return
        if self.policy.dead_letter_exchange is None and not self.policy.retry_limit:
            view.settle(offset, offset + 1)
            return
        self.outbox.reject(view, offset, reason)

    async def rejects_moved(self) -> None:
        """Wait until every message rejected so far has been dead-lettered, or the queue is deleted."""
        await self.outbox.wait_empty()

    async def purge(self) -> int:
        """Remove all ready messages durably; returns how many. Messages in flight stay in flight."""
        removed = self.backlog.settle_ready()
        if self.limits.bytes is not None:
            self.limits.bytes.purged()
        if any(view.durable for view in self.views):
            await self.vhost.flushes.wait_settles_stored()
        return removed

    def settle_void(self, view: View, void: RangeSet, is_committed: bool) -> None:
        """A Kafka transaction has ended and these offsets hold no message."""
        self.limits.settle_void(view, void, is_committed)

    def drop_expired(self) -> None:
        self.limits.drop_expired()

    # Delivering.

    def _dispatch(self) -> None:
        self.dispatcher.dispatch()

    def serve(self) -> None:
        """Serve the consumers now if they have been woken: basic.get takes only messages that no consumer takes."""
        self._schedule.dispatch_now()

    async def prepare_get(self) -> None:
        """Wait until `get` needs neither a reservation nor the disk."""
        await self.backlog.prepare_take()

    def get(self, *, no_ack: bool = False) -> tuple[View, int, Message, bool] | None:
        """(view, offset, message, redelivered) of the next message. It is in flight until settled or returned; with
        no_ack it is settled."""
        self.lifetime.used()
        return self.dispatcher.get(no_ack=no_ack)

    def add_consumer(self, consumer: Consumer, *, is_subscription: bool = True) -> None:
        """A consumer that is no subscription takes some messages and is removed: it does not keep an auto-delete queue
        alive, nor does its end delete one."""
        is_shared = self.policy.single_active or len(self.consumers)
        if self.consumers.exclusive or (consumer.exclusive and is_shared):
            raise ExclusiveUse(f"queue '{self.name}' in vhost '{self.vhost.name}' in exclusive use")
        if is_subscription:
            self.lifetime.consumer_added()
        self.consumers.add(consumer)
        for view in self.views:
            view.reserve_past(view.next)
        self.wake()

    def remove_consumer(self, consumer: Consumer, *, is_subscription: bool = True) -> asyncio.Task[None] | None:
        """The task that deletes the queue, if it was an auto-delete queue's last consumer."""
        before = len(self.consumers)
        self.consumers.remove(consumer)
        self.lifetime.used()
        if before and not len(self.consumers):
            self.dispatcher.stop_waiting()
            if is_subscription:
                return self.lifetime.last_consumer_removed()
            self.lifetime.deletion_cancelled()  # x-expires did not run meanwhile
            return None
        self.wake()
        return None

    # Events of the components.

    def _returned(self) -> None:
        self.limits.returned()

    def _records_lost(self) -> None:
        self.limits.count_bytes_anew()

    def _moves_failed(self) -> None:
        self.limits.moves_failed()

    # Ending.

    def apply_policy(self, policy: QueueArguments) -> None:
        self.policy = self.dispatcher.policy = policy
        self.limits.apply_policy(policy)
        self.lifetime.set_expires(policy.expires_ms)

    def used(self) -> None:
        """The queue was declared again: x-expires starts anew."""
        self.lifetime.used()

    def _delete_unused(self) -> asyncio.Task[None] | None:
        return self.vhost.delete_unused(self)

    def close(self) -> None:
        """The queue has been deleted: cancels its consumers and delivers nothing more."""
        self.is_deleted = True
        self.backlog.is_closed = True
        self._schedule.close()
        self.outbox.release_waiters()
        self.dispatcher.stop_waiting()
        self.limits.close()
        self.lifetime.close()
        for consumer in self.consumers:
            self.consumers.remove(consumer)
            consumer.cancelled()
        self.backlog.close()
        for view in self.views:
            self.vhost.flushes.forget(view)
            if not view.durable:
                view.log.close()
