"""Authentication and authorization: RabbitMQ's rules, tested with a real client."""

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


def add_user(running: Running, name: str, permission: Permission | None = NOTHING, **options: Any) -> None:
    change(running, lambda users: users.put_user(name, password="secret", **options))
    if permission is not None:
        change(running, lambda users: users.set_permission("/", name, permission))


def set_permission(running: Running, name: str, **patterns: str) -> None:
    permission = Permission(**{"configure": "", "write": "", "read": "", **patterns})
    change(running, lambda users: users.set_permission("/", name, permission))


def set_topic_permission(running: Running, name: str, exchange: str, **patterns: str) -> None:
    found = TopicPermission(**{"write": ".*", "read": ".*", **patterns})
    change(running, lambda users: users.set_topic_permission("/", name, exchange, found))


def credentials(name: str, password: str = "secret") -> pika.PlainCredentials:
    return pika.PlainCredentials(name, password)


def channel_of(running: Running, name: str) -> BlockingChannel:
    return running.channel(credentials=credentials(name))


class ConnectedUser:
    """Runs operations as one user, each on a new channel, and checks whether they are refused."""

    def __init__(self, running: Running, name: str) -> None:
        self.name = name
        self.connection = running.connect(credentials=credentials(name))

    def refusal(self, work: Callable[[BlockingChannel], Any]) -> str:
        channel = self.connection.channel()
        with pytest.raises(ChannelClosedByBroker) as caught:
            work(channel)
            channel.queue_declare("innocent", passive=True)  # reports a refused publish
        assert caught.value.reply_code == 403
        return str(caught.value.reply_text)

    def may_not(self, right: str, what: str, work: Callable[[BlockingChannel], Any]) -> None:
        text = f"ACCESS_REFUSED - {right} access to {what} in vhost '/' refused for user '{self.name}'"
        assert self.refusal(work) == text

    def may(self, work: Callable[[BlockingChannel], Any]) -> Any:
        channel = self.connection.channel()
        found = work(channel)
        channel.queue_declare("innocent", passive=True)
        channel.close()
        return found


@pytest.fixture(autouse=True)
def innocent(channel: BlockingChannel) -> None:
    channel.queue_declare("innocent", durable=True)


# Authentication.


@pytest.mark.parametrize(("name", "password"), [("ann", "wrong"), ("ann", ""), ("nobody", "secret"), ("", "")])
def test_a_wrong_user_or_password_is_403_with_the_same_text(running: Running, name: str, password: str) -> None:
    add_user(running, "ann", EVERYTHING)
    with pytest.raises(ProbableAuthenticationError) as caught:
        running.connect(credentials=credentials(name, password))
    assert "(403) 'ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN." in str(caught.value)
    assert "For details see the broker logfile.'" in str(caught.value)
    running.connect(credentials=credentials("ann"))


