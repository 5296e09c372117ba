"""Refused commits get codes that clients expect there: any other is fatal to Java."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.errors import ConcurrentTransactions, DiskFull, HeadraceError
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, world_at

TOPICS = [{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 3}]}]


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path) as opened:
        await opened.topic("t")
        yield opened


@pytest_asyncio.fixture
async def client(world: World) -> Client:
    return await world.client()


async def commit(client: Client, generation: int, version: int = 9, **fields: Any) -> int:
    asked = {"group_id": "g", "member_id": "m", **fields}
    answer = await client.call(
        Api.OFFSET_COMMIT, version, generation_id_or_member_epoch=generation, topics=TOPICS, **asked
    )
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def commit_in_transaction(client: Client, generation: int, **fields: Any) -> int:
    producer = await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id="x", transaction_timeout=60_000)
    who = {
        "transactional_id": "x",
        "producer_id": producer.producer_id,
        "producer_epoch": producer.producer_epoch,
        "group_id": "g",
    }
    assert (await client.call(Api.ADD_OFFSETS_TO_TXN, 3, **who)).error_code == 0
    asked = {"member_id": "m", **who, **fields}
    answer = await client.call(Api.TXN_OFFSET_COMMIT, 3, generation_id=generation, topics=TOPICS, **asked)
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def beat(client: Client, epoch: int = 0) -> int:
    """The epoch of member m of a consumer group."""
    answer = await client.call(
        Api.CONSUMER_GROUP_HEARTBEAT, 0, group_id="g", member_id="m", member_epoch=epoch,
        rebalance_timeout=60_000, subscribed_topic_names=["t"], topic_partitions=[],
    )  # fmt: skip
    assert answer.error_code == 0
    member_epoch: int = answer.member_epoch
    return member_epoch


async def join(client: Client) -> Any:
    """Joins a classic group and stays between join and sync. No test sends heartbeats."""
    return await client.call(
        Api.JOIN_GROUP, 3, group_id="g", session_timeout=60_000, rebalance_timeout=60_000,
        protocol_type="consumer", protocols=[{"name": "range", "metadata": b""}],
    )  # fmt: skip


async def test_a_stale_epoch_is_an_illegal_generation_in_a_transaction(client: Client) -> None:
    epoch = await beat(client)
    assert await commit_in_transaction(client, epoch - 1) == Code.ILLEGAL_GENERATION
    assert await commit(client, epoch - 1) == Code.STALE_MEMBER_EPOCH
    assert await commit(client, epoch - 1, version=8) == Code.ILLEGAL_GENERATION
    assert await commit_in_transaction(client, epoch) == Code.NONE


async def test_a_rebalance_does_not_refuse_offsets_of_a_transaction(client: Client) -> None:
    """Kafka accepts them, and REBALANCE_IN_PROGRESS there is fatal to a Java producer."""
    joined = await join(client)
    assert await commit(client, joined.generation_id, member_id=joined.member_id) == Code.REBALANCE_IN_PROGRESS
    assert await commit_in_transaction(client, joined.generation_id, member_id=joined.member_id) == Code.NONE
    wrong = joined.generation_id + 1
    assert await commit_in_transaction(client, wrong, member_id=joined.member_id) == Code.ILLEGAL_GENERATION


async def test_a_consumer_group_member_can_commit_right_after_a_restart(tmp_path: Path) -> None:
    """Before its next heartbeat."""
    async with world_at(tmp_path) as world:
        await world.topic("t")
        epoch = await beat(await world.client())
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert await commit(client, epoch) == Code.NONE
        assert await commit_in_transaction(client, epoch) == Code.NONE
        assert await beat(client, epoch) == epoch
        assert await commit(client, epoch) == Code.NONE


async def test_a_member_of_a_missing_group_is_unknown(client: Client) -> None:
    """With any other code, commitSync of a Java consumer (KIP-848) fails with "Unexpected error"."""
    assert await commit(client, 1) == Code.UNKNOWN_MEMBER_ID
    assert await commit(client, 1, version=8) == Code.ILLEGAL_GENERATION, "certainly a classic member"
    assert await commit_in_transaction(client, 1) == Code.ILLEGAL_GENERATION


async def test_a_classic_member_with_an_old_generation_gets_illegal_generation(client: Client) -> None:
    joined = await join(client)
    assert await commit(client, joined.generation_id - 1, member_id=joined.member_id) == Code.ILLEGAL_GENERATION


async def test_a_commit_on_a_full_disk_is_retriable(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients look up the coordinator and retry; they do not expect a storage error here."""

    def full(entries: object, answer: Callable[[HeadraceError | None], None]) -> None:
        answer(DiskFull("no space left"))

    async def full_too(*args: object, **options: object) -> None:
        raise DiskFull("no space left")

    epoch = await beat(client)
    with monkeypatch.context() as broken:
        broken.setattr(world.context.coordination.groups.offsets, "commit", full)
        broken.setattr(world.context.coordination.transactions, "commit_offsets", full_too)
        assert await commit(client, epoch) == Code.COORDINATOR_NOT_AVAILABLE
        assert await commit_in_transaction(client, epoch) == Code.COORDINATOR_NOT_AVAILABLE
    assert await commit(client, epoch) == Code.NONE


