"""Bytes that no honest client sends. Each guard has a test that fails without it; nobody else is disturbed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from pamqp import commands

from headrace.listeners.amqp import connection as listener_connection
from headrace.listeners.amqp import transport as listener_link
from headrace.wire.amqp.methods import AccessRequest, AccessRequestOk, frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER
from tests.listeners.amqp.raw import Raw, content_header, raw_frame
from tests.listeners.amqp.running import Running, Traced, eventually


@pytest.fixture
def client(running: Running) -> Iterator[Raw]:
    raw = Raw(running.port)
    yield raw
    raw.close()


@pytest.fixture(autouse=True)
def nobody_else_is_disturbed(running: Running) -> Iterator[None]:
    other = running.channel()
    other.queue_declare("innocent")
    yield
    other.basic_publish("", "innocent", b"x")
    method, _, _ = other.basic_get("innocent", auto_ack=True)
    assert method is not None
    other.connection.close()


def publish(queue: str = "innocent") -> bytes:
    return frame(1, commands.Basic.Publish, routing_key=queue)


def refusal(client: Raw) -> tuple[int, str, int, int]:
    close = client.expect(commands.Connection.Close)
    return close.reply_code, close.reply_text, close.class_id, close.method_id


@pytest.mark.parametrize(
    "hello",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"AMQP\x00\x01\x00\x00",
        b"AMQP\x01\x01\x00\x0a",
        b"\x00\x00\x00\x20\x00\x12\x00\x03",
        b"X",
    ],
)
def test_01_whoever_speaks_something_else_is_told_what_is_spoken_here(client: Raw, hello: bytes) -> None:
    client.send(hello)
    assert client.take(8) == PROTOCOL_HEADER
    assert client.is_closed()


@pytest.mark.parametrize("said", [b"", b"AMQP", PROTOCOL_HEADER])
def test_02_whoever_does_not_finish_the_handshake_is_hung_up_on(
    running: Running, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(listener_connection, "HANDSHAKE_TIMEOUT_S", 0.1)
    with closing(Raw(running.port)) as client:
        client.send(said)
        assert client.is_closed()


@pytest.mark.parametrize("size", [131_073, 2**31, 2**32 - 1])
def test_03_a_frame_over_frame_max_is_501_and_nothing_is_allocated_for_it(client: Raw, size: int) -> None:
    client.open().channel()
    with Traced() as memory:
        client.send(b"\x01\x00\x01" + size.to_bytes(4, "big"))
        assert client.expect(commands.Connection.Close).reply_code == 501
    assert memory.peak_bytes < 150_000  # this client reads 64 KB at a time


@pytest.mark.parametrize("frame_max", [4096, 131_072])
def test_03_a_body_that_counts_frame_max_without_the_frame_around_it_is_taken(client: Raw, frame_max: int) -> None:
    """AMQPStorm cuts bodies so, and RabbitMQ allows those 8 bytes; what goes out keeps to frame_max all the same."""
    client.open(frame_max=frame_max).channel()
    body = b"x" * frame_max
    client.send(publish() + raw_frame(2, 1, content_header(len(body))) + raw_frame(3, 1, body))
    client.method(1, commands.Basic.Get, queue="innocent", no_ack=True)
    client.expect(commands.Basic.GetOk)
    assert client.frame()[0] == 2
    assert [len(client.frame()[2]) for _ in range(2)] == [frame_max - 8, 8]


def test_03_before_tune_a_frame_of_8_kb_is_the_limit(client: Raw) -> None:
    client.start()
    client.send(b"\x01\x00\x00" + (9000).to_bytes(4, "big"))
    assert client.expect(commands.Connection.Close).reply_code == 501


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (raw_frame(1, 1, b"\x00\x3c\x00\x0a\0\0\0\0\0\0\0", end=b"\0"), 501),
        (raw_frame(7, 1, b"x"), 501),
        (raw_frame(8, 1, b""), 505),
        (raw_frame(8, 0, b"x"), 501),
        (publish() + raw_frame(2, 1, content_header(0, b"\0")), 501),
        (raw_frame(2, 0, content_header(1)), 505),
        (raw_frame(3, 0, b"x"), 505),
        (raw_frame(3, 77, b"x"), 505),
        (frame(2, commands.Basic.Qos), 504),
        (frame(1, commands.Channel.Open), 504),
        (frame(1, commands.Channel.CloseOk), 503),
        (frame(2, commands.Channel.CloseOk), 504),
        (raw_frame(1, 1, b"\0"), 501),
        (raw_frame(1, 1, b"\x00\x3c\x00\x28\0\0\x05a"), 501),
        (raw_frame(1, 1, b"\x00\x3c\x00\x50\0\0"), 501),
        (raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\x01q\0\xff\xff\xff\xff"), 501),
        (raw_frame(1, 1, b"\x00\x3c\x03\xe7"), 503),
        (frame(0, commands.Basic.Qos), 504),
        (frame(1, commands.Queue.DeclareOk), 503),
        (frame(1, commands.Connection.Open), 503),
        (frame(1, commands.Connection.Close), 503),
        (frame(2, commands.Connection.Close), 504),
        (frame(0, commands.Connection.CloseOk), 504),
    ],
)
def test_04_frames_that_cannot_be_end_only_this_connection(client: Raw, data: bytes, code: int) -> None:
    client.open().channel().send(data)
    assert client.expect(commands.Connection.Close).reply_code == code


def test_04_a_channel_that_both_close_at_once_is_there_until_close_ok(client: Raw) -> None:
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="not-there", passive=True)
    client.method(1, commands.Channel.Close).method(1, commands.Channel.CloseOk)
    assert client.expect(commands.Channel.Close).reply_code == 404
    client.expect(commands.Channel.CloseOk)
    client.channel(1)


def test_04_a_cancel_ok_is_refused_as_by_rabbitmq_even_after_our_cancel(client: Raw) -> None:
    """We say cancel with nowait, so that there is nothing to answer."""
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="going").expect(commands.Queue.DeclareOk)
    client.method(1, commands.Basic.Consume, queue="going", consumer_tag="mine").expect(commands.Basic.ConsumeOk)
    client.method(1, commands.Queue.Delete, queue="going").expect(commands.Queue.DeleteOk)
    assert client.expect(commands.Basic.Cancel).nowait
    client.method(1, commands.Basic.CancelOk, consumer_tag="mine")
    assert refusal(client) == (503, "COMMAND_INVALID - unimplemented method", 60, 31)


@pytest.mark.parametrize(
    ("method", "number"),
    [
        (frame(1, commands.Basic.Deliver, consumer_tag="tag", delivery_tag=1, routing_key="innocent"), 60),
        (frame(1, commands.Basic.Return, reply_code=312, reply_text="NO_ROUTE", routing_key="innocent"), 50),
        (frame(1, commands.Basic.GetOk, delivery_tag=1, routing_key="innocent", message_count=0), 71),
    ],
)
def test_04_a_message_as_only_a_broker_sends_it_is_refused_once_for_all_its_frames(
    client: Raw, method: bytes, number: int
) -> None:
    """With RabbitMQ's words. It reads the content first; we refuse before it, and its frames are no second mistake."""
    client.open().channel()
    client.send(method + raw_frame(2, 1, content_header(5)) + raw_frame(3, 1, b"hello"))
    assert refusal(client) == (503, "COMMAND_INVALID - unimplemented method", 60, number)
    client.method(0, commands.Connection.CloseOk)
    assert client.is_closed()


