"""The checklist of bad input, item by item: bad input affects only its sender."""

import asyncio
import struct
import tracemalloc
from typing import Any

import cramjam
import pytest

from headrace.listeners.kafka.errors import Code
from headrace.record.batch.crc32c import crc32c
from headrace.record.layout import (
    ATTRIBUTES_AT,
    COUNT_AT,
    CRC_AT,
    LAST_OFFSET_DELTA_AT,
    LENGTH_AT,
    LZ4,
    MAGIC_AT,
    MAX_TIMESTAMP_AT,
    RECORDS_AT,
    ZSTD,
)
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import response_struct
from tests.listeners.kafka.world import SECONDS, Client, World, alive, batch

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("no_bug")]


SETTINGS = {"decompressed_bytes_max": 1 << 20}


async def prepare(world: World) -> None:
    await world.topic("t")
    await world.topic("small", batch_bytes_max=2000)


# 15. The size of a request.


@pytest.mark.parametrize("size", [-1, 0, -(2**31), 100 * 1024 * 1024 + 1, 2**31 - 1])
async def test_an_invalid_request_size_closes_the_connection(world: World, client: Client, size: int) -> None:
    client.send_bytes(struct.pack(">i", size) + b"x" * 10)
    assert await client.is_closed()
    await alive(world)


async def test_a_large_announced_size_allocates_no_memory(world: World) -> None:
    tracemalloc.start()
    try:
        for _ in range(10):
            slow = await world.client()
            slow.send_bytes(struct.pack(">i", 99 * 1024 * 1024) + b"x")
        await alive(world)
        assert tracemalloc.get_traced_memory()[1] < 10 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"AMQP\0\0\x09\x01", b"\x16\x03\x01\x02\0"])
async def test_other_protocols_close_the_connection(world: World, client: Client, data: bytes) -> None:
    client.send_bytes(data + bytes(100))
    assert await client.is_closed()
    await alive(world)


# 16. Unknown APIs and versions.


async def test_an_unknown_api_versions_version_is_answered_in_version_0(client: Client) -> None:
    client.send(Api.API_VERSIONS, 99, b"\x01\x01\0", flexible=True)
    data = await client.receive()
    [code] = struct.unpack_from(">h", data, 4)
    assert code == Code.UNSUPPORTED_VERSION


@pytest.mark.parametrize(("api", "version"), [(999, 0), (-1, 0), (3, 99), (3, -1), (4, 0), (17, 2)])
async def test_unknown_apis_and_versions_close_the_connection(
    world: World, client: Client, api: int, version: int
) -> None:
    client.send(api, version, b"", flexible=False)
    assert await client.is_closed()
    await alive(world)


# 17. False counts, tags and lengths.


@pytest.mark.parametrize(
    ("api", "version", "body"),
    [
        (Api.METADATA, 0, struct.pack(">i", 2**31 - 1)),
        (Api.METADATA, 12, b"\xff\xff\xff\xff\x0f"),
        (Api.METADATA, 12, b"\x80" * 11),
        (Api.JOIN_GROUP, 9, b"\2g" + bytes(8) + b"\1\0\2c" + b"\xff\xff\xff\xff\x0f"),
        (Api.JOIN_GROUP, 9, b"\0"),
        (Api.FETCH, 12, bytes(25) + b"\xff\xff\xff\xff\x0f"),
        (Api.PRODUCE, 9, b"\0\xff\xff" + bytes(4) + b"\xff\xff\xff\xff\x0f"),
        (Api.HEARTBEAT, 0, b"\0\4\xff\xff\xff\xff" + bytes(8)),
        # Complete requests with one mistake: null where null is not allowed, and a varint of six bytes.
        (Api.HEARTBEAT, 4, b"\0" + bytes(4) + b"\2m\0\0"),
        (Api.HEARTBEAT, 0, b"\xff\xff" + bytes(4) + b"\0\1m"),
        (Api.LEAVE_GROUP, 4, b"\2g\0\0"),
        (Api.METADATA, 12, b"\x81\x80\x80\x80\x80\0" + bytes(3)),
    ],
)
async def test_false_counts_and_lengths_close_the_connection(
    world: World, client: Client, api: Api, version: int, body: bytes
) -> None:
    client.send(api, version, body)
    assert await client.is_closed()
    await alive(world)


