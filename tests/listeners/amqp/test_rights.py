"""Who may come in, and what they may do: RabbitMQ's rules, seen by a real client (reliability, item 11)."""

import asyncio
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pika
import pytest
from pamqp import commands
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    ChannelClosedByBroker,
    ConnectionClosedByBroker,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from headrace.broker.access.permissions import EVERYTHING, Permission, TopicPermission
from headrace.broker.access.users import Users
from headrace.config import Address
from headrace.listeners.amqp.methods import connection as handshake
from headrace.listeners.common.addresses import is_loopback
from headrace.record.amqp.properties import encode_table
from tests.listeners.amqp.raw import Closed, Raw
from tests.listeners.amqp.running import PATIENCE_S, Running, bodies, eventually, patient_connection
from tests.listing import listed

NOTHING = Permission(configure="", write="", read="")


def change(running: Running, what: Callable[[Users], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run_coroutine_threadsafe(what(running.server.broker.users), running.loop).result(PATIENCE_S)


def add(running: Running, name: str, permission: Permission | None = NOTHING, **options: Any) -> None:
    change(running, lambda users: users.put_user(name, password="secret", **options))
    if permission is not None:
        change(running, lambda users: users.set_permission("/", name, permission))


def allow(running: Running, name: str, **patterns: str) -> None:
    permission = Permission(**{"configure": "", "write": "", "read": "", **patterns})
    change(running, lambda users: users.set_permission("/", name, permission))


def rule(running: Running, name: str, exchange: str, **patterns: str) -> None:
    found = TopicPermission(**{"write": ".*", "read": ".*", **patterns})
    change(running, lambda users: users.set_topic_permission("/", name, exchange, found))


def credentials(name: str, password: str = "secret") -> pika.PlainCredentials:
    return pika.PlainCredentials(name, password)


def channel_of(running: Running, name: str) -> BlockingChannel:
    return running.channel(credentials=credentials(name))


class Refusals:
    """Tries things, each on a channel of its own, and says what was answered."""

    def __init__(self, running: Running, name: str) -> None:
        self.name = name
        self.connection = running.connect(credentials=credentials(name))

    def of(self, work: Callable[[BlockingChannel], Any]) -> str:
        channel = self.connection.channel()
        with pytest.raises(ChannelClosedByBroker) as refused:
            work(channel)
            channel.queue_declare("innocent", passive=True)  # a publish is answered by what comes next
        assert refused.value.reply_code == 403
        return str(refused.value.reply_text)

    def expect(self, right: str, what: str, work: Callable[[BlockingChannel], Any]) -> None:
        text = f"ACCESS_REFUSED - {right} access to {what} in vhost '/' refused for user '{self.name}'"
        assert self.of(work) == text

    def works(self, work: Callable[[BlockingChannel], Any]) -> Any:
        channel = self.connection.channel()
        found = work(channel)
        channel.queue_declare("innocent", passive=True)
        channel.close()
        return found


@pytest.fixture(autouse=True)
def innocent(channel: BlockingChannel) -> None:
    channel.queue_declare("innocent", durable=True)


# Coming in.


@pytest.mark.parametrize(("name", "password"), [("ann", "wrong"), ("ann", ""), ("nobody", "secret"), ("", "")])
def test_11_a_wrong_password_is_403_and_does_not_say_why(running: Running, name: str, password: str) -> None:
    add(running, "ann", EVERYTHING)
    with pytest.raises(ProbableAuthenticationError) as refused:
        running.connect(credentials=credentials(name, password))
    assert "(403) 'ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN." in str(refused.value)
    assert "For details see the broker logfile.'" in str(refused.value)
    running.connect(credentials=credentials("ann"))


def test_a_failed_login_is_answered_late_and_holds_up_nobody_else(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sent behind it is not looked at meanwhile: that could be the next guess."""
    monkeypatch.setattr(handshake, "FAILURE_DELAY_S", 3600.0)
    before = refusals(running)
    guesser = Raw(running.port)
    guesser.start()
    guesser.log_in("guest", "wrong").log_in("guest", "guest")
    while refusals(running) == before:
        time.sleep(0.005)
    Raw(running.port).open().close()
    assert select.select([guesser.socket], [], [], 0)[0] == [], "it was told"
    guesser.close()


def refusals(running: Running) -> int:
    return running.call(lambda: int(running.listener.stats.events.get("logins_refused", 0)))


def test_a_client_that_does_not_know_of_refused_logins_is_only_hung_up_on(running: Running) -> None:
    raw = Raw(running.port)
    raw.start()
    raw.method(
        0, commands.Connection.StartOk, client_properties={}, mechanism="PLAIN", response=b"\0guest\0no",
        locale="en_US",
    )  # fmt: skip
    with pytest.raises(Closed):
        raw.frame()
    raw.close()


@pytest.mark.parametrize(("password", "is_taken"), [("secret", True), ("wrong", False)])
def test_amqplain_asks_for_the_same_password(running: Running, password: str, is_taken: bool) -> None:
    add(running, "ann", EVERYTHING)
    raw = Raw(running.port)
    raw.start()
    response = encode_table({"LOGIN": "ann", "PASSWORD": password})[4:]
    capabilities = {"capabilities": {"authentication_failure_close": True}}
    raw.method(
        0, commands.Connection.StartOk, client_properties=capabilities, mechanism="AMQPLAIN", response=response,
        locale="en_US",
    )  # fmt: skip
    if is_taken:
        raw.expect(commands.Connection.Tune)
    else:
        close = raw.expect(commands.Connection.Close)
        assert close.reply_code == 403 and "mechanism AMQPLAIN" in close.reply_text
    raw.close()


@pytest.mark.parametrize(("acts_as", "is_taken"), [(b"", True), (b"guest", True), (b"ann", False)])
def test_nobody_acts_as_somebody_else(running: Running, acts_as: bytes, is_taken: bool) -> None:
    """PLAIN may name whom to act as (RFC 4616); to let them in as who they are is not what they asked for."""
    add(running, "ann", EVERYTHING)
    raw = Raw(running.port)
    raw.start()
    raw.method(
        0, commands.Connection.StartOk, client_properties={}, mechanism="PLAIN", response=acts_as + b"\0guest\0guest",
        locale="en_US",
    )  # fmt: skip
    if is_taken:
        raw.expect(commands.Connection.Tune)
    else:
        close = raw.expect(commands.Connection.Close)
        assert close.reply_code == 502 and "malformed PLAIN response" in close.reply_text
    raw.close()


def test_a_password_of_any_bytes_is_that_password_and_no_other(running: Running) -> None:
    """Older clients send Latin-1; RabbitMQ hashes what came."""
    change(running, lambda users: users.put_user("latin", password="caf\udce9"))
    for password, answer in ((b"caf\xe9", commands.Connection.Tune), (b"caf\xe8", commands.Connection.Close)):
        raw = Raw(running.port)
        raw.start()
        raw.method(
            0, commands.Connection.StartOk, client_properties={"capabilities": {"authentication_failure_close": True}},
            mechanism="PLAIN", response=b"\0latin\0" + password, locale="en_US",
        )  # fmt: skip
        raw.expect(answer)
        raw.close()


def test_11_guest_comes_from_this_machine_only(tmp_path: Path) -> None:
    elsewhere = next((found for found in own_addresses() if not is_loopback(found)), None)
    if elsewhere is None:
        pytest.skip("this machine has no address but loopback")
    broker = Running(tmp_path / "data", amqp=Address("0.0.0.0", 0))
    try:
        add(broker, "ann", EVERYTHING)
        with pytest.raises(ProbableAuthenticationError, match="For details see the broker logfile"):
            patient_connection(broker.port, host=elsewhere)
        patient_connection(broker.port, host=elsewhere, credentials=credentials("ann")).close()
        broker.connect()
    finally:
        broker.stop()


def own_addresses() -> list[str]:
    """The address this machine would use to reach another one. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return []
        return [probe.getsockname()[0]]


@pytest.mark.parametrize(
    ("address", "expected"),
    [(None, True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
     ("fe80::1%eth0", False), ("192.168.1.7", False), ("::ffff:192.168.1.7", False), ("nonsense", False)],
)  # fmt: skip
def test_what_is_this_machine(address: str | None, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_11_a_vhost_without_permission_is_530(running: Running) -> None:
    add(running, "stranger", None)
    with pytest.raises(ProbableAccessDeniedError) as refused:
        running.connect(credentials=credentials("stranger"))
    assert "(530) \"NOT_ALLOWED - access to vhost '/' refused for user 'stranger'\"" in str(refused.value)


# Doing things.


def test_11_publishing_needs_the_write_right_on_the_exchange(running: Running) -> None:
    add(running, "pub")
    allow(running, "pub", write="^allowed$", read="^innocent$", configure="^allowed$")
    tries = Refusals(running, "pub")
    tries.works(lambda c: c.exchange_declare("allowed", "fanout"))
    tries.works(lambda c: c.basic_publish("allowed", "k", b"x"))
    tries.expect("write", "exchange 'amq.default'", lambda c: c.basic_publish("", "innocent", b"x"))
    tries.expect("write", "exchange 'amq.topic'", lambda c: c.basic_publish("amq.topic", "k", b"x"))
    # Asked before it is looked up: nobody learns what there is.
    tries.expect("write", "exchange 'nowhere'", lambda c: c.basic_publish("nowhere", "k", b"x"))
    assert bodies(running.channel(), "innocent") == []


def test_11_a_routing_key_outside_the_rule_is_403(running: Running) -> None:
    add(running, "sensor", EVERYTHING)
    rule(running, "sensor", "amq.topic", write=r"^{username}\.")
    tries = Refusals(running, "sensor")
    tries.works(lambda c: c.basic_publish("amq.topic", "sensor.heat", b"x"))
    tries.works(lambda c: c.basic_publish("amq.direct", "other.heat", b"x"))
    tries.expect(
        "write",
        "topic 'other.heat' in exchange 'amq.topic'",
        lambda c: c.basic_publish("amq.topic", "other.heat", b"x"),
    )


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_11_a_further_routing_key_outside_the_rule_is_403(running: Running, header: str) -> None:
    add(running, "copier", EVERYTHING)
    rule(running, "copier", "amq.topic", write="^mine$")
    copies = pika.BasicProperties(headers={header: ["theirs"]})
    Refusals(running, "copier").expect(
        "write", "topic 'theirs' in exchange 'amq.topic'",
        lambda c: c.basic_publish("amq.topic", "mine", b"x", copies),
    )  # fmt: skip


def test_a_delayed_topic_exchange_has_its_rule_too(running: Running) -> None:
    add(running, "later", EVERYTHING)
    rule(running, "later", "delayed", write="^mine$")
    tries = Refusals(running, "later")
    tries.works(lambda c: c.exchange_declare("delayed", "x-delayed-message", arguments={"x-delayed-type": "topic"}))
    tries.expect("write", "topic 'theirs' in exchange 'delayed'", lambda c: c.basic_publish("delayed", "theirs", b"x"))


def test_11_a_right_that_is_taken_away_is_gone_at_once(running: Running) -> None:
    """Although where a key leads is remembered: no message is stored after the right is gone."""
    add(running, "leaver", EVERYTHING)
    channel = channel_of(running, "leaver")
    channel.queue_declare("leaving", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "leaving", b"1")
    allow(running, "leaver", write="^other$", read=".*")
    with pytest.raises(ChannelClosedByBroker, match=r"write access to exchange 'amq\.default'"):
        channel.basic_publish("", "leaving", b"2")
    rule(running, "leaver", "amq.topic", write="^a$")
    allow(running, "leaver", write=".*", read=".*")
    again = channel.connection.channel()
    again.confirm_delivery()
    again.basic_publish("amq.topic", "a", b"x")
    rule(running, "leaver", "amq.topic", write="^b$")
    with pytest.raises(ChannelClosedByBroker, match="write access to topic 'a'"):
        again.basic_publish("amq.topic", "a", b"x")
    change(running, lambda users: users.clear_permission("/", "leaver"))
    tries = channel.connection.channel()
    with pytest.raises(ChannelClosedByBroker, match="read access to queue 'leaving'"):
        tries.basic_get("leaving")
    assert bodies(running.channel(), "leaving") == [b"1"]


def test_11_a_transaction_is_checked_when_it_is_made_and_when_it_is_committed(running: Running) -> None:
    add(running, "tx", EVERYTHING)
    channel = channel_of(running, "tx")
    channel.queue_declare("txq", durable=True)
    channel.tx_select()
    channel.basic_publish("", "txq", b"x")
    allow(running, "tx", read=".*")
    with pytest.raises(ChannelClosedByBroker, match=r"write access to exchange 'amq\.default'"):
        channel.tx_commit()
    assert bodies(running.channel(), "txq") == []
    late = channel.connection.channel()
    late.tx_select()
    late.basic_publish("", "txq", b"x")
    with pytest.raises(ChannelClosedByBroker, match=r"write access to exchange 'amq\.default'"):
        late.tx_rollback()


def test_11_configuring_needs_the_configure_right(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("kept", durable=True)
    channel.exchange_declare("keptx", "direct")
    add(running, "conf", Permission(configure="^mine", write=".*", read=".*"))
    tries = Refusals(running, "conf")
    tries.works(lambda c: c.queue_declare("mine"))
    tries.works(lambda c: c.exchange_declare("minex", "topic"))
    tries.works(lambda c: c.exchange_delete("minex"))
    tries.works(lambda c: c.queue_delete("mine"))
    tries.expect("configure", "queue 'other'", lambda c: c.queue_declare("other"))
    tries.expect("configure", "queue 'kept'", lambda c: c.queue_declare("kept", durable=True))
    tries.expect("configure", "queue 'kept'", lambda c: c.queue_delete("kept"))
    tries.expect("configure", "exchange 'other'", lambda c: c.exchange_declare("other", "topic"))
    tries.expect("configure", "exchange 'keptx'", lambda c: c.exchange_delete("keptx"))
    channel.queue_declare("kept", passive=True)
    channel.exchange_declare("keptx", passive=True)


def test_a_name_the_server_gives_is_checked_like_any_other(running: Running) -> None:
    add(running, "anon", Permission(configure="^mine", write="", read="^innocent$"))
    assert "configure access to queue 'amq.gen-" in Refusals(running, "anon").of(lambda c: c.queue_declare(""))
    allow(running, "anon", configure=r"^amq\.gen", read="^innocent$")
    assert Refusals(running, "anon").works(lambda c: c.queue_declare("", exclusive=True)).method.queue


def test_dead_letters_and_alternates_go_only_where_their_owner_may_write(running: Running) -> None:
    add(running, "dlx", Permission(configure=".*", write="^open$", read="^(innocent|dead|alt)$"))
    tries = Refusals(running, "dlx")

    def declare(queue: str, exchange: str) -> Callable[[BlockingChannel], Any]:
        return lambda c: c.queue_declare(queue, arguments={"x-dead-letter-exchange": exchange})

    tries.expect("write", "exchange 'closed'", declare("dead", "closed"))
    tries.expect("write", "exchange 'amq.default'", declare("dead", ""))
    tries.expect("read", "queue 'deaf'", declare("deaf", "open"))
    tries.works(declare("dead", "open"))
    # Met again it is not asked: nothing new is made.
    change(running, lambda users: users.set_permission("/", "dlx", Permission(configure=".*", write="", read=".*")))
    tries.works(declare("dead", "open"))
    alternate = {"alternate-exchange": "amq.fanout"}
    tries.expect("write", "exchange 'amq.fanout'", lambda c: c.exchange_declare("alt", "direct", arguments=alternate))
    allow(running, "dlx", configure=".*", write="amq.fanout", read="^innocent$")
    tries.expect("read", "exchange 'alt'", lambda c: c.exchange_declare("alt", "direct", arguments=alternate))
    allow(running, "dlx", configure=".*", write="amq.fanout", read="^(innocent|alt)$")
    tries.works(lambda c: c.exchange_declare("alt", "direct", arguments=alternate))


def test_11_reading_needs_the_read_right(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("secretq", durable=True)
    channel.basic_publish("", "secretq", b"x")
    add(running, "reader", Permission(configure="", write=".*", read="^(innocent|open)$"))
    tries = Refusals(running, "reader")
    tries.works(lambda c: c.basic_get("innocent"))
    tries.works(lambda c: c.basic_consume("innocent", lambda *_: None))
    tries.works(lambda c: c.queue_purge("innocent"))
    tries.expect("read", "queue 'secretq'", lambda c: c.basic_get("secretq"))
    tries.expect("read", "queue 'secretq'", lambda c: c.basic_consume("secretq", lambda *_: None))
    tries.expect("read", "queue 'secretq'", lambda c: c.queue_purge("secretq"))
    tries.expect("read", "queue 'nowhere'", lambda c: c.basic_get("nowhere"))
    assert bodies(channel, "secretq") == [b"x"]


def test_11_binding_writes_to_the_queue_and_reads_from_the_exchange(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("bound", durable=True)
    for exchange in ("from", "to"):
        channel.exchange_declare(exchange, "topic")
    add(running, "binder", Permission(configure="", write="^(bound|to)$", read="^(innocent|from)$"))
    rule(running, "binder", "from", read="^a")
    tries = Refusals(running, "binder")
    for method, kind, own, other in (
        ("queue_bind", "queue", "bound", "innocent"),
        ("queue_unbind", "queue", "bound", "innocent"),
        ("exchange_bind", "exchange", "to", "from"),
        ("exchange_unbind", "exchange", "to", "from"),
    ):

        def work(destination: str, source: str, key: str, method: str = method) -> Callable[[BlockingChannel], Any]:
            return lambda c: getattr(c, method)(destination, source, key)

        tries.works(work(own, "from", "a.b"))
        tries.expect("write", f"{kind} '{other}'", work(other, "from", "a.b"))
        tries.expect("read", "exchange 'amq.topic'", work(own, "amq.topic", "a"))
        tries.expect("read", "topic 'b' in exchange 'from'", work(own, "from", "b"))


def test_looking_needs_any_right_at_all(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("seen", durable=True)
    add(running, "looker", Permission(configure="^c", write="^w|^amq.direct$", read="^innocent$"))
    tries = Refusals(running, "looker")
    tries.works(lambda c: c.exchange_declare("amq.direct", passive=True))
    tries.expect("configure", "queue 'seen'", lambda c: c.queue_declare("seen", passive=True))
    tries.expect("configure", "exchange 'amq.topic'", lambda c: c.exchange_declare("amq.topic", passive=True))


def test_answers_need_no_right_to_be_read_and_one_to_be_sent(running: Running) -> None:
    """RabbitMQ's reply-to: the pseudo queue is everybody's, answers go through the default exchange."""
    add(running, "asker", Permission(configure="", write="", read="^innocent$"))
    tries = Refusals(running, "asker")
    tries.works(lambda c: c.basic_consume("amq.rabbitmq.reply-to", lambda *_: None, auto_ack=True))
    tries.expect("write", "exchange 'amq.default'", lambda c: c.basic_publish("", "amq.rabbitmq.reply-to.x", b"x"))


def test_only_impersonators_send_in_the_name_of_others(running: Running) -> None:
    add(running, "plain", EVERYTHING)
    add(running, "actor", EVERYTHING, tags=["impersonator"])
    theirs = pika.BasicProperties(user_id="guest")
    channel = channel_of(running, "plain")
    channel.basic_publish("", "innocent", b"own", pika.BasicProperties(user_id="plain"))
    channel.basic_publish("", "innocent", b"x", theirs)
    with pytest.raises(ChannelClosedByBroker) as refused:
        channel.queue_declare("innocent", passive=True)
    assert refused.value.reply_code == 406
    assert "user_id property set to 'guest' but authenticated user was 'plain'" in refused.value.reply_text
    actor = channel_of(running, "actor")
    actor.confirm_delivery()
    actor.basic_publish("", "innocent", b"as guest", theirs)
    assert bodies(actor, "innocent") == [b"own", b"as guest"]


def test_names_as_long_as_they_may_be_still_get_their_answer(running: Running) -> None:
    name = "u" * 255
    add(running, name, Permission(configure="", write=".*", read="^innocent$"))
    rule(running, name, "amq.topic", write="^$")
    tries = Refusals(running, name)
    for work in (
        lambda c: c.queue_declare("q" * 255),
        lambda c: c.basic_publish("amq.topic", "k" * 255, b"x"),
    ):
        assert "access to" in tries.of(work)


def test_a_user_has_as_many_connections_as_its_limit_says(running: Running) -> None:
    add(running, "few", EVERYTHING, limits={"max-connections": 2})
    first, _ = (running.connect(credentials=credentials("few")) for _ in range(2))
    with pytest.raises(ProbableAccessDeniedError) as refused:
        running.connect(credentials=credentials("few"))
    text = "(530) \"NOT_ALLOWED - connection refused for user 'few': user connection limit (2) is reached\""
    assert text in str(refused.value)
    first.close()
    running.connect(credentials=credentials("few"))
    running.connect()  # others have none
    change(running, lambda users: users.put_user("few", limits={"max-connections": -1}))
    running.connect(credentials=credentials("few"))


def test_a_vhost_has_as_many_connections_and_queues_as_its_limits_say(running: Running) -> None:
    def limit(**limits: int) -> None:
        named = {f"max-{name}": value for name, value in limits.items()}
        work = running.server.broker.vhosts.set_limits("narrow", named)
        asyncio.run_coroutine_threadsafe(work, running.loop).result(PATIENCE_S)

    asyncio.run_coroutine_threadsafe(running.server.broker.vhosts.create("narrow"), running.loop).result(PATIENCE_S)
    add(running, "tenant", None)
    change(running, lambda users: users.set_permission("narrow", "tenant", EVERYTHING))
    first = running.connect(credentials=credentials("tenant"), virtual_host="narrow")
    limit(connections=1, queues=1)
    with pytest.raises(ProbableAccessDeniedError) as refused:
        running.connect(credentials=credentials("tenant"), virtual_host="narrow")
    text = "access to vhost 'narrow' refused for user 'tenant': connection limit (1) is reached"
    assert f'(530) "NOT_ALLOWED - {text}"' in str(refused.value)
    running.connect()  # other vhosts have none
    first.channel().queue_declare("one", exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as full:
        first.channel().queue_declare("two")
    text = "cannot declare queue 'two': queue limit in vhost 'narrow' (1) is reached"
    assert (full.value.reply_code, full.value.reply_text) == (406, f"PRECONDITION_FAILED - {text}")
    first.channel().queue_declare("one", exclusive=True)
    first.close()
    running.connect(credentials=credentials("tenant"), virtual_host="narrow")


def test_a_user_has_as_many_channels_as_its_limit_says(running: Running) -> None:
    add(running, "narrow", EVERYTHING, limits={"max-channels": 3})
    one, other = (running.connect(credentials=credentials("narrow")) for _ in range(2))
    for connection in (one, one, other):
        last = connection.channel()
    last.close()
    other.channel()
    with pytest.raises(ConnectionClosedByBroker) as refused:
        one.channel()
    assert refused.value.reply_code == 530
    assert "for user 'narrow' has reached the maximum allowed user limit of 3" in refused.value.reply_text


# Users that change under a connection.


def test_removing_a_user_closes_its_connections_and_no_others(running: Running) -> None:
    add(running, "gone", EVERYTHING)
    add(running, "stays", EVERYTHING)
    connection = running.connect(credentials=credentials("gone"))
    other = channel_of(running, "stays")
    change(running, lambda users: users.remove_user("gone"))
    with pytest.raises(ConnectionClosedByBroker) as closed:
        eventually(lambda: connection.process_data_events(0.05))
    assert (closed.value.reply_code, closed.value.reply_text) == (320, "CONNECTION_FORCED - user 'gone' is deleted")
    other.queue_declare("innocent", passive=True)
    with pytest.raises(ProbableAuthenticationError):
        running.connect(credentials=credentials("gone"))


def test_a_new_password_closes_nothing_and_is_asked_for_from_then_on(running: Running) -> None:
    add(running, "changer", EVERYTHING)
    channel = channel_of(running, "changer")
    change(running, lambda users: users.put_user("changer", password="other"))
    channel.queue_declare("innocent", passive=True)
    with pytest.raises(ProbableAuthenticationError):
        channel_of(running, "changer")
    running.connect(credentials=credentials("changer", "other"))


def test_users_and_rights_are_there_after_a_restart(tmp_path: Path) -> None:
    broker = Running(tmp_path / "data")
    try:
        add(broker, "ann", Permission(configure="^innocent$", write="", read=""))
        broker.restart()
        channel_of(broker, "ann").queue_declare("innocent")
        with pytest.raises(ChannelClosedByBroker, match="configure access to queue 'other'"):
            channel_of(broker, "ann").queue_declare("other")
    finally:
        broker.stop()


# Secrets.


def test_36_no_secret_is_ever_in_the_log(tmp_path: Path) -> None:
    """A broker of its own at the most talkative level; logins good and bad, by both mechanisms, refusals of all
    kinds and a new secret: none of the words is in what it wrote, and none of them in clear on the disk."""
    folder, log = tmp_path / "data", tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--data-dir", str(folder), "--amqp", "127.0.0.1:0",
             "--http", "127.0.0.1:0", "--kafka", "127.0.0.1:0", "--log-level", "debug"],
            stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        port = int(eventually(lambda: amqp_port(log, process), "the broker's address"))
        secrets = [b"Wr0ngPassw0rd", b"An0therWr0ng", b"N3wS3cret"]
        with pytest.raises(ProbableAuthenticationError):
            patient_connection(port, credentials=credentials("guest", secrets[0].decode()))
        raw = Raw(port)
        raw.start()
        response = encode_table({"LOGIN": "nobody", "PASSWORD": secrets[1].decode()})[4:]
        raw.method(0, commands.Connection.StartOk, mechanism="AMQPLAIN", response=response, locale="en_US")
        assert raw.is_closed()
        raw.close()
        raw = Raw(port)
        raw.open()
        raw.method(0, commands.Connection.UpdateSecret, new_secret=secrets[2], reason="it was time")
        raw.expect(commands.Connection.UpdateSecretOk)
        raw.close()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    written = log.read_bytes()
    assert b"login refused" in written and b"'nobody'" in written  # it did say what it saw
    stored = b"".join(path.read_bytes() for path in listed(folder, "**/*.json"))
    for secret in secrets:
        assert secret not in written
        assert secret not in stored


def amqp_port(log: Path, process: "subprocess.Popen[bytes]") -> str | None:
    assert process.poll() is None, log.read_text()
    for line in log.read_text().splitlines():
        words = line.lower().split()
        if "amqp" in words[:1] or any(word.startswith("amqp://") for word in words):
            return next(word for word in words if ":" in word).rpartition(":")[2].strip("/,")
    return None
