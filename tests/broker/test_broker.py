"""Streams, publishing, cursors and housekeeping over a real shard, without a listener."""

import asyncio
import errno
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.streams.cursors import CURSORS_MAX
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.streams.publish import StreamShape, prepare
from headrace.broker.streams.read import PageReader
from headrace.broker.types.aborted_ranges import NO_ABORTS
from headrace.broker.vhosts.settings import VhostMetadata
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.errors import (
    ArgumentMismatch,
    CorruptLog,
    CursorNotFound,
    DataFolderLocked,
    DiskFull,
    InvalidInput,
    LimitReached,
    OffsetOutOfRange,
    PartlyStored,
    StorageError,
    StreamExists,
    StreamNotFound,
)
from headrace.log.disk.disk import RealDisk
from headrace.log.read.reader import Chunk
from headrace.log.settings import LogSettings, StreamSettings
from headrace.record import codec
from headrace.record.codec import partition_for
from tests.log.helpers import batch

DAY_MS = 24 * 3600 * 1000


SMALL = LogSettings(journal_file_bytes=1 << 20)  # quick to make


def config(folder: Path, **settings: Any) -> Config:
    return Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=SMALL, **settings)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    opened = await Broker.open(config(tmp_path / "data"), clock=ManualClock())
    yield opened
    await opened.close()


def values(broker: Broker, name: str, partition: int = 0) -> list[bytes | None]:
    """Page by page: one ends where the next message is not in the system's memory."""
    target = broker.streams.get(name).partitions[partition]
    found: list[bytes | None] = []
    offset, most = target.start_offset, 1 << 24
    while offset < target.end_offset:
        try:
            chunk = target.read_now(offset, most)
        except ReadWaits as cold:
            cold.load()
            continue
        found += [record.value for record in codec.records(chunk.data, from_offset=offset)]
        offset = chunk.next_offset
    return found


class Rotten:
    """A partition of two messages, the second of which cannot be read."""

    number, log_id, start_offset, stable_end = 0, 0, 0, 2

    def read_now(self, offset: int, *_: object, **__: object) -> Chunk:
        if offset:
            raise CorruptLog("a file", 70, "the CRC32C does not match")
        return Chunk(bytes(batch([b"one"])), 0, 1)


async def test_records_before_damage_are_read_and_then_the_damage_raises(broker: Broker) -> None:
    partition: Any = Rotten()
    pages = PageReader(lambda _: NO_ABORTS, broker.pages.decoder)
    page = await pages.read("rotten", partition, 0, limit=10, bytes_max=1 << 20)
    assert [record.value for record in page.records] == [b"one"]
    assert page.next_offset == 1
    with pytest.raises(CorruptLog):
        await pages.read("rotten", partition, 1, limit=10, bytes_max=1 << 20)


def message(value: bytes, key: bytes | None = None, stamp: int = -1) -> tuple[Any, ...]:
    return key, value, (), None, stamp


# Streams.


async def test_streams_survive_a_restart_under_any_name(tmp_path: Path) -> None:
    names = ["plain", "../../etc", "x" * 255, "é✓ \n\0", "."]
    first = await Broker.open(config(tmp_path))
    for name in names:
        stream = await first.streams.create(name, kind="queue")
        await first.publish(stream, [message(name.encode())])
    await first.streams.create("topic", 3, {"retention.ms": "1h"})
    await first.close()
    again = await Broker.open(config(tmp_path))
    assert {stream.name for stream in again.streams.list()} == {*names, "topic"}
    for name in names:
        assert values(again, name) == [name.encode()]
    assert again.streams.get("topic").settings.retention_ms == 3_600_000
    assert again.streams.get("plain").settings.retention_ms == -1  # a queue keeps unsettled messages
    await again.close()


async def test_vhosts_keep_equal_names_apart(broker: Broker) -> None:
    one = await broker.streams.create("a", kind="queue")
    other = await broker.streams.create("a", kind="queue", vhost="other")
    await broker.publish(other, [message(b"x")])
    assert one.partitions[0].end_offset == 0
    assert [stream.vhost for stream in broker.streams.list("other")] == ["other"]
    assert len(broker.streams.list(None)) == 2
    with pytest.raises(StreamNotFound):
        broker.streams.get("a", "nowhere")


