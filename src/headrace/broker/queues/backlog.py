"""What a queue holds: messages in views of logs (one for each priority level in use), and the bounds on them.

Publishing, length and age, reading one message, settling. Who gets what is decided in queue.py.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker.queues.byte_bound import ReadyBytes
from headrace.broker.queues.dead_letter_outbox import DeadLetterOutbox
from headrace.broker.queues.queue_arguments import DROP_HEAD, REJECT_DLX, STREAM, QueueArguments
from headrace.broker.queues.view import Run, View
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.types.message import Message, from_record
from headrace.broker.types.range_set import RangeSet
from headrace.record.layout import SEAL_BYTES

if TYPE_CHECKING:
    from headrace.broker.vhosts.vhost import VirtualHost

logger = logging.getLogger("headrace.broker")

NEVER = -(2**62)
VOID_RUNS_MAX = 4096  # memory must not grow with the backlog: the markers of more transactions settle when they are met
HEAD_TIMER_MAX_S = 60.0  # the clock may be set meanwhile, or the machine sleep: what expires then is late by no more
DROPPED_AT_ONCE = 40  # a few milliseconds where they are dead-lettered: others get their turn


class QueueContents:
    def __init__(
        self,
        vhost: "VirtualHost",
        name: str,
        policy: QueueArguments,
        views: list[View],
        *,
        durable: bool,
        auto_delete: bool = False,
        owner: object | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.vhost = vhost
        self.name = name
        self.policy = policy  # in force: what was declared, bounded by the policies that fit
        self.declared_policy = policy
        self.policy_name: str | None = None
        self.operator_policy_name: str | None = None
        self.views = views  # the highest priority first
        self.durable, self.auto_delete = durable, auto_delete
        self.owner = owner  # the connection of an exclusive queue
        self.arguments = arguments or {}
        self._bytes: ReadyBytes | None = None  # kept only where the policy bounds them
        self.is_deleted = False
        self.published = self.delivered = self.acked = self.redelivered = self.dead_lettered = 0
        self._arrivals: dict[View, Any] = {}  # of messages through any listener, where there are bounds to keep
        self._loading: list[Callable[[], object]] = []  # what goes on when something was read from the disk
        self._going_on: list[Callable[[], object]] = []  # what has more to drop in the next turn of the loop
        self._departures = DeadLetterOutbox(self)
        # Whether a message may have an expiration of its own: then each new head is looked at. What was here before is
        # not known.
        self._may_expire = any(view.has_ready for view in views)
        self._timer: Any = None
        self._timer_at = 0.0
        self._checked_at = -1
        for view in views:
            view.on_reserved = self.wake
            view.on_put_back = self.moves_failed
            view.on_lost = self._count_bytes_anew
        self._bound_bytes()
        self._watch_arrivals()

    def wake(self) -> None:
        """Something changed that consumers may wait for."""
        raise NotImplementedError

    @property
    def is_serving(self) -> bool:
        """Consumers have their turn next: what they take is not dropped."""
        raise NotImplementedError

    def taken_at_once(self, most: int) -> int:
        """How many of so many messages consumers have room for: they do not stay here."""
        raise NotImplementedError

    @property
    def exclusive(self) -> bool:
        return self.owner is not None

    @property
    def ready(self) -> int:
        return sum(view.ready for view in self.views)

    @property
    def most_returns(self) -> int:
        """Of the message that came back most often."""
        return max(view.counts.highest for view in self.views)

    @property
    def unacked(self) -> int:
        return sum(view.out for view in self.views)

    @property
    def view(self) -> View:
        return self.views[-1]

    @property
    def is_stream(self) -> bool:
        return self.policy.kind == STREAM

    @property
    def needs_python(self) -> bool:
        return self.policy.decides_per_message

    # Publishing.

    def open_writer(self, target: Any = None) -> Any:
        """For the fast path: messages are appended without being looked at."""
        writer = self.view.open_writer(target)
        if self.policy.length_max is not None or self.policy.ttl_ms is not None:
            self._check_after_flush()
        return writer

    def seal(self) -> None:
        self.view.seal()

    def publish(self, message: Message, timestamp_ms: int) -> bool:
        """Appends one message; False when the queue is full and its policy is to refuse."""
        if self.refuses(len(message.body)):
            if self.policy.overflow == REJECT_DLX:
                self.vhost.dead_letters.publish_copy(self, message, "maxlen", timestamp_ms)
            return False
        self._append(self._view_for(message), message, timestamp_ms)
        return True

    def refuses(self, size: int) -> bool:
        """One more message of that size."""
        return self.policy.overflow != DROP_HEAD and self._is_full(size)

    def _append(self, view: View, message: Message, timestamp_ms: int) -> None:
        writer = view.open_writer()
        if writer.size > SEAL_BYTES:
            view.seal()
        writer.append(message.key, message.body, message.record_headers(), timestamp_ms)
        self.published += 1
        if self._bytes is not None:
            self._bytes.published(self.vhost.flushes.flush_count, len(message.body))
        if self.policy.length_max is not None or self.policy.bytes_max is not None:
            self._check_after_flush()
        self._may_expire |= message.has_expiration
        if message.has_expiration or self.policy.ttl_ms is not None:
            self._check_after_flush()

    def _view_for(self, message: Message) -> View:
        if len(self.views) == 1:
            return self.views[0]
        level = min(message.priority(), self.policy.priority_max)
        return self.views[len(self.views) - 1 - level]

    def _is_full(self, more_bytes: int) -> bool:
        """Whether one more is too much, beside what is here and no consumer has room for."""
        self._follow_starts()
        waiting = self.ready + sum(view.pending for view in self.views)
        size = self._bytes.with_unflushed if self._bytes is not None else 0
        if not self._overflows(waiting + 1, size + more_bytes):
            return False
        left = waiting - self.taken_at_once(waiting)
        left_bytes = size * left // max(1, waiting)  # as if all were of one size
        return self._overflows(left + 1, left_bytes + more_bytes)

    def _check_after_flush(self) -> None:
        flushes = self.vhost.flushes
        if self._checked_at != flushes.flush_count:  # once for each flush, and for none too few
            self._checked_at = flushes.flush_count
            flushes.after(partial(self._after_flush, flushes.flush_count))

    def _after_flush(self, flush: int, error: object) -> None:
        if self.is_deleted:
            return
        self.wake()
        if self._bytes is not None:
            self._bytes.flushed(flush)
        self.drop_overflow()
        self.drop_expired()

    def moves_failed(self) -> None:
        """What was to be moved elsewhere is here again, and is judged again."""
        if self.is_deleted:
            return
        self._count_bytes_anew()  # it was counted as gone
        self.wake()
        self.drop_overflow()
        self.drop_expired()

    # Bounds: length and age.

    def apply_policy(self, policy: QueueArguments) -> None:
        """From now on this holds; what is over the new bounds goes now."""
        self.policy = policy
        self._bound_bytes()
        self._watch_arrivals()
        self._check_after_flush()

    def _bound_bytes(self) -> None:
        """Begins to count bytes when they are bounded, in the background, and stops when they are not any more."""
        if self.policy.bytes_max is None or self.is_stream:
            self._bytes = None
        elif self._bytes is None:
            self._bytes = ReadyBytes(self, self.drop_overflow)
            self.vhost.loop.call_soon(self._bytes.catch_up)

    def _follow_starts(self) -> None:
        """What was deleted from a log fills nothing."""
        for view in self.views:
            view.follow_start()

    def _count_bytes_anew(self) -> None:
        self._bytes = None
        self._bound_bytes()

    def _watch_arrivals(self) -> None:
        """Kafka and HTTP append to the log themselves: the queue hears of it when there is something to read."""
        if self.is_stream or (self.policy.length_max is None and self.policy.bytes_max is None):
            return
        for view in self.views:
            if view not in self._arrivals and not getattr(view.log, "is_closed", False):
                self._arrivals[view] = view.log.wait(view.log.stable_end, partial(self._arrived_in, view))

    def _arrived_in(self, view: View) -> None:
        self._arrivals.pop(view, None)
        if self.is_deleted:
            return
        self._watch_arrivals()  # first: if something cannot be dropped, the next message is heard of all the same
        self.wake()
        if self._bytes is not None:
            self._bytes.catch_up()
        self.drop_overflow()

    def _overflows(self, messages: int, size: int) -> bool:
        policy = self.policy
        if policy.length_max is not None and messages > policy.length_max:
            return True
        return policy.bytes_max is not None and size > policy.bytes_max

    @property
    def _is_over(self) -> bool:
        return self._overflows(self.ready, self._bytes.total if self._bytes is not None else 0)

    def drop_overflow(self) -> None:
        policy = self.policy
        if policy.overflow != DROP_HEAD or self.is_deleted:
            return
        if self.is_serving:
            self.go_on(self.drop_overflow)
            return
        self._follow_starts()
        left = DROPPED_AT_ONCE
        while self.ready and self._is_over:
            left -= 1
            if left < 0:  # a bound on a long backlog
                self.go_on(self.drop_overflow)
                return
            surplus = self.ready - policy.length_max if policy.length_max is not None else 0
            if policy.dead_letter_exchange is None and policy.bytes_max is None and len(self.views) == 1:
                self._drop_run(surplus)
            else:
                head = self._lowest_head()
                if head is None or not self.is_loaded(*head, self.drop_overflow):
                    return
                taken = self._take_head(lowest=True)
                if taken is None:
                    return
                view, offset, message = taken
                self._forget_bytes(view, offset, message)
                self._departures.move(view, offset, message, "maxlen")

    def go_on(self, drop: Callable[[], object]) -> None:
        """In the next turn of the loop, and once in it however many ask: each flush does."""
        if drop not in self._going_on:
            self._going_on.append(drop)
            self.vhost.loop.call_soon(self._goes_on, drop)

    def _goes_on(self, drop: Callable[[], object]) -> None:
        self._going_on.remove(drop)
        drop()

    def _lowest_head(self) -> tuple[View, Run] | None:
        for view in reversed(self.views):
            if view.has_ready and (run := view.next_run_unreserved()) is not None:
                return view, run
        return None

    def _drop_run(self, count: int) -> None:
        view = self.view
        run = view.next_run_unreserved()
        if run is None:
            return
        end = min(run.end, run.start + count)
        view.advance(run, end)
        view.settle(run.start, end)

    def drop_expired(self) -> None:
        """Judges the heads, dead-letters what is too old, and comes back when the next one will be."""
        if self.is_deleted:
            return
        if self.is_serving:
            self.go_on(self.drop_expired)
            return
        now = self.vhost.clock.now_ms()
        next_at: int | None = None
        left = DROPPED_AT_ONCE
        for view in self.views:
            dropped, at = self._drop_expired_of(view, now, left)
            left -= dropped
            if left <= 0:
                self.go_on(self.drop_expired)
                return
            if at is not None:
                next_at = at if next_at is None else min(at, next_at)
        if next_at is not None:
            self._arm_head_timer(next_at - now)
        elif self._may_expire:
            self._may_expire = any(view.has_ready or view.out or view.pending for view in self.views)

    def _head_changed(self) -> None:
        """The next one may be older than its expiration, or come to be while nothing else happens here."""
        if self._may_expire:
            self.go_on(self.drop_expired)

    def _drop_expired_of(self, view: View, now: int, most: int) -> tuple[int, int | None]:
        """How many it dropped, and when the head expires after that, if it does."""
        dropped = 0
        while dropped < most and view.has_ready:
            run = view.next_run_unreserved()
            if run is None or not self.is_loaded(view, run, self.drop_expired):
                break
            # Most often the head is young, and nothing else is looked at. Behind an old one there are more.
            for offset, message in self._read_some(view, run, most - dropped if dropped else 1):
                at = self.expires_at(message)
                if at is None or at > now:
                    return dropped, at
                view.advance(run._replace(start=offset), offset + 1)
                self._forget_bytes(view, offset, message)
                self._departures.move(view, offset, message, "expired")
                dropped += 1
        return dropped, None

    def _arm_head_timer(self, delay_ms: int) -> None:
        loop, when = self.vhost.loop, self.vhost.loop.time() + min(delay_ms / 1000, HEAD_TIMER_MAX_S) + 0.001
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = loop.call_at(when, self._head_timer)

    def _head_timer(self) -> None:
        self._timer = None
        if not self.is_deleted:
            self.drop_expired()

    def expires_at(self, message: Message) -> int | None:
        own = message.expiration_ms()
        limits = [limit for limit in (own, self.policy.ttl_ms) if limit is not None]
        return message.timestamp + min(limits) if limits else None

    def _expired_until(self, run: Run) -> int:
        """For deliveries. A TTL of 0 means now or never: what no consumer takes when it is new, drop_expired does."""
        ttl_ms = self.policy.ttl_ms
        if ttl_ms is None or (ttl_ms == 0 and not run.returned):
            return NEVER
        return self.vhost.clock.now_ms() - ttl_ms

    def _forget_bytes(self, view: View, offset: int, message: Message) -> None:
        if self._bytes is not None:
            self._bytes.taken(view, offset, len(message.body))

    # Reading, a message at a time.

    def is_loaded(self, view: View, run: Run, then: Callable[[], object]) -> bool:
        """False: it is being read from the disk, and `then` is called when it is there."""
        try:
            view.load_chunk(run)
        except ReadWaits as cold:
            if then not in self._loading:
                self._loading.append(then)
                cold.then(lambda: self._loaded(then))
            return False
        return True

    def _loaded(self, then: Callable[[], object]) -> None:
        self._loading.remove(then)
        if not self.is_deleted:
            then()

    def read(self, view: View, run: Run) -> Message | None:
        """The message at the start of the run; None when there is none there any more."""
        found = self._read_some(view, run, 1)
        return found[0][1] if found else None

    def _read_some(self, view: View, run: Run, most: int) -> list[tuple[int, Message]]:
        """Messages from the start of the run on, up to where one is missing. Empty: there is none at the start any
        more."""
        found, to = view.records(run, most)
        if not found:
            self._skip(view, run, to)
        return [(record.offset, from_record(record)) for record in found]

    def _skip(self, view: View, run: Run, to: int) -> None:
        """Offsets without a message settle themselves."""
        view.advance(run, to)
        view.settle(run.start, to)

    def _take_head(self, *, lowest: bool = False) -> tuple[View, int, Message] | None:
        for view in reversed(self.views) if lowest else self.views:
            while view.has_ready:
                run = view.next_run_unreserved()
                if run is None:
                    break
                message = self.read(view, run)
                if message is None:
                    continue
                view.advance(run, run.start + 1)
                self._last_run = run
                return view, run.start, message
        return None

    # Settling.

    def voided(self, view: View, void: RangeSet, is_committed: bool) -> None:
        """A Kafka transaction has ended: these hold no message. Settled before they are met, so that they are not
        counted: a bound on the length would drop messages for them."""
        is_long = view.settled.runs >= VOID_RUNS_MAX and self.policy.length_max is None
        if self.is_deleted or (is_committed and is_long):
            return
        for start, end in void:
            view.settle(start, end)

    def settle(self, view: View, start: int, end: int) -> None:
        if self.is_deleted:
            return  # its settles are gone from the disk with it, and stay gone
        view.settle(start, end)
        self.acked += end - start

    def give_back(self, view: View, offset: int, *, counts: bool = True) -> None:
        """To be delivered again; past the delivery limit it is dead-lettered instead."""
        if self.is_deleted or offset < view.log.start_offset:
            return  # it was deleted while it was out
        limit = self.policy.returns_max
        if counts and self.policy.counts_deliveries:
            count = view.count_return(offset)
            if limit is not None and count > limit:
                self.reject(view, offset, "delivery_limit")
                return
        view.give_back(offset, offset + 1)
        if self._bytes is not None:
            self._bytes.came_back(view, offset)
        self.came_back()

    @property
    def gives_back_runs(self) -> bool:
        """Whether messages come back without a look at each: at how often it did, or how large it is."""
        return self._bytes is None and not self.policy.counts_deliveries

    def give_back_run(self, view: View, start: int, end: int) -> None:
        start = max(start, view.log.start_offset)
        if start < end and not self.is_deleted:
            view.give_back(start, end)
            self.came_back()

    def came_back(self) -> None:
        self.wake()
        self._head_changed()
        self._check_after_flush_if_bounded()

    def _check_after_flush_if_bounded(self) -> None:
        policy = self.policy
        if policy.length_max is not None or policy.bytes_max is not None or policy.ttl_ms is not None:
            self._check_after_flush()

    def reject(self, view: View, offset: int, reason: str = "rejected") -> None:
        """Not wanted: to the dead letter exchange if there is one, else gone."""
        if self.is_deleted or offset < view.log.start_offset:
            return
        if self.policy.dead_letter_exchange is None:
            view.settle(offset, offset + 1)
            return
        self._departures.reject(view, offset, reason)

    async def rejects_moved(self) -> None:
        """Returns when all that was rejected so far is where dead letters go, or the queue is deleted."""
        await self._departures.done()

    async def purge(self) -> int:
        """Removes what is ready, for good when this returns; what is out stays out."""
        removed = 0
        for view in self.views:
            while (run := view.next_run_unreserved()) is not None:
                removed += run.end - run.start
                view.advance(run, run.end)
                view.settle(run.start, run.end)
        if self._bytes is not None:
            self._bytes.purged()
        if any(view.durable for view in self.views):
            await self.vhost.flushes.settles_stored()
        return removed
