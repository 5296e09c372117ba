"""kill -9 under publishers with confirms and consumers with acks, again and again; then everything is counted.

The names of the invariants (D1, D2, ...) are those of the reliability notes: a confirmed message is delivered
at least once, a second delivery is flagged, order holds, nothing that was never sent appears.
HEADRACE_CRASH_ROUNDS asks for more rounds than a test run can wait for.
"""

import os
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import pika
import pytest
from pika.exceptions import AMQPError

from tests.crash.broker_process import BrokerProcess
from tests.ports import free_port

ROUNDS = int(os.environ.get("HEADRACE_CRASH_ROUNDS", "3"))
PUBLISHERS = CONSUMERS = 10
QUEUES = ["kill-a", "kill-b"]
QUIET_S = 2.0


class Load:
    """Publishers and consumers in threads; each writes only its own lists."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.stop_publishing = threading.Event()
        self.stop_consuming = threading.Event()
        self.sent: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        self.confirmed: list[list[int]] = [[] for _ in range(PUBLISHERS)]
        self.got: list[list[tuple[float, int, str, bytes, bool]]] = [[] for _ in range(CONSUMERS)]
        self.last_delivery = time.monotonic()
        self._threads: list[threading.Thread] = []

    def connect(self) -> pika.BlockingConnection:
        return pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self.port, socket_timeout=5, blocked_connection_timeout=20)
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
        for number in range(PUBLISHERS):
            self._threads.append(threading.Thread(target=self._publish, args=(number,)))
        for number in range(CONSUMERS):
            self._threads.append(threading.Thread(target=self._consume, args=(number,)))
        for thread in self._threads:
            thread.start()

    def _publish(self, number: int) -> None:
        sequence = 0
        while not self.stop_publishing.is_set():
            try:
                channel = self.connect().channel()
                channel.confirm_delivery()
                while not self.stop_publishing.is_set():
                    sequence += 1  # never sent twice: what was not confirmed may be there, or not
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

    def drain(self) -> None:
        self.stop_publishing.set()
        self.last_delivery = time.monotonic()
        while time.monotonic() - self.last_delivery < QUIET_S:
            time.sleep(0.05)
        self.stop_consuming.set()
        for thread in self._threads:
            thread.join(30)


@pytest.mark.slow
def test_confirmed_messages_survive_kills_and_come_flagged_when_they_come_again(tmp_path: Path) -> None:
    port = free_port()
    broker = BrokerProcess(tmp_path, "--amqp", f"127.0.0.1:{port}")
    broker.start()
    load = Load(port)
    try:
        load.declare()
        load.start()
        chance = random.Random(7)
        for _ in range(ROUNDS):
            time.sleep(chance.uniform(0.3, 1.2))
            broker.kill()
            broker.start()
        time.sleep(0.5)
        load.drain()
    finally:
        load.stop_publishing.set()
        load.stop_consuming.set()
        broker.close()
    check(load)


def check(load: Load) -> None:
    assert all(len(numbers) > ROUNDS for numbers in load.confirmed), "every publisher got on after every kill"
    for queue in QUEUES:
        deliveries = sorted(d for got in load.got for d in got if d[2] == queue)
        seen: dict[bytes, int] = defaultdict(int)
        for _, _, _, body, redelivered in deliveries:
            if seen[body]:
                assert redelivered, f"D2: {body!r} came to {queue} again without the flag"
            seen[body] += 1
        confirmed = {b"%d:%d" % (p, n) for p, numbers in enumerate(load.confirmed) for n in numbers}
        sent = {b"%d:%d" % (p, n) for p, numbers in enumerate(load.sent) for n in numbers}
        lost = confirmed - seen.keys()
        assert not lost, f"D1: {len(lost)} confirmed messages never came to {queue}: {sorted(lost)[:5]}"
        assert not seen.keys() - sent, "D5: something came that nobody sent"
    for got in load.got:
        check_order(got)


def check_order(got: list[tuple[float, int, str, bytes, bool]]) -> None:
    """D4: within a session, what comes for the first time comes in its publisher's order."""
    last: dict[tuple[int, bytes], int] = {}
    for _, session, _, body, redelivered in got:
        publisher, _, number = body.partition(b":")
        if not redelivered:
            assert int(number) > last.get((session, publisher), 0), f"D4: {body!r} came out of order"
            last[session, publisher] = int(number)
