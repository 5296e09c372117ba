"""Responses that the clients of the interop tests do not request, or whose errors they would not notice."""

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.streams.partition import Partition, ReadWaits
from headrace.errors import StorageFailed
from headrace.listeners.kafka.admin import topics
from headrace.listeners.kafka.data.fetch import Fetch
from headrace.listeners.kafka.errors import Code
from headrace.record import codec as records
from headrace.wire.kafka import hot, metadata
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.frames import FIRST_BYTES
from tests.listeners.kafka.world import Client, Closed, World, batch, world_at

pytestmark = pytest.mark.asyncio(loop_scope="module")
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5


async def offset_at(client: Client, topic: str, timestamp: int, isolation: int = 0) -> tuple[int, int]:
    parts = [{"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp}]
    answer = await client.call(
        Api.LIST_OFFSETS, 10, isolation_level=isolation, topics=[{"name": topic, "partitions": parts}]
    )
    [part] = answer.topics[0].partitions
    assert part.error_code == 0
    return part.offset, part.timestamp


def timed(*times_ms: int) -> bytes:
    return bytes(records.build([(None, b"x", (), time_ms) for time_ms in times_ms]))


async def test_offsets_by_every_kind_of_time(world: World, client: Client) -> None:
    await world.topic("times")
    assert await offset_at(client, "times", MAX_TIMESTAMP) == (-1, -1), "there are no records"
    await client.produce("times", timed(1000, 5000, 3000))
    await client.produce("times", timed(4000, 2000))
    assert await offset_at(client, "times", EARLIEST) == (0, -1)
    assert await offset_at(client, "times", EARLIEST_LOCAL) == (0, -1)
    assert await offset_at(client, "times", LATEST) == (5, -1)
    assert await offset_at(client, "times", MAX_TIMESTAMP) == (1, 5000)
    assert await offset_at(client, "times", LATEST_TIERED) == (-1, -1)
    assert await offset_at(client, "times", 0) == (0, 1000)
    assert await offset_at(client, "times", 1001) == (1, 5000), "the first at or after the time, in log order"
    assert await offset_at(client, "times", 5001) == (-1, -1)


async def test_a_buffer_is_reused_only_if_no_write_can_be_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the waiters are notified at once, while the write of their batch may still be running: the next
    client's bytes, read into the same buffer, would be written in its place."""
    free: list[int] = []
    with pytest.raises(StorageFailed):  # raised again by the close
        async with world_at(tmp_path) as failing:
            await failing.topic("large")
            client = await failing.client()
            large = batch(bytes(2 * FIRST_BYTES))
            shard, pool = failing.broker.shard, failing.context.pool
            for fails in (False, True):
                if fails:
                    monkeypatch.setattr(shard.staging, "start_round", lambda: None)
                waiting = asyncio.create_task(client.produce("large", large))
                while fails and not shard.pending_bytes:
                    await asyncio.sleep(0.001)
                if fails:
                    free.append(pool.free_bytes)
                    shard.fail(OSError(errno.EIO, "Input/output error"))
                assert (await waiting).error_code == (Code.KAFKA_STORAGE_ERROR if fails else 0)
                free.append(pool.free_bytes)
    before, during, after = free
    assert during < before, "normally the buffer is reused"
    assert after == during


async def test_a_response_that_fails_closes_only_its_own_connection(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = await world.topic("unanswered"), await world.client()
    with monkeypatch.context() as broken:
        broken.setattr(hot, "produce_response", lambda *_: 1 // 0)
        with pytest.raises(Closed):
            await client.produce(topic, batch(b"a"))
    assert "closed after a bug" in caplog.text
    assert (await other.produce(topic, batch(b"b"))).base_offset == 1


async def test_a_fetch_that_fails_closes_only_its_own_connection(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = await world.topic("unread"), await world.client()
    waits = asyncio.create_task(client.fetch(topic, max_wait=60_000))
    [log] = [partition.log for partition in world.broker.streams.get(topic).partitions]
    while not log._waiters:
        await asyncio.sleep(0)
    with monkeypatch.context() as broken:
        broken.setattr(hot, "fetch_response", lambda *_: 1 // 0)
        assert (await other.produce(topic, batch(b"a"))).error_code == 0
        with pytest.raises(Closed):
            await waits
    assert "closed after a bug" in caplog.text


@pytest.mark.parametrize(("asked", "epoch", "end"), [(3, 3, 2), (4, 3, 2), (7, 7, 4)])
async def test_an_epoch_ends_where_the_next_one_begins(
    world: World, client: Client, asked: int, epoch: int, end: int
) -> None:
    """The request of a consumer after a broker was killed, to detect truncation."""
    topic = await world.topic(f"lived-{asked}")
    log = world.broker.streams.get(topic).partitions[0].log
    await client.produce(topic, batch(b"a", b"b", b"c", b"d"))
    log.epoch, log.epochs = 7, [(3, 0), (7, 2)]  # as if it had been killed after its second record
    wanted = [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": asked}]
    answer = await client.call(
        Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=[{"topic": topic, "partitions": wanted}]
    )
    [part] = answer.topics[0].partitions
    assert (part.error_code, part.leader_epoch, part.end_offset) == (0, epoch, end)


@pytest.mark.parametrize("asked", [8, -1])
async def test_a_leader_epoch_that_never_was_has_no_end_offset(world: World, client: Client, asked: int) -> None:
    """A client with a future epoch has read another log, which an older copy has replaced: it starts over, as with
    Kafka, instead of continuing in the middle of other records."""
    topic = await world.topic(f"never{asked}")
    log = world.broker.streams.get(topic).partitions[0].log
    await client.produce(topic, batch(b"a", b"b"))
    log.epoch, log.epochs = 7, [(3, 0), (7, 1)]
    wanted = [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": asked}]
    answer = await client.call(
        Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=[{"topic": topic, "partitions": wanted}]
    )
    [part] = answer.topics[0].partitions
    assert (part.error_code, part.leader_epoch, part.end_offset) == (0, -1, -1)


@pytest.mark.parametrize(
    ("given", "code"),
    [([[1]], Code.INVALID_REPLICA_ASSIGNMENT), ([[1], [9]], Code.INVALID_REPLICA_ASSIGNMENT), ([[1], [1]], Code.NONE)],
)
async def test_replica_assignments_must_name_this_broker_only(
    world: World, client: Client, given: list[list[int]], code: int
) -> None:
    topic = await world.topic(f"grows-{given}".translate(str.maketrans("[], ", "....")))
    where = [{"broker_ids": ids} for ids in given]
    asked = [{"name": topic, "count": 3, "assignments": where}]
    [answer] = (await client.call(Api.CREATE_PARTITIONS, 3, topics=asked, timeout=1000)).results
    assert answer.error_code == code
    assert len(world.broker.streams.get(topic).partitions) == (1 if code else 3)


async def test_another_leader_epoch_is_fenced_or_unknown(world: World, client: Client) -> None:
    await world.topic("epochs")
    epoch = world.broker.streams.get("epochs").partitions[0].log.epoch
    for known, code in ((epoch, 0), (epoch - 1, Code.FENCED_LEADER_EPOCH), (epoch + 1, Code.UNKNOWN_LEADER_EPOCH)):
        if known < 0:
            continue
        wanted = [{"partition": 0, "current_leader_epoch": known, "leader_epoch": epoch}]
        answer = await client.call(
            Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=[{"topic": "epochs", "partitions": wanted}]
        )
        assert answer.topics[0].partitions[0].error_code == code


async def test_cold_data_is_loaded_while_other_partitions_have_records_in_memory(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition that always has new records in memory starved the cold partitions of the same consumer."""
    names = [await world.topic(name) for name in ("colder", "cold", "warm")]
    for name in names:
        await client.produce(name, batch(name.encode()))
    logs = [world.broker.streams.get(name).partitions[0].log for name in names[:2]]
    records_of = Fetch._records

    class OnDisk(ReadWaits):
        def __init__(self, log: Any) -> None:
            self.log = log

        def then(self, callback: Callable[[], object]) -> None:
            logs.remove(self.log)
            callback()

    def cold(self: Fetch, partition: Partition, *args: Any) -> Any:
        if partition.log in logs:
            raise OnDisk(partition.log)
        return records_of(self, partition, *args)

    monkeypatch.setattr(Fetch, "_records", cold)
    wanted = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}]
    asked = [{"topic": name, "partitions": wanted} for name in names]
    for count in (1, 2, 3):
        answer = await client.call(
            Api.FETCH, 12, topics=asked, max_wait=0, min_bytes=1, max_bytes=1 << 24, session_epoch=-1
        )
        assert sum(bool(topic.partitions[0].records) for topic in answer.responses) == count


async def test_a_fetch_waits_for_min_bytes(world: World, client: Client) -> None:
    await world.topic("patient")
    writer = await world.client()
    messages, sent = world.context.stats.messages_out, world.context.stats.bytes_out
    waiting = asyncio.ensure_future(client.fetch("patient", max_wait=60_000, min_bytes=1000))
    one = batch(b"x" * 400)
    for _ in range(2):
        await writer.produce("patient", one)
        await asyncio.sleep(0.02)
        assert not waiting.done()
    await writer.produce("patient", one)
    assert len((await waiting).records) >= 1000
    assert world.context.stats.messages_out - messages == 3, "counted once, when it is sent"
    assert world.context.stats.bytes_out - sent == 3 * len(one)


async def test_only_the_first_batch_may_exceed_max_bytes(world: World, client: Client) -> None:
    """librdkafka closes the connection when a response exceeds its fetch.max.bytes, and repeats the request. A fetch
    that is full does not wait, either."""
    await world.topic("tight", 3)
    for partition in range(3):
        await client.produce("tight", batch(b"x" * 1000), partition=partition)
        await client.produce("tight", batch(b"y" * 100), partition=partition)
    for max_bytes, part_bytes, sizes in (
        (1, 1 << 20, [1, 0, 0]), (1500, 1 << 20, [2, 0, 0]), (2400, 1 << 20, [2, 1, 0]), (1 << 20, 200, [1, 0, 0]),
    ):  # fmt: skip
        wanted = [{"partition": n, "fetch_offset": 0, "partition_max_bytes": part_bytes} for n in range(3)]
        limits = {"max_wait": 10 * 60_000, "min_bytes": 1 << 20, "max_bytes": max_bytes, "session_epoch": -1}
        answer = await client.call(Api.FETCH, 12, topics=[{"topic": "tight", "partitions": wanted}], **limits)
        [topic] = answer.responses
        assert [len(records.scan(part.records)) for part in topic.partitions] == sizes


async def transaction(client: Client, name: str, topic: str) -> Any:
    producer = await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id=name, transaction_timeout=60_000)
    await client.call(
        Api.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.producer_epoch,
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )
    data = batch(
        b"x", b"y", producer_id=producer.producer_id, producer_epoch=producer.producer_epoch, base_sequence=0,
        transactional=True,
    )  # fmt: skip
    assert (await client.produce(topic, bytes(data), of=name)).error_code == 0
    return producer


async def test_producers_and_transactions_are_described(world: World, client: Client) -> None:
    await world.topic("described")
    await client.produce("described", batch(b"before"))
    producer = await transaction(client, "mine", "described")
    asked = [{"name": "described", "partition_indexes": [0, 7]}]
    known, unknown = (await client.call(Api.DESCRIBE_PRODUCERS, 0, topics=asked)).topics[0].partitions
    [active] = known.active_producers
    assert (active.producer_id, active.producer_epoch) == (producer.producer_id, producer.producer_epoch)
    assert (active.last_sequence, active.current_txn_start_offset) == (1, 1)
    assert unknown.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    mine, nobodys = (
        await client.call(Api.DESCRIBE_TRANSACTIONS, 0, transactional_ids=["mine", "nobody's"])
    ).transaction_states
    assert (mine.transaction_state, mine.producer_id) == ("Ongoing", producer.producer_id)
    assert [(one.topic, one.partitions) for one in mine.topics] == [("described", [0])]
    assert nobodys.error_code == Code.TRANSACTIONAL_ID_NOT_FOUND
    listed = await client.call(Api.LIST_TRANSACTIONS, 1, state_filters=["Ongoing", "Nonsense"])
    assert [one.transactional_id for one in listed.transaction_states] == ["mine"]
    assert listed.unknown_state_filters == ["Nonsense"]
    for pattern, found in (("m.*|x", ["mine"]), ("in", []), ("", ["mine"]), (None, ["mine"])):
        listed = await client.call(Api.LIST_TRANSACTIONS, 2, transactional_id_pattern=pattern)
        assert [one.transactional_id for one in listed.transaction_states] == found, pattern
    refused = await client.call(Api.LIST_TRANSACTIONS, 2, transactional_id_pattern="(mine")
    assert (refused.error_code, refused.transaction_states) == (Code.INVALID_REGULAR_EXPRESSION, [])
    assert await offset_at(client, "described", LATEST, isolation=1) == (1, -1), "the last stable offset"
    ended = await client.call(
        Api.END_TXN, 3, transactional_id="mine", producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch, committed=False,
    )  # fmt: skip
    assert ended.error_code == 0
    aborted = await client.fetch("described", isolation_level=1)
    assert [(one.producer_id, one.first_offset) for one in aborted.aborted_transactions] == [(producer.producer_id, 1)]
    assert (await client.call(Api.LIST_TRANSACTIONS, 1, state_filters=["Ongoing"])).transaction_states == []


@pytest.mark.parametrize("codec", [0, 1])
async def test_a_compacted_topic_refuses_records_without_a_key(world: World, client: Client, codec: int) -> None:
    """It could never be compacted away. Kafka returns INVALID_RECORD, which clients report to their callers."""
    topic = f"compacted-{codec}"
    await world.topic(topic)
    keyless = records.build([(b"k", b"v", (), 1), (None, b"v", (), 1)], codec=codec)
    assert (await client.produce(topic, keyless)).error_code == 0, "not compacted yet"
    await world.broker.streams.configure(topic, {"cleanup_policy": "compact,delete"})
    refused = await client.produce(topic, keyless)
    assert refused.error_code == Code.INVALID_RECORD
    assert "key" in refused.error_message
    # Clients report the other records of the batch as valid.
    assert [one.batch_index for one in refused.record_errors] == [1]
    assert (await client.produce(topic, keyless + b"and more")).error_code == Code.INVALID_RECORD
    keyed = records.build([(b"k", b"v", (), 1), (b"", None, (), 1)], codec=codec)
    assert (await client.produce(topic, keyed)).base_offset == 2


async def delete_records(client: Client, topic: str, offset: int) -> int:
    parts = [{"partition_index": 0, "offset": offset}]
    answer = await client.call(Api.DELETE_RECORDS, 2, topics=[{"name": topic, "partitions": parts}], timeout=1000)
    [part] = answer.topics[0].partitions
    return int(part.error_code)


async def test_delete_records_is_refused_on_a_compacted_topic(world: World, client: Client) -> None:
    topic = await world.topic("kept", cleanup_policy="compact")
    await client.produce(topic, records.build([(b"k", b"v", (), 1)]))
    assert await delete_records(client, topic, 1) == Code.POLICY_VIOLATION
    await world.broker.streams.configure(topic, {"cleanup_policy": "compact,delete"})
    assert await delete_records(client, topic, 1) == Code.NONE


async def test_read_committed_starts_at_the_log_start(world: World, client: Client) -> None:
    """Even if an open transaction began before the deleted records: the last stable offset must not be before the log
    start, or the client would loop between the two."""
    topic = await world.topic("cut")
    await transaction(client, "cut-off", topic)
    assert await delete_records(client, topic, 1) == Code.NONE
    assert await offset_at(client, topic, LATEST, isolation=1) == (1, -1)
    waits = await client.fetch(topic, 1, isolation_level=1)
    assert (waits.error_code, waits.last_stable_offset, waits.records) == (0, 1, b"")
    assert await delete_records(client, topic, -1) == Code.NONE
    assert await offset_at(client, topic, LATEST, isolation=1) == (2, -1)


async def test_max_timestamp_excludes_open_transactions_with_read_committed(world: World, client: Client) -> None:
    topic = await world.topic("newest")
    await transaction(client, "newest", topic)
    assert (await offset_at(client, topic, MAX_TIMESTAMP))[0] == 0
    assert await offset_at(client, topic, MAX_TIMESTAMP, isolation=1) == (-1, -1)


async def test_a_fetch_with_min_bytes_0_is_answered_at_once(world: World, client: Client) -> None:
    topic = await world.topic("hasty")
    assert (await client.fetch(topic, max_wait=10 * 60_000, min_bytes=0)).error_code == 0


async def test_an_idempotent_producers_batch_must_be_the_only_one(world: World, client: Client) -> None:
    """After a batch of a plain producer it was not checked, and left a transaction in the log that could not be
    ended."""
    topic = await world.topic("hidden")
    hidden = batch(b"b", producer_id=4711, producer_epoch=0, base_sequence=7, transactional=True)
    refused = await client.produce(topic, bytes(batch(b"a") + hidden))
    assert refused.error_code == Code.INVALID_RECORD
    assert await offset_at(client, topic, LATEST) == (0, -1)


@pytest.mark.parametrize("version", [3, 6])
async def test_an_unknown_coordinator_type_is_refused(client: Client, version: int) -> None:
    for kind in (2, 3, -1):
        asked = {"key": "k"} if version < 4 else {"coordinator_keys": ["k"]}
        answer = await client.call(Api.FIND_COORDINATOR, version, key_type=kind, **asked)
        one = answer if version < 4 else answer.coordinators[0]
        assert (one.error_code, one.node_id) == (Code.INVALID_REQUEST, -1)


async def test_elections_and_reassignments_change_nothing(world: World, client: Client) -> None:
    await world.topic("led")
    asked = [{"topic": "led", "partitions": [0, 7]}]
    [result] = (await client.call(Api.ELECT_LEADERS, 2, topic_partitions=asked)).replica_election_results
    assert [one.error_code for one in result.partition_result] == [
        Code.ELECTION_NOT_NEEDED,
        Code.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    moves = [{"partition_index": 0, "replicas": replicas} for replicas in ([1], [2], None)]
    answer = await client.call(Api.ALTER_PARTITION_REASSIGNMENTS, 1, topics=[{"name": "led", "partitions": moves}])
    assert [one.error_code for one in answer.responses[0].partitions] == [
        0,
        Code.INVALID_REPLICA_ASSIGNMENT,
        Code.NO_REASSIGNMENT_IN_PROGRESS,
    ]
    assert (await client.call(Api.LIST_PARTITION_REASSIGNMENTS, 0)).topics == []


class Compared(str):
    times = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)


async def test_creating_many_topics_does_not_compare_each_with_all(world: World) -> None:
    """A request has room for 20,000 of them, and blocks the event loop meanwhile."""
    fields = SimpleNamespace(topics=[SimpleNamespace(name=Compared("again")) for _ in range(1000)])
    asked: Any = SimpleNamespace(connection=SimpleNamespace(access=None))
    made = await topics.create_topics(world.context, asked, fields)
    assert {topic["error_code"] for topic in made["topics"]} == {Code.INVALID_REQUEST}
    assert Compared.times < 10_000


@pytest.mark.parametrize(("limit", "pages"), [(2, 3), (0, 5), (-1, 5)])
async def test_topic_partitions_are_described_in_pages(world: World, client: Client, limit: int, pages: int) -> None:
    """A page has at least one partition: a client with a limit of 0 would loop forever."""
    for name, partitions in (("paged-a", 3), ("paged-b", 2)):
        if world.broker.streams.find(name) is None:
            await world.topic(name, partitions)
    topics = [{"name": "paged-a"}, {"name": "paged-b"}]
    seen: list[tuple[str, int]] = []
    cursor: Any = None
    for _ in range(pages):
        answer = await client.call(
            Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=topics, response_partition_limit=limit, cursor=cursor
        )
        seen += [(topic.name, part.partition_index) for topic in answer.topics for part in topic.partitions]
        if answer.next_cursor is None:
            break
        cursor = {
            "topic_name": answer.next_cursor.topic_name,
            "partition_index": answer.next_cursor.partition_index,
        }
    assert seen == [("paged-a", 0), ("paged-a", 1), ("paged-a", 2), ("paged-b", 0), ("paged-b", 1)]


async def test_offsets_of_a_group_are_deleted_unless_it_reads_the_topic(world: World, client: Client) -> None:
    await world.topic("left")
    part = {"partition_index": 0, "committed_offset": 3}
    await client.call(Api.OFFSET_COMMIT, 8, group_id="leaving", topics=[{"name": "left", "partitions": [part]}])
    asked = [{"name": "left", "partitions": [{"partition_index": 0}]}]
    deleted = await client.call(Api.OFFSET_DELETE, 0, group_id="leaving", topics=asked)
    assert (deleted.error_code, deleted.topics[0].partitions[0].error_code) == (0, 0)
    wanted = [{"name": "left", "partition_indexes": [0]}]
    fetched = await client.call(Api.OFFSET_FETCH, 7, group_id="leaving", topics=wanted)
    assert fetched.topics[0].partitions[0].committed_offset == -1
    assert (await client.call(Api.OFFSET_DELETE, 0, group_id="nobody's", topics=asked)).error_code == (
        Code.GROUP_ID_NOT_FOUND
    )


async def test_offsets_of_a_group_with_another_protocol_type_are_not_deleted(world: World, client: Client) -> None:
    """The metadata of Kafka Connect's workers does not show which topics they read."""
    await world.topic("worked")
    part = {"partition_index": 0, "committed_offset": 3}
    await client.call(Api.OFFSET_COMMIT, 8, group_id="workers", topics=[{"name": "worked", "partitions": [part]}])
    joined = await client.call(
        Api.JOIN_GROUP, 3, group_id="workers", session_timeout=60_000, rebalance_timeout=60_000,
        protocol_type="connect", protocols=[{"name": "sessioned", "metadata": b""}],
    )  # fmt: skip
    assert joined.error_code == 0
    asked = [{"name": "worked", "partitions": [{"partition_index": 0}]}]
    answer = await client.call(Api.OFFSET_DELETE, 0, group_id="workers", topics=asked)
    assert (answer.error_code, answer.topics) == (Code.NON_EMPTY_GROUP, [])


async def test_metadata_of_a_topic_is_encoded_once(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 partitions are a megabyte of metadata, which must not be encoded again for each client."""
    for number in range(5):
        await world.topic(f"cached-{number}", 10)
    await client.call(Api.METADATA, 12, topics=None)
    encoded: list[str] = []
    encode = metadata.encode_topic

    def counted(topic: Any, version: int, node_id: int) -> bytes:
        encoded.append(topic.name)
        return encode(topic, version, node_id)

    monkeypatch.setattr(metadata, "encode_topic", counted)
    for _ in range(3):
        other = await world.client()
        answer = await other.call(Api.METADATA, 12, topics=None)
        assert sum(topic.name.startswith("cached-") for topic in answer.topics) == 5
    assert encoded == []
    await client.call(Api.CREATE_PARTITIONS, 3, topics=[{"name": "cached-3", "count": 11}], timeout=1000)
    answer = await client.call(Api.METADATA, 12, topics=[{"name": "cached-3"}])
    assert len(answer.topics[0].partitions) == 11
    assert encoded == ["cached-3"]


async def test_versions_that_kafka_dropped_and_clients_of_2021_use(world: World, client: Client) -> None:
    """librdkafka, Sarama and kafka-go; the bytes of these versions are in tests/wire/kafka/test_older.py."""
    topic = {"name": "old", "num_partitions": 1, "replication_factor": 1}
    made = [await client.call(Api.CREATE_TOPICS, version, topics=[topic], timeout=1000) for version in (0, 1)]
    assert [answer.topics[0].error_code for answer in made] == [Code.NONE, Code.TOPIC_ALREADY_EXISTS]
    described = await client.call(
        Api.DESCRIBE_CONFIGS, 0, resources=[{"resource_type": 2, "resource_name": "old", "configuration_keys": None}]
    )
    assert all(config.is_default for config in described.results[0].configs)
    partition = {"partition_index": 0, "committed_offset": 3, "commit_timestamp": -1, "committed_metadata": "note"}
    at = {"group_id": "g", "generation_id_or_member_epoch": -1, "topics": [{"name": "old", "partitions": [partition]}]}
    committed = await client.call(Api.OFFSET_COMMIT, 1, **at)
    assert committed.topics[0].partitions[0].error_code == Code.NONE
    fetched = await client.call(Api.OFFSET_FETCH, 1, group_id="g", topics=[{"name": "old", "partition_indexes": [0]}])
    [found] = fetched.topics[0].partitions
    assert (found.committed_offset, found.metadata) == (3, "note")
    await client.produce("old", batch(b"a", b"b"))
    for wanted, offsets in ((-2, [0]), (-1, [2]), (1 << 60, [])):
        partition = {"partition_index": 0, "timestamp": wanted, "max_num_offsets": 1}
        listed = await client.call(Api.LIST_OFFSETS, 0, topics=[{"name": "old", "partitions": [partition]}])
        assert listed.topics[0].partitions[0].old_style_offsets == offsets
    deleted = await client.call(Api.DELETE_TOPICS, 0, topic_names=["old"], timeout=1000)
    assert deleted.responses[0].error_code == Code.NONE
