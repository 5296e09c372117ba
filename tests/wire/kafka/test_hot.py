"""The hand-written codecs of Produce, Fetch and Metadata, with kio's classes as the oracle."""

import datetime
import io
import struct
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from headrace.errors import MalformedRequest
from headrace.wire.kafka import hot, metadata
from headrace.wire.kafka.apis import VERSIONS, Api, has_header_tags
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import response_struct

PRODUCE = range(3, 14)
FETCH = range(4, VERSIONS[Api.FETCH].highest + 1)
METADATA = range(VERSIONS[Api.METADATA].highest + 1)
TOPIC_ID = uuid.UUID(int=77)


def module(api: int, version: int, *, request: bool) -> Any:
    load = load_request_schema if request else load_response_schema
    return __import__(load(api, version).__module__, fromlist=["_"])


def written(entity: Any) -> bytes:
    buffer = io.BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def make(cls: Any, **values: Any) -> Any:
    """cls with the values that its version has."""
    return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})


def produce_request(version: int) -> bytes:
    schema = module(0, version, request=True)
    return written(
        make(
            schema.ProduceRequest,
            transactional_id="t",
            acks=-1,
            timeout=datetime.timedelta(milliseconds=1500),
            topic_data=(
                make(
                    schema.TopicProduceData,
                    name="a",
                    topic_id=TOPIC_ID,
                    partition_data=(
                        schema.PartitionProduceData(index=0, records=b"first"),
                        schema.PartitionProduceData(index=7, records=None),
                        schema.PartitionProduceData(index=8, records=b"x" * 300),
                    ),
                ),
            ),
        )
    )


@pytest.mark.parametrize("version", PRODUCE)
def test_produce_requests_are_parsed_with_the_positions_of_records(version: int) -> None:
    data = produce_request(version)
    transactional_id, acks, timeout_ms, topics = hot.parse_produce(data, 0, len(data), version)
    assert (transactional_id, acks, timeout_ms) == ("t", -1, 1500)
    [(topic, parts)] = topics
    assert topic == (TOPIC_ID.bytes if version >= 13 else "a")
    assert [index for index, _, _ in parts] == [0, 7, 8]
    assert [data[start:end] if start >= 0 else None for _, start, end in parts] == [
        b"first",
        None,
        b"x" * 300,
    ]


@pytest.mark.parametrize("version", PRODUCE)
def test_produce_responses_are_read_by_kio(version: int) -> None:
    topic: str | bytes = TOPIC_ID.bytes if version >= 13 else "a"
    data = hot.produce_response(
        version, 9, [(topic, [(3, 0, 42, -1, 5, None, ()), (4, 2, -1, -1, -1, "no", [1, 300])])], 70
    )
    got = answer(data, Api.PRODUCE, version)
    [one, other] = got.responses[0].partition_responses
    assert (one.index, one.error_code, one.base_offset) == (3, ErrorCode.none, 42)
    assert other.error_code is ErrorCode.corrupt_message
    assert got.throttle_time == datetime.timedelta(milliseconds=70)
    if version >= 5:
        assert one.log_start_offset == 5
    if version >= 8:
        assert other.error_message == "no"
        assert [one.batch_index for one in other.record_errors] == [1, 300]


def answer(data: bytes, api: Api, version: int) -> Any:
    assert struct.unpack_from(">ii", data) == (len(data) - 4, 9)
    start = 8 + has_header_tags(api, version)
    got, size = entity_reader(load_response_schema(api, version))(data, start)
    assert start + size == len(data)
    return got


def fetch_request(version: int) -> bytes:
    schema = module(1, version, request=True)
    values: dict[str, Any] = {}
    if version >= 7:
        values["forgotten_topics_data"] = (
            make(schema.ForgottenTopic, topic="b", topic_id=TOPIC_ID, partitions=(1, 2)),
        )
    if version >= 15:
        values["replica_state"] = schema.ReplicaState(replica_id=5, replica_epoch=1)
    return written(
        make(
            schema.FetchRequest,
            replica_id=5,
            cluster_id="c",
            max_wait=datetime.timedelta(milliseconds=500),
            min_bytes=1,
            max_bytes=1000,
            isolation_level=1,
            session_id=11,
            session_epoch=12,
            topics=(
                make(
                    schema.FetchTopic,
                    topic="a",
                    topic_id=TOPIC_ID,
                    partitions=(
                        make(
                            schema.FetchPartition,
                            partition=3,
                            current_leader_epoch=4,
                            fetch_offset=99,
                            last_fetched_epoch=-1,
                            log_start_offset=-1,
                            partition_max_bytes=77,
                            high_watermark=5,
                        ),
                    ),
                ),
            ),
            rack_id="r",
            **values,
        )
    )


@pytest.mark.parametrize("version", FETCH)
def test_fetch_requests_read_as_kio_wrote_them(version: int) -> None:
    data = fetch_request(version)
    topic: str | bytes = TOPIC_ID.bytes if version >= 13 else "a"
    forgotten: str | bytes = TOPIC_ID.bytes if version >= 13 else "b"
    request = hot.parse_fetch(data, 0, len(data), version)
    assert (request.replica_id, request.max_wait_ms, request.min_bytes, request.max_bytes) == (5, 500, 1, 1000)
    assert request.isolation == 1
    assert (request.session_id, request.session_epoch) == ((11, 12) if version >= 7 else (0, -1))
    assert request.topics == [(topic, [(3, 4 if version >= 9 else -1, 99, 77)])]
    assert request.forgotten == ([(forgotten, [1, 2])] if version >= 7 else [])