async def test_millions_of_tags_are_skipped_quickly(world: World, client: Client) -> None:
    tags = 3_000_000
    body = b"\1" + b"\0\0" + b"\xc0\x8d\xb7\x01" + b"\x32\0" * tags
    client.send(Api.METADATA, 12, body)
    assert await client.receive()
    await alive(world)


async def test_a_partial_request_affects_no_other_client(world: World, client: Client) -> None:
    client.send_bytes(struct.pack(">i", 1000) + b"x" * 500)
    await alive(world)
    client.close()
    await alive(world)


# 19. Batches.


SECOND_DELTA_AT = RECORDS_AT + 10 + 3  # after the first record: length, attributes and timestamp of the second


def broken(change: dict[int, bytes], *, fix_crc: bool = True) -> bytearray:
    data = batch(b"one", b"two")
    for at, value in change.items():
        data[at : at + len(value)] = value
    if fix_crc:
        data[CRC_AT : CRC_AT + 4] = crc32c(data[CRC_AT + 4 :]).to_bytes(4, "big")
    return data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (broken({80: b"\xff"}, fix_crc=False), Code.CORRUPT_MESSAGE),
        (broken({MAGIC_AT: b"\1"}), Code.INVALID_RECORD),
        (broken({MAGIC_AT: b"\0"}), Code.INVALID_RECORD),
        (broken({MAGIC_AT: b"\3"}), Code.CORRUPT_MESSAGE),
        (broken({COUNT_AT: struct.pack(">i", 3)}), Code.INVALID_RECORD),
        (broken({COUNT_AT: struct.pack(">i", -1)}), Code.INVALID_RECORD),
        (broken({LAST_OFFSET_DELTA_AT: struct.pack(">i", 7)}), Code.INVALID_RECORD),
        (broken({LENGTH_AT: struct.pack(">i", 10)}), Code.INVALID_RECORD),
        (broken({SECOND_DELTA_AT: b"\4"}), Code.INVALID_RECORD),
        (broken({ATTRIBUTES_AT: b"\0\x08", MAX_TIMESTAMP_AT: b"\x7f"}), Code.INVALID_TIMESTAMP),
        (broken({LENGTH_AT: struct.pack(">i", 2**31 - 1)}), Code.MESSAGE_TOO_LARGE),
        (bytearray(b""), Code.INVALID_RECORD),
        (bytearray(b"short"), Code.INVALID_RECORD),
    ],
)
async def test_an_invalid_batch_gets_kafkas_code_and_the_connection_stays_open(
    world: World, client: Client, data: bytearray, code: Code
) -> None:
    end = world.broker.streams.get("t").partitions[0].end_offset
    assert (await client.produce("t", data)).error_code == code
    assert world.broker.streams.get("t").partitions[0].end_offset == end, "nothing of it was stored"
    assert (await client.produce("t", batch(b"fine"))).error_code == 0


SKIPPABLE_FRAME = struct.pack("<II", 0x184D2A50, 5) + b"hello"


def lz4_frame(data: bytes, *, linked: bool = False) -> bytes:
    frame = cramjam.lz4.Compressor(level=1, content_checksum=False, block_linked=linked)
    frame.compress(data)
    return bytes(frame.finish())


def lz4_batch(*frames: bytes) -> bytes:
    data = bytearray(batch(b"one" * 50, b"two" * 50))[:RECORDS_AT] + b"".join(frames)
    data[ATTRIBUTES_AT : ATTRIBUTES_AT + 2] = struct.pack(">h", LZ4)
    data[LENGTH_AT : LENGTH_AT + 4] = struct.pack(">i", len(data) - LENGTH_AT - 4)
    data[CRC_AT : CRC_AT + 4] = crc32c(data[CRC_AT + 4 :]).to_bytes(4, "big")
    return bytes(data)


