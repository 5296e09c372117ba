"""Declaring, finding and deleting queues: RabbitMQ's rules and reply codes."""

import asyncio
from contextlib import closing
from typing import Any

import pika
import pytest
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from headrace.errors import StorageError
from tests.listeners.amqp.raw import Raw
from tests.listeners.amqp.running import Running, depth, eventually
from tests.listing import listed


def code(caught: pytest.ExceptionInfo[ChannelClosedByBroker]) -> int:
    return int(caught.value.reply_code)


def test_a_queue_without_a_name_gets_a_generated_one(channel: BlockingChannel) -> None:
    first = channel.queue_declare("", exclusive=True).method.queue
    second = channel.queue_declare("", exclusive=True).method.queue
    assert first.startswith("amq.gen-")
    assert first != second


def test_an_empty_queue_name_means_the_last_declared_queue(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.basic_publish("", name, b"x")
    method, _, body = channel.basic_get("")
    assert method is not None and body == b"x"
    channel.queue_bind("", "amq.direct", "")  # an empty key means the name of the queue, for bind and unbind
    channel.queue_unbind("", "amq.direct", "")
    channel.basic_publish("amq.direct", name, b"unroutable")
    assert depth(channel, name) == 0


def test_declaring_an_existing_queue_returns_its_message_count(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-message-ttl": 60_000})
    channel.basic_publish("", name, b"x")
    again = channel.queue_declare(name, durable=True, arguments={"x-message-ttl": 60_000})
    assert again.method.message_count == 1


@pytest.mark.parametrize(
    "change",
    [{"durable": False}, {"auto_delete": True}, {"arguments": {"x-message-ttl": 5}}, {"arguments": {"x-expires": 99}}],
)
def test_declaring_a_queue_with_other_parameters_is_406(
    channel: BlockingChannel, name: str, change: dict[str, Any]
) -> None:
    channel.queue_declare(name, durable=True)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, **{"durable": True, **change})
    assert code(caught) == 406
    assert "inequivalent arg" in caught.value.reply_text


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-message-ttl": -1},
        {"x-message-ttl": "soon"},
        {"x-expires": 0},
        {"x-max-length": -5},
        {"x-max-priority": 256},
        {"x-overflow": "explode"},
        {"x-queue-type": "fancy"},
        {"x-dead-letter-routing-key": "k"},
        {"x-single-active-consumer": "yes"},
    ],
)
def test_invalid_queue_arguments_are_406(channel: BlockingChannel, name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, arguments=arguments)
    assert code(caught) == 406


