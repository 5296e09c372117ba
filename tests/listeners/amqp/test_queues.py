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


def test_a_queue_without_a_name_gets_one(channel: BlockingChannel) -> None:
    first = channel.queue_declare("", exclusive=True).method.queue
    second = channel.queue_declare("", exclusive=True).method.queue
    assert first.startswith("amq.gen-")
    assert first != second


def test_the_empty_name_means_the_queue_declared_last(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name)
    channel.basic_publish("", name, b"x")
    method, _, body = channel.basic_get("")
    assert method is not None and body == b"x"
    channel.queue_bind("", "amq.direct", "")  # and the key with it, to unbind as to bind
    channel.queue_unbind("", "amq.direct", "")
    channel.basic_publish("amq.direct", name, b"to nobody")
    assert depth(channel, name) == 0


def test_declaring_the_same_again_is_fine_and_counts(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-message-ttl": 60_000})
    channel.basic_publish("", name, b"x")
    again = channel.queue_declare(name, durable=True, arguments={"x-message-ttl": 60_000})
    assert again.method.message_count == 1


@pytest.mark.parametrize(
    "change",
    [{"durable": False}, {"auto_delete": True}, {"arguments": {"x-message-ttl": 5}}, {"arguments": {"x-expires": 99}}],
)
def test_declaring_otherwise_is_406(channel: BlockingChannel, name: str, change: dict[str, object]) -> None:
    channel.queue_declare(name, durable=True)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, **{"durable": True, **change})  # type: ignore[arg-type]
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
def test_arguments_that_cannot_be_are_406(channel: BlockingChannel, name: str, arguments: dict[str, object]) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, arguments=arguments)
    assert code(caught) == 406


def test_unknown_arguments_are_kept_and_ignored(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-somebody-elses": 1})
    channel.queue_declare(name, arguments={"x-somebody-elses": 2})


def test_the_largest_number_is_a_bound(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, arguments={"x-max-length": 2**63 - 1, "x-max-length-bytes": 2**63 - 1})
    stream = {"x-queue-type": "stream", "x-max-length-bytes": 2**63 - 1}
    channel.queue_declare(name + ".stream", durable=True, arguments=stream)


def test_names_that_begin_with_amq_are_403(channel: BlockingChannel) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare("amq.mine")
    assert code(caught) == 403


def test_what_is_not_there_is_404(channel: BlockingChannel, name: str) -> None:
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, passive=True)
    assert code(caught) == 404
    assert caught.value.reply_text == f"NOT_FOUND - no queue '{name}' in vhost '/'"


