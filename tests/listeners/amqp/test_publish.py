"""Publishing: confirms, returns, refusals, transactions and the validation of messages."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pika
import pytest
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    NackError,
    UnroutableError,
)

from headrace.errors import StorageError
from headrace.listeners.amqp import transaction
from headrace.record.amqp.properties import encode_properties
from headrace.wire.amqp.methods import frame
from tests.listeners.amqp.raw import Raw, content_header, raw_frame
from tests.listeners.amqp.running import Running, bodies, depth, eventually, take


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 300_000, 3_000_000])
def test_a_body_of_any_size_is_delivered_unchanged(
    channel: BlockingChannel, name: str, size: int, durable: bool
) -> None:
    channel.queue_declare(name, durable=durable)
    channel.confirm_delivery()
    body = bytes(n % 251 for n in range(1000)) * (size // 1000 + 1)
    properties = pika.BasicProperties(
        content_type="a/b", headers={"n": None, "t": {"x": [1, "two", None]}, "b": True, "big": 2**40},
        delivery_mode=2, priority=3, correlation_id="c", reply_to="r", message_id="m", timestamp=17, type="t",
        app_id="a",
    )  # fmt: skip
    channel.basic_publish("", name, body[:size], properties)
    method, found, got = channel.basic_get(name, auto_ack=True)
    assert got == body[:size]
    assert found == properties
    assert (method.exchange, method.routing_key, method.redelivered) == ("", name, False)


def test_an_unroutable_mandatory_message_is_returned(channel: BlockingChannel, name: str) -> None:
    channel.confirm_delivery()
    with pytest.raises(UnroutableError) as caught:
        channel.basic_publish("", name, b"x", mandatory=True)
    assert caught.value.messages[0].method.reply_code == 312
    channel.basic_publish("", name, b"x")  # without mandatory it is confirmed and dropped


def test_every_message_is_confirmed_when_many_are_in_flight(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    confirmed: list[int] = []

    class Counter:
        def __call__(self, frame: Any) -> None:
            method = frame.method
            first = (confirmed[-1] if confirmed else 0) + 1 if method.multiple else method.delivery_tag
            confirmed.extend(range(first, method.delivery_tag + 1))

    channel._impl.confirm_delivery(Counter(), lambda _: None)
    channel.connection.process_data_events(0.2)
    for n in range(500):
        channel._impl.basic_publish("", name, b"%d" % n)
    while len(confirmed) < 500:
        channel.connection.process_data_events(0.1)
    assert sorted(confirmed) == list(range(1, 501))
    assert bodies(channel, name) == [b"%d" % n for n in range(500)]


def test_a_confirmed_message_is_in_every_queue_it_was_routed_to(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    for n in range(10):
        channel.queue_declare(f"{name}{n}", durable=n % 2 == 0)
        channel.queue_bind(f"{name}{n}", name)
    channel.confirm_delivery()
    channel.basic_publish(name, "", b"everywhere")
    assert [depth(channel, f"{name}{n}") for n in range(10)] == [1] * 10


def test_cc_and_bcc_reach_their_queues_and_the_bcc_header_is_removed(channel: BlockingChannel, name: str) -> None:
    for queue in "abc":
        channel.queue_declare(name + queue)
    headers = {"CC": [name + "b"], "BCC": [name + "c"], "x": 1}
    channel.basic_publish("", name + "a", b"x", pika.BasicProperties(headers=headers))
    for queue in "abc":
        _, properties, _ = take(channel, name + queue)
        assert properties.headers == {"CC": [name + "b"], "x": 1}


WRONG_PROPERTIES = [
    pika.BasicProperties(expiration="soon"),
    pika.BasicProperties(expiration="-1"),
    pika.BasicProperties(user_id="other"),
    pika.BasicProperties(headers={"CC": "not a list"}),
    pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"),
]


@pytest.mark.parametrize("properties", WRONG_PROPERTIES)
def test_invalid_properties_close_the_channel(
    channel: BlockingChannel, name: str, properties: pika.BasicProperties
) -> None:
    channel.queue_declare(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.basic_publish("", name, b"x", properties)
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 406


def message(queue: str, properties: dict[str, Any]) -> bytes:
    header = content_header(1, encode_properties(properties))
    return frame(1, commands.Basic.Publish, routing_key=queue) + raw_frame(2, 1, header) + raw_frame(3, 1, b"x")


@pytest.fixture
def confirming(running: Running, name: str) -> Iterator[Raw]:
    with closing(Raw(running.port)) as client:
        client.open().channel()
        client.method(1, commands.Queue.Declare, queue=name).expect(commands.Queue.DeclareOk)
        client.method(1, commands.Confirm.Select).expect(commands.Confirm.SelectOk)
        yield client


@pytest.mark.parametrize("properties", WRONG_PROPERTIES)
def test_a_message_that_closes_its_channel_is_not_confirmed(
    confirming: Raw, name: str, properties: pika.BasicProperties
) -> None:
    confirming.send(message(name, {key: value for key, value in vars(properties).items() if value is not None}))
    assert confirming.expect(commands.Channel.Close).reply_code == 406


def test_pika_reports_the_closed_channel_of_a_refused_message(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker):
        channel.basic_publish("", name, b"x", pika.BasicProperties(expiration="soon"))


def test_a_valid_message_is_confirmed_before_an_invalid_one_in_the_same_read(confirming: Raw, name: str) -> None:
    confirming.send(message(name, {}) + message(name, {"expiration": "soon"}))
    ack = confirming.expect(commands.Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (1, False)
    assert confirming.expect(commands.Channel.Close).reply_code == 406


def test_the_user_id_of_the_authenticated_user_is_accepted(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.basic_publish("", name, b"x", pika.BasicProperties(user_id="guest"))
    assert depth(channel, name) == 1


def test_immediate_is_540_and_closes_the_connection(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish = pika.spec.Basic.Publish(exchange="", routing_key=name, immediate=True)
    with pytest.raises(ConnectionClosedByBroker) as caught:
        channel._impl._send_method(publish, (pika.BasicProperties(), b"x"))
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 540


def test_a_message_over_the_size_limit_is_311_and_the_connection_stays_open(running: Running, name: str) -> None:
    connection = running.connect()
    channel = connection.channel()
    channel.queue_declare(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.basic_publish("", name, b"x" * (16 * 1024 * 1024))
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 311
    connection.channel().queue_declare(name, passive=True)


def test_reject_publish_nacks_messages_and_keeps_the_existing_ones(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    channel.basic_publish("", name, b"1")
    channel.basic_publish("", name, b"2")
    with pytest.raises(NackError):
        channel.basic_publish("", name, b"3")
    assert bodies(channel, name) == [b"1", b"2"]
    channel.basic_publish("", name, b"4")
    assert bodies(channel, name) == [b"4"]


def test_a_transaction_publishes_and_acks_atomically(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    channel.basic_publish("", name, b"before")
    channel.tx_select()
    channel.basic_publish("", name, b"rolled back")
    method, _, _ = channel.basic_get(name)
    channel.basic_ack(method.delivery_tag)
    channel.tx_rollback()
    channel.basic_nack(method.delivery_tag, requeue=True)  # still unacknowledged: the ack was rolled back
    channel.tx_commit()
    assert depth(channel, name) == 1
    method, _, _ = channel.basic_get(name)
    channel.basic_ack(method.delivery_tag)
    channel.basic_publish("", name, b"after")
    assert depth(channel, name) == 0
    channel.tx_commit()
    method, _, body = channel.basic_get(name)
    assert body == b"after"


def test_a_transaction_with_an_invalid_message_publishes_none(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    channel.exchange_declare(name, "direct")
    channel.tx_select()
    channel.basic_publish("", name, b"good")
    channel.basic_publish(name, "k", b"to an exchange that will be gone")
    channel.basic_publish("", name, b"also good")
    running.channel().exchange_delete(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.tx_commit()
    assert caught.value.reply_code == 404
    assert depth(running.channel(), name) == 0


def test_a_commit_fails_if_a_queue_refuses_a_message(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.tx_select()
    channel.basic_publish("", name, b"1")
    channel.basic_publish("", name, b"2")
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.tx_commit()
    assert (caught.value.reply_code, "partial tx completion" in caught.value.reply_text) == (406, True)
    assert depth(running.channel(), name) == 1


def test_a_transaction_that_settles_a_message_twice_publishes_nothing(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    channel.queue_declare(name + ".more", durable=True)
    channel.basic_publish("", name, b"1")
    channel.tx_select()
    method, _, _ = take(channel, name)
    channel.basic_publish("", name + ".more", b"2")
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.basic_nack(method.delivery_tag, requeue=False)
        channel.basic_nack(method.delivery_tag, requeue=False)
        channel.tx_commit()
    assert caught.value.reply_code == 406
    assert depth(running.channel(), name + ".more") == 0
    assert depth(running.channel(), name) == 1


def test_the_size_limit_of_a_transaction_also_counts_empty_messages(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only bodies were counted, so a transaction could hold eight million empty messages."""
    monkeypatch.setattr(transaction, "TX_BYTES_MAX", 10_000)
    channel = running.channel()
    channel.queue_declare(name)
    channel.tx_select()
    with pytest.raises(ChannelClosedByBroker) as caught:
        for _ in range(100):
            channel.basic_publish("", name, b"")
        channel.tx_commit()
    assert "transaction is larger than the maximum" in caught.value.reply_text


