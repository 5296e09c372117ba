"""Authentication: SASL/PLAIN with the users of all listeners, and the limits of unauthenticated clients."""

import asyncio
import functools
import logging
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.access.users import GUEST
from headrace.demo.kafka import KafkaClient
from headrace.errors import AccessRefused
from headrace.listeners.kafka import connection
from headrace.listeners.kafka.auth import login
from headrace.listeners.kafka.connection import TOKEN_BYTES_MAX
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import VERSIONS, Api
from headrace.wire.kafka.schema import request_entity
from tests.listeners.kafka.logins import MECHANISMS, PASSWORD, add, logged_in, token, try_login
from tests.listeners.kafka.world import Client, Closed, World, batch, make, world_at
from tests.wire.kafka.test_schema_codec import written

pytestmark = pytest.mark.asyncio(loop_scope="module")
WRONG = "Authentication failed: Invalid username or password"
SASL = {Api.API_VERSIONS, Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE}


async def prepare(world: World) -> None:
    """With users and without guest, so that local clients have to log in, too."""
    await world.topic("t")
    await add(world, "ann")
    await add(world, "bob")
    await world.broker.users.remove_user(GUEST)


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(tmp_path: Path) -> AsyncIterator[World]:
    """A new broker: guest is the only user."""
    async with world_at(tmp_path) as opened:
        await opened.topic("t")
        yield opened


