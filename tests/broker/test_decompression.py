"""Highly compressed batches are decompressed one by one, and no further than a page needs."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues import view_reader
from headrace.broker.queues.consumers import Consumer
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.queues.view import View
from headrace.broker.streams import browse as browsing
from headrace.broker.streams.browse import browse, contains
from headrace.broker.streams.partition import Partition
from headrace.broker.types.message import Message
from headrace.clock import ManualClock
from headrace.log.disk.file_cache import FileCache
from headrace.record import codec
from headrace.record.batch import recompress
from headrace.record.compression import payload
from headrace.record.compression.codecs import decompress
from headrace.record.types import Record
from tests.broker.queue_world import bodies, declare, until
from tests.broker.test_broker import config

BATCHES, MESSAGES, SIZE = 20, 10, 100_000
BATCH_BYTES = MESSAGES * SIZE
ZSTD = 4
MANY = 1000


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    opened = await Broker.open(config(tmp_path / "data"), clock=ManualClock())
    yield opened
    await opened.close()


@pytest.fixture
async def compressed(broker: Broker) -> Partition:
    """20 MB of one letter, compressed to a few kilobytes; a single read returns it. The last message also has a z."""
    await broker.streams.create("compressed")
    partition = broker.streams.get("compressed").partitions[0]
    for batch in range(BATCHES):
        values = [b"a" * SIZE] * MESSAGES
        if batch == BATCHES - 1:
            values[-1] += b"z"
        await partition.append(codec.build([(None, value, (), 1) for value in values], codec=ZSTD, timestamp_ms=1))
    assert partition.log.size_bytes < 64 * 1024
    return partition


@pytest.fixture
def decoded_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of value bytes that each call decoded."""
    sizes: list[int] = []

    def counted(decode: Callable[..., Any]) -> Callable[..., Any]:
        def decode_and_count(*args: Any, **options: Any) -> Any:
            found = decode(*args, **options)
            records: list[Record] = found if isinstance(found, list) else found[0]
            sizes.append(sum(len(record.value or b"") for record in records))
            return found

        return decode_and_count

    monkeypatch.setattr(codec, "records", counted(codec.records))
    monkeypatch.setattr(codec, "records_of", counted(codec.records_of))
    return sizes


async def test_reading_decompresses_about_as_much_as_a_page_takes(
    broker: Broker, compressed: Partition, decoded_bytes: list[int]
) -> None:
    stream = broker.streams.get("compressed")
    seen, offset = 0, 0
    while offset < compressed.end_offset:
        decoded_bytes.clear()
        page = await broker.read(stream, compressed, offset, limit=10_000, bytes_max=int(1.5 * BATCH_BYTES))
        assert [record.offset for record in page.records] == list(range(offset, page.next_offset))
        assert sum(decoded_bytes) <= 3 * BATCH_BYTES
        seen += len(page.records)
        offset = page.next_offset
    assert seen == BATCHES * MESSAGES


async def test_a_page_that_ends_with_a_batch_continues_after_it(broker: Broker, compressed: Partition) -> None:
    stream = broker.streams.get("compressed")
    page = await broker.read(stream, compressed, 0, limit=10_000, bytes_max=MESSAGES * (SIZE + 64))
    assert (len(page.records), page.next_offset) == (MESSAGES, MESSAGES)
    page = await broker.read(stream, compressed, 0, limit=MESSAGES, bytes_max=100 * BATCH_BYTES)
    assert (len(page.records), page.next_offset) == (MESSAGES, MESSAGES)


async def test_browsing_decompresses_about_as_much_as_a_page_takes(
    broker: Broker, compressed: Partition, decoded_bytes: list[int]
) -> None:
    found = await browse(broker.pages.decoder, compressed, 0, limit=500, bytes_max=BATCH_BYTES + 1)
    assert (len(found.records), found.next_offset) == (MESSAGES + 1, MESSAGES + 1)
    assert sum(decoded_bytes) == 2 * BATCH_BYTES


async def test_a_search_ends_its_page_after_many_bytes_and_can_continue(
    broker: Broker, compressed: Partition, decoded_bytes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browsing, "SCAN_BYTES_MAX", 2 * BATCH_BYTES)
    offset, found, pages = 0, [], 0
    while offset < compressed.end_offset:
        decoded_bytes.clear()
        page = await browse(
            broker.pages.decoder, compressed, offset, limit=500, bytes_max=BATCH_BYTES, content=contains("z")
        )
        assert page.next_offset > offset and sum(decoded_bytes) <= 3 * BATCH_BYTES
        offset, pages = page.next_offset, pages + 1
        found += page.records
    assert [record.offset for record in found] == [BATCHES * MESSAGES - 1]
    assert pages == BATCHES // 2