async def test_the_queue_type_of_a_vhost_holds_for_new_queues_after_a_restart_too(tmp_path: Path) -> None:
    async def declare(broker: Broker, name: str, *, durable: bool = True, **arguments: str) -> str:
        flags = {"durable": durable, "exclusive": False, "auto_delete": False}
        given = {key.replace("_", "-"): value for key, value in arguments.items()}
        return (await broker.vhosts.get("/").declare_queue(name, **flags, arguments=given, owner=None)).policy.kind

    first = await Broker.open(config(tmp_path))
    assert await declare(first, "before") == "classic"
    await first.vhosts.create("/", metadata=VhostMetadata(default_queue_type="quorum"))
    await first.close()
    again = await Broker.open(config(tmp_path))
    assert [await declare(again, name) for name in ("before", "new", "new")] == ["classic", "quorum", "quorum"]
    assert await declare(again, "said", x_queue_type="classic") == "classic"
    assert await declare(again, "fleeting", durable=False) == "classic", "no other kind can be that"
    await again.vhosts.create("/", metadata=VhostMetadata())
    with pytest.raises(ArgumentMismatch):
        await declare(again, "new")
    await again.close()


async def test_a_stream_is_made_once_however_many_ask_at_once(broker: Broker) -> None:
    made = await asyncio.gather(*(broker.streams.create("a") for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(result, StreamExists) for result in made) == 4
    found = await asyncio.gather(*(broker.streams.get_or_create("b") for _ in range(5)))
    assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "\ud800"])
async def test_names_that_nothing_can_have_are_refused(broker: Broker, name: str) -> None:
    with pytest.raises(InvalidInput):
        await broker.streams.create(name, kind="queue")


async def test_a_topic_has_a_name_that_kafka_clients_can_use(broker: Broker) -> None:
    with pytest.raises(InvalidInput):
        await broker.streams.create("a b")


async def test_log_ids_are_never_used_again(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(3):
        broker = await Broker.open(config(tmp_path))
        for _ in range(3):
            stream = await broker.streams.create("t", 2)
            seen += [partition.log.id for partition in stream.partitions]
            await broker.streams.delete("t")
        await broker.close()
    assert len(set(seen)) == len(seen) == 18


async def test_a_deleted_stream_leaves_no_files(tmp_path: Path) -> None:
    broker = await Broker.open(config(tmp_path))
    stream = await broker.streams.create("t")
    await broker.publish(stream, [message(b"x")])
    await broker.streams.delete("t")
    assert stream.is_deleted
    await broker.close()
    assert list((tmp_path / "logs").iterdir()) == []
    assert list((tmp_path / "catalog" / "streams").iterdir()) == []


async def test_a_catalog_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    class Full(RealDisk):
        full = False

        def rename(self, source: str, target: str) -> None:
            if self.full and "catalog" in target:
                raise OSError(28, "No space left on device")
            super().rename(source, target)

    disk = Full()
    broker = await Broker.open(config(tmp_path), disk=disk)
    disk.full = True
    with pytest.raises(DiskFull):
        await broker.streams.create("t")
    assert broker.streams.find("t") is None
    disk.full = False
    await broker.streams.create("t")
    await broker.close()


async def test_a_broker_stops_on_a_full_disk_and_the_next_start_stores_what_the_journal_holds(
    tmp_path: Path,
) -> None:
    class Full(RealDisk):
        full = False

        def pwrite(self, file: int, buffers: Any, position: int) -> int:
            if self.full and "/logs/" in (self.names.path(file) or ""):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().pwrite(file, buffers, position)

    disk = Full()
    broker = await Broker.open(config(tmp_path), disk=disk)
    stream = await broker.streams.create("t")
    await broker.publish(stream, [message(b"before")])
    disk.full = True
    publishing = asyncio.ensure_future(broker.publish(stream, [message(b"in the journal")]))
    async with asyncio.timeout(60):
        while not broker.shard.committer.is_stuck:
            await asyncio.sleep(0.01)
        await broker.close()
    with pytest.raises(StorageError):
        await publishing
    disk.full = False
    again = await Broker.open(config(tmp_path), disk=disk)
    assert values(again, "t") == [b"before", b"in the journal"]
    await again.close()


async def test_a_folder_is_locked_against_a_second_broker(broker: Broker) -> None:
    with pytest.raises(DataFolderLocked):
        await Broker.open(broker.config)


async def test_a_folder_that_is_a_file_is_one_clear_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="it is not a folder"):
        await Broker.open(config(tmp_path / "file"))


