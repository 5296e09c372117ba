"""Who sits on a message too long, and who only looks like it."""

from typing import Any

from headrace.listeners.amqp.consumer_timeouts import WatchedDeliveries
from headrace.wire.amqp.tags import TagRing

SECOND_MS = 1000


class Consumer:
    """One of a channel, as far as its deliveries are watched."""

    def __init__(self) -> None:
        self.tags = TagRing()
        self.source = self.tags.add_source()
        self.channel_number = 1
        self.is_open = self.is_subscribed = True
        self.watched = WatchedDeliveries(self, SECOND_MS, 0.0)  # type: ignore[arg-type]

    def deliver(self, count: int = 1, *, watched: Any = True) -> None:
        for _ in range(count):
            tag = self.tags.add(self.source, 0)
            if watched:
                self.watched.delivered(tag, tag + 1)


def test_what_was_delivered_with_one_that_was_acked_is_as_old() -> None:
    """Its time began when the one before it was acked: of many, the last could be out for as many limits."""
    consumer = Consumer()
    consumer.deliver(3)
    assert not consumer.watched.is_late(0.5)
    consumer.tags.settle(1, False)
    assert not consumer.watched.is_late(1.4)
    consumer.tags.settle(2, False)
    assert consumer.watched.is_late(1.6)


def test_what_others_of_the_channel_have_out_is_nobody_elses() -> None:
    """A consumer without a limit lost its channel for the limit of another."""
    consumer = Consumer()
    consumer.deliver(watched=False)
    for second in range(1, 10):
        consumer.deliver()
        assert not consumer.watched.is_late(second)
        consumer.tags.settle(second + 1, False)


def test_little_is_kept_while_one_message_is_out() -> None:
    consumer = Consumer()
    consumer.deliver()
    for look in range(1, 4):
        consumer.deliver(1000)
        consumer.tags.settle(consumer.tags.next_tag - 1, False)
        for tag in range(2, consumer.tags.next_tag - 1):
            consumer.tags.settle(tag, False)
        assert not consumer.watched.is_late(look / 4)
    assert sum(len(tags) for _, tags in consumer.watched._unacked) == 1


def test_a_consumer_that_left_is_watched_until_all_is_settled() -> None:
    consumer = Consumer()
    consumer.deliver()
    consumer.is_subscribed = False
    assert not consumer.watched.is_late(0.5) and not consumer.watched.is_finished
    consumer.tags.settle(1, False)
    assert not consumer.watched.is_late(1.0) and consumer.watched.is_finished
