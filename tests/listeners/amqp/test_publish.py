"""Publishing: confirms, returns, refusals, and what a message must look like."""

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
def test_a_body_of_any_size_comes_back_as_it_was(channel: BlockingChannel, name: str, size: int, durable: bool) -> None:
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


def test_a_message_that_nobody_takes_comes_back_if_it_is_mandatory(channel: BlockingChannel, name: str) -> None:
    channel.confirm_delivery()
    with pytest.raises(UnroutableError) as caught:
        channel.basic_publish("", name, b"x", mandatory=True)
    assert caught.value.messages[0].method.reply_code == 312
    channel.basic_publish("", name, b"x")  # and is confirmed and gone if it is not


def test_confirms_come_for_every_message_also_when_many_are_on_their_way(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    confirmed: list[int] = []

    class Counter:
        def __call__(self, frame: object) -> None:
            method = frame.method  # type: ignore[attr-defined]
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


def test_a_message_to_many_queues_is_in_all_of_them_once_it_is_confirmed(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    for n in range(10):
        channel.queue_declare(f"{name}{n}", durable=n % 2 == 0)
        channel.queue_bind(f"{name}{n}", name)
    channel.confirm_delivery()
    channel.basic_publish(name, "", b"everywhere")
    assert [depth(channel, f"{name}{n}") for n in range(10)] == [1] * 10


def test_cc_and_bcc_reach_their_queues_and_bcc_is_not_told(channel: BlockingChannel, name: str) -> None:
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
    pika.BasicProperties(user_id="somebody"),
    pika.BasicProperties(headers={"CC": "not a list"}),
    pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"),
]


@pytest.mark.parametrize("properties", WRONG_PROPERTIES)
def test_properties_that_cannot_be_end_the_channel(
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
def test_what_is_refused_with_its_channel_is_not_confirmed(
    confirming: Raw, name: str, properties: pika.BasicProperties
) -> None:
    confirming.send(message(name, {key: value for key, value in vars(properties).items() if value is not None}))
    assert confirming.expect(commands.Channel.Close).reply_code == 406


def test_pika_hears_that_the_channel_is_closed_and_no_confirm(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker):
        channel.basic_publish("", name, b"x", pika.BasicProperties(expiration="soon"))


def test_of_two_that_come_together_the_good_one_is_confirmed_and_the_bad_one_is_not(confirming: Raw, name: str) -> None:
    confirming.send(message(name, {}) + message(name, {"expiration": "soon"}))
    ack = confirming.expect(commands.Basic.Ack)
    assert (ack.delivery_tag, ack.multiple) == (1, False)
    assert confirming.expect(commands.Channel.Close).reply_code == 406


def test_the_right_user_id_is_taken(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.basic_publish("", name, b"x", pika.BasicProperties(user_id="guest"))
    assert depth(channel, name) == 1


def test_immediate_is_540_and_ends_the_connection(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    publish = pika.spec.Basic.Publish(exchange="", routing_key=name, immediate=True)
    with pytest.raises(ConnectionClosedByBroker) as caught:
        channel._impl._send_method(publish, (pika.BasicProperties(), b"x"))
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 540


def test_a_message_over_the_limit_is_311_and_the_connection_lives(running: Running, name: str) -> None:
    connection = running.connect()
    channel = connection.channel()
    channel.queue_declare(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.basic_publish("", name, b"x" * (16 * 1024 * 1024))
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 311
    connection.channel().queue_declare(name, passive=True)


def test_a_full_queue_that_rejects_says_nack_and_keeps_what_it_has(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length": 2, "x-overflow": "reject-publish"})
    channel.confirm_delivery()
    channel.basic_publish("", name, b"1")
    channel.basic_publish("", name, b"2")
    with pytest.raises(NackError):
        channel.basic_publish("", name, b"3")
    assert bodies(channel, name) == [b"1", b"2"]
    channel.basic_publish("", name, b"4")
    assert bodies(channel, name) == [b"4"]


def test_a_transaction_publishes_and_acks_together_or_not_at_all(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    channel.basic_publish("", name, b"before")
    channel.tx_select()
    channel.basic_publish("", name, b"rolled back")
    method, _, _ = channel.basic_get(name)
    channel.basic_ack(method.delivery_tag)
    channel.tx_rollback()
    channel.basic_nack(method.delivery_tag, requeue=True)  # still out: the ack never happened
    channel.tx_commit()
    assert depth(channel, name) == 1
    method, _, _ = channel.basic_get(name)
    channel.basic_ack(method.delivery_tag)
    channel.basic_publish("", name, b"after")
    assert depth(channel, name) == 0
    channel.tx_commit()
    method, _, body = channel.basic_get(name)
    assert body == b"after"


def test_a_transaction_with_one_bad_message_publishes_none(running: Running, name: str) -> None:
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


def test_a_transaction_of_which_a_queue_refused_a_message_is_not_told_to_be_done(running: Running, name: str) -> None:
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


def test_a_transaction_of_many_small_messages_is_bounded_like_one_of_large_ones(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only bodies were counted: of empty messages eight million were kept, and committed in one go."""
    monkeypatch.setattr(transaction, "TX_BYTES_MAX", 10_000)
    channel = running.channel()
    channel.queue_declare(name)
    channel.tx_select()
    with pytest.raises(ChannelClosedByBroker) as caught:
        for _ in range(100):
            channel.basic_publish("", name, b"")
        channel.tx_commit()
    assert "transaction is larger than the maximum" in caught.value.reply_text


def test_what_comes_after_an_ack_of_everything_is_not_settled_with_the_transaction(
    channel: BlockingChannel, name: str
) -> None:
    """Tag 0 was read at the commit: what was delivered meanwhile was acked and gone, and nobody had said so."""
    channel.queue_declare(name)
    for body in (b"acked", b"not yet"):
        channel.basic_publish("", name, body)
    channel.tx_select()
    channel.basic_ack(0, multiple=True)  # nothing is out
    take(channel, name)
    channel.basic_ack(0, multiple=True)
    take(channel, name)
    channel.tx_commit()
    channel.basic_recover(requeue=True)
    assert bodies(channel, name) == [b"not yet"]


def test_recovering_in_a_transaction_leaves_what_it_has_settled(channel: BlockingChannel, name: str) -> None:
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
    """The disk has less room than the log keeps in reserve, which the next tick sees, and each one after it."""
    shard = running.server.broker.shard
    reserve = shard.disk_space._reserve
    running.call(lambda: setattr(shard.disk_space, "_reserve", 1 << 60))
    eventually(lambda: running.call(lambda: shard.is_full))
    yield
    running.call(lambda: setattr(shard.disk_space, "_reserve", reserve))
    eventually(lambda: not running.call(lambda: shard.is_full))


def test_a_full_disk_is_a_nack_and_heals_itself_d5(running: Running, name: str) -> None:
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
    """Two queues; what the second is to store is refused."""
    good, bad = f"{name}.good", f"{name}.bad"
    for queue in (good, bad):
        running.channel().queue_declare(queue, durable=True)
    monkeypatch.setattr(running.queue(bad).view.log, "append", refuse)
    return good, bad


@contextmanager
def one_flush(running: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is published in the block is stored together, at its end."""
    rounds = running.server.broker.vhosts.flushes
    with monkeypatch.context() as held:
        held.setattr(rounds, "flush", lambda: None)
        yield
    running.call(rounds.flush)


def pending(running: Running, *queues: str) -> tuple[int, ...]:
    return tuple(running.queue(queue).view.pending_records for queue in queues)


@pytest.mark.parametrize("properties", [b"\0\0", encode_properties({"expiration": "3600000"})])
def test_a_queue_that_refuses_is_no_trouble_of_those_who_publish_to_others(
    running: Running, good_and_bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch, properties: bytes
) -> None:
    """The connections of all who published at that time were closed with 541."""
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
    """A channel whose publishes wait for nothing, and what each was told in the end."""
    channel = running.channel()
    told: dict[int, str] = {}

    def hear(found: Any) -> None:
        method = found.method
        for tag in range(1, method.delivery_tag + 1) if method.multiple else [method.delivery_tag]:
            told.setdefault(tag, method.NAME)

    channel._impl.confirm_delivery(hear, lambda _: None)
    return channel, told


def test_of_a_read_with_publishes_to_both_kinds_each_has_its_own_answer(
    running: Running, good_and_bad: tuple[str, str], answered: tuple[BlockingChannel, dict[int, str]]
) -> None:
    """The connection was closed with 541. That the queue refuses is known from a publish before them."""
    good, bad = good_and_bad
    channel, told = answered

    def hears(count: int) -> bool:
        channel.connection.process_data_events(0.01)
        return len(told) == count

    channel._impl.basic_publish("", bad, b"x")
    eventually(lambda: hears(1))
    for queue in (good, bad, good, bad, bad, good):
        channel._impl.basic_publish("", queue, b"x")
    eventually(lambda: hears(7))
    kinds = {"Basic.Ack": good, "Basic.Nack": bad}
    assert [kinds[told[tag]] for tag in range(1, 8)] == [bad, good, bad, good, bad, bad, good]
    assert depth(channel, good) == 3


@pytest.mark.parametrize("properties", [b"\0\0", encode_properties({"expiration": "3600000"})])
def test_publishes_in_one_read_with_the_first_refusal_have_each_their_own_answer(
    running: Running, good_and_bad: tuple[str, str], properties: bytes
) -> None:
    """All of them were refused, stored or not."""
    good, bad = good_and_bad
    running.call(running.server.broker.vhosts.flushes.refusing.clear)  # of the tests before
    sent = [good, good, bad, good, bad, bad, good]
    content = raw_frame(2, 1, content_header(1, properties)) + raw_frame(3, 1, b"x")
    told: list[str] = []
    with closing(Raw(running.port).open().channel().method(1, commands.Confirm.Select)) as client:
        client.expect(commands.Confirm.SelectOk)
        client.send(b"".join(frame(1, commands.Basic.Publish, routing_key=queue) + content for queue in sent))
        while len(told) < len(sent):
            answer = client.expect(commands.Basic.Ack | commands.Basic.Nack)  # type: ignore[arg-type]
            kind = good if isinstance(answer, commands.Basic.Ack) else bad
            told += [kind] * (answer.delivery_tag - len(told))
    assert told == sent
    assert depth(running.channel(), good) == 4


def test_whoever_is_refused_a_message_may_look_at_queues(running: Running, good_and_bad: tuple[str, str]) -> None:
    """The declaration behind it was told 541, and the connection ended."""
    bad = good_and_bad[1]
    with closing(Raw(running.port).open().channel()) as client:
        client.send(message(bad, {}) + frame(1, commands.Queue.Declare, queue=bad, passive=True))
        assert client.expect(commands.Queue.DeclareOk).message_count == 0


def test_a_transaction_is_done_although_a_queue_of_others_refuses(
    running: Running, good_and_bad: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told 541 for what somebody else had published meanwhile."""
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


def test_a_purge_is_done_although_a_queue_of_others_refuses(
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


def test_a_dead_letter_that_finds_no_room_stays_where_it_is_d10(running: Running, name: str) -> None:
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


def test_a_message_that_cannot_be_dead_lettered_is_not_lost(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True, arguments={"x-dead-letter-exchange": "amq.fanout"})
    channel.basic_publish("", name, b"x")
    method, _, _ = take(channel, name)

    def bug(*_: object) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(running.queue(name).vhost.dead_letters, "publish_copy", bug)
        channel.basic_reject(method.delivery_tag, requeue=False)
        with pytest.raises(AMQPConnectionError):
            channel.connection.process_data_events(60)
    eventually(lambda: running.call(lambda: running.queue(name).ready) == 1)


@pytest.mark.parametrize("how", ["nack", "close"])
def test_a_message_that_cannot_be_read_keeps_no_other_from_its_queue(
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


def test_confirms_and_transactions_exclude_each_other(running: Running) -> None:
    channel = running.channel()
    channel.tx_select()
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.confirm_delivery()
    assert caught.value.reply_code == 406


def test_an_answer_goes_straight_to_the_channel_that_asked(running: Running, name: str) -> None:
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
