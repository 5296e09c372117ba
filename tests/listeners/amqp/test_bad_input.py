"""Malformed and malicious input. Every check has a test that fails without it, and other clients are unaffected."""

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
def other_clients_are_unaffected(running: Running) -> Iterator[None]:
    other = running.channel()
    other.queue_declare("unaffected")
    yield
    other.basic_publish("", "unaffected", b"x")
    method, _, _ = other.basic_get("unaffected", auto_ack=True)
    assert method is not None
    other.connection.close()


def publish(queue: str = "unaffected") -> bytes:
    return frame(1, commands.Basic.Publish, routing_key=queue)


def close_reason(client: Raw) -> tuple[int, str, int, int]:
    close = client.expect(commands.Connection.Close)
    return close.reply_code, close.reply_text, close.class_id, close.method_id


@pytest.mark.parametrize(
    "first_bytes",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"AMQP\x00\x01\x00\x00",
        b"AMQP\x01\x01\x00\x0a",
        b"\x00\x00\x00\x20\x00\x12\x00\x03",
        b"X",
    ],
)
def test_another_protocol_is_answered_with_the_protocol_header(client: Raw, first_bytes: bytes) -> None:
    client.send(first_bytes)
    assert client.take(8) == PROTOCOL_HEADER
    assert client.is_closed()


@pytest.mark.parametrize("sent", [b"", b"AMQP", PROTOCOL_HEADER])
def test_an_unfinished_handshake_times_out(running: Running, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(listener_connection, "HANDSHAKE_TIMEOUT_S", 0.1)
    with closing(Raw(running.port)) as client:
        client.send(sent)
        assert client.is_closed()


@pytest.mark.parametrize("size", [131_073, 2**31, 2**32 - 1])
def test_a_frame_over_frame_max_is_501_and_allocates_nothing(client: Raw, size: int) -> None:
    client.open().channel()
    with Traced() as memory:
        client.send(b"\x01\x00\x01" + size.to_bytes(4, "big"))
        assert client.expect(commands.Connection.Close).reply_code == 501
    assert memory.peak_bytes < 150_000  # this client reads 64 KB at a time


@pytest.mark.parametrize("frame_max", [4096, 131_072])
def test_a_body_frame_may_exceed_frame_max_by_its_overhead(client: Raw, frame_max: int) -> None:
    """AMQPStorm splits bodies like this, and RabbitMQ allows the extra 8 bytes. Deliveries still respect frame_max."""
    client.open(frame_max=frame_max).channel()
    body = b"x" * frame_max
    client.send(publish() + raw_frame(2, 1, content_header(len(body))) + raw_frame(3, 1, body))
    client.method(1, commands.Basic.Get, queue="unaffected", no_ack=True)
    client.expect(commands.Basic.GetOk)
    assert client.frame()[0] == 2
    assert [len(client.frame()[2]) for _ in range(2)] == [frame_max - 8, 8]


def test_before_tune_frames_are_limited_to_8_kb(client: Raw) -> None:
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
def test_invalid_frames_close_only_their_connection(client: Raw, data: bytes, code: int) -> None:
    client.open().channel().send(data)
    assert client.expect(commands.Connection.Close).reply_code == code


def test_a_channel_closed_by_both_sides_at_once_can_be_reopened_after_close_ok(client: Raw) -> None:
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="not-there", passive=True)
    client.method(1, commands.Channel.Close).method(1, commands.Channel.CloseOk)
    assert client.expect(commands.Channel.Close).reply_code == 404
    client.expect(commands.Channel.CloseOk)
    client.channel(1)


def test_a_cancel_ok_is_refused_even_after_a_cancel_of_the_broker(client: Raw) -> None:
    """The broker sends basic.cancel with nowait, so no reply is expected."""
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="going").expect(commands.Queue.DeclareOk)
    client.method(1, commands.Basic.Consume, queue="going", consumer_tag="mine").expect(commands.Basic.ConsumeOk)
    client.method(1, commands.Queue.Delete, queue="going").expect(commands.Queue.DeleteOk)
    assert client.expect(commands.Basic.Cancel).nowait
    client.method(1, commands.Basic.CancelOk, consumer_tag="mine")
    assert close_reason(client) == (503, "COMMAND_INVALID - unimplemented method", 60, 31)


