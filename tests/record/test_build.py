"""Building batches: same bytes as the reference encoder, and reading them returns the input."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BatchTooLarge, InvalidInput, UnknownCodec
from headrace.record.codec import BatchWriter, build, encode_headers, records, scan, validate
from headrace.record.layout import CODEC_NAMES, HEADER_BYTES
from tests.record import oracle, strategies
from tests.record.oracle import Fields, Message


def tuples(
    messages: list[Message],
) -> list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]]:
    return [(m.key, m.value, m.headers, m.timestamp) for m in messages]


@given(strategies.batches)
def test_a_batch_is_byte_identical_to_the_reference_encoder(messages: list[Message]) -> None:
    assert build(tuples(messages)) == oracle.batch(messages)


@given(strategies.batches, strategies.codecs)
def test_reading_a_batch_returns_the_records_it_was_built_from(messages: list[Message], codec: int) -> None:
    batch = build(tuples(messages), codec=codec)
    found = records(batch, verify_crc=True)
    assert [(r.key, r.value, list(r.headers), r.timestamp) for r in found] == tuples(messages)
    assert [r.offset for r in found] == list(range(len(messages)))


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
    st.booleans(),
)
def test_producer_and_transaction_fields_are_written_and_read(
    producer_id: int, epoch: int, sequence: int, transactional: bool, control: bool
) -> None:
    writer = BatchWriter(7)
    writer.append(b"k", b"v")
    batch = writer.finish(
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
        control=control,
    )
    attributes = 0x10 * transactional + 0x20 * control
    fields = Fields(attributes=attributes, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
    assert batch == oracle.batch([Message(b"k", b"v", [], 7)], fields)
    (info,) = validate(batch)
    assert (info.producer_id, info.producer_epoch, info.base_sequence) == (producer_id, epoch, sequence)
    assert (info.is_transactional, info.is_control) == (transactional, control)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 8191, 8192, 8193, 1_048_575, 1_048_576])
def test_lengths_around_each_width_of_a_varint_are_encoded_correctly(size: int) -> None:
    message = Message(b"k" * (size // 2), b"v" * size, [("h" * min(size, 70), b"x" * size)], 1)
    assert build(tuples([message])) == oracle.batch([message])


@given(st.lists(st.integers(1 - 2**62, 2**62 - 1), min_size=1, max_size=5))
def test_timestamps_may_decrease_and_be_negative(timestamps: list[int]) -> None:
    messages = [Message(None, b"v", [], t if t != -1 else 0) for t in timestamps]
    assert build(tuples(messages)) == oracle.batch(messages)


def test_records_without_a_timestamp_get_the_timestamp_of_the_writer() -> None:
    writer = BatchWriter(1000)
    writer.append(None, b"a")
    writer.append(None, b"b", timestamp_ms=990)
    writer.timestamp_ms = 1005
    writer.append(None, b"c")
    assert [r.timestamp for r in records(writer.finish())] == [1000, 990, 1005]


def test_a_timestamp_too_far_from_the_first_is_refused() -> None:
    writer = BatchWriter(0)
    writer.append(None, b"a", timestamp_ms=-(2**63))
    with pytest.raises(InvalidInput, match="too far"):
        writer.append(None, b"b", timestamp_ms=1)
    assert writer.count == 1


def test_a_writer_is_empty_after_finish_and_ready_for_the_next_batch() -> None:
    writer = BatchWriter(5)
    writer.append(b"1", b"one")
    first = writer.finish()
    assert (writer.count, writer.size) == (0, HEADER_BYTES)
    writer.append(b"1", b"one")
    assert writer.finish() == first
    writer.append(b"2", b"two")
    writer.discard()
    with pytest.raises(InvalidInput, match="needs a record"):
        writer.finish()


def test_a_writer_grows_past_its_capacity_and_shrinks_again() -> None:
    writer = BatchWriter(0, 1024)
    writer.append(None, b"x" * 10_000_000)
    assert len(writer.finish()) > 10_000_000
    writer.append(None, b"small")
    assert [r.value for r in records(writer.finish())] == [b"small"]


def test_an_append_beyond_the_size_limit_is_refused_and_changes_nothing() -> None:
    writer = BatchWriter(0, bytes_max=HEADER_BYTES + 100)
    writer.append(None, b"x" * 50)
    before = writer.size
    for key, value in ((None, b"x" * 50), (b"k" * 1000, None), (None, b"v" * 1_000_000)):
        with pytest.raises(BatchTooLarge):
            writer.append(key, value)
    with pytest.raises(BatchTooLarge):
        writer.append(None, None, [("name", b"x" * 100)])
    assert (writer.count, writer.size) == (1, before)
    while writer.size < HEADER_BYTES + 100 - 8:
        writer.append(None, b"")
    assert len(writer.finish()) <= HEADER_BYTES + 100


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_contiguous_buffer_can_be_a_key_or_value(kind: type) -> None:
    batch = build([(kind(b"key"), kind(b"value"), [("h", kind(b"x"))], 1)])
    assert batch == oracle.batch([Message(b"key", b"value", [("h", b"x")], 1)])


@pytest.mark.parametrize("wrong", ["text", 7, memoryview(b"abcd")[::2]])
def test_a_key_or_value_of_another_type_is_refused_and_changes_nothing(wrong: object) -> None:
    writer = BatchWriter(0)
    for key, value in ((wrong, b"v"), (b"k", wrong)):
        with pytest.raises((TypeError, BufferError)):
            writer.append(key, value)  # type: ignore[arg-type]
    with pytest.raises((TypeError, BufferError, ValueError)):
        writer.append(b"k", b"v", [("h", 7)])  # type: ignore[list-item]
    assert writer.count == 0


def test_header_names_may_be_given_as_bytes() -> None:
    assert build([(None, None, [("é", None)], 1)]) == build([(None, None, [("é".encode(), None)], 1)])


def test_encode_headers_writes_the_headers_as_in_a_record() -> None:
    pairs = [("a", b"1"), ("b", None)]
    encoded, count = encode_headers(pairs)
    whole = build([(None, None, pairs, 1)])
    assert count == 2
    assert whole.endswith(oracle.varint(2) + encoded)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_a_batch_that_compression_does_not_shrink_stays_uncompressed(codec: int) -> None:
    assert scan(build([(None, b"a", (), 1)], codec=codec))[0].codec == 0
    assert scan(build([(None, b"a" * 1000, (), 1)], codec=codec))[0].codec == codec, CODEC_NAMES[codec]


@pytest.mark.parametrize("codec", [-1, 5, 7, 99])
def test_an_unknown_codec_is_refused(codec: int) -> None:
    with pytest.raises(UnknownCodec):
        build([(None, b"a", (), 1)], codec=codec)


def test_a_new_batch_has_offset_zero_and_no_leader_epoch() -> None:
    batch = build([(None, b"a", (), 1)])
    assert struct.unpack_from(">qii", batch) == (0, len(batch) - 12, -1)


@settings(max_examples=20)
@given(st.lists(strategies.batches, min_size=1, max_size=5))
def test_scan_finds_every_batch_in_a_sequence_of_batches(groups: list[list[Message]]) -> None:
    parts = [bytes(build(tuples(group))) for group in groups]
    infos = scan(b"".join(parts))
    assert [info.size for info in infos] == [len(part) for part in parts]
    assert [info.count for info in infos] == [len(group) for group in groups]
