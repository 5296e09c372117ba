"""kill -9 while AMQP clients publish with confirms and consume with acks, several times; then all messages are checked.

D1: a confirmed message is delivered at least once. D2: a second delivery has the redelivered flag. D4: the order holds.
D5: no message appears that was never sent. HEADRACE_CRASH_ROUNDS sets the number of kills.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.exceptions import AMQPError

from tests.crash.broker_process import HttpBroker

ROUNDS = int(os.environ.get("HEADRACE_CRASH_ROUNDS", "3"))
PUBLISHERS = CONSUMERS = 10
QUEUES = ["kill-a", "kill-b"]
PATIENCE_S = 60.0  # without a single delivery; generous, for busy machines
HANG_S = 120.0


class Load:
    """Publishers and consumers in threads. Each thread writes only to its own lists."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.stop_publishing = threading.Event()
        self.stop_consuming = threading.Event()
        self.sent: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        self.confirmed: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        self.got: list[list[tuple[float, int, str, bytes, bool]]] = [[] for _ in range(CONSUMERS)]
        self.last_delivery = time.monotonic()
        self._publishers = [threading.Thread(target=self._publish, args=(number,)) for number in range(PUBLISHERS)]
        self._consumers = [threading.Thread(target=self._consume, args=(number,)) for number in range(CONSUMERS)]

    def connect(self) -> pika.BlockingConnection:
        return pika.BlockingConnection(
            pika.ConnectionParameters(
                "127.0.0.1", self.port, socket_timeout=30, stack_timeout=60, blocked_connection_timeout=60
            )
        )

    def declare(self) -> None:
        connection = self.connect()
        channel = connection.channel()
        channel.exchange_declare("kill", "fanout", durable=True)
        for queue in QUEUES:
            channel.queue_declare(queue, durable=True)
            channel.queue_bind(queue, "kill")
        connection.close()

    def start(self) -> None:
        for thread in (*self._publishers, *self._consumers):
            thread.start()

    def _publish(self, number: int) -> None:
        sequence = 0
        while not self.stop_publishing.is_set():
            try:
                channel = self.connect().channel()
                channel.confirm_delivery()
                while not self.stop_publishing.is_set():
                    sequence += 1  # never sent twice: an unconfirmed message may be stored or not
                    self.sent[number].append(sequence)
                    channel.basic_publish(
                        "kill", "", b"%d:%d" % (number, sequence), pika.BasicProperties(delivery_mode=2)
                    )
                    self.confirmed[number].append(sequence)
                channel.connection.close()
            except (AMQPError, OSError):
                time.sleep(0.05)

    def _consume(self, number: int) -> None:
        queue = QUEUES[number % len(QUEUES)]
        session = 0
        while not self.stop_consuming.is_set():
            session += 1
            try:
                channel = self.connect().channel()
                channel.basic_qos(prefetch_count=20)
                for method, _, body in channel.consume(queue, inactivity_timeout=0.2):
                    if self.stop_consuming.is_set():
                        break
                    if method is None:
                        continue
                    self.last_delivery = time.monotonic()
                    self.got[number].append((self.last_delivery, session, queue, body, method.redelivered))
                    channel.basic_ack(method.delivery_tag)
                channel.connection.close()
            except (AMQPError, OSError):
                time.sleep(0.05)

    def wait_for_progress(self) -> None:
        """Wait until every publisher has got another confirm, however long the broker takes to restart."""
        before = [len(numbers) for numbers in self.confirmed]
        deadline = time.monotonic() + HANG_S
        while any(len(numbers) <= count for numbers, count in zip(self.confirmed, before, strict=True)):
            assert time.monotonic() < deadline, "a publisher makes no progress"
            time.sleep(0.01)

    def drain(self) -> None:
        """Consume until all confirmed messages have arrived, or no more arrive."""
        self.stop_publishing.set()
        self._join(self._publishers)
        self.last_delivery = time.monotonic()
        while self.missing() and time.monotonic() - self.last_delivery < PATIENCE_S:
            time.sleep(0.2)
        self.stop_consuming.set()
        self._join(self._consumers)

    @staticmethod
    def _join(threads: list[threading.Thread]) -> None:
        for thread in threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "a client does not stop"

    def missing(self) -> dict[str, set[bytes]]:
        """The confirmed messages that were not delivered, by queue."""
        confirmed = {b"%d:%d" % (p, n) for p, numbers in enumerate(self.confirmed) for n in numbers}
        missing = {}
        for queue in QUEUES:
            lost = confirmed - {body for got in self.got for _, _, there, body, _ in got if there == queue}
            if lost:
                missing[queue] = lost
        return missing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_confirmed_messages_survive_kills_and_repeated_deliveries_are_flagged(tmp_path: Path) -> None:
    broker = HttpBroker(tmp_path, amqp=True).start()
    load = Load(broker.amqp_port)
    try:
        load.declare()
        load.start()
        rng = random.Random(7)
        for _ in range(ROUNDS):
            load.wait_for_progress()
            time.sleep(rng.uniform(0.3, 1.2))  # only varies the moment of the kill
            broker.kill()
            broker.start()
        load.wait_for_progress()
        load.drain()
    finally:
        load.stop_publishing.set()
        load.stop_consuming.set()
        broker.close()
    check(load)


