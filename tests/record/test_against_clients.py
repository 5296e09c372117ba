"""The codec against kafka-python and aiokafka: same bytes, and each reads what the other wrote."""

import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings

from headrace.record.codec import build, murmur2, partition_for, patch, records, scan, validate
from headrace.record.compression.codecs import decompress
from headrace.record.layout import CODEC_NAMES, CODECS, HEADER_BYTES
from tests.record import oracle, strategies
from tests.record.clients import BUILDERS, PARSERS, kafka_codec, kafka_murmur2
from tests.record.oracle import Message
from tests.record.test_build import tuples

# kafka-python supports snappy and lz4 only if python-snappy and lz4 are installed; aiokafka has all four codecs.
KAFKA_PYTHON_CODECS = (
    {0, 1, 4} | ({2} if kafka_codec.has_snappy() else set()) | ({3} if kafka_codec.has_lz4() else set())
)


def supports(name: str, codec: int) -> bool:
    return name != "kafka-python" or codec in KAFKA_PYTHON_CODECS


CASES = [(name, codec) for name in BUILDERS for codec in range(5) if supports(name, codec)]


def built_by(name: str, messages: Iterable[Message], codec: int, **producer: int) -> bytes:
    fields: dict[str, int] = {
        "is_transactional": 0,
        "producer_id": -1,
        "producer_epoch": -1,
        "base_sequence": -1,
        **producer,
    }
    builder: Any = BUILDERS[name](magic=2, compression_type=codec, batch_size=2**30, **fields)
    for i, m in enumerate(messages):
        assert builder.append(i, m.timestamp, m.key, m.value, m.headers) is not None
    batch = bytearray(builder.build())
    patch(batch, 0, 0, -1)  # kafka-python writes 0 as leader epoch, which the checksum does not cover
    return bytes(batch)


def read_by(name: str, batch: bytes | bytearray) -> list[tuple[Any, ...]]:
    parser: Any = PARSERS[name](bytes(batch))
    assert parser.validate_crc()
    return [(r.offset, r.timestamp, r.key, r.value, [(k, v) for k, v in r.headers]) for r in parser]


def rows(messages: list[Message]) -> list[tuple[Any, ...]]:
    return [(i, m.timestamp, m.key, m.value, m.headers) for i, m in enumerate(messages)]


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=60)
@given(messages=strategies.batches)
def test_uncompressed_batches_are_byte_identical_to_the_clients(name: str, messages: list[Message]) -> None:
    assert built_by(name, messages, 0) == build(tuples(messages))


@pytest.mark.parametrize("name", BUILDERS)
def test_batches_with_producer_fields_are_byte_identical_to_the_clients(name: str) -> None:
    message = Message(b"k", b"v", [], 123)
    batch = built_by(name, [message], 0, is_transactional=1, producer_id=77, producer_epoch=3, base_sequence=900)
    assert batch == build(tuples([message]), producer_id=77, producer_epoch=3, base_sequence=900, transactional=True)


@pytest.mark.parametrize(("name", "codec"), CASES)
@settings(max_examples=20)
@given(messages=strategies.batches)
def test_clients_read_the_batches_that_build_writes(name: str, codec: int, messages: list[Message]) -> None:
    assert read_by(name, build(tuples(messages), codec=codec)) == rows(messages)


@pytest.mark.parametrize(("name", "codec"), CASES)
@settings(max_examples=20)
@given(messages=strategies.batches)
def test_records_reads_the_batches_that_clients_write(name: str, codec: int, messages: list[Message]) -> None:
    batch = built_by(name, messages, codec)
    validate(batch)
    assert [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in records(batch)] == rows(messages)


@pytest.mark.parametrize(("name", "codec"), [case for case in CASES if case[1]])
def test_compressed_batches_have_the_records_and_header_of_the_clients(name: str, codec: int) -> None:
    """Compressors write different bytes. The decompressed records and the header after its CRC are the same."""
    messages = [Message(b"key-%d" % (i % 7), b"some value " * (i % 30), [("h", b"x")], 10**12 + i) for i in range(500)]
    ours, other = build(tuples(messages), codec=codec), built_by(name, messages, codec)
    for batch in (ours, other):
        assert scan(batch)[0].codec == codec, CODEC_NAMES[codec]
        assert decompress(codec, batch[HEADER_BYTES:], 2**24) == oracle.payload(messages)
    assert ours[21:HEADER_BYTES] == other[21:HEADER_BYTES]


@pytest.mark.parametrize("name", PARSERS)
def test_clients_read_the_offsets_that_patch_assigns(name: str) -> None:
    batch = build([(b"k", b"v", (), 5), (b"k", b"w", (), 6)])
    patch(batch, 0, 2**40, 12)
    assert [row[0] for row in read_by(name, batch)] == [2**40, 2**40 + 1]
    assert struct.unpack_from(">i", batch, 12) == (12,)
    (info,) = scan(batch)
    assert (info.base_offset, info.last_offset, info.leader_epoch) == (2**40, 2**40 + 1, 12)


@pytest.mark.parametrize("name", PARSERS)
def test_clients_recognize_a_control_batch(name: str) -> None:
    marker = build(
        [(struct.pack(">hh", 0, 1), struct.pack(">hi", 0, 9), (), 5)],
        producer_id=4,
        producer_epoch=1,
        transactional=True,
        control=True,
    )
    parser: Any = PARSERS[name](bytes(marker))
    assert parser.is_control_batch
    assert parser.is_transactional
    assert records(marker) == []
    assert [r.key for r in records(marker, control=True)] == [struct.pack(">hh", 0, 1)]


# From Kafka's own UtilsTest.testMurmur2.
JAVA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "expected"), JAVA_VECTORS.items())
def test_murmur2_matches_the_vectors_of_the_java_client(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected


@given(strategies.data)
def test_partition_for_agrees_with_the_partitioner_of_kafka_python(key: bytes | None) -> None:
    key = key or b""
    assert murmur2(key) % 2**32 == kafka_murmur2(key) % 2**32
    for partitions in (1, 2, 3, 12, 1000):
        assert partition_for(key, partitions) == (kafka_murmur2(key) & 0x7FFFFFFF) % partitions


def test_every_codec_is_checked_against_a_client() -> None:
    assert {codec for _, codec in CASES} == set(CODECS.values())