@pytest.mark.parametrize(
    ("method", "number"),
    [
        (frame(1, commands.Basic.Deliver, consumer_tag="tag", delivery_tag=1, routing_key="unaffected"), 60),
        (frame(1, commands.Basic.Return, reply_code=312, reply_text="NO_ROUTE", routing_key="unaffected"), 50),
        (frame(1, commands.Basic.GetOk, delivery_tag=1, routing_key="unaffected", message_count=0), 71),
    ],
)
def test_a_content_method_of_the_broker_is_refused_once_and_its_content_ignored(
    client: Raw, method: bytes, number: int
) -> None:
    """RabbitMQ reads the content first. Headrace refuses at once and ignores the content, with the same reply text."""
    client.open().channel()
    client.send(method + raw_frame(2, 1, content_header(5)) + raw_frame(3, 1, b"hello"))
    assert close_reason(client) == (503, "COMMAND_INVALID - unimplemented method", 60, number)
    client.method(0, commands.Connection.CloseOk)
    assert client.is_closed()


def test_a_flow_ok_is_refused(client: Raw) -> None:
    """The broker never sends channel.flow."""
    client.open().channel().method(1, commands.Channel.FlowOk, active=True)
    assert close_reason(client) == (503, "COMMAND_INVALID - unimplemented method", 20, 21)


@pytest.mark.parametrize(
    "late", [frame(1, commands.Channel.FlowOk, active=True), frame(1, commands.Basic.CancelOk, consumer_tag="x")]
)
def test_an_unexpected_reply_is_ignored_on_a_closing_channel(client: Raw, late: bytes) -> None:
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="not-there", passive=True).send(late)
    assert client.expect(commands.Channel.Close).reply_code == 404
    client.method(1, commands.Channel.CloseOk).channel(1)


def test_opening_a_channel_before_its_close_ok_is_504(client: Raw) -> None:
    client.open().channel()
    client.method(1, commands.Queue.Declare, queue="not-there", passive=True)
    client.method(1, commands.Channel.Close).method(1, commands.Channel.Open)
    assert client.expect(commands.Channel.Close).reply_code == 404
    client.expect(commands.Channel.CloseOk)
    assert client.expect(commands.Connection.Close).reply_code == 504


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 16 * 1024 * 1024])
def test_a_body_announced_too_large_closes_the_channel_and_is_discarded(client: Raw, size: int) -> None:
    client.open().channel().send(publish()).send(raw_frame(2, 1, content_header(size)))
    assert client.expect(commands.Channel.Close).reply_code == 311
    for _ in range(20):
        client.send(raw_frame(3, 1, b"x" * 100_000))
    client.method(1, commands.Channel.CloseOk).channel(1)


def test_a_large_announced_body_allocates_nothing_before_it_arrives(running: Running, client: Raw) -> None:
    client.open()
    for number in range(1, 1001):
        client.method(number, commands.Channel.Open)
    for number in range(1, 1001):
        client.send(frame(number, commands.Basic.Publish, routing_key="unaffected"))
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
def test_content_frames_in_the_wrong_order_are_505(client: Raw, frames: bytes) -> None:
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
            publish() + raw_frame(2, 1, b"\0\x3c\0\1" + content_header(0)[4:]),  # weight 1
            "expected content header for class 60, got non content header frame instead",
            (60, 40),
        ),
    ],
)
def test_unexpected_content_frames_have_the_reply_text_of_rabbitmq(
    client: Raw, sent: bytes, text: str, method: tuple[int, int]
) -> None:
    client.open().channel().send(sent)
    found = client.expect(commands.Connection.Close)
    assert (found.reply_code, found.reply_text) == (505, f"UNEXPECTED_FRAME - {text}")
    assert (found.class_id, found.method_id) == method


