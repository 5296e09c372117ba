"""Delivering: order, credit, turns, and what happens to what is not acked."""

from contextlib import closing
from typing import Any

import pika
import pytest
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from headrace.wire.amqp.methods import frame
from tests.listeners.amqp.raw import Raw, content_header, raw_frame
from tests.listeners.amqp.running import Running, depth, eventually


class Inbox:
    """A consumer that writes down what it got."""

    def __init__(self, channel: BlockingChannel, queue: str, **options: Any) -> None:
        self.channel = channel
        self.got: list[tuple[int, bool, bytes]] = []
        self.tag = channel.basic_consume(queue, self._on_message, **options)

    def _on_message(self, _channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        self.got.append((method.delivery_tag, method.redelivered, body))

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.got]

    def wait(self, count: int) -> "Inbox":
        eventually(lambda: self.channel.connection.process_data_events(0.02) or len(self.got) >= count, f"{count}")
        return self

    def idle(self) -> "Inbox":
        self.channel.connection.process_data_events(0.15)
        return self


def fill(channel: BlockingChannel, queue: str, count: int, **options: Any) -> None:
    channel.queue_declare(queue, **{"durable": True, **options})
    for n in range(count):
        channel.basic_publish("", queue, b"%d" % n)
    assert depth(channel, queue) == count


def test_messages_come_in_order(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 300)
    assert Inbox(channel, name, auto_ack=True).wait(300).bodies == [b"%d" % n for n in range(300)]
    assert depth(channel, name) == 0


def test_no_more_than_the_prefetch_is_ever_out_d8(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 10)
    channel.basic_qos(prefetch_count=3)
    inbox = Inbox(channel, name).wait(3).idle()
    assert inbox.bodies == [b"0", b"1", b"2"]
    channel.basic_ack(2, multiple=True)
    assert inbox.wait(5).idle().bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert depth(channel, name) == 5


def test_a_changed_prefetch_reaches_the_consumer_that_is_there(channel: BlockingChannel, name: str) -> None:
    """What Celery counts on when tasks with an ETA fill its window."""
    fill(channel, name, 10)
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, name).wait(1)
    channel.basic_qos(prefetch_count=4)
    assert len(inbox.wait(4).idle().got) == 4


def test_a_global_prefetch_holds_for_all_consumers_of_the_channel(channel: BlockingChannel, name: str) -> None:
    fill(channel, name + "a", 5)
    fill(channel, name + "b", 5)
    channel.basic_qos(prefetch_count=4, global_qos=True)
    first, second = Inbox(channel, name + "a"), Inbox(channel, name + "b")
    eventually(lambda: len(first.idle().got) + len(second.got) >= 4)
    assert len(first.idle().got) + len(second.got) == 4
    channel.basic_ack(0, multiple=True)
    eventually(lambda: len(first.idle().got) + len(second.got) >= 8)
    assert len(first.got) + len(second.got) == 8


def test_a_consumer_without_acks_waits_for_the_global_prefetch_too(channel: BlockingChannel, name: str) -> None:
    other = f"{name}.no-ack"
    fill(channel, name, 1)
    fill(channel, other, 3)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    acked = Inbox(channel, name).wait(1)
    free = Inbox(channel, other, auto_ack=True)
    assert free.idle().got == []
    assert depth(channel, other) == 3
    channel.basic_ack(acked.got[0][0])
    free.wait(3)


def test_a_global_prefetch_goes_round_the_queues_of_the_channel(channel: BlockingChannel, name: str) -> None:
    queues = [f"{name}.{number}" for number in range(3)]
    for queue in queues:
        fill(channel, queue, 10, durable=False)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    inboxes = [Inbox(channel, queue) for queue in queues]
    for turn in range(9):
        eventually(
            lambda turn=turn: channel.connection.process_data_events(0.02) or sum(len(i.got) for i in inboxes) > turn
        )
        channel.basic_ack(max(i.got[-1][0] for i in inboxes if i.got))
    assert [min(3, len(inbox.got)) for inbox in inboxes] == [3, 3, 3]


@pytest.mark.parametrize("durable", [False, True])
def test_what_a_consumer_takes_is_not_there_for_basic_get(running: Running, name: str, durable: bool) -> None:
    """In one write, so that nothing happens between the two."""
    with closing(Raw(running.port).open().channel()) as client:
        client.method(1, commands.Queue.Declare, queue=name, durable=durable, auto_delete=True)
        client.expect(commands.Queue.DeclareOk)
        client.method(1, commands.Basic.Consume, queue=name, consumer_tag="all")
        client.expect(commands.Basic.ConsumeOk)
        client.send(
            frame(1, commands.Basic.Publish, routing_key=name)
            + raw_frame(2, 1, content_header(0))
            + frame(1, commands.Basic.Get, queue=name)
        )
        client.expect(commands.Basic.Deliver)
        client.frame()
        client.expect(commands.Basic.GetEmpty)