def test_04_a_flow_ok_is_refused_as_by_rabbitmq(client: Raw) -> None:
    """We never say flow."""
    client.open().channel().method(1, commands.Channel.FlowOk, active=True)
    assert refusal(client) == (503, "COMMAND_INVALID - unimplemented method", 20, 21)


@pytest.mark.parametrize(
    "late", [frame(1, commands.Channel.FlowOk, active=True), frame(1, commands.Basic.CancelOk, consumer_tag="x")]
)
def test_04_what_is_refused_elsewhere_is_nothing_on_a_channel_that_is_closing(client: Raw, late: bytes) -> None:
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="not-there", passive=True).send(late)
    assert client.expect(commands.Channel.Close).reply_code == 404
    client.method(1, commands.Channel.CloseOk).channel(1)


def test_04_opening_a_channel_before_its_close_ok_is_504(client: Raw) -> None:
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="not-there", passive=True)
    client.method(1, commands.Channel.Close).method(1, commands.Channel.Open)
    assert client.expect(commands.Channel.Close).reply_code == 404
    client.expect(commands.Channel.CloseOk)
    assert client.expect(commands.Connection.Close).reply_code == 504


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 16 * 1024 * 1024])
def test_05_a_body_that_is_announced_too_large_ends_the_channel_and_is_not_kept(client: Raw, size: int) -> None:
    client.open().channel().send(publish()).send(raw_frame(2, 1, content_header(size)))
    assert client.expect(commands.Channel.Close).reply_code == 311
    for _ in range(20):
        client.send(raw_frame(3, 1, b"x" * 100_000))
    client.method(1, commands.Channel.CloseOk).channel(1)


