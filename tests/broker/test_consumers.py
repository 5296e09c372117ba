"""The choice of the next consumer. Deliveries to real consumers are in tests/listeners/amqp/test_consume.py."""

from typing import cast

from headrace.broker.queues.consumers import Consumer, Consumers


class Asked:
    """A consumer with credit that counts how often it was asked for it."""

    def __init__(self, name: str, credit: int = 10, priority: int = 0) -> None:
        self.name, self.left, self.priority = name, credit, priority
        self.times = 0

    def credit(self) -> int:
        self.times += 1
        return self.left


def of(*everyone: Asked) -> Consumers:
    consumers = Consumers(single_active=False)
    for consumer in everyone:
        consumers.add(cast(Consumer, consumer))
    return consumers


def names(found: list[Consumer]) -> str:
    return "".join(cast(Asked, consumer).name for consumer in found)


def test_consumers_are_served_round_robin_in_the_order_they_were_added() -> None:
    consumers = of(*map(Asked, "abc"))
    seen = ""
    for _ in range(7):
        found = consumers.in_turn(1)
        seen += names(found)
        consumers.served(found[0])
    assert seen == "abcabca"
    assert names(consumers.in_turn(10)) == "bca"


def test_delivering_a_message_does_not_check_all_consumers() -> None:
    everyone = [Asked(str(number)) for number in range(100)]
    consumers = of(*everyone)
    for _ in range(100):
        consumers.served(consumers.in_turn(1)[0])
    assert [consumer.times for consumer in everyone] == [1] * 100


def test_consumers_without_credit_are_skipped_and_keep_their_place() -> None:
    poor = Asked("b", credit=0)
    consumers = of(Asked("a"), poor, Asked("c"))
    assert names(consumers.in_turn(3)) == "ac"
    consumers.served(consumers.in_turn(1)[0])
    assert names(consumers.in_turn(1)) == "c"
    poor.left = 1
    assert names(consumers.in_turn(1)) == "b"


def test_a_lower_priority_waits_until_no_higher_one_has_credit() -> None:
    high = Asked("h", priority=5)
    consumers = of(Asked("a"), high, Asked("b"))
    assert names(consumers.in_turn(3)) == "h"
    consumers.served(cast(Consumer, high))
    assert names(consumers.in_turn(3)) == "h"
    high.left = 0
    assert names(consumers.in_turn(3)) == "ab"
    assert names(of(Asked("a", credit=0)).in_turn(1)) == ""
