"""Errors of idempotent producers: the codes that Apache Kafka 4.3.1 returned for the same requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, batch

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def init(client: Client, name: str | None = None, **fields: Any) -> SimpleNamespace:
    return await client.call(
        Api.INIT_PRODUCER_ID, 5, transactional_id=name, **{"transaction_timeout": 60_000, **fields}
    )


async def send(
    client: Client,
    topic: str,
    producer: Any,
    sequence: int,
    *,
    of: str | None = None,
    transactional: bool = False,
    version: int = 12,
) -> SimpleNamespace:
    data = batch(
        b"x",
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    answer = await client.call(
        Api.PRODUCE, version, transactional_id=of, acks=-1, timeout=1000,
        topic_data=[{"name": topic, "partition_data": [{"index": 0, "records": bytes(data)}]}],
    )  # fmt: skip
    result: SimpleNamespace = answer.responses[0].partition_responses[0]
    return result


async def add(client: Client, name: str, producer: Any, topic: str) -> int:
    said = {"transactional_id": name, "producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
    answer = await client.call(
        Api.ADD_PARTITIONS_TO_TXN, 3, **{f"v3_and_below_{field}": value for field, value in said.items()},
        v3_and_below_topics=[{"name": topic, "partitions": [0]}],
    )  # fmt: skip
    code: int = answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
    return code


async def commit_offset(client: Client, name: str, producer: Any, topic: str, version: int) -> int:
    answer = await client.call(
        Api.TXN_OFFSET_COMMIT, version, transactional_id=name, group_id=f"{name}-group", member_id="",
        generation_id=-1, producer_id=producer.producer_id, producer_epoch=producer.producer_epoch,
        topics=[{"name": topic, "partitions": [{"partition_index": 0, "committed_offset": 3}]}],
    )  # fmt: skip
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def end(client: Client, name: str, producer: Any, version: int) -> int:
    answer = await client.call(
        Api.END_TXN, version, transactional_id=name, producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch, committed=True,
    )  # fmt: skip
    code: int = answer.error_code
    return code


async def test_an_idempotent_producer_must_number_its_batches(world: World, client: Client) -> None:
    topic = await world.topic("unnumbered")
    producer = await init(client)
    assert (await send(client, topic, producer, -1)).error_code == Code.INVALID_RECORD
    assert (await send(client, topic, producer, 0)).base_offset == 0
    assert (await send(client, topic, producer, -1)).error_code == Code.INVALID_RECORD


async def test_a_non_transactional_batch_is_refused_during_a_transaction(world: World, client: Client) -> None:
    topic = await world.topic("beside")
    producer = await init(client, "beside")
    assert (await send(client, topic, producer, 0, of="beside", transactional=True)).error_code == 0
    assert (await send(client, topic, producer, 1)).error_code == Code.INVALID_TXN_STATE
    assert (await send(client, topic, producer, 0)).base_offset == 0, (
        "a repeated batch is recognized by its sequence alone"
    )
    assert await end(client, "beside", producer, 4) == 0
    assert (await send(client, topic, producer, 1)).error_code == 0


async def test_the_first_batch_of_a_version_2_transaction_has_sequence_0(world: World, client: Client) -> None:
    """Another sequence means that an earlier batch is still missing: accepting this one would refuse that one
    forever."""
    topic = await world.topic("overtaken")
    producer = await init(client, "overtaken")
    early = await send(client, topic, producer, 1, of="overtaken", transactional=True)
    assert early.error_code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert (await send(client, topic, producer, 0, of="overtaken", transactional=True)).base_offset == 0
    assert (await send(client, topic, producer, 1, of="overtaken", transactional=True)).base_offset == 1


async def test_a_version_1_producer_may_start_at_any_sequence(world: World, client: Client) -> None:
    """As in Kafka: its sequences continue across transactions, and the log may have forgotten the producer."""
    topic = await world.topic("forgotten")
    producer = await init(client, "forgotten")
    assert await add(client, "forgotten", producer, topic) == 0
    assert (await send(client, topic, producer, 7, of="forgotten", transactional=True, version=11)).error_code == 0
    assert (await send(client, topic, await init(client), 7)).error_code == 0


async def test_a_transactional_batch_needs_a_transactional_id_in_its_request(world: World, client: Client) -> None:
    topic = await world.topic("nameless")
    producer = await init(client, "nameless")
    for version in (11, 12):
        refused = await send(client, topic, producer, 0, transactional=True, version=version)
        assert refused.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert (await send(client, topic, producer, 0, of="nameless", transactional=True)).base_offset == 0


async def test_a_partition_or_group_that_was_not_added_is_abortable(world: World, client: Client) -> None:
    """INVALID_TXN_STATE is fatal to a Java producer; since 3.8 they know TRANSACTION_ABORTABLE."""
    topic = await world.topic("not-added")
    producer = await init(client, "not-added")
    for version, code in ((9, Code.INVALID_TXN_STATE), (10, Code.INVALID_TXN_STATE), (11, Code.TRANSACTION_ABORTABLE)):
        refused = await send(client, topic, producer, 0, of="not-added", transactional=True, version=version)
        assert refused.error_code == code, version
    assert await commit_offset(client, "not-added", producer, topic, 3) == Code.INVALID_TXN_STATE
    assert await commit_offset(client, "not-added", producer, topic, 4) == Code.TRANSACTION_ABORTABLE


@pytest.mark.parametrize(
    "said", [{"producer_id": 3, "producer_epoch": -1}, {"producer_id": -1, "producer_epoch": 3}], ids=str
)
@pytest.mark.parametrize("name", [None, "half"])
async def test_a_producer_id_without_an_epoch_is_refused(client: Client, name: str | None, said: Any) -> None:
    refused = await init(client, name, **said)
    assert (refused.error_code, refused.producer_id, refused.producer_epoch) == (Code.INVALID_REQUEST, -1, -1)


async def test_an_empty_transactional_id_is_refused(world: World, client: Client) -> None:
    topic = await world.topic("empty-id")
    producer = await init(client, "empty-id")
    assert await add(client, "", producer, topic) == Code.INVALID_REQUEST
    assert await end(client, "", producer, 4) == Code.INVALID_REQUEST
    assert await end(client, "", producer, 5) == Code.INVALID_REQUEST