async def test_lz4_data_that_java_and_librdkafka_cannot_read_is_refused(world: World, client: Client) -> None:
    """Was stored. Java's consumer then ended with an exception, and librdkafka's delivered none of the records."""
    whole = bytes(batch(b"one" * 50, b"two" * 50))[RECORDS_AT:]
    frame, half = lz4_frame(whole), len(whole) // 2
    partition = world.broker.streams.get("t").partitions[0]
    end = partition.end_offset
    for frames in (
        (lz4_frame(whole[:half]), lz4_frame(whole[half:])),
        (SKIPPABLE_FRAME, frame),
        (lz4_frame(b""), frame),
        (frame, SKIPPABLE_FRAME),
        (frame, lz4_frame(b"")),
        (lz4_frame(whole, linked=True),),
    ):
        assert (await client.produce("t", lz4_batch(*frames))).error_code == Code.INVALID_RECORD
    assert partition.end_offset == end, "nothing of it was stored"
    assert (await client.produce("t", lz4_batch(frame))).error_code == 0


async def test_a_missing_key_is_reported_even_if_later_records_are_invalid(world: World, client: Client) -> None:
    await world.topic("compacted")
    await world.broker.streams.configure("compacted", {"cleanup_policy": "compact"})
    refused = await client.produce("compacted", broken({SECOND_DELTA_AT: b"\4"}))
    assert refused.error_code == Code.INVALID_RECORD
    assert "key" in refused.error_message


async def test_a_batch_over_the_topics_limit_is_too_large(client: Client) -> None:
    assert (await client.produce("small", batch(b"x" * 3000))).error_code == Code.MESSAGE_TOO_LARGE
    assert (await client.produce("small", batch(b"x" * 100))).error_code == 0


async def test_a_batch_that_decompresses_past_the_limit_is_refused(client: Client) -> None:
    bomb = batch(bytes(8 << 20), codec=4)
    assert len(bomb) < 10_000
    assert (await client.produce("t", bomb)).error_code in (Code.MESSAGE_TOO_LARGE, Code.INVALID_RECORD)


TAKEN, TOO_LARGE, LATER = Code.NONE, Code.MESSAGE_TOO_LARGE, Code.THROTTLING_QUOTA_EXCEEDED


@pytest.mark.parametrize(
    ("sizes", "codes"),
    [((700_000, 700_000, 100), (TAKEN, LATER, LATER)), ((1 << 21, 100_000, 100), (TOO_LARGE, LATER, LATER))],
)
async def test_a_request_decompresses_to_no_more_than_one_batch_may(
    client: Client, sizes: tuple[int, ...], codes: tuple[Code, ...]
) -> None:
    """A megabyte of batches of zeros blocked the broker for minutes. Batches that were not accepted may be sent
    again."""
    batches = [bytes(batch(bytes(size), codec=ZSTD)) for size in sizes]
    parts = [{"index": 0, "records": data} for data in batches]
    answer = await client.call(
        Api.PRODUCE, 9, acks=-1, timeout=1000, topic_data=[{"name": "t", "partition_data": parts}]
    )
    told = [one.error_code for one in answer.responses[0].partition_responses]
    assert sorted(told) == sorted(codes)
    assert (await client.produce("t", batches[1])).error_code == 0