def test_ack_all_in_a_transaction_covers_only_messages_delivered_before_it(channel: BlockingChannel, name: str) -> None:
    """Tag 0 was evaluated at the commit, so messages delivered after the ack were acked too and lost."""
    channel.queue_declare(name)
    for body in (b"acked", b"not yet"):
        channel.basic_publish("", name, body)
    channel.tx_select()
    channel.basic_ack(0, multiple=True)  # nothing is unacknowledged yet
    take(channel, name)
    channel.basic_ack(0, multiple=True)
    take(channel, name)
    channel.tx_commit()
    channel.basic_recover(requeue=True)
    assert bodies(channel, name) == [b"not yet"]


def test_recover_in_a_transaction_skips_messages_settled_by_it(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    for body in (b"acked", b"kept"):
        channel.basic_publish("", name, body)
    channel.tx_select()
    acked, _, _ = take(channel, name)
    take(channel, name)
    channel.basic_ack(acked.delivery_tag)
    channel.basic_recover(requeue=True)
    channel.tx_commit()
    assert bodies(channel, name) == [b"kept"]


@contextmanager
def full_disk(running: Running) -> Iterator[None]:
    """Make the disk look full: less space is free than the log keeps in reserve, as the next check notices."""
    shard = running.server.broker.shard
    reserve = shard.disk_space._reserve
    running.call(lambda: setattr(shard.disk_space, "_reserve", 1 << 60))
    eventually(lambda: running.call(lambda: shard.is_full))
    yield
    running.call(lambda: setattr(shard.disk_space, "_reserve", reserve))
    eventually(lambda: not running.call(lambda: shard.is_full))


def test_a_full_disk_nacks_messages_until_there_is_space_again(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", name, b"before")
    with full_disk(running), pytest.raises(NackError):
        channel.basic_publish("", name, b"refused")
    channel.basic_publish("", name, b"after")
    assert bodies(channel, name) == [b"before", b"after"]


def refuse(*_: object) -> None:
    raise StorageError("damaged")


@pytest.fixture
def good_and_bad(running: Running, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two durable queues. Appends to the second one fail."""
    good, bad = f"{name}.good", f"{name}.bad"
    for queue in (good, bad):
        running.channel().queue_declare(queue, durable=True)
    monkeypatch.setattr(running.queue(bad).view.log, "append", refuse)
    return good, bad


@contextmanager
def one_flush(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Store all messages published in the block with one flush at its end."""
    rounds = running.server.broker.vhosts.flushes
    with monkeypatch.context() as held:
        held.setattr(rounds, "flush", lambda: None)
        yield
    running.call(rounds.flush)


def pending(running: Running, *queues: str) -> tuple[int, ...]:
    return tuple(running.queue(queue).view.pending_records for queue in queues)


@pytest.mark.parametrize("properties", [b"\0\0", encode_properties({"expiration": "3600000"})])
def test_a_failing_queue_does_not_affect_publishers_to_other_queues(
    running: Running, good_and_bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch, properties: bytes
) -> None:
    """The connections of all clients that published at that time were closed with 541."""
    good, bad = good_and_bad

    def publisher(queue: str) -> Raw:
        client = Raw(running.port).open().channel().method(1, commands.Confirm.Select)
        client.expect(commands.Confirm.SelectOk)
        publish(client, queue)
        return client

    def publish(client: Raw, queue: str) -> None:
        client.method(1, commands.Basic.Publish, exchange="", routing_key=queue)
        client.send(raw_frame(2, 1, content_header(1, properties)) + raw_frame(3, 1, b"x"))

    with ExitStack() as clients:
        with one_flush(running, monkeypatch):
            to_good, to_bad, to_both = (clients.enter_context(closing(publisher(queue))) for queue in (good, bad, good))
            eventually(lambda: pending(running, good, bad) == (2, 1))
            publish(to_both, bad)
            eventually(lambda: pending(running, good, bad) == (2, 2))
        assert to_good.expect(commands.Basic.Ack).delivery_tag == 1
        assert to_bad.expect(commands.Basic.Nack).delivery_tag == 1
        assert to_both.expect(commands.Basic.Ack).delivery_tag == 1
        assert to_both.expect(commands.Basic.Nack).delivery_tag == 2
        publish(to_good, good)
        assert to_good.expect(commands.Basic.Ack).delivery_tag == 2
    assert depth(running.channel(), good) == 3


@pytest.fixture
def answered(running: Running) -> tuple[BlockingChannel, dict[int, str]]:
    """A channel that does not wait for confirms, and the reply to each delivery tag."""
    channel = running.channel()
    replies: dict[int, str] = {}

    def record(found: Any) -> None:
        method = found.method
        for tag in range(1, method.delivery_tag + 1) if method.multiple else [method.delivery_tag]:
            replies.setdefault(tag, method.NAME)

    channel._impl.confirm_delivery(record, lambda _: None)
    return channel, replies


def test_publishes_to_good_and_failing_queues_in_one_read_are_confirmed_separately(
    running: Running, good_and_bad: tuple[str, str], answered: tuple[BlockingChannel, dict[int, str]]
) -> None:
    """The connection was closed with 541. The broker knows from an earlier publish that the queue refuses."""
    good, bad = good_and_bad
    channel, replies = answered

    def has_replies(count: int) -> bool:
        channel.connection.process_data_events(0.01)
        return len(replies) == count

    channel._impl.basic_publish("", bad, b"x")
    eventually(lambda: has_replies(1))
    for queue in (good, bad, good, bad, bad, good):
        channel._impl.basic_publish("", queue, b"x")
    eventually(lambda: has_replies(7))
    kinds = {"Basic.Ack": good, "Basic.Nack": bad}
    assert [kinds[replies[tag]] for tag in range(1, 8)] == [bad, good, bad, good, bad, bad, good]
    assert depth(channel, good) == 3


@pytest.mark.parametrize("properties", [b"\0\0", encode_properties({"expiration": "3600000"})])
def test_publishes_in_one_read_with_the_first_failure_are_confirmed_separately(
    running: Running, good_and_bad: tuple[str, str], properties: bytes
) -> None:
    """All of them were refused, even those that were stored."""
    good, bad = good_and_bad
    running.call(running.server.broker.vhosts.flushes.refusing.clear)  # left over from earlier tests
    sent = [good, good, bad, good, bad, bad, good]
    content = raw_frame(2, 1, content_header(1, properties)) + raw_frame(3, 1, b"x")
    replies: list[str] = []
    with closing(Raw(running.port).open().channel().method(1, commands.Confirm.Select)) as client:
        client.expect(commands.Confirm.SelectOk)
        client.send(b"".join(frame(1, commands.Basic.Publish, routing_key=queue) + content for queue in sent))
        while len(replies) < len(sent):
            answer = client.expect(commands.Basic.Ack | commands.Basic.Nack)  # type: ignore[arg-type]  # isinstance accepts it
            kind = good if isinstance(answer, commands.Basic.Ack) else bad
            replies += [kind] * (answer.delivery_tag - len(replies))
    assert replies == sent
    assert depth(running.channel(), good) == 4


def test_a_passive_declare_works_after_a_refused_message(running: Running, good_and_bad: tuple[str, str]) -> None:
    """The declaration after the refused message failed with 541, and the connection was closed."""
    bad = good_and_bad[1]
    with closing(Raw(running.port).open().channel()) as client:
        client.send(message(bad, {}) + frame(1, commands.Queue.Declare, queue=bad, passive=True))
        assert client.expect(commands.Queue.DeclareOk).message_count == 0


def test_a_transaction_commits_although_another_queue_fails(
    running: Running, good_and_bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It failed with 541 because of a message that another client had published."""
    good, bad = good_and_bad
    client = Raw(running.port).open().channel().method(1, commands.Tx.Select)
    with closing(client):
        client.expect(commands.Tx.SelectOk)
        with one_flush(running, monkeypatch):
            running.channel().basic_publish("", bad, b"x")
            eventually(lambda: pending(running, bad) == (1,))
            client.send(message(good, {})).method(1, commands.Tx.Commit)
            eventually(lambda: pending(running, good) == (1,))
        client.expect(commands.Tx.CommitOk)
    assert depth(running.channel(), good) == 1


def test_a_purge_completes_although_another_queue_fails(
    running: Running, good_and_bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = good_and_bad
    channel = running.channel()
    channel.confirm_delivery()
    channel.basic_publish("", good, b"x")
    with closing(Raw(running.port).open().channel()) as client:
        with one_flush(running, monkeypatch):
            running.channel().basic_publish("", bad, b"x")
            eventually(lambda: pending(running, bad) == (1,))
            client.method(1, commands.Queue.Purge, queue=good)
            eventually(lambda: not running.call(lambda: running.queue(good).ready))
        assert client.expect(commands.Queue.PurgeOk).message_count == 1


def test_on_a_full_disk_a_rejected_message_stays_in_its_queue(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name + ".dead", durable=True)
    channel.queue_declare(
        name, durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name + ".dead"}
    )
    channel.basic_publish("", name, b"x")
    method, _, _ = take(channel, name)
    with full_disk(running):
        channel.basic_reject(method.delivery_tag, requeue=False)
        eventually(lambda: running.call(lambda: running.queue(name).ready) == 1)
    method, _, body = take(channel, name)
    assert body == b"x"
    channel.basic_reject(method.delivery_tag, requeue=False)
    assert take(channel, name + ".dead")[2] == b"x"


def test_a_message_is_requeued_if_dead_lettering_fails(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True, arguments={"x-dead-letter-exchange": "amq.fanout"})
    channel.basic_publish("", name, b"x")
    method, _, _ = take(channel, name)

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(running.queue(name).vhost.dead_letters, "publish_copy", fail)
        channel.basic_reject(method.delivery_tag, requeue=False)
        with pytest.raises(AMQPConnectionError):
            channel.connection.process_data_events(60)
    eventually(lambda: running.call(lambda: running.queue(name).ready) == 1)


@pytest.mark.parametrize("how", ["nack", "close"])
def test_an_unreadable_message_does_not_prevent_the_requeue_of_others(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    channel = running.channel()
    bad, good = name + ".bad", name + ".good"
    limit = {"x-queue-type": "quorum", "x-delivery-limit": 0, "x-dead-letter-exchange": "amq.fanout"}
    channel.queue_declare(bad, durable=True, arguments=limit)
    channel.queue_declare(good, durable=True)
    for queue in (bad, good):
        channel.basic_publish("", queue, b"x")
        take(channel, queue)

    def damaged(*_: object) -> None:
        raise StorageError("damaged")

    monkeypatch.setattr(running.queue(bad).view.reader, "chunk", damaged)
    if how == "nack":
        channel.basic_nack(0, multiple=True, requeue=False)
        with pytest.raises(ConnectionClosedByBroker, match="damaged"):
            channel.connection.process_data_events(60)
    else:
        channel.connection.close()
    eventually(lambda: running.call(lambda: [running.queue(q).unacked for q in (bad, good)]) == [0, 0])
    assert running.call(lambda: running.queue(bad).ready) == 1


def test_confirms_and_transactions_are_mutually_exclusive(running: Running) -> None:
    channel = running.channel()
    channel.tx_select()
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.confirm_delivery()
    assert caught.value.reply_code == 406


def test_direct_reply_to_delivers_to_the_requesting_channel(running: Running, name: str) -> None:
    client, server = running.channel(), running.channel()
    server.queue_declare(name)
    answers: list[bytes] = []
    client.basic_consume("amq.rabbitmq.reply-to", lambda _c, _m, _p, body: answers.append(body), auto_ack=True)
    client.basic_publish("", name, b"question", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
    _, properties, _ = take(server, name)
    assert properties.reply_to.startswith("amq.rabbitmq.reply-to.")
    server.queue_declare(properties.reply_to, passive=True)
    server.basic_publish("", properties.reply_to, b"answer")
    while not answers:
        client.connection.process_data_events(0.1)
    assert answers == [b"answer"]
    client.close()
    with pytest.raises(ChannelClosedByBroker) as caught:
        server.queue_declare(properties.reply_to, passive=True)
    assert caught.value.reply_code == 404