@pytest.fixture(autouse=True)
def no_bug(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No mistake of a client may be logged as a bug."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(login, "FAILURE_DELAY_S", 0.0)
    yield
    bugs = [one.getMessage() for one in caplog.get_records("call") if one.levelno >= logging.ERROR]
    assert bugs == []


def end_of(world: World) -> int:
    return int(world.broker.streams.get("t").partitions[0].log.visible_end)


async def is_served(client: Client) -> bool:
    return bool((await client.call(Api.METADATA, 9, topics=None)).topics[0].name == "t")


def users_shown(world: World) -> list[tuple[str, str]]:
    shapes = [one.describe() for one in world.broker.clients.all()]
    return [(shape["user"], shape["auth_mechanism"]) for shape in shapes]


# Logging in.


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_right_credentials_log_in_and_the_connection_shows_its_user(world: World, version: int) -> None:
    client = await world.client()
    answer = await try_login(client, token("ann"), version=version)
    assert (answer.error_code, answer.error_message, answer.auth_bytes) == (0, None, b"")
    assert getattr(answer, "session_lifetime", 0) == 0, "no other login is needed"
    assert await is_served(client)
    assert ("ann", "PLAIN") in users_shown(world)


async def test_a_raw_token_of_an_old_client_logs_in(world: World, client: Client) -> None:
    """Used by kafka-python up to 2.0 and by other clients from before Kafka 1.0."""
    await client.call(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN")
    sent = token("ann")
    client.send_bytes(struct.pack(">i", len(sent)) + sent)
    assert await client.receive() == b""
    assert await is_served(client)


async def test_a_raw_token_with_wrong_credentials_closes_the_connection(world: World, client: Client) -> None:
    await client.call(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN")
    sent = token("ann", "wrong")
    client.send_bytes(struct.pack(">i", len(sent)) + sent)
    assert await client.is_closed()


async def test_the_client_of_the_demo_logs_in(world: World) -> None:
    demo = await KafkaClient.connect("127.0.0.1", world.listener.port, ("ann", PASSWORD))
    assert (await demo.fetch("t", 0)).error == 0
    await demo.close()
    with pytest.raises(AccessRefused, match="'ann'"):
        await KafkaClient.connect("127.0.0.1", world.listener.port, ("ann", "wrong"))


@pytest.mark.parametrize("sent", [token("ann", "wrong"), token("nobody"), token("guest", "guest")])
async def test_wrong_credentials_are_refused_without_a_reason(
    world: World, client: Client, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await try_login(client, sent)
    assert (answer.error_code, answer.error_message) == (Code.SASL_AUTHENTICATION_FAILED, WRONG)
    assert await client.is_closed()
    name = sent.split(b"\0")[1].decode()
    assert f"user '{name}' - invalid credentials" in caplog.text
    assert "wrong" not in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-1", "GSSAPI", "", "plain", "x" * 9000])
async def test_an_unknown_mechanism_is_refused_with_the_supported_ones(world: World, mechanism: str) -> None:
    for version in (0, 1):
        client = await world.client()
        answer = await client.call(Api.SASL_HANDSHAKE, version, mechanism=mechanism)
        assert (answer.error_code, answer.mechanisms) == (Code.UNSUPPORTED_SASL_MECHANISM, MECHANISMS)
        assert await client.is_closed()


async def test_guest_can_log_in_from_this_machine_only(fresh: World) -> None:
    for silent in (False, True):
        await add(fresh, "ann")
        client = await fresh.client()
        await client.call(Api.API_VERSIONS, 3)
        [found] = fresh.listener.connections
        found.peer = ("203.0.113.7", 1)
        if silent:
            client.send(Api.METADATA, 9, written(make(request_entity(Api.METADATA, 9), {})))
        else:
            answer = await try_login(client, token("guest", "guest"))
            assert (answer.error_code, answer.error_message) == (Code.SASL_AUTHENTICATION_FAILED, WRONG)
        assert await client.is_closed()


# While the broker is open, and when that ends.


async def test_an_open_broker_needs_no_login_and_accepts_one(fresh: World) -> None:
    silent = await fresh.client()
    assert (await silent.produce("t", batch(b"a"))).error_code == 0
    assert users_shown(fresh) == [("", "")]
    guest = await fresh.client()
    assert (await try_login(guest, token("guest", "guest"))).error_code == 0
    assert (await guest.fetch("t")).error_code == 0
    assert ("guest", "PLAIN") in users_shown(fresh)
    assert all(found.access is None for found in fresh.listener.connections), "nothing is authorized"
    wrong = await fresh.client()
    assert (await try_login(wrong, token("guest", "wrong"))).error_code == Code.SASL_AUTHENTICATION_FAILED


async def test_a_local_client_without_a_login_is_guest_while_guest_has_its_first_password(
    fresh: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = await fresh.client()
    assert await is_served(before)
    await add(fresh, "ann")
    assert await is_served(before)
    assert users_shown(fresh) == [("guest", "")]
    other = await fresh.client()
    assert (await other.produce("t", batch(b"x" * 2_000_000))).error_code == 0, "and may send large requests"
    await fresh.broker.users.put_user(GUEST, password="another")
    before.send(Api.METADATA, 9, written(make(request_entity(Api.METADATA, 9), {})))
    assert await before.is_closed()
    assert "closed: METADATA without a login" in caplog.text
    guest = await fresh.client()
    assert (await try_login(guest, token("guest", "another"))).error_code == 0
    assert await is_served(guest)


async def test_a_guest_that_logs_in_gets_the_permissions_of_its_user(fresh: World) -> None:
    await add(fresh, "ann", permission=None)
    client = await fresh.client()
    assert await is_served(client)
    assert (await try_login(client, token("ann"))).error_code == 0
    assert (await client.produce("t", batch(b"a"))).error_code == Code.TOPIC_AUTHORIZATION_FAILED
    assert users_shown(fresh) == [("ann", "PLAIN")]


async def test_an_incomplete_login_is_not_guest(fresh: World) -> None:
    await add(fresh, "ann")
    client = await fresh.client()
    await client.call(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
    client.send(Api.METADATA, 9, written(make(request_entity(Api.METADATA, 9), {})))
    assert await client.is_closed()


async def test_a_waiting_fetch_is_not_answered_once_a_login_is_required(fresh: World) -> None:
    await add(fresh, "ann")
    waiting = await fresh.client()
    fetch = asyncio.ensure_future(waiting.fetch("t", max_wait=60_000))
    while not any(found.fetch_waiters for found in fresh.listener.connections):
        await asyncio.sleep(0.01)
    await closed_to_strangers(fresh)
    with pytest.raises(Closed):
        await fetch


async def closed_to_strangers(fresh: World) -> None:
    """Even when records arrive."""
    await fresh.broker.users.put_user(GUEST, password="another")
    writer = await logged_in(fresh, "ann")
    assert (await writer.produce("t", batch(b"not for you"))).error_code == 0


async def test_a_waiting_share_fetch_acquires_nothing_once_a_login_is_required(fresh: World) -> None:
    await add(fresh, "ann")
    waiting = await fresh.client()
    member = {"group_id": "g", "member_id": "AAAAAAAAAAAAAAAAAAAAAA"}
    await waiting.call(Api.SHARE_GROUP_HEARTBEAT, 1, **member, subscribed_topic_names=["t"])
    topic_id = fresh.context.topics.id_of(fresh.broker.streams.get("t"))
    topics = [{"topic_id": topic_id, "partitions": [{"partition_index": 0, "acknowledgement_batches": []}]}]
    limits = {"max_wait": 60_000, "min_bytes": 1, "max_bytes": 1000, "max_records": 1, "batch_size": 1}
    fetch = asyncio.ensure_future(waiting.call(Api.SHARE_FETCH, 1, **member, **limits, topics=topics))
    while not fresh.context.share_sessions.by_key:
        await asyncio.sleep(0.01)
    await closed_to_strangers(fresh)
    with pytest.raises(Closed):
        await fetch


# Unauthenticated clients.


async def test_before_a_login_only_three_requests_are_answered(world: World, caplog: pytest.LogCaptureFixture) -> None:
    before = end_of(world)
    for api, versions in VERSIONS.items():
        if api in SASL:
            continue
        client = await world.client()
        assert (await client.call(Api.API_VERSIONS, 4)).error_code == 0
        client.send(api, versions.highest, bytes(40))
        assert await client.is_closed(), api
        assert f"closed: {api.name} without a login" in caplog.text
    assert end_of(world) == before


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "expected 3 tokens, got 1"),
        (b"ann secret", "expected 3 tokens, got 1"),
        (b"ann\0secret", "expected 3 tokens, got 2"),
        (b"\0ann\0secret\0", "expected 3 tokens, got 4"),
        (b"\0" * 100_000, "expected 3 tokens, got 100001"),
        (b"\0\0secret", "username not specified"),
        (b"\0ann\0", "password not specified"),
        (b"bob\0ann\0secret", "authorization id that is different from username"),
        (b"\0\xff\xfe\0secret", WRONG),
        (b"\0ann\0\xff\xfe", WRONG),
        (b"\0ann\0secret\r\nsecret", WRONG),
    ],
)
async def test_invalid_tokens_are_refused(world: World, client: Client, sent: bytes, says: str) -> None:
    answer = await try_login(client, sent)
    assert answer.error_code == Code.SASL_AUTHENTICATION_FAILED
    assert says in answer.error_message
    assert await client.is_closed()


async def test_a_password_may_be_any_bytes(world: World, client: Client) -> None:
    await world.broker.users.put_user("bytes", password=b"\xff\xfe".decode("utf-8", "surrogateescape"))
    assert (await try_login(client, b"\0bytes\0\xff\xfe")).error_code == 0


@pytest.mark.parametrize("size", [TOKEN_BYTES_MAX + 1, 99 * 1024 * 1024])
async def test_an_unauthenticated_client_cannot_announce_a_large_request(
    world: World, client: Client, size: int
) -> None:
    client.send_bytes(struct.pack(">i", size))
    assert await client.is_closed()


async def test_an_authenticated_client_can_send_large_requests(world: World) -> None:
    client = await logged_in(world, "ann")
    assert (await client.produce("t", batch(b"x" * 2_000_000))).error_code == 0


async def test_a_token_that_is_too_long_is_refused_from_any_client(fresh: World) -> None:
    """Even if it is correct, and the connection may send large requests."""
    await fresh.broker.users.put_user("ann", password="x" * TOKEN_BYTES_MAX)
    for version in (0, 1):
        client = await fresh.client()
        await client.call(Api.SASL_HANDSHAKE, version, mechanism="PLAIN")
        sent = b"\0ann\0" + b"x" * TOKEN_BYTES_MAX
        if version:
            client.send(Api.SASL_AUTHENTICATE, 0, struct.pack(">i", len(sent)) + sent)
        else:
            client.send_bytes(struct.pack(">i", len(sent)) + sent)
        assert await client.is_closed()


async def test_a_token_without_a_handshake_is_refused(world: World, client: Client) -> None:
    answer = await client.call(Api.SASL_AUTHENTICATE, 2, auth_bytes=token("ann"))
    assert answer.error_code == Code.ILLEGAL_SASL_STATE
    assert await client.is_closed()


async def test_a_token_may_arrive_in_parts(world: World, client: Client) -> None:
    await client.call(Api.SASL_HANDSHAKE, 1, mechanism="PLAIN")
    body = struct.pack(">hhih", Api.SASL_AUTHENTICATE, 0, 7, 0) + struct.pack(">i", 11) + token("ann")
    whole = struct.pack(">i", len(body)) + body
    client.send_bytes(whole[:-4])
    other = await logged_in(world, "bob")
    assert await is_served(other)
    client.send_bytes(whole[-4:])
    assert (await client.receive())[4:6] == b"\0\0"
    assert await is_served(client)


def pipelined(sent: bytes, value: bytes) -> bytes:
    """A handshake, a login and a Produce in one write."""
    return (
        framed(Api.SASL_HANDSHAKE, 1, struct.pack(">h", 5) + b"PLAIN")
        + framed(Api.SASL_AUTHENTICATE, 0, struct.pack(">i", len(sent)) + sent)
        + framed(Api.PRODUCE, 3, produce_body(value))
    )


def framed(api: Api, version: int, body: bytes) -> bytes:
    frame = struct.pack(">hhih", api, version, 1, 0) + body
    return struct.pack(">i", len(frame)) + frame


def produce_body(value: bytes) -> bytes:
    records = bytes(batch(value))
    head = struct.pack(">hhii", -1, -1, 1000, 1) + struct.pack(">h", 1) + b"t"
    return head + struct.pack(">iii", 1, 0, len(records)) + records


@pytest.mark.parametrize("handshake", [0, 1])
async def test_requests_after_a_failed_login_are_not_executed_on_an_open_broker(fresh: World, handshake: int) -> None:
    client = await fresh.client()
    if handshake:
        client.send_bytes(pipelined(token("guest", "wrong"), b"a"))
    else:
        await client.call(Api.SASL_HANDSHAKE, 0, mechanism="PLAIN")
        sent = token("guest", "wrong")
        client.send_bytes(struct.pack(">i", len(sent)) + sent + framed(Api.PRODUCE, 3, produce_body(b"a")))
    while not await client.is_closed():
        pass
    other = await fresh.client()
    assert (await other.produce("t", batch(b"b"))).base_offset == 0, "the first offset"


async def test_requests_after_a_failed_login_are_not_executed(world: World, client: Client) -> None:
    before = end_of(world)
    client.send_bytes(pipelined(token("ann", "wrong"), b"a"))
    while not await client.is_closed():
        pass
    assert end_of(world) == before
    other = await world.client()
    other.send_bytes(pipelined(token("ann"), b"a"))
    for _ in range(3):
        assert await other.receive()
    assert end_of(world) == before + 1, "after a successful login it is"


async def test_a_second_login_must_be_of_the_same_user(world: World, client: Client) -> None:
    assert (await try_login(client, token("ann"))).error_code == 0
    assert await is_served(client)
    assert (await try_login(client, token("ann"))).error_code == 0
    assert await is_served(client)
    answer = await try_login(client, token("bob"))
    assert answer.error_code == Code.SASL_AUTHENTICATION_FAILED
    assert "from User:ann to User:bob" in answer.error_message
    assert await client.is_closed()


async def test_a_failed_login_is_answered_late_without_delaying_others(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "FAILURE_DELAY_S", 0.5)
    late = held_timers(world, monkeypatch, 0.5)
    failing = asyncio.ensure_future(try_login(client, token("ann", "wrong")))
    while not late:
        await asyncio.sleep(0.001)
    assert await is_served(await logged_in(world, "ann"))
    assert not failing.done()
    late[0]()
    assert (await failing).error_message == WRONG


def held_timers(world: World, monkeypatch: pytest.MonkeyPatch, delay_s: float) -> list[Callable[[], object]]:
    """Collects the callbacks that the listener schedules with this delay: the test calls them, because timers are
    unreliable on a slow machine."""
    held: list[Callable[[], object]] = []
    loop = world.context.loop

    class Holding:
        def __getattr__(self, name: str) -> Any:
            return getattr(loop, name)

        def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Any:
            if delay != delay_s:
                return loop.call_later(delay, callback, *args)
            return held.append(functools.partial(callback, *args))

    monkeypatch.setattr(world.context, "loop", Holding())
    return held


async def test_a_client_that_does_not_log_in_is_disconnected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = held_timers(world, monkeypatch, connection.LOGIN_TIMEOUT_S)
    known = await logged_in(world, "ann")
    idle = await world.client()
    while len(patience) < 2:
        await asyncio.sleep(0.001)
    for is_over in patience:
        is_over()
    assert await idle.is_closed()
    assert await is_served(known)


async def test_silent_connections_from_one_address_lock_no_client_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither clients of other addresses nor those of the same address that log in; authenticated connections stay."""
    monkeypatch.setattr(connection, "LOGIN_TIMEOUT_S", 300.0)
    known = [await logged_in(world, "ann") for _ in range(5)]
    places = len(world.listener.connections) + 4
    monkeypatch.setattr(
        world.listener.connections, "_config", msgspec.structs.replace(world.context.config, connections_max=places)
    )
    silent = [await world.client() for _ in range(10)]
    assert await silent[0].is_closed()
    assert all([await is_served(client) for client in [*known, await logged_in(world, "ann")]])
    monkeypatch.setattr(connection, "source_of", lambda host: "198.51.100.1")
    assert await is_served(await logged_in(world, "bob"))


async def test_deleting_a_user_closes_its_connections(world: World) -> None:
    await add(world, "carl")
    known = await logged_in(world, "ann")
    gone = await logged_in(world, "carl")
    assert await is_served(gone)
    [found] = [one for one in world.listener.connections if one.user == "carl"]
    await world.broker.users.remove_user("carl")
    assert world.context.gate.user_of(found) is None, "also for requests that still wait"
    assert await gone.is_closed()
    assert await is_served(known)
    again = await try_login(await world.client(), token("carl"))
    assert again.error_code == Code.SASL_AUTHENTICATION_FAILED