# Publishing.


async def test_keys_choose_partitions_as_kafka_clients_do(broker: Broker) -> None:
    stream = await broker.streams.create("t", 5)
    rng = Random(1)
    messages = [message(b"v%d" % i, rng.randbytes(rng.randrange(12))) for i in range(300)]
    places = await broker.publish(stream, messages)
    for (key, *_), (partition, _) in zip(messages, places, strict=True):
        assert partition == partition_for(key, 5)
    for partition in range(5):
        expected = [m[1] for m, (p, _) in zip(messages, places, strict=True) if p == partition]
        assert values(broker, "t", partition) == expected


async def test_one_request_is_one_batch_per_partition(broker: Broker) -> None:
    stream = await broker.streams.create("t", 2)
    prepared = prepare(StreamShape.of(stream), [message(b"x", b"k%d" % i) for i in range(100)], 1, 0)
    assert sorted(part.partition for part in prepared) == [0, 1]
    assert all(len(part.infos) == 1 for part in prepared)


async def test_a_request_too_large_for_one_journal_entry_is_stored_partition_by_partition(broker: Broker) -> None:
    stream = await broker.streams.create("t", 3)
    messages: list[Any] = [(None, b"x" * 100_000, (), p, -1) for p in (0, 1, 2) for _ in range(5)]
    places = await broker.publish(stream, messages)  # 1.5 MB; the journal's files have 1 MB
    assert places == [(p, i) for p in (0, 1, 2) for i in range(5)]
    full = DiskFull("no room")

    def refuse(batch: Any, infos: Any = None) -> Any:
        ticket = broker.shard.new_ticket()
        ticket.resolve(full)
        return ticket

    stream.partitions[1].log.append = refuse  # type: ignore[method-assign]
    with pytest.raises(PartlyStored, match="1 of the 3 partitions"):
        await broker.publish(stream, messages)


async def test_publishing_to_a_deleted_stream_fails(broker: Broker) -> None:
    stream = await broker.streams.create("t", 2)
    await broker.streams.delete("t")
    with pytest.raises(StorageError):
        await broker.publish(stream, [message(b"x")])