def test_05_a_large_announced_body_costs_nothing_until_it_comes(running: Running, client: Raw) -> None:
    client.open()
    for number in range(1, 1001):
        client.method(number, commands.Channel.Open)
    for number in range(1, 1001):
        client.send(frame(number, commands.Basic.Publish, routing_key="innocent"))
        client.send(raw_frame(2, number, content_header(15 * 1024 * 1024)))
        client.send(raw_frame(3, number, b"x"))

    def kept() -> int:
        found: int = sum(
            channel.state.pending_bytes for c in running.listener.connections for channel in c.channels.values()
        )
        return found

    def most_channels() -> int:
        return max((len(c.channels) for c in running.listener.connections), default=0)

    eventually(lambda: running.call(most_channels) == 1000)
    assert running.call(kept) < 1 << 20


@pytest.mark.parametrize(
    "frames",
    [
        raw_frame(2, 1, content_header(5)) + raw_frame(3, 1, b"123456"),
        raw_frame(2, 1, content_header(5)) + raw_frame(3, 1, b"123") + frame(1, commands.Basic.Qos),
        raw_frame(2, 1, content_header(5)) + raw_frame(2, 1, content_header(5)),
        frame(1, commands.Basic.Qos),
        raw_frame(3, 1, b"x"),
        raw_frame(3, 1, b""),
    ],
)
def test_06_content_out_of_step_is_505(client: Raw, frames: bytes) -> None:
    client.open().channel().send(publish() + frames)
    assert client.expect(commands.Connection.Close).reply_code == 505


@pytest.mark.parametrize(
    ("sent", "text", "method"),
    [
        (raw_frame(3, 1, b"x"), "expected method frame, got non method frame instead", (0, 0)),
        (
            publish() + raw_frame(3, 1, b"x"),
            "expected content header for class 60, got non content header frame instead",
            (60, 40),
        ),
        (
            publish() + raw_frame(2, 1, content_header(3)) * 2,
            "expected content body, got non content body frame instead",
            (60, 40),
        ),
        (
            publish() + raw_frame(2, 1, content_header(0, class_id=61)),
            "expected content header for class 60, got one for class 61 instead",
            (60, 40),
        ),
        (
            publish() + raw_frame(2, 1, b"\0\x3c\0\1" + content_header(0)[4:]),  # of weight 1
            "expected content header for class 60, got non content header frame instead",
            (60, 40),
        ),
    ],
)
def test_06_content_out_of_step_is_said_in_rabbitmqs_words(
    client: Raw, sent: bytes, text: str, method: tuple[int, int]
) -> None:
    client.open().channel().send(sent)
    found = client.expect(commands.Connection.Close)
    assert (found.reply_code, found.reply_text) == (505, f"UNEXPECTED_FRAME - {text}")
    assert (found.class_id, found.method_id) == method


def test_06_an_empty_body_out_of_nowhere_is_505_and_no_message(running: Running, client: Raw) -> None:
    """No byte is over what was announced, so only the channel's state tells that it does not belong."""
    before = running.call(lambda: running.queue("innocent").published)
    client.open().channel().send(raw_frame(3, 1, b""))
    assert client.expect(commands.Connection.Close).reply_code == 505
    assert running.call(lambda: running.queue("innocent").published) == before


def nested(depth: int) -> bytes:
    table = b""
    for _ in range(depth):
        table = b"\x01aF" + len(table).to_bytes(4, "big") + table
    return len(table).to_bytes(4, "big") + table


TABLES = [
    nested(17),
    nested(10_000),
    b"\0\0\0\x03\x01a?",
    b"\0\0\0\x07\x01aS\xff\xff\xff\xff",
    b"\0\0\0\x07\x01aA\x7f\xff\xff\xff",
    b"\0\0\0\x02\x05a",
]


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_07_tables_that_lie_about_themselves_are_502(running: Running, table: bytes) -> None:
    in_method = raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\x01q\0" + table)
    in_message = publish() + raw_frame(2, 1, content_header(0, b"\x20\x00" + table))
    for data in (in_method, in_message):
        with closing(Raw(running.port)) as client:
            client.open().channel().send(data)
            assert client.expect(commands.Connection.Close).reply_code == 502