def test_what_was_fetched_takes_nothing_of_a_global_prefetch(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 3)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    channel.basic_get(name)
    assert Inbox(channel, name).wait(1).idle().bodies == [b"1"]


def test_consumers_take_turns(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name)
    inboxes = [Inbox(running.channel(), name, auto_ack=True) for _ in range(3)]
    for n in range(9):
        channel.basic_publish("", name, b"%d" % n)
        channel.queue_declare(name, passive=True)
    for inbox in inboxes:
        inbox.wait(3)
    assert sorted(b for inbox in inboxes for b in inbox.bodies) == [b"%d" % n for n in range(9)]


def test_a_backlog_is_shared_fairly(running: Running, name: str) -> None:
    fill(running.channel(), name, 0)
    inboxes = [Inbox(running.channel(), name, auto_ack=True) for _ in range(2)]
    channel = running.channel()
    for n in range(200):
        channel.basic_publish("", name, b"%d" % n)
    eventually(lambda: len(inboxes[0].idle().got) + len(inboxes[1].idle().got) == 200)
    assert min(len(inbox.got) for inbox in inboxes) >= 50


def test_the_higher_priority_consumer_is_served_first(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name)
    low = Inbox(running.channel(), name)
    important = running.channel()
    important.basic_qos(prefetch_count=2)
    high = Inbox(important, name, arguments={"x-priority": 10})
    for n in range(4):
        channel.basic_publish("", name, b"%d" % n)
    assert high.wait(2).idle().bodies == [b"0", b"1"]
    assert low.wait(2).bodies == [b"2", b"3"]


def test_only_the_active_consumer_is_served_and_the_next_takes_over(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, arguments={"x-single-active-consumer": True})
    first, second = Inbox(running.channel(), name), Inbox(running.channel(), name)
    channel.basic_publish("", name, b"1")
    first.wait(1)
    assert second.idle().got == []
    first.channel.connection.close()
    assert second.wait(1).got[0][1:] == (True, b"1")


