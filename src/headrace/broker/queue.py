"""A queue: a view of a log (one for each priority level in use) with its consumers and its policy.

The queue decides what goes to whom and when; the log keeps the messages, the view keeps the score, and
the door's consumers make frames of them. Everything runs on the loop's thread; work that was caused
in one turn of the loop (acks, new messages, new consumers) is done once, by dispatch.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker.consumers import Consumer, Consumers
from headrace.broker.message import Message, from_record
from headrace.broker.partition import ReadWaits, when_loaded
from headrace.broker.policy import DROP_HEAD, REJECT_DLX, STREAM, QueuePolicy
from headrace.broker.view import Run, View
from headrace.errors import ExclusiveUse
from headrace.record import codec

if TYPE_CHECKING:
    from headrace.broker.vhost import VirtualHost

TURN_MESSAGES = 2000  # what one turn of dispatch may deliver before others get theirs
TURN_BYTES = 1 << 20
SHARE_MAX = 512
NEVER = -(2**62)
SEAL_AT = 1 << 20


class Queue:
    def __init__(
        self,
        vhost: "VirtualHost",
        name: str,
        policy: QueuePolicy,
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
        self.consumers = Consumers(single_active=policy.single_active)
        self.ready_bytes = 0  # kept only where the policy bounds it
        self.had_consumer = False
        self.is_deleted = False
        self.last_used = vhost.clock.monotonic()
        self.published = self.delivered = self.acked = self.redelivered = self.dead_lettered = 0
        self._scheduled = False
        self._waits: dict[View, Any] = {}
        self._loading: list[Callable[[], object]] = []  # what goes on when something was read from the disk
        self._timer: Any = None
        self._timer_at = 0.0
        self._checked_at = -1
        for view in views:
            view.on_reserved = self.wake
        if policy.expires_ms is not None:
            self._arm_expires()

    # Facts.

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
        policy = self.policy
        if policy.overflow != DROP_HEAD and self._is_full(len(message.body)):
            if policy.overflow == REJECT_DLX:
                self.vhost.dead_letters.publish_copy(self, message, "maxlen", timestamp_ms)
            return False
        self._append(self._view_for(message), message, timestamp_ms)
        return True

    def _append(self, view: View, message: Message, timestamp_ms: int) -> None:
        writer = view.open_writer()
        if writer.size > SEAL_AT:
            view.seal()
        writer.append(message.key, message.body, message.record_headers(), timestamp_ms)
        self.published += 1
        if self.policy.bytes_max is not None:
            self.ready_bytes += len(message.body)
        if self.policy.length_max is not None or self.policy.bytes_max is not None:
            self._check_after_flush()
        if message.has_expiration or self.policy.ttl_ms is not None:
            self._check_after_flush()

    def _view_for(self, message: Message) -> View:
        if len(self.views) == 1:
            return self.views[0]
        level = min(message.priority(), self.policy.priority_max)
        return self.views[len(self.views) - 1 - level]

    def _is_full(self, more_bytes: int) -> bool:
        policy = self.policy
        pending = sum(view.pending for view in self.views)
        if policy.length_max is not None and self.ready + pending >= policy.length_max:
            return True
        return policy.bytes_max is not None and self.ready_bytes + more_bytes > policy.bytes_max

    def _check_after_flush(self) -> None:
        rounds = self.vhost.rounds
        if self._checked_at != rounds.flushes:  # once for each flush, and for none too few
            self._checked_at = rounds.flushes
            rounds.after(self._after_flush)

    def _after_flush(self, error: object) -> None:
        if self.is_deleted:
            return
        self.drop_overflow()
        self.drop_expired()

    # Bounds: length and age.

    def apply_policy(self, policy: QueuePolicy) -> None:
        """From now on this holds; what is over the new bounds goes now."""
        before, self.policy = self.policy, policy
        if policy.bytes_max is not None and before.bytes_max is None:
            self.ready_bytes = sum(view.ready_bytes() for view in self.views)
        if policy.expires_ms is not None and policy.expires_ms != before.expires_ms:
            self._arm_expires()
        self._check_after_flush()

    def drop_overflow(self) -> None:
        policy = self.policy
        if policy.overflow != DROP_HEAD:
            return
        while self.ready and (
            (policy.length_max is not None and self.ready > policy.length_max)
            or (policy.bytes_max is not None and self.ready_bytes > policy.bytes_max)
        ):
            surplus = self.ready - policy.length_max if policy.length_max is not None else 0
            if policy.dead_letter_exchange is None and policy.bytes_max is None and len(self.views) == 1:
                self._drop_run(surplus)
            else:
                taken = self._take_head(lowest=True)
                if taken is None:
                    return
                view, offset, message = taken
                self._forget_bytes(message)
                self.vhost.dead_letters.move(self, view, offset, message, "maxlen")

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
        now = self.vhost.clock.now_ms()
        next_at: int | None = None
        for view in self.views:
            while view.has_ready:
                run = view.next_run_unreserved()
                if run is None or not self._is_loaded(view, run, self.drop_expired):
                    break
                message = self._read(view, run)
                if message is None:
                    continue
                at = self.expires_at(message)
                if at is None:
                    break
                if at > now:
                    next_at = at if next_at is None else min(at, next_at)
                    break
                view.advance(run, run.start + 1)
                self._forget_bytes(message)
                self.vhost.dead_letters.move(self, view, run.start, message, "expired")
        if next_at is not None:
            self._arm_head_timer(next_at - now)

    def _arm_head_timer(self, delay_ms: int) -> None:
        loop, when = self.vhost.loop, self.vhost.loop.time() + min(delay_ms, 3_600_000) / 1000 + 0.001
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

    @property
    def _expired_until(self) -> int:
        return NEVER if self.policy.ttl_ms is None else self.vhost.clock.now_ms() - self.policy.ttl_ms

    def _forget_bytes(self, message: Message) -> None:
        if self.policy.bytes_max is not None:
            self.ready_bytes -= len(message.body)

    # Delivering.

    def wake(self) -> None:
        """Something changed: dispatch at the end of this turn of the loop."""
        if not self._scheduled and not self.is_deleted:
            self._scheduled = True
            self.vhost.loop.call_soon(self.dispatch)

    def dispatch(self) -> None:
        self._scheduled = False
        if self.is_deleted or not self.consumers:
            return
        left, left_bytes = TURN_MESSAGES, TURN_BYTES
        while left > 0 and left_bytes > 0:
            chosen = self.consumers.next()
            if chosen is None:
                return  # credit wakes us
            found = self._next_run()
            if found is None:
                self._wait_for_more()
                return
            view, run = found
            if not self._is_loaded(view, run, self.wake):
                return
            consumer, credit, peers = chosen
            # A few for each in turn: with many ready, one consumer does not take all of them.
            share = min(credit, SHARE_MAX if peers == 1 else max(1, min(SHARE_MAX, self.ready // peers)))
            count, size = self._deliver(consumer, view, run, share)
            left -= count + 1
            left_bytes -= size
        self.wake()

    def _is_loaded(self, view: View, run: Run, then: Callable[[], object]) -> bool:
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

    def _next_run(self) -> tuple[View, Run] | None:
        for view in self.views:
            run = view.next_run()
            if run is not None:
                return view, run
            if view.has_ready:
                return None  # waits for its reservation: a lower priority must not overtake it
        return None

    def _wait_for_more(self) -> None:
        for view in self.views:
            if view not in self._waits and view.next >= view.log.stable_end:
                self._waits[view] = view.log.wait(view.next, lambda v=view: self._more(v))

    def _more(self, view: View) -> None:
        self._waits.pop(view, None)
        self.wake()

    def _deliver(self, consumer: Consumer, view: View, run: Run, share: int) -> tuple[int, int]:
        chunk = view.chunk(run)
        if not chunk.data:
            self._skip(view, run, min(run.end, chunk.next_offset))
            return 0, 0
        if view.counts and self.policy.counts_deliveries:
            if run.start in view.counts:
                return self._deliver_one(consumer, view, run)
            run = run._replace(end=view.counts.next_in(run.start, run.end))
        next_offset, count, foreign, gaps, size = consumer.deliver(
            view,
            chunk.data,
            run.start,
            min(run.end, chunk.next_offset),
            share,
            run.redelivered_below,
            self._expired_until,
        )
        if next_offset > run.start:
            view.advance(run, next_offset)
            for start, end in gaps:
                view.settle(start, end)
            if consumer.no_ack and count:
                self.settle(view, run.start, next_offset)
            self._count(run, count, size)
        if foreign:
            rest = run._replace(start=next_offset)
            if rest.start < rest.end and count < share:
                more, more_size = self._deliver_one(consumer, view, rest)
                return count + more, size + more_size
        return count, size

    def _count(self, run: Run, count: int, size: int) -> None:
        self.delivered += count
        if run.returned:
            self.redelivered += count
        if self.policy.bytes_max is not None:
            self.ready_bytes -= size

    def _deliver_one(self, consumer: Consumer, view: View, run: Run) -> tuple[int, int]:
        """The slow way, for a record that has to be looked at."""
        message = self._read(view, run)
        if message is None:
            return 0, 0
        offset = run.start
        view.advance(run, offset + 1)
        at = self.expires_at(message)
        if at is not None and at <= self.vhost.clock.now_ms():
            self._forget_bytes(message)
            self.vhost.dead_letters.move(self, view, offset, message, "expired")
            return 0, 0
        redelivered = offset < run.redelivered_below
        count = view.counts.get(offset)
        if count and self.policy.counts_deliveries:
            message = message.with_headers(**{"x-delivery-count": count})
        consumer.deliver_message(view, offset, message, redelivered)
        self._count(run, 1, len(message.body))
        if consumer.no_ack:
            self.settle(view, offset, offset + 1)
        return 1, len(message.body) + 200

    def _read(self, view: View, run: Run) -> Message | None:
        """The message at the start of the run; None when there is none there any more."""
        chunk = view.chunk(run)
        found = (
            codec.records(chunk.data, from_offset=run.start, to_offset=run.start + 1, limit=1)
            if chunk.data
            else []
        )
        if not found:
            self._skip(view, run, run.start + 1 if chunk.data else min(run.end, chunk.next_offset))
            return None
        return from_record(found[0])

    def _skip(self, view: View, run: Run, to: int) -> None:
        """Offsets without a message settle themselves."""
        view.advance(run, to)
        view.settle(run.start, to)

    async def prepare_get(self) -> None:
        for view in self.views:
            await view.reserve_next()
            if view.has_ready:
                await when_loaded(partial(self._load_head, view))
                return

    @staticmethod
    def _load_head(view: View) -> None:
        run = view.next_run_unreserved()
        if run is not None:
            view.load_chunk(run)

    def get(self) -> tuple[View, int, Message, bool] | None:
        """The next message, for basic.get: it is out until it is settled or given back."""
        self.last_used = self.vhost.clock.monotonic()
        while True:
            taken = self._take_head()
            if taken is None:
                return None
            view, offset, message = taken
            view.reserve_past(offset)
            redelivered = self._last_run.redelivered_below > offset
            at = self.expires_at(message)
            self._forget_bytes(message)
            if at is None or at > self.vhost.clock.now_ms():
                count = view.counts.get(offset)
                if count and self.policy.counts_deliveries:
                    message = message.with_headers(**{"x-delivery-count": count})
                self.delivered += 1
                return view, offset, message, redelivered
            self.vhost.dead_letters.move(self, view, offset, message, "expired")

    def _take_head(self, *, lowest: bool = False) -> tuple[View, int, Message] | None:
        for view in reversed(self.views) if lowest else self.views:
            while view.has_ready:
                run = view.next_run_unreserved()
                if run is None:
                    break
                message = self._read(view, run)
                if message is None:
                    continue
                view.advance(run, run.start + 1)
                self._last_run = run
                return view, run.start, message
        return None

    # Settling.

    def settle(self, view: View, start: int, end: int) -> None:
        view.settle(start, end)
        self.acked += end - start

    def give_back(self, view: View, offset: int, *, counts: bool = True) -> None:
        """To be delivered again; past the delivery limit it is dead-lettered instead."""
        if self.is_deleted:
            return
        limit = self.policy.delivery_limit
        if counts and self.policy.counts_deliveries:
            count = view.count_return(offset)
            if limit is not None and count > limit:
                self.reject(view, offset, "delivery_limit")
                return
        view.give_back(offset, offset + 1)
        if self.policy.bytes_max is not None:
            message = self._read(view, Run(offset, offset + 1, 0, True))
            self.ready_bytes += len(message.body) if message is not None else 0
        self.wake()
        self._check_after_flush_if_bounded()

    def _check_after_flush_if_bounded(self) -> None:
        if self.policy.length_max is not None or self.policy.ttl_ms is not None:
            self._check_after_flush()

    def reject(self, view: View, offset: int, reason: str = "rejected") -> None:
        """Not wanted: to the dead letter exchange if there is one, else gone."""
        if self.policy.dead_letter_exchange is None:
            view.settle(offset, offset + 1)
            return
        message = self._read(view, Run(offset, offset + 1, 0, True))
        if message is not None:
            self.vhost.dead_letters.move(self, view, offset, message, reason)

    def purge(self) -> int:
        """Removes what is ready; what is out stays out."""
        removed = 0
        for view in self.views:
            while (run := view.next_run_unreserved()) is not None:
                removed += run.end - run.start
                view.advance(run, run.end)
                view.settle(run.start, run.end)
        self.ready_bytes = 0
        return removed

    # Consumers.

    def add_consumer(self, consumer: Consumer) -> None:
        if self.consumers.exclusive or (consumer.exclusive and len(self.consumers)):
            raise ExclusiveUse(f"queue '{self.name}' in vhost '{self.vhost.name}' in exclusive use")
        self.had_consumer = True
        self.consumers.add(consumer)
        for view in self.views:
            view.reserve_past(view.next)
        self.wake()

    def remove_consumer(self, consumer: Consumer) -> None:
        before = len(self.consumers)
        self.consumers.remove(consumer)
        self.last_used = self.vhost.clock.monotonic()
        if before and not len(self.consumers):
            self._stop_waiting()
            if self.auto_delete and not self.is_deleted:
                self.vhost.delete_soon(self)
            elif self.policy.expires_ms is not None:
                self._arm_expires()
        else:
            self.wake()

    def _stop_waiting(self) -> None:
        for waiter in self._waits.values():
            waiter.cancel()
        self._waits.clear()
        for view in self.views:
            view.release_chunk()

    # Going away.

    def _arm_expires(self) -> None:
        assert self.policy.expires_ms is not None
        self.vhost.loop.call_later(self.policy.expires_ms / 1000, self._expires_timer)

    def _expires_timer(self) -> None:
        if self.is_deleted or len(self.consumers) or self.policy.expires_ms is None:
            return
        idle = self.vhost.clock.monotonic() - self.last_used
        if idle * 1000 >= self.policy.expires_ms - 1:
            self.vhost.delete_soon(self)
        else:
            self.vhost.loop.call_later(self.policy.expires_ms / 1000 - idle, self._expires_timer)

    def used(self) -> None:
        """Declared again or read from: its x-expires starts anew."""
        self.last_used = self.vhost.clock.monotonic()

    def close(self, notify: Callable[[Consumer], None] | None = None) -> None:
        """The queue is gone: consumers hear of it, nothing is delivered any more."""
        self.is_deleted = True
        self._stop_waiting()
        if self._timer is not None:
            self._timer.cancel()
        for consumer in self.consumers:
            self.consumers.remove(consumer)
            consumer.cancelled()
        for view in self.views:
            view.release_waiters()
            view.discard_pending()
            self.vhost.rounds.forget(view)
            if not view.durable:
                view.log.close()
