"""Records that are large, or that decompress to much, are decompressed and copied in a thread, and the event loop runs
meanwhile. Every way to read them is covered here without sockets; the listeners have tests of their own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.consumers import Consumer
from headrace.broker.queues.stream_queue import StreamQueue
from headrace.broker.streams import decode
from headrace.broker.streams.browse import browse, contains, has_text
from headrace.broker.streams.partition import Partition
from headrace.clock import ManualClock
from headrace.errors import RecordTooLarge
from headrace.record import codec
from headrace.record.batch import recompress
from headrace.record.compression import payload
from headrace.record.compression.codecs import decompress
from tests.broker.queue_world import declare, until
from tests.broker.test_broker import config
from tests.broker.test_decompression import Prefetching

GZIP, SNAPPY, LZ4, ZSTD = 1, 2, 3, 4
SIZE = 3 << 20
KEY = b"k"


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    opened = await Broker.open(config(tmp_path / "data"), clock=ManualClock())
    yield opened
    await opened.close()


class Work:
    """The sizes of what was decompressed on the event loop, and elsewhere."""

    def __init__(self) -> None:
        self.on_loop: list[int] = []
        self.in_thread: list[int] = []
        self._loop_thread = threading.get_ident()

    def decompress(self, *args: Any) -> bytes:
        found = decompress(*args)
        (self.on_loop if threading.get_ident() == self._loop_thread else self.in_thread).append(len(found))
        return found


@pytest.fixture
async def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    made = Work()
    monkeypatch.setattr(payload, "decompress", made.decompress)
    monkeypatch.setattr(recompress, "decompress", made.decompress)
    return made


def large(codec_: int = GZIP, size: int = SIZE) -> bytes:
    return bytes(codec.build([(KEY, bytes(size), (), 1)], codec=codec_, timestamp_ms=1))


async def stored(broker: Broker, name: str, batch: bytes, **settings: Any) -> Partition:
    stream = await broker.streams.create(name, 1, settings)
    await stream.partitions[0].append(bytearray(batch))
    return stream.partitions[0]


@pytest.mark.parametrize("codec_", [GZIP, SNAPPY, LZ4, ZSTD])
async def test_a_page_of_a_large_record_is_decompressed_in_the_thread(broker: Broker, work: Work, codec_: int) -> None:
    partition = await stored(broker, "t", large(codec_))
    page = await broker.read(broker.streams.get("t"), partition, 0, limit=10, bytes_max=1 << 20)
    assert [len(record.value or b"") for record in page.records] == [SIZE] and page.next_offset == 1
    assert work.in_thread[-1] > SIZE and max(work.on_loop, default=0) <= decode.INLINE_BYTES_MAX


async def test_a_large_record_without_compression_is_copied_in_the_thread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watched(*args: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return copy(*args, **options)

    copy = codec.records_of
    monkeypatch.setattr(codec, "records_of", watched)
    partition = await stored(broker, "t", large(codec_=0))
    page = await broker.read(broker.streams.get("t"), partition, 0, limit=1, bytes_max=1 << 20)
    assert len(page.records[0].value or b"") == SIZE
    assert threads and threading.get_ident() not in threads


async def test_the_event_loop_runs_while_a_large_record_is_read(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits until the event loop has run ten times: on the event loop it would wait for ever."""
    turns, ran = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        turns += 1
        if turns == 10:
            ran.set()
        else:
            asyncio.get_running_loop().call_soon(count)

    def slow(*args: Any) -> bytes:
        asyncio_loop.call_soon_threadsafe(count)
        assert ran.wait(60), "the event loop does not run"
        return decompress(*args)

    asyncio_loop = asyncio.get_running_loop()
    partition = await stored(broker, "t", large())
    monkeypatch.setattr(payload, "decompress", slow)
    page = await broker.read(broker.streams.get("t"), partition, 0, limit=1, bytes_max=1 << 20)
    assert len(page.records) == 1 and turns == 10


async def test_small_batches_are_decoded_at_once(broker: Broker, work: Work) -> None:
    partition = await stored(broker, "t", large(size=1000))
    page = await broker.read(broker.streams.get("t"), partition, 0, limit=1, bytes_max=1 << 20)
    assert len(page.records) == 1 and work.in_thread == []


