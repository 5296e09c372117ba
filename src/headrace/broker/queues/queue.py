"""A queue: what it holds (queue_contents.py), its consumers, and who gets what and when.

The log keeps the messages, the view keeps the score, and the listener's consumers make frames of them. Everything
runs on
the loop's thread; work that was caused in one turn of the loop (acks, new messages, new consumers) is done once, by
dispatch.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker.queues.backlog import QueueContents
from headrace.broker.queues.consumers import Consumer, Consumers
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.queues.view import Run, View
from headrace.broker.streams.partition import when_loaded
from headrace.broker.types.message import Message, properties_of
from headrace.errors import ExclusiveUse

if TYPE_CHECKING:
    from headrace.broker.vhosts.vhost import VirtualHost

TURN_MESSAGES = 2000  # what one turn of dispatch may deliver before others get theirs
TURN_BYTES = 1 << 20
SHARE_MAX = 512


class Queue(QueueContents):
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
        super().__init__(
            vhost, name, policy, views, durable=durable, auto_delete=auto_delete, owner=owner, arguments=arguments
        )
        self.consumers = Consumers(single_active=policy.single_active)
        self.had_consumer = False
        self.last_used = vhost.clock.monotonic()
        self._scheduled = False
        self._waits: dict[View, Any] = {}
        self._expiry: asyncio.TimerHandle | None = None
        if policy.expires_ms is not None:
            self._arm_expires()

    # Delivering.

    def wake(self) -> None:
        """Something changed: dispatch at the end of this turn of the loop."""
        if not self._scheduled and not self.is_deleted:
            self._scheduled = True
            self.vhost.loop.call_soon(self.dispatch)

    @property
    def is_serving(self) -> bool:
        return self._scheduled and bool(self.consumers)

    def taken_at_once(self, most: int) -> int:
        return self.consumers.room(most)

    def serve(self) -> None:
        """Does now what waits for the end of the turn: basic.get is for what no consumer takes."""
        if self._scheduled:
            self.dispatch()

    def dispatch(self) -> None:
        self._scheduled = False
        if self.is_deleted or not self.consumers:
            return
        left, left_bytes = TURN_MESSAGES, TURN_BYTES
        while left > 0 and left_bytes > 0:
            ready = self.ready
            chosen = self.consumers.in_turn(max(1, ready))
            if not chosen:
                return  # credit wakes us
            # What is ready is parted once: a share for each, and no look at all the others for every message.
            share = SHARE_MAX if len(chosen) == 1 else max(1, min(SHARE_MAX, -(-ready // len(chosen))))
            for consumer in chosen:
                found = self._next_run()
                if found is None:
                    self._wait_for_more()
                    return
                view, run = found
                if not self.is_loaded(view, run, self.wake):
                    return
                credit = consumer.credit()  # others of its channel may have used it, or its socket may be full by now
                if credit <= 0:
                    continue
                count, size = self._deliver(consumer, view, run, min(credit, share))
                self.consumers.served(consumer)
                left -= count + 1
                left_bytes -= size
        self.wake()

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
        seen = view.seen_ahead(run.start)
        if seen is not None and properties_of(seen) is None:  # known before the consumer has walked there to say so
            self._head_changed()
            return self._deliver_one(consumer, view, run)
        if view.counts and self.policy.counts_deliveries:
            if run.start in view.counts:
                self._head_changed()
                return self._deliver_one(consumer, view, run)
            run = run._replace(end=view.counts.next_in(run.start, run.end))
        if self._bytes is not None:
            run = run._replace(end=self._bytes.up_to(view, run.start, run.end))
        delivered = consumer.deliver(
            view,
            chunk.data,
            run.start,
            min(run.end, chunk.next_offset),
            share,
            run.redelivered_below,
            self._expired_until(run),
        )
        next_offset, count, size = delivered.next_offset, delivered.count, delivered.body_bytes
        self._head_changed()
        if next_offset > run.start:
            view.advance(run, next_offset)
            for start, end in delivered.gaps:
                view.settle(start, end)
            if consumer.no_ack and count:
                self.settle(view, run.start, next_offset)
            self._count(view, run, count, size)
        if delivered.needs_message:
            rest = run._replace(start=next_offset)
            if rest.start < rest.end and count < share:
                more, more_size = self._deliver_one(consumer, view, rest)
                return count + more, size + more_size
        return count, size

    def _count(self, view: View, run: Run, count: int, size: int) -> None:
        self.delivered += count
        if run.returned:
            self.redelivered += count
        if self._bytes is not None:
            self._bytes.taken(view, run.start, size)

    def _deliver_one(self, consumer: Consumer, view: View, run: Run) -> tuple[int, int]:
        """The slow way, for a record that has to be looked at."""
        message = self.read(view, run)
        if message is None:
            return 0, 0
        offset = run.start
        view.advance(run, offset + 1)
        at = self.expires_at(message)
        is_now_or_never = at == message.timestamp and not run.returned  # see _expired_until
        if at is not None and at <= self.vhost.clock.now_ms() and not is_now_or_never:
            self._forget_bytes(view, offset, message)
            self._departures.move(view, offset, message, "expired")
            return 0, 0
        redelivered = offset < run.redelivered_below
        count = view.counts.get(offset)
        if count and self.policy.counts_deliveries:
            message = message.with_headers(**{"x-delivery-count": count})
        consumer.deliver_message(view, offset, message, redelivered)
        self._count(view, run, 1, len(message.body))
        if consumer.no_ack:
            self.settle(view, offset, offset + 1)
        return 1, len(message.body) + 200

    async def prepare_get(self) -> None:
        for view in self.views:
            await view.reserve_next()
            if self.is_deleted:
                return  # while we waited
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
        while not self.is_deleted:
            taken = self._take_head()
            if taken is None:
                return None
            view, offset, message = taken
            view.reserve_past(offset)
            redelivered = self._last_run.redelivered_below > offset
            at = self.expires_at(message)
            self._forget_bytes(view, offset, message)
            if at is None or at > self.vhost.clock.now_ms():
                count = view.counts.get(offset)
                if count and self.policy.counts_deliveries:
                    message = message.with_headers(**{"x-delivery-count": count})
                self.delivered += 1
                self._head_changed()
                return view, offset, message, redelivered
            self._departures.move(view, offset, message, "expired")
        return None

    # Consumers.

    def add_consumer(self, consumer: Consumer) -> None:
        is_shared = self.policy.single_active or len(self.consumers)
        if self.consumers.exclusive or (consumer.exclusive and is_shared):
            raise ExclusiveUse(f"queue '{self.name}' in vhost '{self.vhost.name}' in exclusive use")
        self.had_consumer = True
        self.consumers.add(consumer)
        for view in self.views:
            view.reserve_past(view.next)
        self.wake()

    def remove_consumer(self, consumer: Consumer) -> asyncio.Task[None] | None:
        """What deletes the queue, where this was the last that it was for."""
        before = len(self.consumers)
        self.consumers.remove(consumer)
        self.last_used = self.vhost.clock.monotonic()
        if before and not len(self.consumers):
            self._stop_waiting()
            if self.auto_delete and not self.is_deleted:
                return self.vhost.delete_soon(self)
            if self.policy.expires_ms is not None:
                self._arm_expires()
        else:
            self.wake()
        return None

    def _stop_waiting(self) -> None:
        for waiter in self._waits.values():
            waiter.cancel()
        self._waits.clear()
        for view in self.views:
            view.release_chunk()

    # Going away.

    def apply_policy(self, policy: QueueArguments) -> None:
        before = self.policy
        super().apply_policy(policy)
        if policy.expires_ms is not None and policy.expires_ms != before.expires_ms:
            self._arm_expires()

    def _arm_expires(self, idle_s: float = 0.0) -> None:
        """One timer, however often consumers come and go."""
        assert self.policy.expires_ms is not None
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self.vhost.loop.call_later(self.policy.expires_ms / 1000 - idle_s, self._expires_timer)

    def _expires_timer(self) -> None:
        self._expiry = None
        if self.is_deleted or len(self.consumers) or self.policy.expires_ms is None:
            return
        if self._is_idle:
            self.vhost.delete_soon(self)
        else:
            self._arm_expires(self.vhost.clock.monotonic() - self.last_used)

    @property
    def _is_idle(self) -> bool:
        """For as long as its x-expires says."""
        expires_ms = self.policy.expires_ms
        return expires_ms is not None and (self.vhost.clock.monotonic() - self.last_used) * 1000 >= expires_ms - 1

    @property
    def is_abandoned(self) -> bool:
        """Whether a deletion that nobody asked for by name may still go on."""
        return not len(self.consumers) and ((self.auto_delete and self.had_consumer) or self._is_idle)

    def stays(self) -> None:
        """Such a deletion was given up: the next one comes in its time."""
        if self.policy.expires_ms is not None and not self.is_deleted and not len(self.consumers):
            self._arm_expires()

    def used(self) -> None:
        """Declared again or read from: its x-expires starts anew."""
        self.last_used = self.vhost.clock.monotonic()

    def close(self, notify: Callable[[Consumer], None] | None = None) -> None:
        """The queue is gone: consumers hear of it, nothing is delivered any more."""
        self.is_deleted = True
        self._departures.end()
        self._stop_waiting()
        for waiter in self._arrivals.values():
            waiter.cancel()
        self._arrivals.clear()
        for timer in (self._timer, self._expiry):
            if timer is not None:
                timer.cancel()
        for consumer in self.consumers:
            self.consumers.remove(consumer)
            consumer.cancelled()
        for view in self.views:
            view.release_waiters()
            view.discard_pending()
            self.vhost.flushes.forget(view)
            if not view.durable:
                view.log.close()