@pytest.mark.parametrize("version", FETCH)
def test_fetch_responses_are_read_by_kio(version: int) -> None:
    topic: str | bytes = TOPIC_ID.bytes if version >= 13 else "a"
    large, small = memoryview(b"r" * 5000), b"s" * 10
    pieces = hot.fetch_response(
        version,
        9,
        30,
        0,
        44,
        [
            (
                topic,
                [
                    hot.FetchResult(0, 0, 10, 9, 1, [(7, 3)], large),
                    hot.FetchResult(1, 1, -1, -1, -1, None, None),
                    hot.FetchResult(2, 0, 5, 5, 0, [], small),
                ],
            )
        ],
    )
    assert any(piece is large for piece in pieces), "large records are not copied"
    got = answer(b"".join(pieces), Api.FETCH, version)
    one, two, three = got.responses[0].partitions
    assert (one.partition_index, one.high_watermark, one.last_stable_offset, bytes(one.records)) == (
        0,
        10,
        9,
        b"r" * 5000,
    )
    assert (one.aborted_transactions[0].producer_id, one.aborted_transactions[0].first_offset) == (7, 3)
    assert two.error_code is ErrorCode.offset_out_of_range
    assert bytes(three.records) == small
    if version >= 7:
        assert got.session_id == 44


@pytest.mark.parametrize("version", METADATA)
def test_metadata_responses_match_the_schema(version: int) -> None:
    topics = [
        metadata.Topic("a", b"i" * 16, (3, 4)),
        metadata.Topic("missing", bytes(16), (), error=3),
    ]
    data = b"".join(
        metadata.response(
            version,
            9,
            throttle_ms=5,
            node=metadata.Node(1, "höst", 9092),
            cluster_id="cluster",
            topics=[metadata.encode_topic(topic, version, 1) for topic in topics],
        )
    )
    assert struct.unpack_from(">ii", data) == (len(data) - 4, 9)
    got = decode(response_struct(3, version), data, 8 + (version >= 9))
    assert [(b.node_id, b.host, b.port) for b in got.brokers] == [(1, "höst", 9092)]
    one, missing = got.topics
    assert (one.name, missing.error_code) == ("a", 3)
    assert [(p.partition_index, p.leader_id, p.replica_nodes) for p in one.partitions] == [
        (0, 1, [1]),
        (1, 1, [1]),
    ]
    if version >= 2:
        assert got.cluster_id == "cluster"
    if version >= 7:
        assert [p.leader_epoch for p in one.partitions] == [3, 4]
    if version >= 10:
        assert one.topic_id == b"i" * 16
    _, size = entity_reader(load_response_schema(3, version))(data, 8 + (version >= 9))
    assert size == len(data) - 8 - (version >= 9)


@pytest.mark.parametrize("version", METADATA)
def test_topics_of_one_shape_encode_alike(version: int) -> None:
    topic = metadata.Topic("a", b"i" * 16, (1,))
    assert metadata.encode_topic(topic, version, 1) == metadata.encode_topic(topic, metadata.shape_of(version), 1)


@pytest.mark.parametrize("version", [3, 9, 13])
def test_every_cut_of_a_produce_request_is_malformed(version: int) -> None:
    data = produce_request(version)
    for cut in range(len(data)):
        with pytest.raises(MalformedRequest):
            hot.parse_produce(data, 0, cut, version)


@pytest.mark.parametrize("version", [4, 11, 12, 18])
def test_every_cut_of_a_fetch_request_is_malformed(version: int) -> None:
    data = fetch_request(version)
    for cut in range(len(data)):
        with pytest.raises(MalformedRequest):
            hot.parse_fetch(data, 0, cut, version)


@given(st.binary(max_size=300), st.integers(0, 18))
def test_random_bytes_are_parsed_or_malformed(data: bytes, version: int) -> None:
    for parse in (hot.parse_produce, hot.parse_fetch):
        try:
            parse(data, 0, len(data), version)
        except MalformedRequest:
            pass


@given(st.data(), st.sampled_from([3, 9, 13]))
def test_a_changed_byte_never_names_records_outside_the_request(data: st.DataObject, version: int) -> None:
    request = bytearray(produce_request(version))
    at = data.draw(st.integers(0, len(request) - 1))
    request[at] = data.draw(st.integers(0, 255))
    try:
        _, _, _, topics = hot.parse_produce(request, 0, len(request), version)
    except MalformedRequest:
        return
    for _, parts in topics:
        for _, start, end in parts:
            assert start == -1 or 0 <= start <= end <= len(request)


def test_the_number_of_topics_without_partitions_is_limited() -> None:
    """A hundred megabytes of them would take gigabytes, and seconds of the event loop."""
    many = 200_001
    count, topics = b"\xc2\x9a\x0c", b"\x04ttt\x01\x00" * many  # one more than there are, in seven bits each
    produce = b"\0" + bytes(6) + count + topics + b"\0"
    with pytest.raises(MalformedRequest, match="too many"):
        hot.parse_produce(produce, 0, len(produce), 9)
    fetch = bytes(4 * 4 + 1 + 8)
    for asked in (fetch + count + topics + b"\x01\x01\x00", fetch + b"\x01" + count + topics + b"\x01\x00"):
        with pytest.raises(MalformedRequest, match="too many"):
            hot.parse_fetch(asked, 0, len(asked), 12)