def test_an_exclusive_queue_is_405_for_others_and_goes_with_its_connection(running: Running, name: str) -> None:
    owner = running.connect()
    owner.channel().queue_declare(name, exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as caught:
        running.channel().queue_declare(name, passive=True)
    assert code(caught) == 405
    owner.close()
    running.channel().queue_declare(name, exclusive=True)


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_queue_declared_as_exclusive_and_not_is_405(channel: BlockingChannel, name: str, exclusive: bool) -> None:
    """As RabbitMQ says it, to the connection that made the queue, too: clients take 405 for a reason to wait."""
    channel.queue_declare(name, exclusive=exclusive)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare(name, exclusive=not exclusive)
    assert code(caught) == 405


def test_an_exclusive_queue_is_gone_when_its_connection_hears_that_it_is_closed(running: Running, name: str) -> None:
    """Not when its socket ends: whoever waited for close-ok may have it declared at once, as with RabbitMQ."""
    others = running.channel()
    with closing(Raw(running.port)) as owner:
        owner.open().channel()
        owner.method(1, commands.Queue.Declare, queue=name, exclusive=True)
        owner.expect(commands.Queue.DeclareOk)
        owner.method(0, commands.Connection.Close, reply_code=200, reply_text="", class_id=0, method_id=0)
        owner.expect(commands.Connection.CloseOk)
        others.queue_declare(name, exclusive=True)


def left_while_declaring(running: Running, name: str, is_waiting: Any) -> None:
    """Declares an exclusive queue, and hangs up as soon as the declaration waits for something."""
    owner = Raw(running.port).open().channel()
    link = running.link_of(owner.socket)
    owner.method(1, commands.Queue.Declare, queue=name, exclusive=True)
    eventually(lambda: running.call(lambda: is_waiting(link)), "a declaration that waits")
    owner.close()
    eventually(lambda: running.call(lambda: link not in running.listener.connections), "the end of the connection")


def test_an_exclusive_queue_whose_connection_ends_before_its_turn_is_not_made(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, waiting = asyncio.Event(), []

    async def flushed(link: Any) -> None:
        waiting.append(link)
        await published.wait()

    with monkeypatch.context() as patched:
        patched.setattr("headrace.listeners.amqp.connection.Connection.flushed", flushed)
        left_while_declaring(running, name, lambda link: link in waiting)
    running.call(published.set)
    running.channel().queue_declare(name, exclusive=True)


def test_an_exclusive_queue_whose_connection_ends_while_it_is_made_goes_with_it(
    running: Running, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits behind a durable queue of the same name, which the disk refuses in the end."""
    host = running.server.broker.vhosts.get("/")
    refused, storing = asyncio.Event(), []

    async def create_queue(*_: object) -> None:
        storing.append(name)
        await refused.wait()
        raise StorageError("no room")

    monkeypatch.setattr(host.store, "create_queue", create_queue)
    with closing(Raw(running.port)) as other:
        other.open().channel().method(1, commands.Queue.Declare, queue=name, durable=True)
        eventually(lambda: storing, "the durable queue on its way")
        left_while_declaring(running, name, lambda link: link._dispatcher.waiting is not None)
        running.call(refused.set)
        assert other.expect(commands.Connection.Close).reply_code == 541
    running.channel().queue_declare(name, exclusive=True)


def test_deleting_answers_with_the_messages_that_went_and_is_no_error_twice(
    channel: BlockingChannel, name: str
) -> None:
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


def test_a_cancel_is_answered_when_the_auto_delete_queue_is_gone(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, auto_delete=True, durable=True)
    channel.basic_cancel(channel.basic_consume(name, lambda *_: None))
    with pytest.raises(ChannelClosedByBroker, match="404"):
        channel.queue_declare(name, passive=True)


def test_an_auto_delete_queue_goes_with_its_last_consumer(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, auto_delete=True, durable=True)
    tag = channel.basic_consume(name, lambda *_: None)
    channel.basic_cancel(tag)
    eventually(lambda: running.call(lambda: name not in running.server.broker.vhosts.get("/").queues))


def test_a_queue_expires_when_nobody_uses_it(running: Running, name: str) -> None:
    running.channel().queue_declare(name, arguments={"x-expires": 50})
    eventually(lambda: running.call(lambda: name not in running.server.broker.vhosts.get("/").queues))


def test_purging_takes_what_is_ready_and_leaves_what_is_out(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True)
    for n in range(5):
        channel.basic_publish("", name, b"%d" % n)
    method, _, _ = channel.basic_get(name)
    assert channel.queue_purge(name).method.message_count == 4
    channel.basic_nack(method.delivery_tag, requeue=True)
    assert depth(channel, name) == 1


def test_thousands_of_transient_queues_come_and_go_without_a_file(running: Running, name: str) -> None:
    channel = running.channel()
    folders = {path.name for path in listed(running.folder, "**/*") if path.is_dir()}
    for _ in range(1000):
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_delete(queue)
    # Those of queues that other tests deleted may still be on their way out.
    assert {path.name for path in listed(running.folder, "**/*") if path.is_dir()} <= folders


def test_names_may_hold_anything_but_nul(channel: BlockingChannel) -> None:
    for name in ["with space", "ünï.cödé", "a/../../b", "x" * 255, "%00", "名前"]:
        channel.queue_declare(name, durable=True)
        channel.basic_publish("", name, b"x", pika.BasicProperties(delivery_mode=2))
        assert depth(channel, name) == 1
        channel.queue_delete(name)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare("nul\0")
    assert code(caught) == 406