@pytest.mark.parametrize(
    "properties", [b"\xff\xff", b"\x80\x00\x05abc", b"\x00\x00x", b"\x00\x40\x00", b"\x20\x00\xff\xff\xff\xff"]
)
def test_07_properties_that_do_not_add_up_are_502(client: Raw, properties: bytes) -> None:
    client.open().channel().send(publish() + raw_frame(2, 1, content_header(0, properties)))
    assert client.expect(commands.Connection.Close).reply_code == 502


def test_07_strings_longer_than_their_frame_are_501(running: Running, client: Raw) -> None:
    client.open().channel().send(raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\xffq"))
    assert client.expect(commands.Connection.Close).reply_code == 501
    with closing(Raw(running.port)) as early:
        early.start()
        early.send(raw_frame(1, 0, b"\x00\x0a\x00\x0b\0\0\0\0\x05PLAIN\x7f\xff\xff\xff\0guest\0guest\x05en_US"))
        assert early.expect(commands.Connection.Close).reply_code == 501


def test_08_names_that_are_not_utf8_are_502(client: Raw) -> None:
    client.open().channel().send(raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\x02\xff\xfe\0\0\0\0\0"))
    assert client.expect(commands.Connection.Close).reply_code == 502


@pytest.mark.parametrize("number", [11, 2048, 65_535])
def test_12_a_channel_number_over_channel_max_is_refused(client: Raw, number: int) -> None:
    client.open(channel_max=10).channel(10)
    client.method(number, commands.Channel.Open)
    found = client.expect(commands.Connection.Close)
    said = f"CHANNEL_ERROR - channel number {number} is higher than the negotiated channel_max (10)"
    assert (found.reply_code, found.reply_text) == (504, said)
    assert (found.class_id, found.method_id) == (20, 10)


def test_12_one_channel_more_than_agreed_is_refused(client: Raw) -> None:
    client.open(channel_max=10)
    for number in range(10, 0, -1):
        client.channel(number)
    client.method(11, commands.Channel.Open)
    found = client.expect(commands.Connection.Close)
    said = "NOT_ALLOWED - number of channels opened (10) has reached the negotiated channel_max (10)"
    assert (found.reply_code, found.reply_text) == (530, said)


@pytest.mark.parametrize(
    "asked",
    [{"channel_max": 3000}, {"channel_max": 0}, {"frame_max": 200_000}, {"frame_max": 0}, {"frame_max": 100}],
)
def test_13_asking_for_more_than_was_offered_is_530(client: Raw, asked: dict[str, int]) -> None:
    client.start()
    client.log_in().expect(commands.Connection.Tune)
    client.method(0, commands.Connection.TuneOk, **{"channel_max": 2047, "frame_max": 131_072, "heartbeat": 0, **asked})
    assert client.expect(commands.Connection.Close).reply_code == 530


def test_13_a_heartbeat_of_zero_means_none(running: Running, client: Raw) -> None:
    client.open(heartbeat=0)
    found = running.link_of(client.socket)
    assert running.call(lambda: (found.transport.heartbeat_s, found.transport._timer)) == (0, None)


def test_14_a_silent_client_is_dropped_after_two_heartbeats_and_its_messages_come_back(
    running: Running, client: Raw
) -> None:
    other = running.channel()
    other.queue_declare("beaten", durable=True)
    other.basic_publish("", "beaten", b"x")
    client.start()
    client.log_in().expect(commands.Connection.Tune)
    client.send(  # in one breath: whatever keeps this client from its next word counts as silence
        frame(0, commands.Connection.TuneOk, channel_max=2047, frame_max=131_072, heartbeat=1)
        + frame(0, commands.Connection.Open, virtual_host="/")
        + frame(1, commands.Channel.Open)
        + frame(1, commands.Basic.Consume, queue="beaten", consumer_tag="c")
    )
    for answer in (commands.Connection.OpenOk, commands.Channel.OpenOk, commands.Basic.ConsumeOk):
        client.expect(answer)
    client.expect(commands.Basic.Deliver)
    eventually(lambda: running.call(lambda: running.queue("beaten").ready) == 1)
    method, _, _ = other.basic_get("beaten")
    assert method.redelivered
    other.connection.close()


def test_a_broker_that_was_held_up_does_not_take_its_own_silence_for_the_clients(running: Running, client: Raw) -> None:
    """Timers come before what waits in the sockets: the first look after a pause has heard nobody for as long."""
    client.open(heartbeat=600)
    link = running.link_of(client.socket)

    def wake_up_late() -> None:
        link.transport.last_read -= 3 * 600
        link.transport.check_heartbeat()

    running.call(wake_up_late)
    client.channel()


def test_a_client_that_does_not_read_is_gone_soon_after_it_was_closed(
    running: Running, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed among the connections, with all that was to be written to it."""
    for module in (listener_link, listener_connection):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    other = running.channel()
    other.queue_declare("unread", durable=True)
    for _ in range(40):
        other.basic_publish("", "unread", b"x" * 1_000_000)
    client.open().channel().method(1, commands.Basic.Consume, queue="unread", consumer_tag="c")
    link = running.link_of(client.socket)
    eventually(lambda: running.call(lambda: not link.transport.is_writable))
    running.call(lambda: link.close(320, "CONNECTION_FORCED - in a test"))
    eventually(lambda: running.call(lambda: link not in running.listener.connections))
    other.queue_delete("unread")
    other.connection.close()


def test_a_client_that_does_not_read_what_is_returned_to_it_is_not_read_from(
    running: Running, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it published to nowhere was kept for it, without an end."""
    monkeypatch.setattr(listener_link, "OUTPUT_BYTES_MAX", 1 << 20)
    body = b"x" * 100_000
    lost = frame(1, commands.Basic.Publish, exchange="", routing_key="to.nowhere", mandatory=True)
    lost += raw_frame(2, 1, content_header(len(body))) + raw_frame(3, 1, body)
    client.open().channel()
    link = running.link_of(client.socket)
    with ThreadPoolExecutor(1) as aside:
        sending = aside.submit(client.send, 300 * lost)
        eventually(lambda: running.call(lambda: "output" in link.transport.paused_for))
        assert running.call(lambda: link.transport.output_bytes) < 2 << 20
        for _ in range(300):
            client.expect(commands.Basic.Return)
            assert [client.frame()[0], client.frame()[0]] == [2, 3]
        sending.result(60)


def test_heartbeats_are_sent_to_a_client_that_asked(client: Raw) -> None:
    client.open(heartbeat=1)
    kind, channel, payload = client.frame()
    assert (kind, channel, payload) == (8, 0, b"")


@pytest.mark.parametrize(("user", "password"), [("guest", "wrong"), ("nobody", "guest"), ("", "")])
def test_a_wrong_login_is_403(client: Raw, user: str, password: str) -> None:
    client.start()
    client.log_in(user, password)
    assert client.expect(commands.Connection.Close).reply_code == 403


def test_amqplain_is_understood(client: Raw) -> None:
    from headrace.record.amqp.properties import encode_table

    client.start()
    response = encode_table({"LOGIN": "guest", "PASSWORD": "guest"})[4:]
    client.method(0, commands.Connection.StartOk, mechanism="AMQPLAIN", response=response, locale="en_US")
    client.expect(commands.Connection.Tune)


def test_an_old_client_that_asks_for_access_gets_a_ticket(client: Raw) -> None:
    client.open().channel().send(frame(1, AccessRequest, realm="/data", active=True, write=True, read=True))
    assert client.expect(AccessRequestOk).ticket == 1


def test_methods_before_the_connection_is_open_are_refused(client: Raw) -> None:
    client.start()
    client.method(1, commands.Channel.Open)
    assert client.expect(commands.Connection.Close).reply_code == 503


def test_abusive_connections_leave_nothing_behind(running: Running) -> None:
    """R5: tables are back to where they were after many connections that end in every wrong way."""
    eventually(lambda: running.call(lambda: len(running.listener.connections)) == 1, "only the innocent one is left")
    endings: list[Any] = [
        lambda c: c.send(b"garbage!"),
        lambda c: c.open().channel().send(raw_frame(7, 1, b"x")),
        lambda c: c.open().channel().send(publish()),
        lambda c: c.open().channel().method(1, commands.Basic.Consume, queue="innocent"),
        lambda c: c.send(PROTOCOL_HEADER[:3]),
        lambda c: c.open().channel().method(1, commands.Queue.Declare, exclusive=True),
    ]
    for number in range(120):
        client = Raw(running.port)
        endings[number % len(endings)](client)
        client.close()
    eventually(lambda: running.call(lambda: len(running.listener.connections)) == 1)
    assert running.call(lambda: len(running.queue("innocent").consumers)) == 0
    assert running.call(
        lambda: not [q for q in running.server.broker.vhosts.get("/").queues if q.startswith("amq.gen")]
    )
