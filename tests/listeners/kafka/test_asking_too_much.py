"""Excessive requests: fetches, sessions and arrays of thousands of elements (item 21 of the checklist of bad input)."""

import asyncio
import itertools
import struct
from typing import Any

import pytest

from headrace.broker.cooperative import YieldEvery
from headrace.listeners.kafka import context
from headrace.listeners.kafka.data import fetch, fetch_sessions
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.schema import request_entity
from tests.listeners.kafka.world import SECONDS, Client, World, alive, batch, make
from tests.wire.kafka.test_schema_codec import written

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("no_bug")]


async def prepare(world: World) -> None:
    await world.topic("t")


async def test_a_fetch_of_everything_is_bounded(world: World, client: Client) -> None:
    await world.topic("large")
    for _ in range(20):
        await client.produce("large", batch(b"x" * (1 << 20)))
    result = await client.fetch("large", max_bytes=2**31 - 1)
    assert len(result.records) <= (1 << 20) + 1000, "the partition's own limit"


async def test_a_fetch_of_all_partitions_is_bounded(world: World, client: Client) -> None:
    bound = world.context.flow.answer_bytes_max()
    partitions = 2 + bound // (1 << 20)
    await world.topic("wide", partitions)
    wanted = []
    for number in range(partitions):
        await client.produce("wide", batch(b"x" * (1 << 20)), partition=number)
        wanted.append({"partition": number, "fetch_offset": 0, "partition_max_bytes": 2**31 - 1})
    topics = [{"topic": "wide", "partitions": wanted}]
    answer = await client.call(Api.FETCH, 12, max_wait=0, max_bytes=2**31 - 1, session_epoch=-1, topics=topics)
    sent = sum(len(part.records or b"") for part in answer.responses[0].partitions)
    assert 0 < sent < partitions << 20
    assert sent <= bound + (1 << 20) + 1000, "at most its limit, plus the batch that reached it"


async def test_a_fetch_of_many_partitions_is_answered(client: Client) -> None:
    wanted = [{"partition": number, "fetch_offset": 0, "partition_max_bytes": 1} for number in range(10_000)]
    answer = await client.call(
        Api.FETCH,
        12,
        max_wait=0,
        max_bytes=2**31 - 1,
        session_epoch=-1,
        topics=[{"topic": "t", "partitions": wanted}],
    )
    codes = {part.error_code for part in answer.responses[0].partitions}
    assert codes <= {0, Code.UNKNOWN_TOPIC_OR_PARTITION}


async def test_a_fetch_with_a_replica_id_is_refused(client: Client) -> None:
    answer = await client.call(
        Api.FETCH,
        12,
        replica_id=5,
        max_wait=0,
        topics=[{"topic": "t", "partitions": [{"partition_max_bytes": 9}]}],
    )
    assert answer.error_code == Code.CLUSTER_AUTHORIZATION_FAILED


@pytest.mark.parametrize(("offset", "code"), [(-1, 1), (10**12, 1)])
async def test_offsets_outside_the_log_are_out_of_range(client: Client, offset: int, code: int) -> None:
    assert (await client.fetch("t", offset)).error_code == code


async def test_a_session_cannot_change_from_names_to_ids(world: World, client: Client) -> None:
    """The response would be encoded when a record arrives, and fail there: it has no room for a name."""
    await world.topic("named")
    asked = {"max_wait": 60_000, "min_bytes": 1, "max_bytes": 1 << 20}
    parts = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    began = await client.call(
        Api.FETCH, 12, **{**asked, "max_wait": 0}, session_epoch=0, topics=[{"topic": "named", "partitions": parts}]
    )
    answer = await client.call(Api.FETCH, 13, **asked, session_id=began.session_id, session_epoch=1, topics=[])
    assert answer.error_code == Code.FETCH_SESSION_TOPIC_ID_ERROR


async def test_repeatedly_started_sessions_leave_nothing_behind(world: World) -> None:
    client = await world.client()
    before, session = len(world.context.fetch_sessions.by_id), 0
    for _ in range(20):
        began = await client.call(Api.FETCH, 12, max_wait=0, session_id=session, session_epoch=0)
        session = began.session_id
    [connection] = [one for one in world.listener.connections if session in one.fetch_sessions]
    assert len(world.context.fetch_sessions.by_id) == before + 1
    assert connection.fetch_sessions == {session}
    client.close()
    async with asyncio.timeout(SECONDS):
        while len(world.context.fetch_sessions.by_id) > before:
            await asyncio.sleep(0.001)


