"""transaction.version 2 (KIP-890), next to clients that do not know it."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, batch

pytestmark = pytest.mark.asyncio(loop_scope="module")
LARGE = 4 << 20  # decompresses to more than the event loop checks


async def init(client: Client, name: str) -> SimpleNamespace:
    return await client.call(Api.INIT_PRODUCER_ID, 5, transactional_id=name, transaction_timeout=60_000)


async def write(
    client: Client, name: str, producer: Any, *topics: str, version: int = 12, value: bytes = b"x", codec: int = 0
) -> list[int]:
    """Write one record to each topic; returns the error codes."""
    data = batch(
        value,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=0,
        transactional=True,
        codec=codec,
    )
    parts = [{"index": 0, "records": bytes(data)}]
    answer = await client.call(
        Api.PRODUCE, version, transactional_id=name, acks=-1, timeout=1000,
        topic_data=[{"name": topic, "partition_data": parts} for topic in topics],
    )  # fmt: skip
    return [one.partition_responses[0].error_code for one in answer.responses]


async def end(client: Client, name: str, producer: Any, *, commit: bool = True, version: int = 5) -> SimpleNamespace:
    return await client.call(
        Api.END_TXN, version, transactional_id=name, producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch, committed=commit,
    )  # fmt: skip


async def commit_offset(client: Client, name: str, producer: Any, topic: str, *, version: int = 5) -> int:
    answer = await client.call(
        Api.TXN_OFFSET_COMMIT, version, transactional_id=name, group_id=f"{name}-group", member_id="",
        generation_id=-1, producer_id=producer.producer_id, producer_epoch=producer.producer_epoch,
        topics=[{"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 3}]}],
    )  # fmt: skip
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def test_version_2_adds_partitions_implicitly_and_bumps_the_epoch(world: World, client: Client) -> None:
    topics = [await world.topic(f"new-{number}") for number in range(3)]
    producer = await init(client, "new")
    assert await write(client, "new", producer, *topics[:2]) == [0, 0]
    assert await write(client, "new", producer, topics[2], value=bytes(LARGE), codec=1) == [0], (
        "after the checker thread"
    )
    assert await commit_offset(client, "new", producer, topics[0]) == 0
    ended = await end(client, "new", producer)
    assert (ended.error_code, ended.producer_id) == (0, producer.producer_id)
    assert ended.producer_epoch == producer.producer_epoch + 1
    assert vars(await end(client, "new", producer)) == vars(ended), "its response was lost"
    for topic in topics:
        assert (await client.fetch(topic, isolation_level=1)).last_stable_offset == 2
    found = world.broker.coordination.groups.offsets.get("new-group", topics[0], 0)
    assert found is not None and found.offset == 3
    assert await write(client, "new", producer, topics[0]) == [Code.INVALID_PRODUCER_EPOCH], "it arrives late"
    assert await write(client, "new", ended, topics[0]) == [0]
    assert (await end(client, "new", ended, commit=False)).producer_epoch == producer.producer_epoch + 2


async def test_a_late_batch_gets_transaction_abortable(world: World, client: Client) -> None:
    topic = await world.topic("late")
    producer = await init(client, "late")
    assert await write(client, "late", producer, topic) == [0]
    transactions = world.context.coordination.transactions
    await transactions._abort_late(transactions.get("late"))
    assert await commit_offset(client, "late", producer, topic) == Code.TRANSACTION_ABORTABLE
    refused = await end(client, "late", producer)
    assert (refused.error_code, refused.producer_id, refused.producer_epoch) == (Code.TRANSACTION_ABORTABLE, -1, -1)
    ended = await end(client, "late", producer, commit=False)
    assert (ended.error_code, ended.producer_epoch) == (0, producer.producer_epoch + 1)


async def test_a_client_of_version_1_works_as_before(world: World, client: Client) -> None:
    topic = await world.topic("old")
    producer = await init(client, "old")
    assert await write(client, "old", producer, topic, version=10) == [Code.INVALID_TXN_STATE]
    assert await commit_offset(client, "old", producer, topic, version=3) == Code.INVALID_TXN_STATE
    who = {"transactional_id": "old", "producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
    for number in range(2):
        added = await client.call(
            Api.ADD_PARTITIONS_TO_TXN, 3, **{f"v3_and_below_{field}": value for field, value in who.items()},
            v3_and_below_topics=[{"name": topic, "partitions": [0]}],
        )  # fmt: skip
        assert added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == 0
        assert await write(client, "old", producer, topic, version=11) == [0], "the second is repeated"
        assert (await end(client, "old", producer, version=4)).error_code == 0
        assert (await end(client, "old", producer, version=4)).error_code == 0
        assert (await client.fetch(topic, isolation_level=1)).last_stable_offset == 2 + number
    assert (await end(client, "old", producer, version=4, commit=False)).error_code == Code.INVALID_TXN_STATE


async def test_a_batch_of_an_unknown_producer_opens_no_transaction(world: World, client: Client) -> None:
    producer = await init(client, "mine")
    topic = await world.topic("asked")
    stranger = SimpleNamespace(producer_id=producer.producer_id + 10_000, producer_epoch=0)
    assert await write(client, "mine", stranger, topic) == [Code.INVALID_PRODUCER_ID_MAPPING]
    assert world.context.coordination.transactions.get("mine").state == "Empty"
