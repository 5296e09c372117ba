"""The scanner: any cut of the byte stream gives the same events, and what it writes are the records we meant."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands

from headrace.record import codec
from headrace.record.amqp.properties import encode_properties
from headrace.record.amqp.validate import properties_fault
from headrace.record.codec import BatchWriter
from headrace.wire.amqp.deliver import DeliveryEncoder, Encoded
from headrace.wire.amqp.methods import arguments, content_frames, frame
from headrace.wire.amqp.protocol import ProtocolError
from headrace.wire.amqp.scan import ChannelState, Scanner, Target
from headrace.wire.amqp.tags import TagRing

FRAME_MAX = 4096


class Owner:
    def __init__(self) -> None:
        self.writer = BatchWriter(0)
        self.batches: list[bytearray] = []

    def open_batch(self, target: Target) -> "Owner":
        return self

    def seal(self) -> None:
        self.batches.append(self.writer.finish())

    def records(self) -> list[tuple[bytes | None, bytes | None, dict[str, bytes | None]]]:
        if self.writer.count:
            self.seal()
        return [(r.key, r.value, dict(r.headers)) for batch in self.batches for r in codec.records(batch)]


class Events:
    """Records the events of the scanner; routes by exchange name."""

    def __init__(self) -> None:
        self.topology_version = 1
        self.said: list[Any] = []
        self.owner = Owner()
        self.fast = Target([self.owner], False, True)
        self.slow = Target([], True, False)

    def on_method(self, channel: int, class_id: int, method_id: int, data: bytes) -> bool:
        self.said.append(("method", channel, class_id, method_id, data))
        return False

    def on_route(self, channel: ChannelState, exchange: bytes, key: bytes, bits: int) -> Target | None:
        return self.slow if exchange == b"slow" else self.fast

    def on_message(self, channel: ChannelState, method: bytes, properties: bytes, body: bytes) -> bool:
        self.said.append(("message", channel.number, method, properties, body))
        return False

    def on_unknown_tag(self, channel: ChannelState, tag: int) -> bool:
        self.said.append(("unknown tag", tag))
        return False

    def on_too_large(self, channel: ChannelState, size: int) -> bool:
        self.said.append(("too large", size))
        channel.closing = True
        return False


def scanner() -> tuple[Scanner, Events, ChannelState]:
    events = Events()
    made = Scanner(events, FRAME_MAX)
    channel = ChannelState(1)
    made.add_channel(channel)
    return made, events, channel


def feed(data: bytes, cuts: list[int]) -> tuple[Events, ChannelState]:
    made, events, channel = scanner()
    left = b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        left += data[start:end]
        left = left[made.feed(left, 7) :]
    assert left == b""
    return events, channel


def publish(exchange: str, key: str, body: bytes, properties: bytes = b"\0\0") -> bytes:
    return content_frames(1, commands.Basic.Publish, properties, body, FRAME_MAX, exchange=exchange, routing_key=key)


SAMPLE = b"".join(
    [
        publish("", "a", b"one", encode_properties({"delivery_mode": 2, "headers": {"x": [1, {"y": None}]}})),
        publish("", "a", b""),
        publish("x", "other", b"z" * 10_000),
        frame(1, commands.Basic.Qos, prefetch_count=3),
        b"\x08\0\0\0\0\0\0\xce",
        publish("slow", "k", b"body"),
        publish("", "a", b"timed", encode_properties({"expiration": "5"})),
        publish("", "a", b"last"),
        frame(0, commands.Connection.UpdateSecret, new_secret="s", reason="r"),
    ]
)


def test_events_and_records_do_not_depend_on_how_the_bytes_arrive() -> None:
    whole, _ = feed(SAMPLE, [])
    expected, records = whole.said, whole.owner.records()
    assert [(key, value) for key, value, _ in records] == [
        (b"a", b"one"),
        (b"a", b""),
        (b"other", b"z" * 10_000),
        (b"a", b"last"),
    ]
    assert records[2][2]["amqp.exchange"] == b"x"
    assert [said[0] for said in expected] == ["method", "message", "message", "method"]
    for cut in list(range(1, 700)) + list(range(700, len(SAMPLE), 97)):
        again, _ = feed(SAMPLE, [cut])
        assert again.said == expected, cut
        assert again.owner.records() == records, cut


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(SAMPLE)), max_size=12).map(sorted))
def test_many_cuts_change_nothing_either(cuts: list[int]) -> None:
    again, channel = feed(SAMPLE, cuts)
    whole, _ = feed(SAMPLE, [])
    assert (again.said, again.owner.records()) == (whole.said, whole.owner.records())
    assert channel.sequence == 6


def test_random_bytes_end_in_an_error_or_in_waiting_never_in_a_crash() -> None:
    chance = random.Random(5)
    for _ in range(3000):
        data = bytearray(SAMPLE)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        made, _, _ = scanner()
        try:
            made.feed(bytes(data), 7)
        except ProtocolError as error:
            assert 500 < error.code < 541


def test_a_change_of_topology_is_seen_by_the_next_publish() -> None:
    made, events, _ = scanner()
    made.feed(publish("", "a", b"1"), 7)
    events.topology_version += 1
    events.fast = events.slow
    made.feed(publish("", "a", b"2"), 7)
    assert [said[4] for said in events.said] == [b"2"]


def test_acks_are_merged_and_an_unknown_tag_is_reported() -> None:
    made, events, channel = scanner()
    source = channel.tags.add_source()
    for offset in range(100):
        channel.tags.add(source, offset)
    made.feed(b"".join(frame(1, commands.Basic.Ack, delivery_tag=tag) for tag in range(1, 51)), 7)
    made.feed(frame(1, commands.Basic.Ack, delivery_tag=80, multiple=True), 7)
    made.feed(frame(1, commands.Basic.Ack, delivery_tag=3), 7)
    assert channel.tags.acked() == [(source, 0, 80)]
    assert events.said == [("unknown tag", 3)]


@pytest.mark.parametrize(
    ("properties", "kind"),
    [
        ({}, "plain"),
        ({"content_type": "a", "headers": {"CCX": 1, "deep": {"CC": 1}}, "timestamp": 3}, "plain"),
        ({"headers": {"CC": ["q"]}}, "decision"),
        ({"headers": {"BCC": ["q"]}}, "decision"),
        ({"expiration": "1"}, "decision"),
        ({"user_id": "guest"}, "decision"),
        ({"reply_to": "amq.rabbitmq.reply-to"}, "decision"),
        ({"reply_to": "amq.rabbitmq.reply-tX"}, "plain"),
    ],
)
def test_properties_that_ask_for_a_decision_are_found(properties: dict[str, Any], kind: str) -> None:
    raw = encode_properties(properties)
    assert properties_fault(raw) == kind
    for cut in range(len(raw)):
        assert properties_fault(raw[:cut]) == "bad"
    assert properties_fault(raw + b"x") == "bad"


def batch(*bodies: bytes, base: int = 0, properties: bytes = b"\0\0", timestamp: int = 10) -> bytearray:
    headers = (("amqp.properties", properties), ("amqp.exchange", b"ex"))
    made = codec.build([(b"key", body, headers, timestamp) for body in bodies])
    codec.patch(made, 0, base, 0)
    return made


def deliver(
    data: bytes | bytearray, start: int, end: int, *, no_ack: bool = False, **changes: int
) -> tuple[Encoded, TagRing]:
    ring = TagRing()
    encoder = DeliveryEncoder(ring, 1, b"tag", no_ack=no_ack, frame_max=FRAME_MAX, bytes_max=1 << 30)
    options = {"count_max": 1000, "redelivered_below": 0, "expired_until": -1, **changes}
    return encoder.encode(data, start, end, ring.add_source(), **options), ring


def expected(bodies: list[bytes], first_tag: int = 1, redelivered: int = 0) -> bytes:
    """The oracle: the same frames from the Python codec."""
    return b"".join(
        content_frames(
            1, commands.Basic.Deliver, b"\0\0", body, FRAME_MAX, consumer_tag="tag", delivery_tag=first_tag + n,
            redelivered=n < redelivered, exchange="ex", routing_key="key",
        )
        for n, body in enumerate(bodies)
    )  # fmt: skip


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_deliveries_equal_the_frames_of_the_python_codec(sizes: list[int], start: int, redelivered: int) -> None:
    bodies = [bytes([n]) * size for n, size in enumerate(sizes)]
    start = min(start, len(bodies) - 1)
    half = len(bodies) // 2
    data = batch(*bodies[:half]) if half else bytearray()
    data += batch(*bodies[half:], base=half)
    out, ring = deliver(bytes(data), start, len(bodies), redelivered_below=start + redelivered)
    assert out.frames == expected(bodies[start:], redelivered=redelivered)
    assert (out.next_offset, out.count, out.needs_message, list(out.gaps), out.body_bytes) == (
        len(bodies), len(bodies) - start, False, [], sum(map(len, bodies[start:])),
    )  # fmt: skip
    assert ring.unacked == out.count


def test_encoding_stops_at_its_limits() -> None:
    data = batch(*[b"%d" % n for n in range(10)])
    out, _ = deliver(data, 2, 8, count_max=3)
    assert (out.frames, out.next_offset, out.count) == (expected([b"2", b"3", b"4"]), 5, 3)
    out, ring = deliver(data, 2, 8, no_ack=True)
    assert (out.next_offset, out.count, ring.unacked, ring.next_tag, out.gaps) == (8, 6, 0, 7, ())


def test_a_record_that_needs_a_decision_ends_the_encoding() -> None:
    timed = encode_properties({"expiration": "5"})
    data = batch(b"a") + batch(b"b", base=1, properties=timed) + batch(b"c", base=2)
    out, _ = deliver(data, 0, 3)
    assert (out.frames, out.next_offset, out.count, out.needs_message) == (expected([b"a"]), 1, 1, True)
    foreign = codec.build([(b"key", b"value", (), 10)])
    out, _ = deliver(foreign, 0, 1)
    assert (out.next_offset, out.count, out.needs_message) == (0, 0, True)
    old = batch(b"old", timestamp=5) + batch(b"new", base=1, timestamp=9)
    out, _ = deliver(old, 0, 2, expired_until=5)
    assert (out.next_offset, out.count, out.needs_message) == (0, 0, True)


def test_a_message_whose_trace_headers_are_copies_is_encoded_and_others_need_python() -> None:
    properties = encode_properties({"headers": {"traceparent": "00-1", "baggage": "a=1"}})
    ours = (("amqp.properties", properties), ("amqp.exchange", b"ex"))
    copies = (("traceparent", b"00-1"), ("baggage", b"a=1"))
    whole = codec.build([(b"key", b"body", (*ours, *copies), 10)])
    out, _ = deliver(whole, 0, 1)
    assert (out.count, out.needs_message) == (1, False) and properties[2:] in out.frames
    for changed in (
        copies[:1], copies[::-1], (copies[0], ("baggage", b"a=2")), (copies[0], ("baggage", None)),
        (copies[0], ("luggage", b"a=1")), (*copies, ("tracestate", b"")), (*copies, copies[0]),
    ):  # fmt: skip
        data = codec.build([(b"key", b"body", (*ours, *changed), 10)])
        out, _ = deliver(data, 0, 1)
        assert (out.next_offset, out.count, out.needs_message) == (0, 0, True), changed


def test_gaps_are_returned_so_that_the_queue_can_settle_them() -> None:
    control = codec.build([(b"\0\0\0\1", b"\0" * 6, (), 1)], control=True, transactional=True)
    codec.patch(control, 0, 1, 0)
    data = batch(b"a") + control + batch(b"b", base=2) + batch(b"c", base=5)
    out, _ = deliver(data, 0, 6)
    assert (out.next_offset, out.count, list(out.gaps)) == (6, 3, [(1, 2), (3, 5)])


def left_of(data: bytearray, *kept: int) -> bytes:
    """A batch after compaction, which keeps its first and last offset."""
    [info] = codec.scan(data)
    left = codec.filter_batch(data, info, list(kept))
    assert left is not None
    return bytes(left)


@pytest.mark.parametrize(
    "data",
    [
        bytes(batch(b"a") + batch(b"z", base=9)),
        left_of(batch(b"a", *[b"x"] * 8, b"z"), 0, 9),
        left_of(batch(b"a", *[b"x"] * 9), 0),
    ],
    ids=["between batches", "within a batch", "at the end of a batch"],
)
def test_a_gap_that_extends_past_the_end_is_skipped_up_to_the_end(data: bytes) -> None:
    """A caller that continues at next_offset would otherwise never advance."""
    out, _ = deliver(data, 3, 6)
    assert (out.frames, out.next_offset, out.count, out.needs_message) == (b"", 6, 0, False)
    assert list(out.gaps) == [(3, 6)]
    out, _ = deliver(data, 0, 6)
    assert (out.next_offset, out.count, list(out.gaps)) == (6, 1, [(1, 6)])


def test_truncated_batches_are_never_read_past_their_end() -> None:
    data = bytes(batch(b"abc", b"def"))
    for cut in range(len(data)):
        out, _ = deliver(data[:cut], 0, 2)
        assert (out.frames, out.next_offset, out.count) == (b"", 0, 0)
    assert arguments(commands.Basic.Ack, delivery_tag=1)