async def test_a_record_over_the_limit_is_refused_before_it_is_copied(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = await stored(broker, "t", large())
    stream = broker.streams.get("t")
    with pytest.raises(RecordTooLarge) as caught:
        await broker.read(stream, partition, 0, limit=1, bytes_max=1 << 20, record_bytes_max=SIZE)
    assert (caught.value.offset, caught.value.size, caught.value.limit) == (0, SIZE + len(KEY), SIZE)
    # Records before it are returned first.
    await partition.append(codec.build([(None, b"a", (), 1), (None, bytes(SIZE), (), 1)], codec=ZSTD, timestamp_ms=1))
    page = await broker.read(stream, partition, 1, limit=10, bytes_max=1 << 20, record_bytes_max=1000)
    assert [record.value for record in page.records] == [b"a"] and page.next_offset == 2


async def test_a_batch_over_the_limit_of_the_broker_is_refused_with_its_offset_and_size(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.pages.decoder, "bytes_max", 1 << 20)
    partition = await stored(broker, "t", large())
    with pytest.raises(RecordTooLarge) as caught:
        await broker.read(broker.streams.get("t"), partition, 0, limit=1, bytes_max=1 << 20)
    assert (caught.value.offset, caught.value.next_offset, caught.value.limit) == (0, 1, 1 << 20)
    assert SIZE <= caught.value.size < SIZE + 100, "the size that the batch declares"


async def test_a_page_does_not_copy_more_records_of_a_batch_than_it_takes(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def watched(*args: Any, **options: Any) -> Any:
        found = copy(*args, **options)
        copied.append(sum(len(record.value or b"") for record in found[0]))
        return found

    copy = codec.records_of
    monkeypatch.setattr(codec, "records_of", watched)
    values = [(None, bytes(100_000), (), 1) for _ in range(100)]
    partition = await stored(broker, "t", bytes(codec.build(values, codec=ZSTD, timestamp_ms=1)))
    page = await broker.read(broker.streams.get("t"), partition, 0, limit=1000, bytes_max=1 << 20)
    assert len(page.records) == 10 and sum(copied) == 1_000_000


async def test_browsing_and_searching_a_large_record_happen_in_the_thread(
    broker: Broker, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = await stored(broker, "t", large())
    searched: list[int] = []

    def holds_nothing(_: Any) -> bool:
        searched.append(threading.get_ident())
        return False

    found = await browse(broker.pages.decoder, partition, 0, limit=10, bytes_max=1 << 20)
    assert [len(record.value or b"") for record in found.records] == [SIZE]
    found = await browse(broker.pages.decoder, partition, 0, limit=10, bytes_max=1 << 20, content=holds_nothing)
    assert found.records == [] and found.scanned == 1
    assert searched and threading.get_ident() not in searched
    assert len(work.in_thread) == 2 and work.on_loop == []


def test_a_text_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search looks at a megabyte at a time."""
    from headrace.broker.streams import browse as browsing

    monkeypatch.setattr(browsing, "SEARCH_BYTES", 10)
    for at in range(40):
        assert has_text(b"." * at + b"needle" + b"." * (40 - at), b"needle")
    assert not has_text(b"needl" * 20, b"needle") and has_text(b"", b"") and not has_text(b"", b"x")
    assert contains("")(codec.records(large(0, 10))[0])


async def test_the_key_index_reads_only_the_keys_of_a_large_record(
    broker: Broker, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def watched(*args: Any, **options: Any) -> Any:
        found = copy(*args, **options)
        copied.append(sum(len(record.value or b"") for record in found[0]))
        return found

    copy = codec.records_of
    monkeypatch.setattr(codec, "records_of", watched)
    await stored(broker, "t", large(), key_index="true")
    stream = broker.streams.get("t")
    with pytest.raises(RecordTooLarge):
        await broker.keys.find(stream, KEY, record_bytes_max=1000)
    assert set(copied) == {0}
    found = await broker.keys.find(stream, KEY)
    assert len(found.record.value or b"") == SIZE
    assert work.on_loop == []


async def consumed(queue: Any, wanted: int) -> list[int]:
    consumer = Prefetching()
    if isinstance(queue, StreamQueue):
        queue.attach(cast(Consumer, consumer), 0)
    queue.add_consumer(cast(Consumer, consumer))
    await until(lambda: len(consumer.got) == wanted)
    queue.remove_consumer(cast(Consumer, consumer))
    return [len(body) for body in consumer.got]


async def got(queue: Any, wanted: int) -> list[int]:
    sizes = []
    for _ in range(wanted):
        await queue.prepare_get()
        taken = queue.get()
        assert taken is not None
        sizes.append(len(taken[2].body))
    return sizes


@pytest.mark.parametrize(("kind", "receive"), [("stream", consumed), ("classic", consumed), ("classic", got)])
@pytest.mark.parametrize("batch", [large(), large(ZSTD), large(LZ4), large(GZIP, 17 << 20)])
async def test_an_amqp_client_receives_a_large_record_that_was_decompressed_in_the_thread(
    broker: Broker, work: Work, kind: str, receive: Callable[..., Any], batch: bytes
) -> None:
    queue = await declare(broker.vhosts.get("/"), "q", x_queue_type=kind)
    partition = broker.streams.get("q").partitions[0]
    small = bytes(codec.build([(None, b"small", (), 1)], codec=GZIP, timestamp_ms=1))
    for data in (small, batch, small):
        await partition.append(bytearray(data))
    [size] = [len(record.value or b"") for record in codec.records(batch)]
    del work.on_loop[:], work.in_thread[:]
    assert await receive(queue, 3) == [5, size, 5]
    assert work.in_thread and max(work.in_thread) > size
    assert max(work.on_loop, default=0) <= decode.INLINE_BYTES_MAX


@pytest.mark.parametrize("kind", ["stream", "classic"])
async def test_a_batch_that_declares_less_than_it_holds_is_not_decompressed_on_the_event_loop(
    broker: Broker, work: Work, kind: str
) -> None:
    """LZ4 need not declare a size."""
    queue = await declare(broker.vhosts.get("/"), "q", x_queue_type=kind)
    await broker.streams.get("q").partitions[0].append(bytearray(large(LZ4)))
    assert await consumed(queue, 1) == [SIZE]
    assert max(work.on_loop, default=0) <= decode.INLINE_BYTES_MAX


async def test_a_queue_with_a_limit_on_bytes_counts_large_records_in_the_thread(broker: Broker, work: Work) -> None:
    queue = await declare(broker.vhosts.get("/"), "q", x_max_length_bytes=2 * SIZE)
    partition = broker.streams.get("q").partitions[0]
    for _ in range(3):
        await partition.append(bytearray(large()))
    await until(lambda: queue.ready == 2)
    assert queue.limits.bytes is not None
    assert queue.limits.bytes.total == 2 * SIZE
    assert work.in_thread and max(work.on_loop, default=0) <= decode.INLINE_BYTES_MAX


async def test_a_reader_that_is_gone_leaves_no_decoded_record_behind(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn in the thread is skipped."""
    partition = await stored(broker, "t", large())
    begun, goes_on, count = threading.Event(), threading.Event(), 0

    def slow(*args: Any) -> bytes:
        nonlocal count
        count += 1
        begun.set()
        assert goes_on.wait(60)
        return decompress(*args)

    monkeypatch.setattr(payload, "decompress", slow)
    stream = broker.streams.get("t")
    readers = [asyncio.ensure_future(broker.read(stream, partition, 0, limit=1, bytes_max=1 << 20)) for _ in range(5)]
    await until(begun.is_set)
    for reader in readers[1:4]:
        reader.cancel()
    await asyncio.gather(*readers[1:4], return_exceptions=True)
    goes_on.set()
    pages = [await readers[0], await readers[4]]
    assert [len(page.records) for page in pages] == [1, 1] and count == 2


async def test_a_batch_larger_than_is_accepted_now_can_still_be_read(tmp_path: Path) -> None:
    """Older data folders hold batches of up to 128 MB."""
    size = 40 << 20
    before = await Broker.open(config(tmp_path, decompressed_bytes_max=128 << 20), clock=ManualClock())
    await stored(before, "t", large(GZIP, size))
    await before.close()
    broker = await Broker.open(config(tmp_path), clock=ManualClock())
    try:
        assert broker.config.decompressed_bytes_max < size
        stream = broker.streams.get("t")
        page = await broker.read(stream, stream.partitions[0], 0, limit=1, bytes_max=1 << 20)
        assert len(page.records[0].value or b"") == size
    finally:
        await broker.close()