async def test_a_maximal_topic_name_beside_a_good_batch_is_answered(world: World, client: Client) -> None:
    """Version 8 has 32,767 bytes for the message that contains the name, and the response is encoded when a round is
    done."""
    data, name = bytes(batch(b"x")), b"z" * 0x7FFF
    parts = struct.pack(">iii", 1, 0, len(data)) + data
    topics = [struct.pack(">h", len(topic)) + topic + parts for topic in (b"t", name)]
    client.send(Api.PRODUCE, 8, struct.pack(">hhii", -1, -1, 1000, 2) + b"".join(topics))
    good, refused = decode(response_struct(Api.PRODUCE, 8), await client.receive(), 4).responses
    assert good.partition_responses[0].error_code == 0
    assert refused.name.encode() == name
    assert refused.partition_responses[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert (await client.produce("t", data)).error_code == 0


async def test_an_error_message_with_a_maximal_name_is_truncated(client: Client) -> None:
    wanted = {"resource_type": 2, "resource_name": "z" * 0x7FFF, "configuration_keys": None}
    answer = await client.call(Api.DESCRIBE_CONFIGS, 3, resources=[wanted])
    assert answer.results[0].error_code != 0 and len(answer.results[0].error_message) == 1000


async def test_invalid_acks_are_refused(client: Client) -> None:
    assert (await client.produce("t", batch(b"x"), acks=2)).error_code == Code.INVALID_REQUIRED_ACKS


async def test_refused_batches_are_not_counted(world: World, client: Client) -> None:
    stats = world.context.stats

    async def counted(data: bytearray, code: Code = Code.NONE) -> tuple[int, int]:
        before = stats.messages_in, stats.bytes_in
        assert (await client.produce("t", data)).error_code == code
        return stats.messages_in - before[0], stats.bytes_in - before[1]

    first, later = (batch(b"x", b"y", producer_id=7, producer_epoch=0, base_sequence=number) for number in (0, 9))
    assert await counted(batch(b"x", control=True), Code.INVALID_RECORD) == (0, 0)
    assert await counted(first) == (2, len(first))
    assert await counted(later, Code.OUT_OF_ORDER_SEQUENCE_NUMBER) == (0, 0)


@pytest.mark.parametrize(
    "kind",
    [{}, {"transactional": True}, {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}],
    ids=["unknown", "of a transaction", "of a producer"],
)
async def test_a_control_batch_from_a_client_is_refused(client: Client, kind: dict[str, Any]) -> None:
    forged = batch(b"x", control=True, **kind)
    assert (await client.produce("t", forged)).error_code == Code.INVALID_RECORD


# 20. Names.


@pytest.mark.parametrize("topic", ["", ".", "..", "a/b", "../../etc/passwd", "x" * 250, "ä", "a\0b", "a b"])
async def test_invalid_topic_names_are_refused(client: Client, topic: str) -> None:
    answer = await client.call(Api.METADATA, 12, topics=[{"name": topic}])
    assert answer.topics[0].error_code == Code.INVALID_TOPIC
    made = await client.call(Api.CREATE_TOPICS, 7, topics=[{"name": topic, "num_partitions": 1}])
    assert made.topics[0].error_code == Code.INVALID_TOPIC
    assert (await client.produce(topic, batch(b"x"))).error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_name_that_differs_from_a_topics_only_in_dots_and_underscores_is_refused(
    world: World, client: Client
) -> None:
    """As in Kafka, whose metrics would have the same name; also for automatically created topics."""
    await world.topic("a.b_c")
    for name, code in (("a_b.c", Code.INVALID_TOPIC), ("a.b_c", Code.TOPIC_ALREADY_EXISTS), ("a-b.c", Code.NONE)):
        for validate_only in (True, False):
            topics = [{"name": name, "num_partitions": 1, "replication_factor": 1}]
            made = await client.call(Api.CREATE_TOPICS, 7, topics=topics, validate_only=validate_only)
            assert made.topics[0].error_code == code, name
            if code == Code.INVALID_TOPIC:
                assert made.topics[0].error_message == "Topic 'a_b.c' collides with existing topic: a.b_c"
    answer = await client.call(Api.METADATA, 12, topics=[{"name": "a_b_c"}, {"name": "a.b_c"}])
    assert [topic.error_code for topic in answer.topics] == [Code.INVALID_TOPIC, Code.NONE]
    await client.call(Api.DELETE_TOPICS, 6, topics=[{"name": "a.b_c"}])
    answer = await client.call(Api.METADATA, 12, topics=[{"name": "a_b_c"}])
    assert answer.topics[0].error_code == Code.NONE


async def test_of_two_colliding_topics_created_at_once_one_is_created(world: World) -> None:
    one, other = await world.client(), await world.client()
    made = await asyncio.gather(
        one.call(Api.CREATE_TOPICS, 7, topics=[{"name": "at.once", "num_partitions": 1, "replication_factor": 1}]),
        other.call(Api.CREATE_TOPICS, 7, topics=[{"name": "at_once", "num_partitions": 1, "replication_factor": 1}]),
    )
    assert sorted(answer.topics[0].error_code for answer in made) == [Code.NONE, Code.INVALID_TOPIC]


async def test_queues_may_have_colliding_names_and_kafka_reads_both(world: World, client: Client) -> None:
    await world.broker.streams.create("q.x", 1, {})
    await world.broker.streams.create("q_x", 1, {})
    answer = await client.call(Api.METADATA, 12, topics=[{"name": "q.x"}, {"name": "q_x"}])
    assert [topic.error_code for topic in answer.topics] == [Code.NONE, Code.NONE]
    assert (await client.produce("q_x", batch(b"x"))).error_code == Code.NONE


# 22. Groups.


async def join(client: Client, group: str, **fields: Any) -> Any:
    asked = {
        "session_timeout": 60_000,  # no test sends heartbeats
        "rebalance_timeout": 60_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b""}],
        **fields,
    }
    return await client.call(Api.JOIN_GROUP, 5, group_id=group, **asked)