def test_unknown_queue_arguments_are_ignored(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-unknown": 1})
    channel.queue_declare(name, arguments={"x-unknown": 2})


def test_length_limits_accept_the_largest_int64(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-length": 2**63 - 1, "x-max-length-bytes": 2**63 - 1})
    stream = {"x-queue-type": "stream", "x-max-length-bytes": 2**63 - 1}
    channel.queue_declare(name + ".stream", durable=True, arguments=stream)


def test_names_that_begin_with_amq_are_403(channel: BlockingChannel) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare("amq.mine")
    assert code(caught) == 403


def test_a_passive_declare_of_a_missing_queue_is_404(channel: BlockingChannel, name: str) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, passive=True)
    assert code(caught) == 404
    assert caught.value.reply_text == f"NOT_FOUND - no queue '{name}' in vhost '/'"


def test_an_exclusive_queue_is_405_for_others_and_is_deleted_with_its_connection(running: Running, name: str) -> None:
    owner = running.connect()
    owner.channel().queue_declare(name, exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as caught:
        running.channel().queue_declare(name, passive=True)
    assert code(caught) == 405
    owner.close()
    running.channel().queue_declare(name, exclusive=True)


@pytest.mark.parametrize("exclusive", [True, False])
def test_redeclaring_a_queue_with_another_exclusive_flag_is_405(
    channel: BlockingChannel, name: str, exclusive: bool
) -> None:
    """Also for the connection that declared the queue, as in RabbitMQ: clients retry after a 405."""
    channel.queue_declare(name, exclusive=exclusive)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, exclusive=not exclusive)
    assert code(caught) == 405


def test_an_exclusive_queue_is_deleted_before_close_ok_is_sent(running: Running, name: str) -> None:
    """Not only when its socket closes: after close-ok, other clients can declare it at once, as with RabbitMQ."""
    others = running.channel()
    with closing(Raw(running.port)) as owner:
        owner.open().channel()
        owner.method(1, commands.Queue.Declare, queue=name, exclusive=True)
        owner.expect(commands.Queue.DeclareOk)
        owner.method(0, commands.Connection.Close, reply_code=200, reply_text="", class_id=0, method_id=0)
        owner.expect(commands.Connection.CloseOk)
        others.queue_declare(name, exclusive=True)


def disconnect_while_declaring(running: Running, name: str, is_waiting: Any) -> None:
    """Declare an exclusive queue and close the connection as soon as the declaration waits."""
    owner = Raw(running.port).open().channel()
    link = running.link_of(owner.socket)
    owner.method(1, commands.Queue.Declare, queue=name, exclusive=True)
    eventually(lambda: running.call(lambda: is_waiting(link)), "the declaration waits")
    owner.close()
    eventually(lambda: running.call(lambda: link not in running.listener.connections), "the connection is closed")


def test_a_pending_exclusive_declare_creates_no_queue_after_its_connection_closed(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, waiting = asyncio.Event(), []

    async def flushed(link: Any) -> None:
        waiting.append(link)
        await published.wait()

    with monkeypatch.context() as patched:
        patched.setattr("headrace.listeners.amqp.connection.Connection.flushed", flushed)
        disconnect_while_declaring(running, name, lambda link: link in waiting)
    running.call(published.set)
    running.channel().queue_declare(name, exclusive=True)


def test_an_exclusive_queue_is_removed_if_its_connection_closes_during_the_declare(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The declaration waits for a durable queue of the same name, whose creation then fails."""
    host = running.server.broker.vhosts.get("/")
    refused, storing = asyncio.Event(), []

    async def create_queue(*_: object) -> None:
        storing.append(name)
        await refused.wait()
        raise StorageError("disk full")

    monkeypatch.setattr(host.store, "create_queue", create_queue)
    with closing(Raw(running.port)) as other:
        other.open().channel().method(1, commands.Queue.Declare, queue=name, durable=True)
        eventually(lambda: storing, "the durable queue is being created")
        disconnect_while_declaring(running, name, lambda link: link._dispatcher.waiting is not None)
        running.call(refused.set)
        assert other.expect(commands.Connection.Close).reply_code == 541
    running.channel().queue_declare(name, exclusive=True)


def test_deleting_a_queue_returns_its_message_count_and_can_be_repeated(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    for _ in range(3):
        channel.basic_publish("", name, b"x")
    assert channel.queue_delete(name).method.message_count == 3
    assert channel.queue_delete(name).method.message_count == 0


def test_deleting_if_empty_and_if_unused_refuse_with_406(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name)
    channel.basic_publish("", name, b"x")
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_delete(name, if_empty=True)
    assert code(caught) == 406
    channel = running.channel()
    channel.basic_consume(name, lambda *_: None)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_delete(name, if_unused=True)
    assert code(caught) == 406


def test_cancel_ok_is_sent_after_an_auto_delete_queue_is_deleted(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, auto_delete=True, durable=True)
    channel.basic_cancel(channel.basic_consume(name, lambda *_: None))
    with pytest.raises(ChannelClosedByBroker, match="404"):
        channel.queue_declare(name, passive=True)


def test_an_auto_delete_queue_is_deleted_with_its_last_consumer(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, auto_delete=True, durable=True)
    tag = channel.basic_consume(name, lambda *_: None)
    channel.basic_cancel(tag)
    eventually(lambda: running.call(lambda: name not in running.server.broker.vhosts.get("/").queues))


def test_an_unused_queue_expires_after_x_expires(running: Running, name: str) -> None:
    running.channel().queue_declare(name, arguments={"x-expires": 50})
    eventually(lambda: running.call(lambda: name not in running.server.broker.vhosts.get("/").queues))


def test_purging_removes_ready_messages_but_not_unacknowledged_ones(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    for n in range(5):
        channel.basic_publish("", name, b"%d" % n)
    method, _, _ = channel.basic_get(name)
    assert channel.queue_purge(name).method.message_count == 4
    channel.basic_nack(method.delivery_tag, requeue=True)
    assert depth(channel, name) == 1


def test_transient_queues_create_no_files(running: Running, name: str) -> None:
    channel = running.channel()
    folders = {path.name for path in listed(running.folder, "**/*") if path.is_dir()}
    for _ in range(1000):
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_delete(queue)
    # Folders of queues that other tests deleted may still disappear.
    assert {path.name for path in listed(running.folder, "**/*") if path.is_dir()} <= folders


def test_queue_names_may_contain_any_character_but_nul(channel: BlockingChannel) -> None:
    for name in ["with space", "ünï.cödé", "a/../../b", "x" * 255, "%00", "名前"]:
        channel.queue_declare(name, durable=True)
        channel.basic_publish("", name, b"x", pika.BasicProperties(delivery_mode=2))
        assert depth(channel, name) == 1
        channel.queue_delete(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare("nul\0")
    assert code(caught) == 406
