"""Delivery to consumers: order, prefetch, fairness, and requeueing of unacknowledged messages."""

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
    """A consumer that records its deliveries."""

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


def test_messages_are_delivered_in_order(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 300)
    assert Inbox(channel, name, auto_ack=True).wait(300).bodies == [b"%d" % n for n in range(300)]
    assert depth(channel, name) == 0


def test_unacknowledged_deliveries_never_exceed_the_prefetch(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 10)
    channel.basic_qos(prefetch_count=3)
    inbox = Inbox(channel, name).wait(3).idle()
    assert inbox.bodies == [b"0", b"1", b"2"]
    channel.basic_ack(2, multiple=True)
    assert inbox.wait(5).idle().bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert depth(channel, name) == 5


def test_a_changed_prefetch_applies_to_existing_consumers(channel: BlockingChannel, name: str) -> None:
    """Celery relies on this when tasks with an ETA fill its prefetch window."""
    fill(channel, name, 10)
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, name).wait(1)
    channel.basic_qos(prefetch_count=4)
    assert len(inbox.wait(4).idle().got) == 4


def test_a_global_prefetch_is_shared_by_all_consumers_of_the_channel(channel: BlockingChannel, name: str) -> None:
    fill(channel, name + "a", 5)
    fill(channel, name + "b", 5)
    channel.basic_qos(prefetch_count=4, global_qos=True)
    first, second = Inbox(channel, name + "a"), Inbox(channel, name + "b")
    eventually(lambda: len(first.idle().got) + len(second.got) >= 4)
    assert len(first.idle().got) + len(second.got) == 4
    channel.basic_ack(0, multiple=True)
    eventually(lambda: len(first.idle().got) + len(second.got) >= 8)
    assert len(first.got) + len(second.got) == 8


def test_a_global_prefetch_also_limits_consumers_without_acks(channel: BlockingChannel, name: str) -> None:
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


def test_a_global_prefetch_alternates_between_the_queues_of_the_channel(channel: BlockingChannel, name: str) -> None:
    queues = [f"{name}.{number}" for number in range(3)]
    for queue in queues:
        fill(channel, queue, 10, durable=False)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    inboxes = [Inbox(channel, queue) for queue in queues]
    for delivered in range(9):

        def has_next(delivered: int = delivered) -> bool:
            channel.connection.process_data_events(0.02)
            return sum(len(inbox.got) for inbox in inboxes) > delivered

        eventually(has_next)
        channel.basic_ack(max(i.got[-1][0] for i in inboxes if i.got))
    assert [min(3, len(inbox.got)) for inbox in inboxes] == [3, 3, 3]


@pytest.mark.parametrize("durable", [False, True])
def test_a_consumer_gets_a_message_before_basic_get(running: Running, name: str, durable: bool) -> None:
    """Publish and get are sent in one write, so that nothing happens in between."""
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


def test_basic_get_does_not_count_toward_a_global_prefetch(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 3)
    channel.basic_qos(prefetch_count=1, global_qos=True)
    channel.basic_get(name)
    assert Inbox(channel, name).wait(1).idle().bodies == [b"1"]


def test_messages_are_delivered_to_consumers_in_round_robin_order(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name)
    inboxes = [Inbox(running.channel(), name, auto_ack=True) for _ in range(3)]
    for n in range(9):
        channel.basic_publish("", name, b"%d" % n)
        channel.queue_declare(name, passive=True)
    for inbox in inboxes:
        inbox.wait(3)
    assert sorted(b for inbox in inboxes for b in inbox.bodies) == [b"%d" % n for n in range(9)]


def test_consumers_share_a_backlog_fairly(running: Running, name: str) -> None:
    fill(running.channel(), name, 0)
    inboxes = [Inbox(running.channel(), name, auto_ack=True) for _ in range(2)]
    channel = running.channel()
    for n in range(200):
        channel.basic_publish("", name, b"%d" % n)
    eventually(lambda: len(inboxes[0].idle().got) + len(inboxes[1].idle().got) == 200)
    assert min(len(inbox.got) for inbox in inboxes) >= 50


def test_the_consumer_with_the_higher_priority_is_served_first(running: Running, name: str) -> None:
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


def test_with_single_active_consumer_the_next_one_takes_over(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, arguments={"x-single-active-consumer": True})
    first, second = Inbox(running.channel(), name), Inbox(running.channel(), name)
    channel.basic_publish("", name, b"1")
    first.wait(1)
    assert second.idle().got == []
    first.channel.connection.close()
    assert second.wait(1).got[0][1:] == (True, b"1")