async def test_a_deleted_data_folder_is_reported_and_nothing_is_confirmed_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes to files without a name succeed, but nothing can be found again."""
    broker = await Broker.open(config(tmp_path / "data"))
    stream = await broker.streams.create("t")
    await broker.publish(stream, [message(b"x")])
    shutil.rmtree(tmp_path / "data")
    async with asyncio.timeout(60):
        while broker.why_not_ready() is None:
            await asyncio.sleep(0.01)
    assert "out of reach" in (broker.why_not_ready() or "")
    assert [record.levelname for record in caplog.records if "out of reach" in record.getMessage()] == ["ERROR"]
    with pytest.raises(StorageError, match="out of reach"):
        await broker.publish(stream, [message(b"y")])
    with pytest.raises(StorageError, match="out of reach"):  # nor is it said that all is well in the end
        await broker.close()


# Cursors.


async def test_cursors_survive_a_kill(tmp_path: Path) -> None:
    """A broker that is simply forgotten: its state is what the journal holds."""
    first = await Broker.open(config(tmp_path / "a"))
    stream = await first.streams.create("t")
    await first.publish(stream, [message(b"x")] * 10)
    await first.cursors.commit("job", stream, {0: 7}, pin=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    await first.close()
    again = await Broker.open(config(tmp_path / "b"))
    assert not again.report.clean
    [position] = again.cursors.positions("job")
    assert (position.offset, position.lag) == (7, 3)
    assert again.streams.get("t").partitions[0].log.pins == {"cursor:job": 7}
    await again.close()


async def test_commits_at_once_do_not_lose_each_other(broker: Broker) -> None:
    stream = await broker.streams.create("t", 8)
    await broker.publish(stream, [(None, b"x", (), p, -1) for p in range(8)])
    await asyncio.gather(*(broker.cursors.commit("job", stream, {p: 1}) for p in range(8)))
    assert [position.offset for position in broker.cursors.positions("job")] == [1] * 8


async def test_a_cursor_cannot_stand_where_nothing_is(broker: Broker) -> None:
    stream = await broker.streams.create("t")
    with pytest.raises(OffsetOutOfRange):
        await broker.cursors.commit("job", stream, {0: 1})
    with pytest.raises(CursorNotFound):
        broker.cursors.get("job")


async def test_retention_continues_after_a_pin_is_removed(broker: Broker) -> None:
    stream = await broker.streams.create("t")
    log = stream.partitions[0].log
    await broker.cursors.commit("job", stream, {0: 0}, pin=True)
    assert log.pins == {"cursor:job": 0}
    await broker.cursors.commit("job", stream, {0: 0}, pin=False)
    assert log.pins == {}
    await broker.cursors.commit("job", stream, {0: 0}, pin=True)
    await broker.cursors.delete("job")
    assert log.pins == {}


async def test_the_number_of_cursors_is_bounded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = await broker.streams.create("t")
    monkeypatch.setattr("headrace.broker.streams.cursors.CURSORS_MAX", 2)
    assert CURSORS_MAX > 2
    for name in ("a", "b"):
        await broker.cursors.commit(name, stream, {0: 0})
    with pytest.raises(LimitReached):
        await broker.cursors.commit("c", stream, {0: 0})
    await broker.cursors.commit("a", stream, {0: 0})


# Housekeeping.


async def test_old_messages_go_unless_a_pinned_cursor_needs_them(broker: Broker) -> None:
    clock = broker.clock
    assert isinstance(clock, ManualClock)
    small = {"segment_size": "1KB", "retention_ms": "1d"}
    kept = await broker.streams.create("kept", 1, small)
    gone = await broker.streams.create("gone", 1, small)
    for stream in (kept, gone):
        for i in range(10):
            await broker.publish(stream, [message(b"%d" % i + b"x" * 300)])
    await broker.cursors.commit("job", kept, {0: 0}, pin=True, max_age_ms=3 * DAY_MS)
    clock.advance(2 * 24 * 3600)
    await broker.housekeeping.once()
    assert kept.partitions[0].start_offset == 0
    assert gone.partitions[0].start_offset > 0
    clock.advance(2 * 24 * 3600)  # the cursor was not moved, so it is dropped together with its pin
    await broker.housekeeping.once()
    with pytest.raises(CursorNotFound):
        broker.cursors.get("job")
    assert kept.partitions[0].start_offset > 0


async def test_a_compacted_topic_keeps_the_last_message_of_every_key(tmp_path: Path) -> None:
    settings = StreamSettings(segment_size=2048, cleanup_policy="compact")
    broker = await Broker.open(config(tmp_path, stream=settings), clock=ManualClock())
    stream = await broker.streams.create("t")
    for i in range(60):
        await broker.publish(stream, [message(b"%d" % i + b"x" * 200, b"k%d" % (i % 3))])
    end = stream.partitions[0].end_offset
    before = stream.partitions[0].log.size_bytes
    await broker.housekeeping.once()
    left = values(broker, "t")
    assert len(left) < 30 and stream.partitions[0].log.size_bytes < before / 2
    assert [value.split(b"x")[0] for value in left[-3:] if value] == [b"57", b"58", b"59"]
    assert stream.partitions[0].end_offset == end
    runs = broker.shard.counters.segments_deleted
    await broker.housekeeping.once()
    assert broker.shard.counters.segments_deleted == runs, "what is compacted is not compacted again"
    await broker.close()


async def test_a_loop_that_stalls_is_noticed(broker: Broker) -> None:
    broker.stats.loop_came_back(0.01)
    broker.stats.loop_came_back(0.3)
    assert broker.stats.loop_stall_s.count == 1