AGAIN_AND_AGAIN: list[tuple[Api, int, dict[str, Any], str]] = [
    (Api.DESCRIBE_GROUPS, 5, {"groups": ["g"] * 1000}, "groups"),
    (Api.CONSUMER_GROUP_DESCRIBE, 0, {"group_ids": ["g"] * 1000}, "groups"),
    (Api.SHARE_GROUP_DESCRIBE, 1, {"group_ids": ["g"] * 1000}, "groups"),
    (Api.OFFSET_FETCH, 8, {"groups": [{"group_id": "g", "topics": None}] * 1000}, "groups"),
    (Api.METADATA, 9, {"topics": [{"name": "t"}] * 1000}, "topics"),
    (Api.DESCRIBE_CONFIGS, 4, {"resources": [{"resource_type": 2, "resource_name": "t"}] * 1000}, "results"),
    (Api.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": ["x"] * 1000}, "transaction_states"),
]


@pytest.mark.parametrize(
    ("api", "version", "fields", "answers"), AGAIN_AND_AGAIN, ids=[one[0].name for one in AGAIN_AND_AGAIN]
)
async def test_a_resource_named_many_times_is_described_once(
    client: Client, api: Api, version: int, fields: dict[str, Any], answers: str
) -> None:
    """A name takes a few bytes, and its description may take megabytes."""
    assert len(getattr(await client.call(api, version, **fields), answers)) == 1


async def test_a_partitions_producers_are_described_once(client: Client) -> None:
    asked = [{"name": "t", "partition_indexes": [0] * 1000}] * 2
    answer = await client.call(Api.DESCRIBE_PRODUCERS, 0, topics=asked)
    assert [len(topic.partitions) for topic in answer.topics] == [1, 0]


async def test_a_request_that_names_too_many_elements_closes_the_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would block the event loop."""
    monkeypatch.setattr(context, "ELEMENTS_MAX", 100)
    monkeypatch.setattr(fetch, "LARGE_BYTES", 1000)
    too_many = world.context.elements_max + 1
    parts = [{"partition": number, "fetch_offset": 0, "partition_max_bytes": 1} for number in range(too_many)]
    for api, version, fields in (
        (Api.FIND_COORDINATOR, 4, {"key_type": 0, "coordinator_keys": ["g"] * too_many}),
        (Api.METADATA, 9, {"topics": [{"name": "t"}] * too_many}),
        (Api.FETCH, 12, {"max_wait": 0, "session_epoch": -1, "topics": [{"topic": "t", "partitions": parts}]}),
    ):
        client = await world.client()
        client.send(api, version, written(make(request_entity(api, version), fields)))
        assert await client.is_closed()
    client, many = await world.client(), 16_000
    no_records = struct.pack(">hiiHs", 1, 1000, 1, 1, b"t") + struct.pack(">i", many) + struct.pack(">ii", 0, -1) * many
    client.send(Api.PRODUCE, 3, b"\xff\xff" + no_records)
    assert await client.is_closed()
    await alive(world)


async def test_a_long_request_yields_to_other_clients(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[None] = []

    async def maybe_yield(self: YieldEvery) -> None:
        yields.append(None)

    monkeypatch.setattr(YieldEvery, "maybe_yield", maybe_yield)
    parts = [{"partition_index": number, "timestamp": 0} for number in range(1000)]
    no_new = {"allow_auto_topic_creation": False}
    names = [f"no-{number}" for number in range(1000)]
    deleted = [{"partition_index": number, "offset": 0} for number in range(1000)]

    def new(name: str) -> dict[str, object]:
        return {"name": name, "num_partitions": 1, "replication_factor": 1}

    for api, version, fields in (
        (Api.LIST_OFFSETS, 6, {"replica_id": -1, "topics": [{"name": "t", "partitions": parts}]}),
        (Api.METADATA, 9, {"topics": [{"name": f"no-{number}"} for number in range(1000)], **no_new}),
        (Api.DESCRIBE_GROUPS, 5, {"groups": [f"no-{number}" for number in range(1000)]}),
        (Api.OFFSET_FETCH, 8, {"groups": [{"group_id": f"no-{number}", "topics": []} for number in range(1000)]}),
        (Api.OFFSET_FETCH, 7, {"group_id": "g", "topics": [{"name": "t", "partition_indexes": list(range(1000))}]}),
        (Api.OFFSET_FETCH, 7, {"group_id": "g", "topics": [{"name": n, "partition_indexes": [0]} for n in names]}),
        (Api.CREATE_TOPICS, 5, {"topics": [new(name) for name in names], "validate_only": True}),
        (Api.CREATE_PARTITIONS, 3, {"topics": [{"name": name, "count": 2, "assignments": None} for name in names]}),
        (Api.DELETE_TOPICS, 5, {"topic_names": names}),
        (Api.DELETE_RECORDS, 2, {"topics": [{"name": "no", "partitions": deleted}]}),
        (Api.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [{"resource_type": 2, "resource_name": n} for n in names]}),
        (Api.DESCRIBE_TOPIC_PARTITIONS, 0, {"topics": [{"name": name} for name in names], "cursor": None}),
    ):
        yields.clear()
        await client.call(api, version, **fields)
        assert len(yields) > 20, (api.name, version)


async def begin_session(client: Client) -> int:
    return int((await client.call(Api.FETCH, 12, max_wait=0, session_id=0, session_epoch=0)).session_id)


async def test_one_connection_cannot_use_up_all_sessions(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its least recently used sessions are evicted."""
    greedy, other = await world.client(), await world.client()
    monkeypatch.setattr(fetch_sessions, "SESSIONS_MAX", len(world.context.fetch_sessions.by_id) + 6)
    begun = [await begin_session(greedy) for _ in range(10)]
    assert await begin_session(other) != 0
    assert 0 not in begun and world.context.fetch_sessions.by_id.keys() & begun == {*begun[-4:]}
    for client in (greedy, other):
        client.close()


async def test_an_idle_session_is_evicted_for_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 20, "topics": []}
    clients = [await world.client() for _ in range(3)]
    monkeypatch.setattr(world.context.fetch_sessions, "by_id", {})
    monkeypatch.setattr(fetch_sessions, "SESSIONS_MAX", 2)
    idle, used = [await begin_session(client) for client in clients[:2]]
    assert await begin_session(clients[2]) == 0, "both were used recently"
    for session in world.context.fetch_sessions.by_id.values():
        session.used -= 1000
    await clients[1].call(Api.FETCH, 12, **asked, session_id=used, session_epoch=1)
    assert await begin_session(clients[2]) != 0
    assert idle not in world.context.fetch_sessions.by_id and used in world.context.fetch_sessions.by_id
    assert await begin_session(await world.client()) == 0
    gone = await clients[0].call(Api.FETCH, 12, **asked, session_id=idle, session_epoch=1)
    assert gone.error_code == Code.FETCH_SESSION_ID_NOT_FOUND
    for client in clients:
        client.close()