@pytest.fixture
def decompressions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The compressed size of each batch that was decompressed."""
    sizes: list[int] = []

    def counted(codec: int, data: memoryview, limit_bytes: int) -> bytes:
        sizes.append(len(data))
        return decompress(codec, data, limit_bytes)

    monkeypatch.setattr(payload, "decompress", counted)
    monkeypatch.setattr(recompress, "decompress", counted)
    return sizes


class Prefetching:
    """A consumer with a prefetch of one that settles everything at once, as a queue sees it."""

    no_ack, exclusive, priority = True, False, 0

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def credit(self) -> int:
        return 1

    def deliver(self, view: View, data: Any, start: int, *_: Any) -> Any:
        # As for every record that no AMQP client wrote.
        return SimpleNamespace(next_offset=start, count=0, body_bytes=0, needs_message=True, gaps=())

    def deliver_message(self, view: View, offset: int, message: Message, redelivered: bool) -> None:
        self.got.append(message.body)


@pytest.mark.parametrize("how", ["basic.get", "a consumer", "a consumer of a stream"])
async def test_a_compressed_batch_in_a_queue_is_decompressed_once_for_all_its_messages(
    broker: Broker, decompressions: list[int], decoded_bytes: list[int], how: str
) -> None:
    """Each message cost as much as decompressing the whole batch."""
    kind = "stream" if "stream" in how else "classic"
    queue = await declare(broker.vhosts.get("/"), "q", x_queue_type=kind)
    partition = broker.streams.get("q").partitions[0]
    sent = [b"%d" % n for n in range(2 * MANY)]
    for half in (sent[:MANY], sent[MANY:]):
        records = [(None, value, (), 1) for value in half]
        await partition.append(codec.build(records, codec=ZSTD, timestamp_ms=1))
    del decompressions[:], decoded_bytes[:]
    if how == "basic.get":
        assert bodies(queue) == sent
    else:
        consumer = Prefetching()
        if isinstance(queue, StreamQueue):
            queue.attach(cast(Consumer, consumer), 0)
        queue.add_consumer(cast(Consumer, consumer))
        await until(lambda: len(consumer.got) == len(sent))
        assert consumer.got == sent
    assert len(decompressions) < (40 if kind == "stream" else 3), "about once for each batch"
    assert len(decoded_bytes) < len(sent) / 50, "passes over a batch"


async def test_a_batch_too_large_to_be_cached_decompressed_is_still_read(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_reader, "DECOMPRESSED_BYTES_MAX", 1000)
    queue = await declare(broker.vhosts.get("/"), "q")
    sent = [bytes(100)] * 20
    batch = codec.build([(None, value, (), 1) for value in sent], codec=ZSTD, timestamp_ms=1)
    await broker.streams.get("q").partitions[0].append(batch)
    assert bodies(queue) == sent


async def test_a_search_by_time_decompresses_only_the_batch_it_ends_in(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte may decompress to gigabytes, and each search decoded all of it."""
    await broker.streams.create("timed")
    partition = broker.streams.get("timed").partitions[0]
    for number in range(10):
        times = (10 * number, 10 * number + 5)
        messages = [(b"", b"a" * 1000, (), at) for at in times]
        await partition.append(codec.build(messages, codec=ZSTD, timestamp_ms=times[0]))
    decoded_bytes: list[int] = []

    def counted(*args: Any) -> bytes:
        decoded_bytes.append(1)
        return decompress(*args)

    monkeypatch.setattr(payload, "decompress", counted)
    for timestamp, wanted in ((0, (0, 0)), (1, (1, 5)), (55, (11, 55)), (56, (12, 60)), (95, (19, 95)), (96, None)):
        decoded_bytes.clear()
        assert partition.log.offset_for_timestamp_now(timestamp) == wanted
        assert len(decoded_bytes) == (wanted is not None)


class Held(bytes):
    """Bytes that were read, with the total size of those still referenced."""

    alive_bytes = 0

    def __init__(self, data: bytes) -> None:
        Held.alive_bytes += len(data)

    def __del__(self) -> None:
        Held.alive_bytes -= len(self)


async def test_of_many_searches_by_time_that_wait_for_the_thread_only_the_running_one_holds_a_batch(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, size = 20, 100_000
    stream = await broker.streams.create("timed", looks)
    for partition in stream.partitions:
        values = os.urandom(size), bytes(2 << 20)  # mostly incompressible, and large when decompressed
        await partition.append(codec.build([(None, value, (), 5) for value in values], codec=ZSTD, timestamp_ms=5))
    has_begun, goes_on = threading.Event(), threading.Event()

    def first_at(*args: Any, in_thread: bool = False, **options: Any) -> tuple[int, int] | None:
        if in_thread:
            has_begun.set()
            assert goes_on.wait(60)
        return look(*args, in_thread=in_thread, **options)

    def held(read: Callable[..., bytes | None]) -> Callable[..., bytes | None]:
        def counted(files: FileCache, path: str, *args: int) -> bytes | None:
            found = read(files, path, *args)
            return Held(found) if found is not None and path.endswith(".log") else found

        return counted

    look = codec.first_at
    monkeypatch.setattr(codec, "first_at", first_at)
    monkeypatch.setattr(FileCache, "read", held(FileCache.read))
    monkeypatch.setattr(FileCache, "read_cached", held(FileCache.read_cached))
    waiting = [asyncio.ensure_future(partition.offset_at(5)) for partition in stream.partitions]
    try:
        await until(
            lambda: has_begun.is_set() and all(p.log._reader._decompressions._running for p in stream.partitions)
        )
        assert size < Held.alive_bytes < 2 * size
    finally:
        goes_on.set()
    assert await asyncio.gather(*waiting) == [0] * looks
