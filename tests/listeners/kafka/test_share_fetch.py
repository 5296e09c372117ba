"""Waiting share fetches: wake-ups, sessions and released records."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.streams.partition import Partition, when_loaded
from headrace.listeners.kafka import context
from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.groups import share, share_sessions
from headrace.record import codec
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.test_share_offsets import beat, take
from tests.listeners.kafka.world import Client, Closed, World, batch, topic_at, world_at


async def test_records_that_arrive_during_a_disk_read_are_delivered_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    async def slowly(read: Callable[[], Any]) -> Any:
        nonlocal looks
        looks += 1
        found = await when_loaded(read)
        if looks == 2:  # of the second partition, after the first was read
            await writer.produce("t", bytes(batch(b"x")))
        return found

    async with world_at(tmp_path, read_wait_ms_max=280_000) as world:
        await world.topic("t", 2)
        client, writer = await world.client(), await world.client()
        await beat(client)
        monkeypatch.setattr(share, "when_loaded", slowly)
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": number} for number in (0, 1)]}]
        limits = {"max_wait": 280_000, "min_bytes": 1, "max_bytes": 1 << 20, "max_records": 100}
        answer = await client.call(Api.SHARE_FETCH, 1, group_id="s", member_id="m", topics=wanted, **limits)
        [part] = answer.responses[0].partitions
        assert (part.partition_index, [one.first_offset for one in part.acquired_records]) == (0, [0])


async def test_a_waiting_share_fetch_reads_only_partitions_that_fired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hundred waiting members, each record and each acknowledgement made every member read every partition: 20
    ms of the event loop."""
    looks: list[int] = []
    next_chunk = share._next_chunk

    def counted(listener: Any, partition: Partition, *args: Any) -> Any:
        looks.append(partition.number)
        return next_chunk(listener, partition, *args)

    monkeypatch.setattr(share, "_next_chunk", counted)
    async with world_at(tmp_path, read_wait_ms_max=280_000) as world:
        await world.topic("t", 3)
        client, other, writer = [await world.client() for _ in range(3)]
        await beat(client)
        await beat(other, member="other")
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        limits = {"group_id": "s", "max_wait": 280_000, "max_bytes": 1 << 20, "max_records": 100}
        wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": number} for number in range(3)]}]
        first = asyncio.ensure_future(client.call(Api.SHARE_FETCH, 1, member_id="m", topics=wanted, **limits))
        second = asyncio.ensure_future(other.call(Api.SHARE_FETCH, 1, member_id="other", topics=wanted, **limits))
        while len(looks) < 6:
            await asyncio.sleep(0.001)
        looks.clear()
        await writer.produce("t", batch(b"a", b"b"), partition=1)
        done, [waits] = await asyncio.wait([first, second], return_when=asyncio.FIRST_COMPLETED)
        while len(looks) < 2:
            await asyncio.sleep(0.001)
        assert looks == [1, 1]
        taker, member = (client, "m") if first in done else (other, "other")
        for offset, kind in ((0, 1), (1, 2)):
            said = [{"first_offset": offset, "last_offset": offset, "acknowledge_types": [kind]}]
            parts = [{"partition_index": 1, "acknowledgement_batches": said}]
            answer = await taker.call(
                Api.SHARE_ACKNOWLEDGE, 1, group_id="s", member_id=member, share_session_epoch=1 + offset,
                topics=[{"topic_id": topic_id, "partitions": parts}],
            )  # fmt: skip
            assert answer.responses[0].partitions[0].error_code == 0
            if kind == 1:
                assert looks == [1, 1], "accepted records wake no member"
        [part] = (await waits).responses[0].partitions
        assert [(one.first_offset, one.last_offset) for one in part.acquired_records] == [(1, 1)]


async def two_members(world: World) -> tuple[Client, Client]:
    """Members m and other of the group s, with a topic to read."""
    await world.topic("t")
    client, other = await world.client(), await world.client()
    await beat(client)
    await beat(other, member="other")
    return client, other


