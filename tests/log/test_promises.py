"""Small promises of the log that others build on."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.log.disk.disk import RealDisk
from headrace.log.disk.file_cache import FileCache
from headrace.log.read.external import LogFiles, SegmentGone, aborted_ranges
from headrace.log.settings import LogSettings, StreamSettings
from headrace.record import codec
from headrace.record.types import BatchInfo
from tests.log.helpers import SMALL, Bench, batch, values


def test_other_processes_see_an_append_by_the_time_it_is_confirmed(bench: Bench) -> None:
    """Through the slots, without another sync: only the log itself has been synced by then."""
    shard = bench.open()
    seen: list[int] = []
    ticket = shard.log(1).append(batch([b"a", b"b"]))
    ticket.add_callback(lambda _: seen.append(LogFiles(bench.root).ends()[1].durable_end))
    syncs = shard.counters.syncs
    shard.pump()
    assert seen == [2]
    assert shard.counters.syncs == syncs + 1
    shard.close()


def test_async_records_are_synced_after_flush_bytes_whatever_the_interval(bench: Bench) -> None:
    stream = StreamSettings(write_mode="async", flush_interval_ms=0, flush_bytes=1000)
    shard = bench.open(stream=stream)
    log = shard.log(1)
    bench.append(1, [b"x" * 500])
    shard.tick()
    shard.pump()
    assert (log.visible_end, log.durable_end) == (1, 0)
    bench.append(1, [b"x" * 500])
    shard.tick()
    shard.pump()
    assert (log.visible_end, log.durable_end) == (2, 2)
    shard.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_search_by_time_finds_the_first_record_at_or_after_it_in_any_order(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    shard = bench.open(stream=StreamSettings(segment_size=3000, index_interval=200))
    stamps: list[int] = []
    while len(stamps) < 150:
        times = [rng.randrange(1000) for _ in range(rng.randint(1, 4))]
        shard.log(1).append(codec.build([(None, b"v" * 40, (), at) for at in times]))
        shard.pump()
        stamps += times
    for wanted in range(0, 1002, 7):
        expected = next(((offset, at) for offset, at in enumerate(stamps) if at >= wanted), None)
        assert shard.log(1).offset_for_timestamp(wanted) == expected
    shard.close()


def test_more_logs_than_open_files_are_all_written_and_read(bench: Bench) -> None:
    settings = LogSettings(
        journal_file_bytes=SMALL.journal_file_bytes, journal_files=3, inline_bytes_max=4096, disk_reserve=0,
        open_files_max=8,
    )  # fmt: skip
    shard = bench.open(*range(1, 31), settings=settings)
    for turn in range(3):
        for number in range(1, 31):
            bench.append(number, [b"%d in turn %d" % (number, turn)])
    assert len(shard.files) <= 8
    for number in range(1, 31):
        assert values(shard.log(number)) == [b"%d in turn %d" % (number, turn) for turn in range(3)]
    shard.close()


def test_a_file_in_use_is_not_closed_for_want_of_descriptors(tmp_path: Path) -> None:
    class Crowded(RealDisk):
        """While one file is read, more files are opened than the cache may hold."""

        is_crowded = False

        def pread(self, file: int, size: int, position: int) -> bytes:
            if self.is_crowded:
                self.is_crowded = False
                for i in range(20):
                    files.write(f"{tmp_path}/other{i}", [b"x"], 0, create=True)
            return super().pread(file, size, position)

    disk = Crowded()
    files = FileCache(disk, 8)
    files.write(f"{tmp_path}/read", [b"mine"], 0, create=True)
    disk.is_crowded = True
    assert files.read(f"{tmp_path}/read", 4, 0) == b"mine"
    assert len(files) <= 8
    files.close()


def test_a_transaction_whose_marker_was_removed_is_not_taken_for_committed() -> None:
    """A reader that planned before retention took the marker cannot say any more what became of it."""
    of_it: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    begun = codec.build([(None, b"x", (), 1)], **of_it)
    ended = codec.build([(b"\0\0\0\0", b"\0" * 6, (), 1)], control=True, **of_it)
    codec.patch(ended, 0, 1, 0)
    [first], [marker] = codec.scan(begun), codec.scan(ended)
    assert aborted_ranges([(begun, first), (ended, marker)], 1) == [(7, 0, 1)]
    assert aborted_ranges([(begun, first)], 0) == []
    with pytest.raises(SegmentGone, match="producer 7 from offset 0"):
        aborted_ranges([(begun, first)], 1)


def test_ended_transactions_do_not_cause_a_scan_of_the_rest_of_the_log() -> None:
    """Behind a slice with a transaction may lie terabytes without one."""
    of_it: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    begun = codec.build([(None, b"x", (), 1)], **of_it)
    ended = codec.build([(b"\0\0\0\0", b"\0" * 6, (), 1)], control=True, **of_it)
    looked_at = []

    def batches() -> Iterator[tuple[bytes, BatchInfo]]:
        for offset, data in enumerate([begun, ended, *(codec.build([(None, b"x", (), 1)]) for _ in range(10))]):
            codec.patch(data, 0, offset, 0)
            looked_at.append(offset)
            yield bytes(data), codec.scan(data)[0]

    assert aborted_ranges(batches(), 3) == [(7, 0, 1)]
    assert looked_at == [0, 1, 2, 3]