def test_an_exclusive_consumer_on_a_single_active_consumer_queue_is_403(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-single-active-consumer": True})
    with pytest.raises(ChannelClosedByBroker) as caught:
        Inbox(channel, name, exclusive=True)
    assert (caught.value.reply_code, "in exclusive use" in caught.value.reply_text) == (403, True)


def test_a_second_consumer_beside_an_exclusive_one_is_403(running: Running, name: str) -> None:
    fill(running.channel(), name, 0)
    Inbox(running.channel(), name, exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as caught:
        Inbox(running.channel(), name)
    assert caught.value.reply_code == 403


def test_unacknowledged_messages_return_to_their_position_as_redelivered(running: Running, name: str) -> None:
    fill(running.channel(), name, 6)
    reader = running.channel()
    Inbox(reader, name).wait(6)
    reader.basic_ack(2)
    reader.connection.close()
    got = Inbox(running.channel(), name).wait(5).got
    assert [(redelivered, body) for _, redelivered, body in got] == [(True, b"%d" % n) for n in (0, 2, 3, 4, 5)]


def test_consecutive_unacknowledged_messages_are_requeued_as_one_range(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requeueing a million messages one by one blocked the broker."""
    fill(running.channel(), name, 3000)
    greedy = running.channel()
    Inbox(greedy, name).wait(3000)
    pieces: list[tuple[int, int]] = []
    view = running.queue(name).view
    give_back = view.give_back

    def record(start: int, end: int) -> None:
        pieces.append((start, end))
        give_back(start, end)

    monkeypatch.setattr(view, "give_back", record)
    greedy.connection.close()
    inbox = Inbox(running.channel(), name).wait(3000)
    assert inbox.bodies == [b"%d" % n for n in range(3000)]
    assert all(redelivered for _, redelivered, _ in inbox.got)
    assert pieces == [(0, 3000)]


def test_nack_and_reject_requeue_at_the_original_position(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 4)
    tags = [channel.basic_get(name)[0].delivery_tag for _ in range(3)]
    channel.basic_reject(tags[1], requeue=True)
    channel.basic_nack(tags[0], requeue=True)
    got = [channel.basic_get(name) for _ in range(3)]
    assert [(m.redelivered, body) for m, _, body in got] == [(True, b"0"), (True, b"1"), (False, b"3")]


def test_recover_requeues_all_unacknowledged_messages(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 3)
    for _ in range(3):
        channel.basic_get(name)
    channel.basic_recover(requeue=True)
    assert depth(channel, name) == 3


@pytest.mark.parametrize("twice", [True, False])
def test_an_unknown_or_repeated_tag_is_406_and_other_channels_stay_open(
    running: Running, name: str, twice: bool
) -> None:
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


def test_cancelling_stops_deliveries_but_not_the_unacknowledged_ones(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 2)
    channel.basic_qos(prefetch_count=1)
    inbox = Inbox(channel, name).wait(1)
    channel.basic_cancel(inbox.tag)
    assert depth(channel, name) == 1
    channel.basic_ack(1)
    assert len(inbox.idle().got) == 1


@pytest.mark.parametrize("how", ["consume", "get"])
def test_a_channel_does_not_keep_past_consumers(running: Running, name: str, how: str) -> None:
    """An open channel kept a reference to every past consumer, and so to deleted queues."""
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
    channel.basic_ack(late.got[0][0])  # the deliveries of the cancelled consumer can still be settled
    channel.basic_nack(late.got[1][0], requeue=True)
    again = Inbox(channel, name).wait(1)
    assert again.bodies == [b"1"]
    assert depth(channel, name) == 0


def test_deleting_a_queue_cancels_its_consumers(running: Running, name: str) -> None:
    channel = running.channel()
    fill(running.channel(), name, 0)
    Inbox(channel, name)
    cancelled: list[str] = []
    channel.add_on_cancel_callback(lambda frame: cancelled.append(frame.method.consumer_tag))
    running.channel().queue_delete(name)
    eventually(lambda: channel.connection.process_data_events(0.05) or cancelled)


def test_channel_flow_pauses_and_resumes_deliveries(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 2)
    channel.flow(False)
    inbox = Inbox(channel, name)
    assert inbox.idle().got == []
    channel.flow(True)
    inbox.wait(2)


def test_a_consumer_tag_in_use_is_530(channel: BlockingChannel, name: str) -> None:
    fill(channel, name, 0)
    consume = pika.spec.Basic.Consume(queue=name, consumer_tag="t")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as caught:
        channel._impl._send_method(consume)
        channel._impl._send_method(consume)
        channel.queue_declare(name, passive=True)
    assert caught.value.reply_code == 530


def test_messages_for_a_slow_reader_are_not_buffered_in_the_broker(running: Running, name: str) -> None:
    """Without a prefetch limit, the number of messages in flight stays close to the size of the socket buffers."""
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    for _ in range(400):
        channel.basic_publish("", name, b"x" * 100_000)
    depth(channel, name)
    Inbox(running.channel(), name)
    eventually(lambda: running.call(lambda: running.queue(name).unacked) > 0)
    assert running.call(lambda: running.queue(name).unacked) < 300


def test_the_consumer_timeout_closes_the_channel(running: Running, name: str) -> None:
    fill(running.channel(), name, 1, arguments={"x-consumer-timeout": 300})
    with closing(Raw(running.port)) as client:  # pika drops a delivery if the channel is closed in the same read
        client.open().channel()
        client.method(1, commands.Basic.Consume, queue=name, consumer_tag="c")
        client.expect(commands.Basic.ConsumeOk)
        client.expect(commands.Basic.Deliver)
        client.frame(), client.frame()  # content header and body
        closed = client.expect(commands.Channel.Close)
    assert (closed.reply_code, "timed out" in closed.reply_text) == (406, True)
    eventually(lambda: running.call(lambda: running.queue(name).ready) == 1)
