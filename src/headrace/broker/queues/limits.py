"""Limits of a queue: length, bytes and age of its messages, and what happens to those beyond them."""

import asyncio
from functools import partial

from headrace.broker.queues.backlog import Backlog
from headrace.broker.queues.byte_bound import ReadyBytes
from headrace.broker.queues.dead_letter_outbox import DeadLetterOutbox
from headrace.broker.queues.deferred_calls import DeferredCalls
from headrace.broker.queues.dispatch_schedule import DispatchSchedule
from headrace.broker.queues.queue_arguments import DROP_HEAD, STREAM, QueueArguments
from headrace.broker.queues.vhost_services import VhostServices
from headrace.broker.queues.view import View
from headrace.broker.queues.view_reader import Run
from headrace.broker.streams.partition import Cancellable
from headrace.broker.types.message import Message
from headrace.broker.types.range_set import RangeSet

NEVER = -(2**62)
VOID_RUNS_MAX = 4096  # bounds the memory for markers of transactions: later ones are settled when they are met
HEAD_TIMER_MAX_S = 60.0  # the clock may be set, or the machine suspended: expiry is late by at most this
DROPPED_AT_ONCE = 40  # takes a few milliseconds if they are dead-lettered


class QueueLimits:
    """Owned by one Queue. Enforces nothing on a stream, whose limits are its retention."""

    def __init__(
        self,
        policy: QueueArguments,
        backlog: Backlog,
        outbox: DeadLetterOutbox,
        schedule: DispatchSchedule,
        vhost: VhostServices,
    ) -> None:
        self.policy = policy
        self._backlog = backlog
        self._outbox = outbox
        self._schedule = schedule
        self._vhost = vhost
        self._is_stream = policy.kind == STREAM
        self.deferred = DeferredCalls(vhost.loop)
        self.bytes: ReadyBytes | None = None  # only while the policy limits bytes
        self._arrivals: dict[View, Cancellable] = {}  # waiters for messages, while the queue is bounded
        # A message may have an expiration of its own, so every new head is checked. Unknown for messages from before
        # a restart.
        self.may_expire = any(view.has_ready for view in backlog.views)
        self.head_timer: asyncio.TimerHandle | None = None
        self._head_timer_at = 0.0
        self._checked_flush = -1
        self._bound_bytes()
        self._watch_arrivals()

    def apply_policy(self, policy: QueueArguments) -> None:
        """Messages beyond the new limits are dropped now."""
        self.policy = policy
        self._bound_bytes()
        self._watch_arrivals()
        self.check_after_flush()

    def close(self) -> None:
        for waiter in self._arrivals.values():
            waiter.cancel()
        self._arrivals.clear()
        if self.head_timer is not None:
            self.head_timer.cancel()

    # Events.

    def published(self, message: Message) -> None:
        """A message was appended to the backlog."""
        policy = self.policy
        if self.bytes is not None:
            self.bytes.published(self._vhost.flushes.flush_count, len(message.body))
        has_expiration = message.has_expiration
        self.may_expire |= has_expiration
        if has_expiration or policy.is_bounded:
            self.check_after_flush()

    def check_after_flush(self) -> None:
        """Enforce the limits once the next flush has ended."""
        flushes = self._vhost.flushes
        if self._checked_flush != flushes.flush_count:  # once per flush
            self._checked_flush = flushes.flush_count
            flushes.after(partial(self._after_flush, flushes.flush_count))

    def _after_flush(self, flush: int, error: object) -> None:
        if self._backlog.is_closed:
            return
        self._schedule.wake()
        if self.bytes is not None:
            self.bytes.flushed(flush)
        self.drop_overflow()
        self.drop_expired()

    def returned(self) -> None:
        """Messages in flight became ready again."""
        self._schedule.wake()
        self.head_changed()
        if self.policy.is_bounded:
            self.check_after_flush()

    def moves_failed(self) -> None:
        """Messages that were to move elsewhere are ready again: check them again."""
        if self._backlog.is_closed:
            return
        self.count_bytes_anew()  # they were counted as gone
        self._schedule.wake()
        self.drop_overflow()
        self.drop_expired()

    def head_changed(self) -> None:
        """The new head may have expired, or may expire before anything else happens."""
        if self.may_expire:
            self.deferred.call_soon(self.drop_expired)

    def settle_void(self, view: View, void: RangeSet, is_committed: bool) -> None:
        """A Kafka transaction has ended and these offsets hold no message. They are settled now, so that they do not
        count as messages: a length limit would drop real messages for them."""
        is_long = view.settled.runs >= VOID_RUNS_MAX and self.policy.length_max is None
        if not self._backlog.is_closed and not (is_committed and is_long):
            self._backlog.settle_void(view, void)

    # Length and bytes.

    def _bound_bytes(self) -> None:
        """Start counting bytes in the background when they are limited; stop when they no longer are."""
        if self.policy.bytes_max is None or self._is_stream:
            self.bytes = None
        elif self.bytes is None:
            self.bytes = ReadyBytes(self._backlog, self._vhost.loop, self.drop_overflow)
            self._vhost.loop.call_soon(self.bytes.catch_up)

    def count_bytes_anew(self) -> None:
        self.bytes = None
        self._bound_bytes()

    def forget_bytes(self, view: View, offset: int, message: Message) -> None:
        if self.bytes is not None:
            self.bytes.taken(view, offset, len(message.body))

    def _watch_arrivals(self) -> None:
        """Kafka and HTTP clients append to the log directly: wait until there is something to read."""
        if self._is_stream or (self.policy.length_max is None and self.policy.bytes_max is None):
            return
        for view in self._backlog.views:
            if view not in self._arrivals and not getattr(view.log, "is_closed", False):
                self._arrivals[view] = view.log.wait(view.log.stable_end, partial(self._arrived, view))

    def _arrived(self, view: View) -> None:
        self._arrivals.pop(view, None)
        if self._backlog.is_closed:
            return
        self._watch_arrivals()  # first, so that a failure below does not end the watching
        self._schedule.wake()
        if self.bytes is not None:
            self.bytes.catch_up()
        self.drop_overflow()

    def refuses(self, size: int) -> bool:
        """Whether the queue is full and its policy is to refuse another message of this size."""
        return self.policy.overflow != DROP_HEAD and self._is_full(size)

    def _is_full(self, more_bytes: int) -> bool:
        """Whether one more message is too much. Messages that consumers have credit for do not count."""
        self._backlog.follow_starts()
        waiting = self._backlog.ready + self._backlog.pending
        size = self.bytes.with_unflushed if self.bytes is not None else 0
        if not self._overflows(waiting + 1, size + more_bytes):
            return False
        left = waiting - self._schedule.consumers.total_credit(waiting)
        left_bytes = size * left // max(1, waiting)  # assumes that all have the same size
        return self._overflows(left + 1, left_bytes + more_bytes)

    def _overflows(self, messages: int, size: int) -> bool:
        policy = self.policy
        if policy.length_max is not None and messages > policy.length_max:
            return True
        return policy.bytes_max is not None and size > policy.bytes_max

    def drop_overflow(self) -> None:
        """Drop or dead-letter the oldest messages of the lowest priority beyond the limits."""
        policy, backlog = self.policy, self._backlog
        if policy.overflow != DROP_HEAD or backlog.is_closed or self._is_stream:
            return
        if self._schedule.is_serving:  # consumers first: messages that they take are not dropped
            self.deferred.call_soon(self.drop_overflow)
            return
        backlog.follow_starts()
        left = DROPPED_AT_ONCE
        while (ready := backlog.ready) and self._overflows(ready, self.bytes.total if self.bytes is not None else 0):
            left -= 1
            if left < 0:  # a new limit on a long backlog
                self.deferred.call_soon(self.drop_overflow)
                return
            if policy.dead_letter_exchange is None and policy.bytes_max is None and len(backlog.views) == 1:
                backlog.settle_head(ready - policy.length_max if policy.length_max is not None else 0)
            elif not self._drop_lowest():
                return

    def _drop_lowest(self) -> bool:
        """False if there is nothing to drop, or the disk has to be read first."""
        head = self._backlog.lowest_head()
        if head is None or not self._backlog.is_loaded(*head, self.drop_overflow):
            return False
        taken = self._backlog.take_head(lowest=True)
        if taken is None:
            return False
        self._remove(taken.view, taken.run.start, taken.message, "maxlen")
        return True

    def _remove(self, view: View, offset: int, message: Message, reason: str) -> None:
        self.forget_bytes(view, offset, message)
        self._outbox.move(view, offset, message, reason)

    # Age.

    def expires_at(self, message: Message) -> int | None:
        own = message.expiration_ms()
        limits = [limit for limit in (own, self.policy.ttl_ms) if limit is not None]
        return message.timestamp + min(limits) if limits else None

    def expired_until(self, run: Run) -> int:
        """Messages with a timestamp up to this have expired by the queue's TTL.

        A TTL of 0 means that a message expires unless a consumer can take it at once: a new message is delivered, and
        drop_expired removes it if no consumer has credit.
        """
        ttl_ms = self.policy.ttl_ms
        if ttl_ms is None or (ttl_ms == 0 and not run.returned):
            return NEVER
        return self._vhost.clock.now_ms() - ttl_ms

    def drop_if_expired(self, view: View, run: Run, message: Message, *, to_consumer: bool) -> bool:
        """Dead-letter a message that was just taken from the start of the run, if it has expired."""
        at = self.expires_at(message)
        if at is None:
            return False
        if to_consumer and at == message.timestamp and not run.returned:
            return False  # a TTL of 0: see expired_until
        if at > self._vhost.clock.now_ms():
            return False
        self._remove(view, run.start, message, "expired")
        return True

    def drop_expired(self) -> None:
        """Dead-letter expired messages at the heads, and set a timer for the next one."""
        backlog = self._backlog
        if backlog.is_closed or self._is_stream:
            return
        if self._schedule.is_serving:
            self.deferred.call_soon(self.drop_expired)
            return
        now = self._vhost.clock.now_ms()
        next_at: int | None = None
        left = DROPPED_AT_ONCE
        for view in backlog.views:
            dropped, at = self._drop_expired_of(view, now, left)
            left -= dropped
            if left <= 0:
                self.deferred.call_soon(self.drop_expired)
                return
            if at is not None:
                next_at = at if next_at is None else min(at, next_at)
        if next_at is not None:
            self._arm_head_timer(next_at - now)
        elif self.may_expire:
            self.may_expire = not backlog.is_empty

    def _drop_expired_of(self, view: View, now: int, count_max: int) -> tuple[int, int | None]:
        """(number of messages dropped, when the new head expires)."""
        dropped = 0
        while dropped < count_max and view.has_ready:
            run = view.next_run_unreserved()
            if run is None or not self._backlog.is_loaded(view, run, self.drop_expired):
                break
            # Usually the head has not expired, and one record is enough. After an expired one there are often more.
            for offset, message in self._backlog.read_some(view, run, count_max - dropped if dropped else 1):
                at = self.expires_at(message)
                if at is None or at > now:
                    return dropped, at
                view.advance(run._replace(start=offset), offset + 1)
                self._remove(view, offset, message, "expired")
                dropped += 1
        return dropped, None

    def _arm_head_timer(self, delay_ms: int) -> None:
        loop = self._vhost.loop
        when = loop.time() + min(delay_ms / 1000, HEAD_TIMER_MAX_S) + 0.001
        if self.head_timer is not None:
            if self._head_timer_at <= when:
                return
            self.head_timer.cancel()
        self._head_timer_at = when
        self.head_timer = loop.call_at(when, self._on_head_timer)

    def _on_head_timer(self) -> None:
        self.head_timer = None
        self.drop_expired()