def test_an_unexpected_empty_body_frame_is_505_and_publishes_nothing(running: Running, client: Raw) -> None:
    """An empty body exceeds no announced size, so only the state of the channel can reveal it."""
    before = running.call(lambda: running.queue("unaffected").published)
    client.open().channel().send(raw_frame(3, 1, b""))
    assert client.expect(commands.Connection.Close).reply_code == 505
    assert running.call(lambda: running.queue("unaffected").published) == before


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
def test_malformed_tables_are_502(running: Running, table: bytes) -> None:
    in_method = raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\x01q\0" + table)
    in_message = publish() + raw_frame(2, 1, content_header(0, b"\x20\x00" + table))
    for data in (in_method, in_message):
        with closing(Raw(running.port)) as client:
            client.open().channel().send(data)
            assert client.expect(commands.Connection.Close).reply_code == 502


@pytest.mark.parametrize(
    "properties", [b"\xff\xff", b"\x80\x00\x05abc", b"\x00\x00x", b"\x00\x40\x00", b"\x20\x00\xff\xff\xff\xff"]
)
def test_malformed_properties_are_502(client: Raw, properties: bytes) -> None:
    client.open().channel().send(publish() + raw_frame(2, 1, content_header(0, properties)))
    assert client.expect(commands.Connection.Close).reply_code == 502


