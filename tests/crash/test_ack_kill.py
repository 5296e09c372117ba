"""kill -9 while a sync is running, and what becomes of the acks: docs/amqp.md, "Acks and crashes"."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from tests.crash.held_disk import HeldBroker

PREFETCH = 20
STORED, UNSTORED, ALL = 100, 300, 500  # acked before a confirm; acked while a sync runs; published
PATIENCE_S = 60.0

Delivered = dict[int, bool]  # whether a message had the redelivered flag


class Clients:
    """A broker, and the connections to it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.broker = HeldBroker(folder, *options).start()
        self._connections: list[pika.BlockingConnection] = []

    def channel(self, prefetch: int = 0) -> BlockingChannel:
        """On a connection of its own."""
        connection = pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self.broker.amqp_port, socket_timeout=60, stack_timeout=60)
        )
        self._connections.append(connection)
        channel = connection.channel()
        channel.basic_qos(prefetch_count=prefetch)
        for queue in ("work", "other", "third"):
            channel.queue_declare(queue, durable=True)
        return channel

    @contextlib.contextmanager
    def read_at_once(self) -> Iterator[None]:
        """The broker finds all that is sent inside when it reads next."""
        os.kill(self.broker.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.broker.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.broker.kill()
        self.disconnect()

    def disconnect(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(AMQPError):  # the broker may be dead
                connection.close()


@pytest.fixture
def clients(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Clients]:
    clients = Clients(tmp_path, "--write-mode", getattr(request, "param", "sync"))
    yield clients
    clients.disconnect()
    clients.broker.close()


def take(channel: BlockingChannel, count: int, *, ack: bool) -> Delivered:
    """Messages that the consumer of the queue gets. With acks, more than the prefetch arrive."""
    taken: Delivered = {}
    for method, _, body in channel.consume("work", inactivity_timeout=PATIENCE_S):
        assert method is not None, f"only {len(taken)} of {count} messages were delivered"
        taken[int(body)] = method.redelivered
        if ack:
            channel.basic_ack(method.delivery_tag)
        if len(taken) == count:
            break
    return taken


def publish(channel: BlockingChannel, *bodies: bytes, queue: str = "other") -> None:
    for body in bodies:
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))


def publish_all(channel: BlockingChannel) -> None:
    """Until they are stored: the last one is confirmed, and confirms are in order."""
    *most, last = [b"%d" % number for number in range(ALL)]
    publish(channel, *most, queue="work")
    channel.confirm_delivery()
    publish(channel, last, queue="work")


def wait_for_sync(broker: HeldBroker) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not broker.waits_for_disk:
        assert time.monotonic() < deadline, "no sync has begun"
        time.sleep(0.01)


def test_a_kill_forgets_only_acks_read_during_the_running_sync_and_flags_their_messages(clients: Clients) -> None:
    publish_all(clients.channel())
    consumer, unconfirmed = clients.channel(PREFETCH), clients.channel()
    before = take(consumer, STORED, ack=True)
    consumer.confirm_delivery()
    publish(consumer, b"")  # on the channel of the acks: its confirm proves that they are stored
    with clients.broker.disk_held():
        publish(unconfirmed, b"")
        wait_for_sync(clients.broker)
        during = take(consumer, UNSTORED, ack=True)  # the disk does nothing, and the credit is returned all the same
        clients.kill()
    assert sorted(before | during) == list(range(STORED + UNSTORED))
    assert not any((before | during).values())
    clients.broker.start()
    after = take(clients.channel(), ALL - STORED, ack=False)
    assert not set(after) & set(before), "acks that a confirm had followed were forgotten"
    assert sorted(after) == list(range(STORED, ALL)), "a message was lost"
    assert all(after[number] for number in during), "a message was delivered again without the redelivered flag"


def take_unacked(clients: Clients) -> tuple[BlockingChannel, Delivered]:
    consumer, confirmed = clients.channel(), clients.channel()
    taken = take(consumer, STORED, ack=False)
    confirmed.confirm_delivery()
    publish(confirmed, b"")  # ends the round that stores how far the queue has been delivered
    return consumer, taken


def test_a_kill_during_a_sync_keeps_the_acks_that_were_read_with_its_messages(clients: Clients) -> None:
    publish_all(clients.channel())
    consumer, acked = take_unacked(clients)
    with clients.broker.disk_held():
        with clients.read_at_once():
            publish(consumer, b"")
            consumer.basic_ack(STORED, multiple=True)
        wait_for_sync(clients.broker)
        clients.kill()
    clients.broker.start()
    after = take(clients.channel(), ALL - STORED, ack=False)
    assert sorted(after) == sorted(set(range(ALL)) - set(acked))


@pytest.mark.parametrize("clients", ["sync-immediate"], indirect=True)
def test_a_kill_keeps_no_ack_if_it_loses_what_the_consumer_had_published_before(clients: Clients) -> None:
    """With sync-immediate, each of the two messages has a round of its own, and the first round does not end."""
    publish_all(clients.channel())
    consumer, acked = take_unacked(clients)
    with clients.broker.disk_held():
        with clients.read_at_once():
            publish(consumer, b"")
            publish(consumer, b"", queue="third")
            consumer.basic_ack(STORED, multiple=True)
        wait_for_sync(clients.broker)
        clients.kill()
    clients.broker.start()
    again = clients.channel()
    assert again.basic_get("third")[0] is None
    after = take(again, ALL, ack=False)
    assert sorted(after) == list(range(ALL))
    assert all(after[number] for number in acked), "a message was delivered again without the redelivered flag"