async def test_a_txn_offset_commit_during_a_transition_is_retriable(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example when it is repeated after a timeout, while the first is being written. Kafka's group coordinator
    never returns CONCURRENT_TRANSACTIONS, which is fatal to a Java producer here."""

    async def busy(*args: object, **options: object) -> None:
        raise ConcurrentTransactions("x")

    monkeypatch.setattr(world.context.coordination.transactions, "commit_offsets", busy)
    assert await commit_in_transaction(client, -1, member_id="") == Code.COORDINATOR_LOAD_IN_PROGRESS


async def test_a_transaction_on_a_full_disk_is_retriable(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Kafka: producers do not expect a storage error from a coordinator."""

    async def full(*args: object, **options: object) -> None:
        raise DiskFull("no space left")

    async def init() -> Any:
        return await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id="x", transaction_timeout=60_000)

    producer = await init()
    who = {"producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
    monkeypatch.setattr(world.context.coordination.transactions._table, "put", full)
    monkeypatch.setattr(world.context.coordination.transactions, "end", full)
    added = await client.call(
        Api.ADD_PARTITIONS_TO_TXN, 3, v3_and_below_transactional_id="x",
        **{f"v3_and_below_{name}": value for name, value in who.items()},
        v3_and_below_topics=[{"name": "t", "partitions": [0]}],
    )  # fmt: skip
    codes = [
        added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code,
        (await client.call(Api.ADD_OFFSETS_TO_TXN, 3, transactional_id="x", group_id="g", **who)).error_code,
        (await client.call(Api.END_TXN, 3, transactional_id="x", committed=True, **who)).error_code,
        (await init()).error_code,
    ]
    assert codes == [Code.COORDINATOR_NOT_AVAILABLE] * 4


async def test_init_producer_id_on_a_full_disk_is_retriable(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """COORDINATOR_NOT_AVAILABLE would make Java look up the coordinator of a transactional id that it does not have."""

    async def full() -> int:
        raise DiskFull("no space left")

    monkeypatch.setattr(world.context.coordination.producers, "new_id", full)
    asked = await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id=None, transaction_timeout=60_000)
    assert asked.error_code == Code.COORDINATOR_LOAD_IN_PROGRESS


async def test_joining_a_share_group_on_a_full_disk_is_retriable(
    world: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other code is fatal to a Java share consumer."""

    async def full(*args: object) -> None:
        raise DiskFull("no space left")

    monkeypatch.setattr(world.context.coordination.shares, "_set", full)
    joins = {"group_id": "s", "member_id": "m", "member_epoch": 0, "subscribed_topic_names": ["t"]}
    assert (await client.call(Api.SHARE_GROUP_HEARTBEAT, 1, **joins)).error_code == Code.COORDINATOR_NOT_AVAILABLE
    topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
    fetched = await client.call(
        Api.SHARE_FETCH, 1, group_id="s", member_id="m", max_bytes=1000, max_records=10,
        topics=[{"topic_id": topic_id, "partitions": [{"partition_index": 0}]}],
    )  # fmt: skip
    assert fetched.error_code == Code.KAFKA_STORAGE_ERROR
    monkeypatch.undo()
    assert (await client.call(Api.SHARE_GROUP_HEARTBEAT, 1, **joins)).error_code == 0
