"""Consumer timeouts: which unacknowledged deliveries are late, and which are not."""

from typing import Any

from headrace.listeners.amqp.consumer_timeouts import WatchedDeliveries
from headrace.wire.amqp.tags import TagRing

SECOND_MS = 1000


class Consumer:
    """A consumer as WatchedDeliveries sees it."""

    def __init__(self) -> None:
        self.tags = TagRing()
        self.source = self.tags.add_source()
        self.channel_number = 1
        self.is_open = self.is_subscribed = True
        self.watched = WatchedDeliveries(self, SECOND_MS, 0.0)  # type: ignore[arg-type]  # has the attributes that are used

    def deliver(self, count: int = 1, *, watched: Any = True) -> None:
        for _ in range(count):
            tag = self.tags.add(self.source, 0)
            if watched:
                self.watched.delivered(tag, tag + 1)


def test_acking_one_delivery_does_not_restart_the_time_of_later_ones() -> None:
    """Each ack restarted the time of the next delivery, so the last of many could take many times the limit."""
    consumer = Consumer()
    consumer.deliver(3)
    assert not consumer.watched.is_late(0.5)
    consumer.tags.settle(1, False)
    assert not consumer.watched.is_late(1.4)
    consumer.tags.settle(2, False)
    assert consumer.watched.is_late(1.6)


def test_deliveries_of_other_consumers_do_not_count() -> None:
    """A consumer without a timeout lost its channel because of another consumer's timeout."""
    consumer = Consumer()
    consumer.deliver(watched=False)
    for second in range(1, 10):
        consumer.deliver()
        assert not consumer.watched.is_late(second)
        consumer.tags.settle(second + 1, False)


def test_settled_deliveries_are_not_kept_while_one_is_unacknowledged() -> None:
    consumer = Consumer()
    consumer.deliver()
    for look in range(1, 4):
        consumer.deliver(1000)
        consumer.tags.settle(consumer.tags.next_tag - 1, False)
        for tag in range(2, consumer.tags.next_tag - 1):
            consumer.tags.settle(tag, False)
        assert not consumer.watched.is_late(look / 4)
    assert sum(len(tags) for _, tags in consumer.watched._unacked) == 1


def test_a_cancelled_consumer_is_checked_until_all_its_deliveries_are_settled() -> None:
    consumer = Consumer()
    consumer.deliver()
    consumer.is_subscribed = False
    assert not consumer.watched.is_late(0.5) and not consumer.watched.is_finished
    consumer.tags.settle(1, False)
    assert not consumer.watched.is_late(1.0) and consumer.watched.is_finished