def test_no_consumer_is_exclusive_where_one_is_active_at_a_time(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-single-active-consumer": True})
    with pytest.raises(ChannelClosedByBroker) as caught:
        Inbox(channel, name, exclusive=True)
    assert (caught.value.reply_code, "in exclusive use" in caught.value.reply_text) == (403, True)


def test_an_exclusive_consumer_is_alone(running: Running, name: str) -> None:
    fill(running.channel(), name, 0)
    Inbox(running.channel(), name, exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as caught:
        Inbox(running.channel(), name)
    assert caught.value.reply_code == 403


def test_unacked_messages_come_back_in_place_and_flagged_d2(running: Running, name: str) -> None:
    fill(running.channel(), name, 6)
    reader = running.channel()
    Inbox(reader, name).wait(6)
    reader.basic_ack(2)
    reader.connection.close()
    got = Inbox(running.channel(), name).wait(5).got
    assert [(redelivered, body) for _, redelivered, body in got] == [(True, b"%d" % n) for n in (0, 2, 3, 4, 5)]


def test_what_a_client_without_a_prefetch_had_comes_back_in_one_piece(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a million came back alone, and everybody waited for that."""
    fill(running.channel(), name, 3000)
    hoarder = running.channel()
    Inbox(hoarder, name).wait(3000)
    pieces: list[tuple[int, int]] = []
    view = running.queue(name).view
    give_back = view.give_back
    monkeypatch.setattr(view, "give_back", lambda *run: pieces.append(run) or give_back(*run))
    hoarder.connection.close()
    inbox = Inbox(running.channel(), name).wait(3000)
    assert inbox.bodies == [b"%d" % n for n in range(3000)]
    assert all(redelivered for _, redelivered, _ in inbox.got)
    assert pieces == [(0, 3000)]


def test_nack_and_reject_requeue_in_place(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 4)
    tags = [channel.basic_get(name)[0].delivery_tag for _ in range(3)]
    channel.basic_reject(tags[1], requeue=True)
    channel.basic_nack(tags[0], requeue=True)
    got = [channel.basic_get(name) for _ in range(3)]
    assert [(m.redelivered, body) for m, _, body in got] == [(True, b"0"), (True, b"1"), (False, b"3")]


def test_recover_gives_everything_back(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 3)
    for _ in range(3):
        channel.basic_get(name)
    channel.basic_recover(requeue=True)
    assert depth(channel, name) == 3


@pytest.mark.parametrize("twice", [True, False])
def test_an_unknown_or_repeated_tag_is_406_and_others_live_on(running: Running, name: str, twice: bool) -> None:
    connection = running.connect()
    channel, other = connection.channel(), connection.channel()
    fill(other, name, 2)
    method, _, _ = channel.basic_get(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.basic_ack(method.delivery_tag if twice else 77)
        channel.basic_ack(method.delivery_tag)
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 406
    assert "unknown delivery tag" in caught.value.reply_text
    assert other.queue_declare(name, passive=True).method.message_count == (1 if twice else 2)


def test_cancelling_stops_deliveries_and_leaves_what_is_out(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 2)
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, name).wait(1)
    channel.basic_cancel(inbox.tag)
    assert depth(channel, name) == 1
    channel.basic_ack(1)
    assert len(inbox.idle().got) == 1


@pytest.mark.parametrize("how", ["consume", "get"])
def test_a_channel_keeps_nothing_of_consumers_that_are_gone(running: Running, name: str, how: str) -> None:
    """It kept each of them, and with it a queue that was deleted, for as long as it was open."""
    channel = running.channel()
    fill(channel, name, 2)
    late = Inbox(channel, name).wait(2)
    channel.basic_cancel(late.tag)
    for n in range(20):
        channel.queue_declare(f"{name}.{n}", exclusive=True)
        channel.basic_publish("", f"{name}.{n}", b"x")
        if how == "get":
            channel.basic_get(f"{name}.{n}", auto_ack=True)
        else:
            channel.basic_cancel(Inbox(channel, f"{name}.{n}", auto_ack=True).wait(1).tag)
        channel.queue_delete(f"{name}.{n}")
    link = running.link_of(channel.connection._impl._transport._sock)
    assert running.call(lambda: len(link.channels[1].sources)) <= 3
    channel.basic_ack(late.got[0][0])  # what the first one has out is still its own
    channel.basic_nack(late.got[1][0], requeue=True)
    again = Inbox(channel, name).wait(1)
    assert again.bodies == [b"1"]
    assert depth(channel, name) == 0


def test_consumers_hear_that_their_queue_was_deleted(running: Running, name: str) -> None:
    channel = running.channel()
    fill(running.channel(), name, 0)
    Inbox(channel, name)
    heard: list[str] = []
    channel.add_on_cancel_callback(lambda frame: heard.append(frame.method.consumer_tag))
    running.channel().queue_delete(name)
    eventually(lambda: channel.connection.process_data_events(0.05) or heard)


def test_flow_stops_deliveries_until_it_is_active_again(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 2)
    channel.flow(False)
    inbox = Inbox(channel, name)
    assert inbox.idle().got == []
    channel.flow(True)
    inbox.wait(2)


def test_a_used_consumer_tag_is_530(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 0)
    consume = pika.spec.Basic.Consume(queue=name, consumer_tag="t")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as caught:
        channel._impl._send_method(consume)
        channel._impl._send_method(consume)
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 530


def test_a_slow_reader_does_not_make_the_broker_hold_its_messages(running: Running, name: str) -> None:
    """Without a prefetch and without reading: what is in flight stays near the socket's buffers."""
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    for _ in range(400):
        channel.basic_publish("", name, b"x" * 100_000)
    depth(channel, name)
    Inbox(running.channel(), name)
    eventually(lambda: running.call(lambda: running.queue(name).unacked) > 0)
    assert running.call(lambda: running.queue(name).unacked) < 300


def test_a_consumer_that_sits_on_a_message_too_long_loses_its_channel(running: Running, name: str) -> None:
    fill(running.channel(), name, 1, arguments={"x-consumer-timeout": 300})
    with closing(Raw(running.port)) as client:  # pika shows no delivery of a channel that is closed in the same read
        client.open().channel()
        client.method(1, commands.Basic.Consume, queue=name, consumer_tag="c")
        client.expect(commands.Basic.ConsumeOk)
        client.expect(commands.Basic.Deliver)
        client.frame(), client.frame()  # its properties and its body
        closed = client.expect(commands.Channel.Close)
    assert (closed.reply_code, "timed out" in closed.reply_text) == (406, True)
    eventually(lambda: running.call(lambda: running.queue(name).ready) == 1)