async def test_metadata_of_ten_megabytes_closes_the_connection(world: World, client: Client) -> None:
    body = struct.pack(">h", 1) + b"g" + struct.pack(">ii", 9000, 9000) + b"\0\0\xff\xff\0\1c"
    body += struct.pack(">ih", 1, 1) + b"r" + struct.pack(">i", 10 << 20) + bytes(10 << 20)
    client.send(Api.JOIN_GROUP, 5, body)
    assert await client.is_closed()
    await alive(world)


async def test_a_truncated_name_is_not_read_from_a_reused_buffer(world: World, client: Client) -> None:
    """Large buffers are reused, and may be longer than the request."""
    assert (await client.produce("t", batch(b"secret" * 100_000))).error_code == 0
    other = await world.client()
    names = struct.pack(">h", 30_000) + b"a" * 30_000
    body = struct.pack(">i", 11) + 10 * names + struct.pack(">h", 30_000) + b"a"  # 29,999 bytes are missing
    other.send(Api.METADATA, 1, body)
    assert await other.is_closed()
    await alive(world)


@pytest.mark.parametrize(("version", "who", "instance"), [(3, b"z" * 0x7FFF, None), (5, b"me", b"z" * 0x7FFF)])
async def test_a_long_member_id_does_not_close_other_connections(
    world: World, client: Client, version: int, who: bytes, instance: bytes | None
) -> None:
    """The leader gets the ids of all members, in a version that has 32,767 bytes for each."""
    group = f"long-{version}"
    leader = (await join(client, group)).member_id
    assert (await join(client, group, member_id=leader)).error_code == 0
    body = struct.pack(">h", len(group)) + group.encode() + struct.pack(">iih", 60_000, 60_000, 0)
    if instance is not None:
        body += struct.pack(">h", len(instance)) + instance
    body += b"\0\x08consumer" + struct.pack(">i", 1) + b"\0\x05range" + struct.pack(">i", 0)
    request = struct.pack(">hhih", Api.JOIN_GROUP, version, 1, len(who)) + who + body
    other = await world.client()
    other.send_bytes(struct.pack(">i", len(request)) + request)
    async with asyncio.timeout(SECONDS):
        while len(world.broker.coordination.groups.known_classic(group).members) < 2:
            await asyncio.sleep(0.001)
    assert len((await join(client, group, member_id=leader)).members) == 2
    await other.receive()


async def test_a_string_over_32767_bytes_closes_the_connection(world: World, client: Client) -> None:
    name = b"z" * 0x8000
    client.send(Api.METADATA, 9, b"\x02" + b"\x81\x80\x02" + name + b"\0\1\0\0\0")
    assert await client.is_closed()
    await alive(world)