async def test_a_session_cannot_grow_without_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fetch may add partitions, whether they exist or not."""
    monkeypatch.setattr(context, "ELEMENTS_MAX", 100)
    client, before, number = await world.client(), world.context.fetch_sessions.partitions, itertools.count()
    session = await begin_session(client)
    for epoch in range(1, 1000):
        parts = [{"partition": next(number), "fetch_offset": 0, "partition_max_bytes": 1} for _ in range(20)]
        asked = {"max_wait": 0, "topics": [{"topic": "t", "partitions": parts}]}
        answer = await client.call(Api.FETCH, 12, **asked, session_id=session, session_epoch=epoch)
        if answer.error_code:
            break
        assert world.context.fetch_sessions.partitions == before + 20 * epoch
    assert answer.error_code == Code.FETCH_SESSION_ID_NOT_FOUND
    assert session not in world.context.fetch_sessions.by_id and world.context.fetch_sessions.partitions == before


async def test_the_partitions_of_all_sessions_are_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    client, other = await world.client(), await world.client()
    before = world.context.fetch_sessions.partitions
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", before + 5)
    parts = [{"partition": number, "fetch_offset": 0, "partition_max_bytes": 1} for number in range(4)]
    asked = {"max_wait": 0, "topics": [{"topic": "t", "partitions": parts}]}
    assert (await client.call(Api.FETCH, 12, **asked, session_epoch=0)).session_id != 0
    served = await other.call(Api.FETCH, 12, **asked, session_epoch=0)
    assert (served.session_id, served.error_code, len(served.responses[0].partitions)) == (0, 0, 4)
    client.close()
    async with asyncio.timeout(SECONDS):
        while world.context.fetch_sessions.partitions > before:
            await asyncio.sleep(0.001)
    assert (await other.call(Api.FETCH, 12, **asked, session_epoch=0)).session_id != 0
    other.close()


async def test_unknown_sessions_are_not_found(client: Client) -> None:
    answer = await client.call(Api.FETCH, 12, max_wait=0, session_id=12345, session_epoch=3)
    assert answer.error_code == Code.FETCH_SESSION_ID_NOT_FOUND