async def gone(world: World, client: Client) -> None:
    """Close the client's connection and wait until the broker has noticed."""
    number = len(world.listener.connections)
    client.close()
    while len(world.listener.connections) == number:
        await asyncio.sleep(0.01)


async def test_records_of_a_disconnected_member_are_released_at_once(tmp_path: Path) -> None:
    """Not only when its locks expire: a share session ends with its connection."""
    async with world_at(tmp_path) as world:
        client, other = await two_members(world)
        await client.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        assert await take(world, other, "other") == []
        await gone(world, client)
        assert await take(world, other, "other") == [(0, 1)]
        assert list(world.context.share_sessions.by_key) == [("s", "other")], "its session is removed"


async def test_a_waiting_fetch_of_a_disconnected_client_acquires_nothing(tmp_path: Path) -> None:
    """Its records are released and wake the waiting fetches, and its own must not acquire them again."""
    async with world_at(tmp_path, read_wait_ms_max=280_000) as world:
        client, other = await two_members(world)
        await client.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": 0}]}]
        waiting = asyncio.ensure_future(
            client.call(
                Api.SHARE_FETCH, 1, group_id="s", member_id="m", share_session_epoch=1, max_wait=280_000,
                max_bytes=1 << 20, max_records=100, topics=wanted,
            )
        )  # fmt: skip
        session = world.context.share_sessions.by_key["s", "m"]
        while session.epoch < 2:  # the fetch has arrived
            await asyncio.sleep(0.01)
        await gone(world, client)
        assert await take(world, other, "other") == [(0, 1)]
        with pytest.raises(Closed):
            await waiting


async def test_a_fetch_acquires_nothing_if_the_client_disconnects_during_a_disk_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slowly(read: Callable[[], Any]) -> Any:
        found = await when_loaded(read)
        if client in world.clients:
            world.clients.remove(client)
            await gone(world, client)
            went_on.set()
        return found

    went_on = asyncio.Event()
    async with world_at(tmp_path) as world:
        client, other = await two_members(world)
        await other.produce("t", batch(b"a", b"b"))
        monkeypatch.setattr(share, "when_loaded", slowly)
        with pytest.raises(Closed):
            await take(world, client)
        await went_on.wait()
        assert await take(world, other, "other") == [(0, 1)]


