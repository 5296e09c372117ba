"""kill -9 of the broker under consumers of the KIP-848 protocol: they continue and revoke nothing."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.test_confluent import closing as closing  # a fixture
from tests.interop.kafka.test_confluent import consumer, make_topic, produce, wait_for
from tests.interop.kafka.test_other_clients import commit_when_it_is_back

Name = Callable[[str], str]
PARTITIONS = 4


class Reader:
    """A consumer that counts its assignment callbacks."""

    def __init__(self, broker: KafkaBroker, group: str, topic: str, **config: Any) -> None:
        self.calls: Counter[str] = Counter()
        quick = {"reconnect.backoff.max.ms": 100, "retry.backoff.max.ms": 100, "log_level": 0}
        self.consumer = consumer(broker, group, **{"group.protocol": "consumer"}, **quick, **config)
        self.consumer.subscribe(
            [topic], on_assign=self._count("assign"), on_revoke=self._count("revoke"), on_lost=self._count("lost")
        )

    def _count(self, what: str) -> Callable[[Consumer, list[TopicPartition]], None]:
        def count(_: Consumer, partitions: list[TopicPartition]) -> None:
            self.calls[what] += 1

        return count

    @property
    def partitions(self) -> set[int]:
        return {one.partition for one in self.consumer.assignment()}


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize("static", [False, True])
def test_consumers_of_the_consumer_protocol_do_not_notice_a_kill_of_the_broker(
    own_broker: KafkaBroker, name: Name, closing: list[Consumer], static: bool
) -> None:
    topic, group = make_topic(own_broker, name("t"), PARTITIONS), name("g")
    readers = [
        Reader(own_broker, group, topic, **({"group.instance.id": which} if static else {})) for which in ("one", "two")
    ]
    consumers = [one.consumer for one in readers]
    closing += consumers
    wait_for(lambda: [len(one.partitions) for one in readers] == [2, 2], *consumers)
    before = [(one.partitions, dict(one.calls)) for one in readers]
    for kills in range(1, 3):
        own_broker.kill()
        own_broker.start()
        values = [b"%d of %d" % (number, kills) for number in range(100)]
        produce(own_broker, topic, values)
        seen: set[bytes | None] = set()

        def all_read(seen: set[bytes | None] = seen, values: list[bytes] = values) -> bool:
            for one in consumers:
                for message in one.consume(100, 0.1):
                    if not message.error():
                        seen.add(message.value())
            return seen >= set(values)

        wait_for(all_read)
        for one in consumers:
            for place in one.position(one.assignment()):
                if place.offset >= 0:
                    commit_when_it_is_back(one, place)
    assert [(one.partitions, dict(one.calls)) for one in readers] == before