def test_a_failed_login_is_answered_late_and_delays_no_other_client(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further input is not read during the delay, because it could be the next guess."""
    monkeypatch.setattr(handshake, "FAILURE_DELAY_S", 3600.0)
    before = refused_logins(running)
    guesser = Raw(running.port)
    guesser.start()
    guesser.log_in("guest", "wrong").log_in("guest", "guest")
    while refused_logins(running) == before:
        time.sleep(0.005)
    Raw(running.port).open().close()
    assert select.select([guesser.socket], [], [], 0)[0] == [], "the refusal was sent without the delay"
    guesser.close()


def refused_logins(running: Running) -> int:
    return running.call(lambda: int(running.listener.stats.events.get("logins_refused", 0)))


def test_a_failed_login_without_the_capability_only_closes_the_socket(running: Running) -> None:
    raw = Raw(running.port)
    raw.start()
    raw.method(
        0, commands.Connection.StartOk, client_properties={}, mechanism="PLAIN", response=b"\0guest\0no",
        locale="en_US",
    )  # fmt: skip
    with pytest.raises(Closed):
        raw.frame()
    raw.close()


@pytest.mark.parametrize(("password", "is_accepted"), [("secret", True), ("wrong", False)])
def test_amqplain_checks_the_password(running: Running, password: str, is_accepted: bool) -> None:
    add_user(running, "ann", EVERYTHING)
    raw = Raw(running.port)
    raw.start()
    response = encode_table({"LOGIN": "ann", "PASSWORD": password})[4:]
    capabilities = {"capabilities": {"authentication_failure_close": True}}
    raw.method(
        0, commands.Connection.StartOk, client_properties=capabilities, mechanism="AMQPLAIN", response=response,
        locale="en_US",
    )  # fmt: skip
    if is_accepted:
        raw.expect(commands.Connection.Tune)
    else:
        close = raw.expect(commands.Connection.Close)
        assert close.reply_code == 403 and "mechanism AMQPLAIN" in close.reply_text
    raw.close()


@pytest.mark.parametrize(("identity", "is_accepted"), [(b"", True), (b"guest", True), (b"ann", False)])
def test_a_plain_login_for_another_identity_is_refused(running: Running, identity: bytes, is_accepted: bool) -> None:
    """PLAIN may name an authorization identity (RFC 4616). Any other than the user itself is refused, not ignored."""
    add_user(running, "ann", EVERYTHING)
    raw = Raw(running.port)
    raw.start()
    raw.method(
        0, commands.Connection.StartOk, client_properties={}, mechanism="PLAIN", response=identity + b"\0guest\0guest",
        locale="en_US",
    )  # fmt: skip
    if is_accepted:
        raw.expect(commands.Connection.Tune)
    else:
        close = raw.expect(commands.Connection.Close)
        assert close.reply_code == 502 and "malformed PLAIN response" in close.reply_text
    raw.close()


def test_a_password_may_contain_any_bytes(running: Running) -> None:
    """Older clients send Latin-1. RabbitMQ hashes the bytes as received."""
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


def test_guest_may_log_in_only_over_loopback(tmp_path: Path) -> None:
    address = next((found for found in own_addresses() if not is_loopback(found)), None)
    if address is None:
        pytest.skip("this machine has no address but loopback")
    broker = Running(tmp_path / "data", amqp=Address("0.0.0.0", 0))
    try:
        add_user(broker, "ann", EVERYTHING)
        with pytest.raises(ProbableAuthenticationError, match="For details see the broker logfile"):
            patient_connection(broker.port, host=address)
        patient_connection(broker.port, host=address, credentials=credentials("ann")).close()
        broker.connect()
    finally:
        broker.stop()


def own_addresses() -> list[str]:
    """The address that this machine would use to reach another one. Connecting a UDP socket sends nothing."""
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
def test_is_loopback_recognizes_loopback_addresses(address: str | None, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_a_vhost_without_permission_is_530(running: Running) -> None:
    add_user(running, "stranger", None)
    with pytest.raises(ProbableAccessDeniedError) as caught:
        running.connect(credentials=credentials("stranger"))
    assert "(530) \"NOT_ALLOWED - access to vhost '/' refused for user 'stranger'\"" in str(caught.value)


# Authorization.


def test_publishing_needs_write_permission_on_the_exchange(running: Running) -> None:
    add_user(running, "pub")
    set_permission(running, "pub", write="^allowed$", read="^innocent$", configure="^allowed$")
    user = ConnectedUser(running, "pub")
    user.may(lambda c: c.exchange_declare("allowed", "fanout"))
    user.may(lambda c: c.basic_publish("allowed", "k", b"x"))
    user.may_not("write", "exchange 'amq.default'", lambda c: c.basic_publish("", "innocent", b"x"))
    user.may_not("write", "exchange 'amq.topic'", lambda c: c.basic_publish("amq.topic", "k", b"x"))
    # Permissions are checked before the lookup, so that the error does not reveal which exchanges exist.
    user.may_not("write", "exchange 'nowhere'", lambda c: c.basic_publish("nowhere", "k", b"x"))
    assert bodies(running.channel(), "innocent") == []


def test_a_routing_key_outside_the_topic_permission_is_403(running: Running) -> None:
    add_user(running, "sensor", EVERYTHING)
    set_topic_permission(running, "sensor", "amq.topic", write=r"^{username}\.")
    user = ConnectedUser(running, "sensor")
    user.may(lambda c: c.basic_publish("amq.topic", "sensor.heat", b"x"))
    user.may(lambda c: c.basic_publish("amq.direct", "other.heat", b"x"))
    user.may_not(
        "write",
        "topic 'other.heat' in exchange 'amq.topic'",
        lambda c: c.basic_publish("amq.topic", "other.heat", b"x"),
    )


@pytest.mark.parametrize("header", ["CC", "BCC"])
def test_a_cc_or_bcc_key_outside_the_topic_permission_is_403(running: Running, header: str) -> None:
    add_user(running, "copier", EVERYTHING)
    set_topic_permission(running, "copier", "amq.topic", write="^mine$")
    copies = pika.BasicProperties(headers={header: ["theirs"]})
    ConnectedUser(running, "copier").may_not(
        "write", "topic 'theirs' in exchange 'amq.topic'",
        lambda c: c.basic_publish("amq.topic", "mine", b"x", copies),
    )  # fmt: skip


def test_topic_permissions_apply_to_a_delayed_topic_exchange(running: Running) -> None:
    add_user(running, "later", EVERYTHING)
    set_topic_permission(running, "later", "delayed", write="^mine$")
    user = ConnectedUser(running, "later")
    user.may(lambda c: c.exchange_declare("delayed", "x-delayed-message", arguments={"x-delayed-type": "topic"}))
    user.may_not("write", "topic 'theirs' in exchange 'delayed'", lambda c: c.basic_publish("delayed", "theirs", b"x"))


def test_a_revoked_permission_takes_effect_at_once(running: Running) -> None:
    """Also for cached routes: no message is stored after the permission is revoked."""
    add_user(running, "leaver", EVERYTHING)
    channel = channel_of(running, "leaver")
    channel.queue_declare("leaving", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "leaving", b"1")
    set_permission(running, "leaver", write="^other$", read=".*")
    with pytest.raises(ChannelClosedByBroker, match=r"write access to exchange 'amq\.default'"):
        channel.basic_publish("", "leaving", b"2")
    set_topic_permission(running, "leaver", "amq.topic", write="^a$")
    set_permission(running, "leaver", write=".*", read=".*")
    again = channel.connection.channel()
    again.confirm_delivery()
    again.basic_publish("amq.topic", "a", b"x")
    set_topic_permission(running, "leaver", "amq.topic", write="^b$")
    with pytest.raises(ChannelClosedByBroker, match="write access to topic 'a'"):
        again.basic_publish("amq.topic", "a", b"x")
    change(running, lambda users: users.clear_permission("/", "leaver"))
    last = channel.connection.channel()
    with pytest.raises(ChannelClosedByBroker, match="read access to queue 'leaving'"):
        last.basic_get("leaving")
    assert bodies(running.channel(), "leaving") == [b"1"]


def test_a_transaction_is_authorized_at_publish_and_at_commit(running: Running) -> None:
    add_user(running, "tx", EVERYTHING)
    channel = channel_of(running, "tx")
    channel.queue_declare("txq", durable=True)
    channel.tx_select()
    channel.basic_publish("", "txq", b"x")
    set_permission(running, "tx", read=".*")
    with pytest.raises(ChannelClosedByBroker, match=r"write access to exchange 'amq\.default'"):
        channel.tx_commit()
    assert bodies(running.channel(), "txq") == []
    late = channel.connection.channel()
    late.tx_select()
    late.basic_publish("", "txq", b"x")
    with pytest.raises(ChannelClosedByBroker, match=r"write access to exchange 'amq\.default'"):
        late.tx_rollback()


def test_declaring_and_deleting_needs_configure_permission(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("kept", durable=True)
    channel.exchange_declare("keptx", "direct")
    add_user(running, "conf", Permission(configure="^mine", write=".*", read=".*"))
    user = ConnectedUser(running, "conf")
    user.may(lambda c: c.queue_declare("mine"))
    user.may(lambda c: c.exchange_declare("minex", "topic"))
    user.may(lambda c: c.exchange_delete("minex"))
    user.may(lambda c: c.queue_delete("mine"))
    user.may_not("configure", "queue 'other'", lambda c: c.queue_declare("other"))
    user.may_not("configure", "queue 'kept'", lambda c: c.queue_declare("kept", durable=True))
    user.may_not("configure", "queue 'kept'", lambda c: c.queue_delete("kept"))
    user.may_not("configure", "exchange 'other'", lambda c: c.exchange_declare("other", "topic"))
    user.may_not("configure", "exchange 'keptx'", lambda c: c.exchange_delete("keptx"))
    channel.queue_declare("kept", passive=True)
    channel.exchange_declare("keptx", passive=True)


def test_a_generated_queue_name_needs_configure_permission(running: Running) -> None:
    add_user(running, "anon", Permission(configure="^mine", write="", read="^innocent$"))
    assert "configure access to queue 'amq.gen-" in ConnectedUser(running, "anon").refusal(
        lambda c: c.queue_declare("")
    )
    set_permission(running, "anon", configure=r"^amq\.gen", read="^innocent$")
    assert ConnectedUser(running, "anon").may(lambda c: c.queue_declare("", exclusive=True)).method.queue


def test_dead_letter_and_alternate_exchanges_need_write_permission(running: Running) -> None:
    add_user(running, "dlx", Permission(configure=".*", write="^open$", read="^(innocent|dead|alt)$"))
    user = ConnectedUser(running, "dlx")

    def declare(queue: str, exchange: str) -> Callable[[BlockingChannel], Any]:
        return lambda c: c.queue_declare(queue, arguments={"x-dead-letter-exchange": exchange})

    user.may_not("write", "exchange 'closed'", declare("dead", "closed"))
    user.may_not("write", "exchange 'amq.default'", declare("dead", ""))
    user.may_not("read", "queue 'deaf'", declare("deaf", "open"))
    user.may(declare("dead", "open"))
    # Redeclaring an existing queue does not check the dead-letter exchange again.
    change(running, lambda users: users.set_permission("/", "dlx", Permission(configure=".*", write="", read=".*")))
    user.may(declare("dead", "open"))
    alternate = {"alternate-exchange": "amq.fanout"}
    user.may_not("write", "exchange 'amq.fanout'", lambda c: c.exchange_declare("alt", "direct", arguments=alternate))
    set_permission(running, "dlx", configure=".*", write="amq.fanout", read="^innocent$")
    user.may_not("read", "exchange 'alt'", lambda c: c.exchange_declare("alt", "direct", arguments=alternate))
    set_permission(running, "dlx", configure=".*", write="amq.fanout", read="^(innocent|alt)$")
    user.may(lambda c: c.exchange_declare("alt", "direct", arguments=alternate))


def test_consuming_and_purging_needs_read_permission(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("secretq", durable=True)
    channel.basic_publish("", "secretq", b"x")
    add_user(running, "reader", Permission(configure="", write=".*", read="^(innocent|open)$"))
    user = ConnectedUser(running, "reader")
    user.may(lambda c: c.basic_get("innocent"))
    user.may(lambda c: c.basic_consume("innocent", lambda *_: None))
    user.may(lambda c: c.queue_purge("innocent"))
    user.may_not("read", "queue 'secretq'", lambda c: c.basic_get("secretq"))
    user.may_not("read", "queue 'secretq'", lambda c: c.basic_consume("secretq", lambda *_: None))
    user.may_not("read", "queue 'secretq'", lambda c: c.queue_purge("secretq"))
    user.may_not("read", "queue 'nowhere'", lambda c: c.basic_get("nowhere"))
    assert bodies(channel, "secretq") == [b"x"]


def test_binding_needs_write_on_the_destination_and_read_on_the_source(
    running: Running, channel: BlockingChannel
) -> None:
    channel.queue_declare("bound", durable=True)
    for exchange in ("from", "to"):
        channel.exchange_declare(exchange, "topic")
    add_user(running, "binder", Permission(configure="", write="^(bound|to)$", read="^(innocent|from)$"))
    set_topic_permission(running, "binder", "from", read="^a")
    user = ConnectedUser(running, "binder")
    for method, kind, own, other in (
        ("queue_bind", "queue", "bound", "innocent"),
        ("queue_unbind", "queue", "bound", "innocent"),
        ("exchange_bind", "exchange", "to", "from"),
        ("exchange_unbind", "exchange", "to", "from"),
    ):

        def work(destination: str, source: str, key: str, method: str = method) -> Callable[[BlockingChannel], Any]:
            return lambda c: getattr(c, method)(destination, source, key)

        user.may(work(own, "from", "a.b"))
        user.may_not("write", f"{kind} '{other}'", work(other, "from", "a.b"))
        user.may_not("read", "exchange 'amq.topic'", work(own, "amq.topic", "a"))
        user.may_not("read", "topic 'b' in exchange 'from'", work(own, "from", "b"))


def test_a_passive_declare_needs_any_permission_on_the_resource(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("seen", durable=True)
    add_user(running, "looker", Permission(configure="^c", write="^w|^amq.direct$", read="^innocent$"))
    user = ConnectedUser(running, "looker")
    user.may(lambda c: c.exchange_declare("amq.direct", passive=True))
    user.may_not("configure", "queue 'seen'", lambda c: c.queue_declare("seen", passive=True))
    user.may_not("configure", "exchange 'amq.topic'", lambda c: c.exchange_declare("amq.topic", passive=True))


def test_direct_reply_to_needs_a_permission_only_to_send_replies(running: Running) -> None:
    """RabbitMQ's reply-to: every user may use the pseudo queue, but replies go through the default exchange."""
    add_user(running, "asker", Permission(configure="", write="", read="^innocent$"))
    user = ConnectedUser(running, "asker")
    user.may(lambda c: c.basic_consume("amq.rabbitmq.reply-to", lambda *_: None, auto_ack=True))
    user.may_not("write", "exchange 'amq.default'", lambda c: c.basic_publish("", "amq.rabbitmq.reply-to.x", b"x"))


def test_only_an_impersonator_may_publish_with_another_user_id(running: Running) -> None:
    add_user(running, "plain", EVERYTHING)
    add_user(running, "actor", EVERYTHING, tags=["impersonator"])
    theirs = pika.BasicProperties(user_id="guest")
    channel = channel_of(running, "plain")
    channel.basic_publish("", "innocent", b"own", pika.BasicProperties(user_id="plain"))
    channel.basic_publish("", "innocent", b"x", theirs)
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.queue_declare("innocent", passive=True)
    assert caught.value.reply_code == 406
    assert "user_id property set to 'guest' but authenticated user was 'plain'" in caught.value.reply_text
    actor = channel_of(running, "actor")
    actor.confirm_delivery()
    actor.basic_publish("", "innocent", b"as guest", theirs)
    assert bodies(actor, "innocent") == [b"own", b"as guest"]


def test_names_of_maximum_length_still_get_an_error_text(running: Running) -> None:
    name = "u" * 255
    add_user(running, name, Permission(configure="", write=".*", read="^innocent$"))
    set_topic_permission(running, name, "amq.topic", write="^$")
    user = ConnectedUser(running, name)
    for work in (
        lambda c: c.queue_declare("q" * 255),
        lambda c: c.basic_publish("amq.topic", "k" * 255, b"x"),
    ):
        assert "access to" in user.refusal(work)


def test_max_connections_limits_the_connections_of_a_user(running: Running) -> None:
    add_user(running, "few", EVERYTHING, limits={"max-connections": 2})
    first, _ = (running.connect(credentials=credentials("few")) for _ in range(2))
    with pytest.raises(ProbableAccessDeniedError) as caught:
        running.connect(credentials=credentials("few"))
    text = "(530) \"NOT_ALLOWED - connection refused for user 'few': user connection limit (2) is reached\""
    assert text in str(caught.value)
    first.close()
    running.connect(credentials=credentials("few"))
    running.connect()  # other users have no limit
    change(running, lambda users: users.put_user("few", limits={"max-connections": -1}))
    running.connect(credentials=credentials("few"))


def test_vhost_limits_apply_to_connections_and_queues(running: Running) -> None:
    def limit(**limits: int) -> None:
        named = {f"max-{name}": value for name, value in limits.items()}
        work = running.server.broker.vhosts.set_limits("narrow", named)
        asyncio.run_coroutine_threadsafe(work, running.loop).result(PATIENCE_S)

    asyncio.run_coroutine_threadsafe(running.server.broker.vhosts.create("narrow"), running.loop).result(PATIENCE_S)
    add_user(running, "tenant", None)
    change(running, lambda users: users.set_permission("narrow", "tenant", EVERYTHING))
    first = running.connect(credentials=credentials("tenant"), virtual_host="narrow")
    limit(connections=1, queues=1)
    with pytest.raises(ProbableAccessDeniedError) as caught:
        running.connect(credentials=credentials("tenant"), virtual_host="narrow")
    text = "access to vhost 'narrow' refused for user 'tenant': connection limit (1) is reached"
    assert f'(530) "NOT_ALLOWED - {text}"' in str(caught.value)
    running.connect()  # other vhosts have no limit
    first.channel().queue_declare("one", exclusive=True)
    with pytest.raises(ChannelClosedByBroker) as full:
        first.channel().queue_declare("two")
    text = "cannot declare queue 'two': queue limit in vhost 'narrow' (1) is reached"
    assert (full.value.reply_code, full.value.reply_text) == (406, f"PRECONDITION_FAILED - {text}")
    first.channel().queue_declare("one", exclusive=True)
    first.close()
    running.connect(credentials=credentials("tenant"), virtual_host="narrow")


def test_max_channels_limits_the_channels_of_a_user(running: Running) -> None:
    add_user(running, "narrow", EVERYTHING, limits={"max-channels": 3})
    one, other = (running.connect(credentials=credentials("narrow")) for _ in range(2))
    for connection in (one, one, other):
        last = connection.channel()
    last.close()
    other.channel()
    with pytest.raises(ConnectionClosedByBroker) as caught:
        one.channel()
    assert caught.value.reply_code == 530
    assert "for user 'narrow' has reached the maximum allowed user limit of 3" in caught.value.reply_text


# Changes to users with open connections.


def test_removing_a_user_closes_only_its_connections(running: Running) -> None:
    add_user(running, "gone", EVERYTHING)
    add_user(running, "stays", EVERYTHING)
    connection = running.connect(credentials=credentials("gone"))
    other = channel_of(running, "stays")
    change(running, lambda users: users.remove_user("gone"))
    with pytest.raises(ConnectionClosedByBroker) as closed:
        eventually(lambda: connection.process_data_events(0.05))
    assert (closed.value.reply_code, closed.value.reply_text) == (320, "CONNECTION_FORCED - user 'gone' is deleted")
    other.queue_declare("innocent", passive=True)
    with pytest.raises(ProbableAuthenticationError):
        running.connect(credentials=credentials("gone"))


def test_a_new_password_keeps_connections_and_applies_to_later_logins(running: Running) -> None:
    add_user(running, "changer", EVERYTHING)
    channel = channel_of(running, "changer")
    change(running, lambda users: users.put_user("changer", password="other"))
    channel.queue_declare("innocent", passive=True)
    with pytest.raises(ProbableAuthenticationError):
        channel_of(running, "changer")
    running.connect(credentials=credentials("changer", "other"))


def test_users_and_permissions_survive_a_restart(tmp_path: Path) -> None:
    broker = Running(tmp_path / "data")
    try:
        add_user(broker, "ann", Permission(configure="^innocent$", write="", read=""))
        broker.restart()
        channel_of(broker, "ann").queue_declare("innocent")
        with pytest.raises(ChannelClosedByBroker, match="configure access to queue 'other'"):
            channel_of(broker, "ann").queue_declare("other")
    finally:
        broker.stop()


# Secrets.


def test_no_secret_is_in_the_log_or_in_plain_text_on_disk(tmp_path: Path) -> None:
    """A separate broker with log level debug gets failed logins with both mechanisms and a new secret. No secret is in
    the log or in plain text on the disk."""
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
        raw.method(0, commands.Connection.UpdateSecret, new_secret=secrets[2], reason="rotation")
        raw.expect(commands.Connection.UpdateSecretOk)
        raw.close()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    written = log.read_bytes()
    assert b"login refused" in written and b"'nobody'" in written  # the failed logins were logged
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