async def test_a_forged_member_id_is_unknown(client: Client) -> None:
    assert (await join(client, "g", member_id="forged")).error_code == Code.UNKNOWN_MEMBER_ID
    beat = await client.call(Api.HEARTBEAT, 4, group_id="g", member_id="forged", generation_id=1)
    assert beat.error_code == Code.UNKNOWN_MEMBER_ID


async def test_a_group_without_a_name_is_refused(client: Client) -> None:
    assert (await join(client, "")).error_code == Code.INVALID_GROUP_ID


# 23. Sequences, epochs, transactions of other producers.


async def test_sequence_gaps_stale_epochs_and_unknown_producers_get_their_own_codes(
    world: World, client: Client
) -> None:
    await world.topic("numbered")
    producer = await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout=1000)
    pid = producer.producer_id

    def numbered(sequence: int, epoch: int = 1) -> bytearray:
        return batch(b"x", producer_id=pid, producer_epoch=epoch, base_sequence=sequence)

    assert (await client.produce("numbered", numbered(0))).base_offset == 0
    assert (await client.produce("numbered", numbered(1))).base_offset == 1
    assert (await client.produce("numbered", numbered(1))).base_offset == 1, "a repeated batch gets its first offset"
    assert (await client.produce("numbered", numbered(5))).error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await client.produce("numbered", numbered(2, 0))).error_code == Code.INVALID_PRODUCER_EPOCH
    stranger = await client.call(
        Api.END_TXN, 3, transactional_id="nobody's", producer_id=pid, producer_epoch=0, committed=True
    )
    assert stranger.error_code == Code.INVALID_PRODUCER_ID_MAPPING


async def test_a_transactional_batch_outside_of_a_transaction_is_refused(world: World, client: Client) -> None:
    await world.topic("outside")
    producer = await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id="mine", transaction_timeout=1000)
    data = batch(b"x", producer_id=producer.producer_id, producer_epoch=0, base_sequence=0, transactional=True)
    assert (await client.produce("outside", data, of="mine")).error_code == Code.INVALID_TXN_STATE


@pytest.mark.parametrize("options", [{}, {"transactional": True}], ids=["numbered", "of a transaction"])
async def test_an_idempotent_batch_after_a_plain_one_is_refused_with_it(
    world: World, client: Client, options: dict[str, Any]
) -> None:
    """Its sequence would not be checked, and its transaction could never be ended."""
    topic = await world.topic(f"behind-{len(options)}")
    data = batch(b"x") + batch(b"y", producer_id=7, producer_epoch=0, base_sequence=5, **options)
    assert (await client.produce(topic, data)).error_code == Code.INVALID_RECORD
    assert (await client.produce(topic, batch(b"x") + batch(b"y"))).base_offset == 0


# Slow readers and many requests at once.


async def test_pipelined_requests_are_answered_in_order(client: Client) -> None:
    ids = [client.send(Api.API_VERSIONS, 0, b"") for _ in range(300)]
    assert [struct.unpack_from(">i", await client.receive())[0] for _ in ids] == ids


async def test_a_client_that_does_not_read_responses_is_not_read(world: World) -> None:
    await world.topic("unread")
    writer = await world.client()
    await writer.produce("unread", batch(b"x" * 1_000_000))
    lazy = await world.client()
    request = struct.pack(">iiiibii", -1, 0, 1, 1 << 24, 0, 0, -1)
    request += struct.pack(">ih", 1, 6) + b"unread" + struct.pack(">iiiqqi", 1, 0, -1, 0, -1, 1 << 24)
    request += struct.pack(">ih", 0, 0)
    for _ in range(200):  # 200 MB of responses, if they were all written
        lazy.send(Api.FETCH, 11, request)
    await alive(world)
    [connection] = [one for one in world.listener.connections if one.peer == lazy.address]
    async with asyncio.timeout(SECONDS):
        while not connection._reading_paused:
            await asyncio.sleep(0.001)
    assert len(connection._waiting) <= 200
    assert connection._transport.get_write_buffer_size() < 64 << 20
    lazy.close()