async def test_a_reconnected_member_keeps_its_records_when_its_old_connection_closes(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        client, again, other = [await world.client() for _ in range(3)]
        await beat(client)
        await beat(other, member="other")
        await other.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        assert await take(world, again) == []
        await gone(world, client)
        assert await take(world, other, "other") == []
        await gone(world, again)
        assert await take(world, other, "other") == [(0, 1)]


async def test_a_member_can_restart_its_session_at_the_session_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with topic_at(tmp_path) as (world, client):
        await beat(client)
        await take(world, client)
        monkeypatch.setattr(share_sessions, "SESSIONS_MAX", 1)
        await take(world, client)  # replaces its earlier session


async def test_a_client_over_the_session_limit_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_at(tmp_path) as world:
        client, other = await two_members(world)
        await take(world, client)
        monkeypatch.setattr(share_sessions, "SESSIONS_MAX", 1)
        asked = {"group_id": "s", "max_wait": 10, "max_bytes": 1000, "max_records": 10, "topics": []}
        refused = await other.call(Api.SHARE_FETCH, 1, member_id="other", **asked)
        assert refused.error_code == Code.SHARE_SESSION_LIMIT_REACHED
        await gone(world, client)
        assert (await other.call(Api.SHARE_FETCH, 1, member_id="other", **asked)).error_code == 0


async def test_one_connection_cannot_use_up_all_share_sessions(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        greedy, other = await two_members(world)
        asked = {"group_id": "s", "max_wait": 0, "max_bytes": 1000, "max_records": 10, "topics": []}
        codes = [(await greedy.call(Api.SHARE_FETCH, 1, member_id=f"m{n}", **asked)).error_code for n in range(6)]
        assert codes == [0] * 4 + [Code.SHARE_SESSION_LIMIT_REACHED] * 2
        await take(world, other, "other")
        taken_over = await greedy.call(Api.SHARE_FETCH, 1, member_id="other", **asked)
        assert taken_over.error_code == Code.SHARE_SESSION_LIMIT_REACHED, "other sessions are kept"
        assert (await greedy.call(Api.SHARE_FETCH, 1, member_id="m0", **asked)).error_code == 0, (
            "its own session can be restarted"
        )
        ends = {"group_id": "s", "member_id": "m1", "share_session_epoch": -1, "topics": []}
        assert (await greedy.call(Api.SHARE_ACKNOWLEDGE, 1, **ends)).error_code == 0
        assert (await greedy.call(Api.SHARE_FETCH, 1, member_id="m5", **asked)).error_code == 0
        await gone(world, greedy)
        assert list(world.context.share_sessions.by_key) == [("s", "other")]


async def test_a_share_session_cannot_grow_without_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fetch may add partitions, whether they exist or not."""
    monkeypatch.setattr(context, "ELEMENTS_MAX", 100)
    async with world_at(tmp_path) as world:
        client, other = await two_members(world)
        await client.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        renews = {  # partitions that do not exist are not read
            "group_id": "s", "member_id": "m", "is_renew_ack": True, "max_wait": 0, "min_bytes": 0, "max_bytes": 0,
            "max_records": 0,
        }  # fmt: skip
        codes = []
        for epoch in range(1, 21):
            parts = [{"partition_index": 20 * epoch + number} for number in range(20)]
            wanted = [{"topic_id": bytes(16), "partitions": parts}]
            answer = await client.call(Api.SHARE_FETCH, 2, **renews, share_session_epoch=epoch, topics=wanted)
            codes.append(answer.error_code)
        assert Code.SHARE_SESSION_LIMIT_REACHED in codes[1:]
        assert world.context.share_sessions.partitions == 0 and not world.context.share_sessions.by_key
        assert await take(world, other, "other") == [(0, 1)], "its records are released"
        assert world.context.share_sessions.partitions == 1


@pytest.mark.parametrize(
    "batches",
    [[(0, 1, [1]), (1, 1, [1])], [(0, 0, [2]), (7, 7, [1])], [(0, 0, [1]), (1, 1, [9])], [(1, 1, [1]), (0, 1, [3])]],
)
async def test_acknowledgements_of_a_partition_are_applied_all_or_none(
    tmp_path: Path, batches: list[tuple[int, int, list[int]]]
) -> None:
    async with world_at(tmp_path) as world:
        client, other = await two_members(world)
        await client.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        said = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": types} for first, last, types in batches
        ]
        wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": 0, "acknowledgement_batches": said}]}]
        answer = await client.call(
            Api.SHARE_ACKNOWLEDGE, 1, group_id="s", member_id="m", share_session_epoch=1, topics=wanted
        )
        assert answer.responses[0].partitions[0].error_code == Code.INVALID_RECORD_STATE
        assert await take(world, other, "other") == [], "it still holds both"
        await gone(world, client)
        assert await take(world, other, "other") == [(0, 1)]


async def test_a_fetch_that_renews_locks_acquires_nothing(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        await beat(client)
        await client.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        await client.produce("t", batch(b"c"))
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        said = [{"first_offset": 0, "last_offset": 1, "acknowledge_types": [4, 1]}]
        parts = [{"partition_index": 0, "acknowledgement_batches": said}]
        asked = {
            "group_id": "s", "member_id": "m", "share_session_epoch": 1, "is_renew_ack": True, "min_bytes": 0,
            "max_bytes": 0, "max_records": 0, "max_wait": 0, "topics": [{"topic_id": topic_id, "partitions": parts}],
        }  # fmt: skip
        for limit in ("max_wait", "min_bytes", "max_bytes", "max_records"):
            refused = await client.call(Api.SHARE_FETCH, 2, **{**asked, limit: 1})
            assert refused.error_code == Code.INVALID_REQUEST
        renewed = await client.call(Api.SHARE_FETCH, 2, **asked)
        [part] = renewed.responses[0].partitions
        assert (part.acknowledge_error_code, part.acquired_records, part.records) == (0, [], b"")
        assert await take(world, client) == [(2, 2)]


async def test_a_member_that_left_the_group_can_still_acknowledge(tmp_path: Path) -> None:
    """On close, librdkafka leaves before it acknowledges: accepted records were delivered again."""
    async with world_at(tmp_path) as world:
        client, other = await two_members(world)
        await client.produce("t", batch(b"a", b"b"))
        assert await take(world, client) == [(0, 1)]
        await beat(client, epoch=-1)
        assert await take(world, other, "other") == []
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        accepted = [{"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}]
        parts = [{"partition_index": 0, "acknowledgement_batches": accepted}]
        answer = await client.call(
            Api.SHARE_ACKNOWLEDGE, 1, group_id="s", member_id="m", share_session_epoch=-1,
            topics=[{"topic_id": topic_id, "partitions": parts}],
        )  # fmt: skip
        assert answer.responses[0].partitions[0].error_code == 0
        assert await take(world, other, "other") == [(1, 1)], "the rest is released when the session ends"


async def test_only_batches_with_acquired_records_are_sent(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        await beat(client)
        sent = [batch(text * 100) for text in (b"a", b"b", b"c")]
        for one in sent:
            await client.produce("t", one)
        topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
        wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": 0}]}]
        answer = await client.call(
            Api.SHARE_FETCH, 1, group_id="s", member_id="m", max_records=2, max_bytes=1 << 20, topics=wanted
        )
        [part] = answer.responses[0].partitions
        assert [(one.first_offset, one.last_offset) for one in part.acquired_records] == [(0, 1)]
        assert len(part.records) == len(sent[0]) + len(sent[1])


@pytest.mark.parametrize(("bytes_max", "batches"), [(0, [0, 0]), (1, [1, 0]), (400, [2, 0]), (550, [2, 1])])
async def test_only_the_first_batch_of_a_share_fetch_may_exceed_max_bytes(
    tmp_path: Path, bytes_max: int, batches: list[int]
) -> None:
    async with topic_at(tmp_path, partitions=2) as (world, client):
        await beat(client)
        await client.produce("t", batch(b"the first answer is of one partition"), partition=1)
        assert await take_of(world, client, 2) == [1]
        for number in (0, 0, 1, 1):
            await client.produce("t", batch(b"x" * 100), partition=number)
        limits = {"max_wait": 0, "max_records": 100, "max_bytes": bytes_max, "share_session_epoch": 1}
        answer = await client.call(Api.SHARE_FETCH, 1, group_id="s", member_id="m", **limits)
        sent = {part.partition_index: part.records for topic in answer.responses for part in topic.partitions}
        assert [len(codec.scan(sent.get(number, b""))) for number in (0, 1)] == batches


async def take_of(world: World, client: Client, count: int, *, epoch: int = 0, member: str = "m") -> list[int]:
    """The number of partitions with records in the response."""
    topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
    wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": number} for number in range(count)]}]
    limits = {"max_wait": 0, "max_records": 100, "max_bytes": 1 << 20, "share_session_epoch": epoch}
    answer = await client.call(Api.SHARE_FETCH, 1, group_id="s", member_id=member, topics=wanted, **limits)
    return [part.partition_index for topic in answer.responses for part in topic.partitions if part.acquired_records]


async def test_the_first_member_leaves_records_for_members_that_join_with_it(tmp_path: Path) -> None:
    """The first acquired all records of every partition before the others had sent a request."""
    async with world_at(tmp_path) as world:
        await world.topic("t", 4)
        first, second = await world.client(), await world.client()
        await beat(first, member="a")
        await beat(second, member="b")
        for number in range(4):
            await first.produce("t", batch(b"x"), partition=number)
        assert await take_of(world, first, 4, member="a") == [0]
        assert await take_of(world, second, 4, member="b") == [1]
        assert await take_of(world, first, 4, epoch=1, member="a") == [2, 3], "later all partitions are returned"