def test_strings_longer_than_their_frame_are_501(running: Running, client: Raw) -> None:
    client.open().channel().send(raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\xffq"))
    assert client.expect(commands.Connection.Close).reply_code == 501
    with closing(Raw(running.port)) as early:
        early.start()
        early.send(raw_frame(1, 0, b"\x00\x0a\x00\x0b\0\0\0\0\x05PLAIN\x7f\xff\xff\xff\0guest\0guest\x05en_US"))
        assert early.expect(commands.Connection.Close).reply_code == 501


def test_names_that_are_not_utf8_are_502(client: Raw) -> None:
    client.open().channel().send(raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\x02\xff\xfe\0\0\0\0\0"))
    assert client.expect(commands.Connection.Close).reply_code == 502


@pytest.mark.parametrize("number", [11, 2048, 65_535])
def test_a_channel_number_over_channel_max_is_refused(client: Raw, number: int) -> None:
    client.open(channel_max=10).channel(10)
    client.method(number, commands.Channel.Open)
    found = client.expect(commands.Connection.Close)
    said = f"CHANNEL_ERROR - channel number {number} is higher than the negotiated channel_max (10)"
    assert (found.reply_code, found.reply_text) == (504, said)
    assert (found.class_id, found.method_id) == (20, 10)


def test_one_channel_more_than_channel_max_is_530(client: Raw) -> None:
    client.open(channel_max=10)
    for number in range(10, 0, -1):
        client.channel(number)
    client.method(11, commands.Channel.Open)
    found = client.expect(commands.Connection.Close)
    text = "NOT_ALLOWED - number of channels opened (10) has reached the negotiated channel_max (10)"
    assert (found.reply_code, found.reply_text) == (530, text)


@pytest.mark.parametrize(
    "asked",
    [{"channel_max": 3000}, {"channel_max": 0}, {"frame_max": 200_000}, {"frame_max": 0}, {"frame_max": 100}],
)
def test_a_tune_ok_beyond_the_offered_limits_is_530(client: Raw, asked: dict[str, int]) -> None:
    client.start()
    client.log_in().expect(commands.Connection.Tune)
    client.method(0, commands.Connection.TuneOk, **{"channel_max": 2047, "frame_max": 131_072, "heartbeat": 0, **asked})
    assert client.expect(commands.Connection.Close).reply_code == 530


def test_a_heartbeat_of_zero_disables_heartbeats(running: Running, client: Raw) -> None:
    client.open(heartbeat=0)
    found = running.link_of(client.socket)
    assert running.call(lambda: (found.transport.heartbeat_s, found.transport._timer)) == (0, None)


def test_a_silent_client_is_closed_after_two_heartbeats_and_its_messages_are_requeued(
    running: Running, client: Raw
) -> None:
    other = running.channel()
    other.queue_declare("beaten", durable=True)
    other.basic_publish("", "beaten", b"x")
    client.start()
    client.log_in().expect(commands.Connection.Tune)
    client.send(  # in one write, because any pause between frames would count as silence
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


def test_a_pause_of_the_broker_is_not_counted_as_silence_of_clients(running: Running, client: Raw) -> None:
    """After a pause of the event loop, timers run before sockets are read, so every client seems silent at first."""
    client.open(heartbeat=600)
    link = running.link_of(client.socket)

    def check_after_a_pause() -> None:
        link.transport.last_read -= 3 * 600
        link.transport.check_heartbeat()

    running.call(check_after_a_pause)
    client.channel()


def test_closing_a_client_that_does_not_read_removes_its_connection(
    running: Running, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection stayed registered, together with its unsent output."""
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


def test_the_broker_stops_reading_from_a_client_that_does_not_read_its_returns(
    running: Running, client: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The returned messages were buffered without a limit."""
    monkeypatch.setattr(listener_link, "OUTPUT_BYTES_MAX", 1 << 20)
    body = b"x" * 100_000
    lost = frame(1, commands.Basic.Publish, exchange="", routing_key="to.nowhere", mandatory=True)
    lost += raw_frame(2, 1, content_header(len(body))) + raw_frame(3, 1, body)
    client.open().channel()
    link = running.link_of(client.socket)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.send, 300 * lost)
        eventually(lambda: running.call(lambda: "output" in link.transport.paused_for))
        assert running.call(lambda: link.transport.output_bytes) < 2 << 20
        for _ in range(300):
            client.expect(commands.Basic.Return)
            assert [client.frame()[0], client.frame()[0]] == [2, 3]
        sending.result(60)


def test_the_broker_sends_heartbeats_when_negotiated(client: Raw) -> None:
    client.open(heartbeat=1)
    kind, channel, payload = client.frame()
    assert (kind, channel, payload) == (8, 0, b"")


@pytest.mark.parametrize(("user", "password"), [("guest", "wrong"), ("nobody", "guest"), ("", "")])
def test_a_wrong_login_is_403(client: Raw, user: str, password: str) -> None:
    client.start()
    client.log_in(user, password)
    assert client.expect(commands.Connection.Close).reply_code == 403


def test_amqplain_is_supported(client: Raw) -> None:
    from headrace.record.amqp.properties import encode_table

    client.start()
    response = encode_table({"LOGIN": "guest", "PASSWORD": "guest"})[4:]
    client.method(0, commands.Connection.StartOk, mechanism="AMQPLAIN", response=response, locale="en_US")
    client.expect(commands.Connection.Tune)


def test_an_access_request_is_answered_with_a_ticket(client: Raw) -> None:
    client.open().channel().send(frame(1, AccessRequest, realm="/data", active=True, write=True, read=True))
    assert client.expect(AccessRequestOk).ticket == 1


def test_methods_before_the_connection_is_open_are_refused(client: Raw) -> None:
    client.start()
    client.method(1, commands.Channel.Open)
    assert client.expect(commands.Connection.Close).reply_code == 503


def test_aborted_connections_leave_no_state_behind(running: Running) -> None:
    """Many connections that end in every wrong way leave no entries in the broker's tables."""
    eventually(
        lambda: running.call(lambda: len(running.listener.connections)) == 1, "only the unaffected client is left"
    )
    endings: list[Any] = [
        lambda c: c.send(b"garbage!"),
        lambda c: c.open().channel().send(raw_frame(7, 1, b"x")),
        lambda c: c.open().channel().send(publish()),
        lambda c: c.open().channel().method(1, commands.Basic.Consume, queue="unaffected"),
        lambda c: c.send(PROTOCOL_HEADER[:3]),
        lambda c: c.open().channel().method(1, commands.Queue.Declare, exclusive=True),
    ]
    for number in range(120):
        client = Raw(running.port)
        endings[number % len(endings)](client)
        client.close()
    eventually(lambda: running.call(lambda: len(running.listener.connections)) == 1)
    assert running.call(lambda: len(running.queue("unaffected").consumers)) == 0
    assert running.call(
        lambda: not [q for q in running.server.broker.vhosts.get("/").queues if q.startswith("amq.gen")]
    )