def check(load: Load) -> None:
    assert all(len(numbers) > ROUNDS for numbers in load.confirmed), (
        "every publisher must make progress after every kill"
    )
    for queue, lost in load.missing().items():
        raise AssertionError(
            f"D1: {len(lost)} confirmed messages were never delivered from {queue}: {sorted(lost)[:5]}"
        )
    sent = {b"%d:%d" % (p, n) for p, numbers in enumerate(load.sent) for n in numbers}
    for queue in QUEUES:
        deliveries = [(body, flag) for got in load.got for _, _, there, body, flag in got if there == queue]
        assert not {body for body, _ in deliveries} - sent, "D5: a message was delivered that was never sent"
        # Consumers record their deliveries in any order, so only count the deliveries without the redelivered flag.
        firsts = Counter(body for body, redelivered in deliveries if not redelivered)
        twice = [body for body, count in firsts.items() if count > 1]
        assert not twice, f"D2: {twice[:5]} were delivered from {queue} again without the flag"
    for got in load.got:
        check_order(got)


def check_order(got: list[tuple[float, int, str, bytes, bool]]) -> None:
    """D4: within a session, first deliveries are in the order of their publisher."""
    last: dict[tuple[int, bytes], int] = {}
    for _, session, _, body, redelivered in got:
        publisher, _, number = body.partition(b":")
        if not redelivered:
            assert int(number) > last.get((session, publisher), 0), f"D4: {body!r} was delivered out of order"
            last[session, publisher] = int(number)


def valid_history() -> Load:
    """A valid history: each message once in each queue, one of them twice and flagged."""
    load = Load(0)
    for number in range(PUBLISHERS):
        load.sent[number] = list(range(1, ROUNDS + 4))
        load.confirmed[number] = list(range(1, ROUNDS + 3))  # the last one was not confirmed
    for consumer, queue in enumerate(QUEUES):
        for number in range(PUBLISHERS):
            load.got[consumer] += [(0.0, 1, queue, b"%d:%d" % (number, n), False) for n in load.confirmed[number]]
        load.got[consumer].append((1.0, 2, queue, b"3:1", True))
    return load


def test_check_accepts_a_valid_history() -> None:
    check(valid_history())


@pytest.mark.parametrize(
    ("violation", "planted"),
    [
        ("D1", lambda got: got.pop(3)),
        ("D2", lambda got: got.append((2.0, 3, QUEUES[0], b"3:1", False))),
        ("D4", lambda got: got.append((2.0, 1, QUEUES[0], b"0:%d" % (ROUNDS + 3), False)) or got.insert(0, got.pop())),
        ("D5", lambda got: got.append((2.0, 3, QUEUES[0], b"99:1", False))),
    ],
)
def test_check_finds_a_planted_violation(violation: str, planted: Callable[[list[Any]], object]) -> None:
    load = valid_history()
    planted(load.got[0])
    with pytest.raises(AssertionError, match=violation):
        check(load)
