"""Planning that competes with retention and compaction, without a JVM."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.errors import SegmentGone
from headrace.log.disk.paths import SegmentStem
from headrace.log.read.external import LogFiles, SliceFile
from headrace.log.segments.segment import Segment
from headrace.record.types import Slice
from headrace.spark.access import Lease, ReadTask
from headrace.spark.folder_access import FolderAccess
from headrace.spark.offsets import Partition
from tests.listing import listed
from tests.spark.test_size import planned, publish_all_keys, rows
from tests.spark.world import RunningBroker, wait_until


def test_a_batch_from_earliest_is_planned_again_after_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch from earliest starts at the new log start: no requested record is lost."""
    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("short", segment_size="64KB")
        publish_all_keys(broker, "short")
        lease, planned_tasks = FolderAccess.lease, []

        def overtaken(
            self: FolderAccess, tasks: Sequence[ReadTask], for_ms: int
        ) -> tuple[list[ReadTask], Lease | None]:
            planned_tasks.append(len(tasks))
            if len(planned_tasks) == 1:
                broker.ok("DELETE", "/topics/short/partitions/0/records?before=1000")
                wait_until(lambda: not listed(broker.data, f"logs/*/{0:020d}.log"), "retention left it there")
            return lease(self, tasks, for_ms)

        monkeypatch.setattr(FolderAccess, "lease", overtaken)
        reader, pieces = planned(broker, topic="short", splitBytes="64KB")
        assert [offset for offset, _ in rows(reader, pieces)] == list(range(1000, 1200))
        assert len(planned_tasks) > 1
    finally:
        broker.close()


def test_a_lookup_in_a_segment_that_is_rewritten_meanwhile_is_retried(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction replaces the file between the listing and the opening: a stream that only asks how far its next batch
    goes must not fail."""
    broker = shared_broker
    broker.create("swapped", retention_ms="forever")
    broker.publish("swapped", ({"value": str(n), "timestamp": 1000 + n} for n in range(10)))
    access = FolderAccess(broker.path, committed=True, fail_on_data_loss=True)
    place = Partition("swapped", 0)
    state = access.states(["swapped"])[place]
    opened = LogFiles.open
    has_been_swapped: list[bool] = []

    @contextmanager
    def swapped(self: LogFiles, piece: Slice) -> Iterator[SliceFile]:
        if not has_been_swapped:
            has_been_swapped.append(True)
            raise SegmentGone("it was rewritten")
        with opened(self, piece) as source:
            yield source

    monkeypatch.setattr(LogFiles, "open", swapped)
    looks: list[tuple[Callable[[], int | None], int]] = [
        (lambda: access.offset_after_bytes(place, state, 0, 10, 1), 10),
        (lambda: access.epoch_before(place, state, 10), state.epoch),
        (lambda: access.offset_for_timestamp(place, state, 1005), 5),
    ]
    for look, found in looks:
        has_been_swapped.clear()
        assert look() == found
        assert has_been_swapped


@pytest.mark.parametrize("number", [0, 2])
def test_a_segment_rewritten_during_the_listing_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Regression: the old file was deleted before it was opened, and the new one appeared after the listing, so that
    its records were missing."""
    broker = RunningBroker(tmp_path).start()
    try:
        broker.create("long", segment_size="64KB")
        publish_all_keys(broker, "long")
        broker.stop()
        [folder] = listed(broker.data, "logs/*-long")
        old = sorted(file.name.removesuffix(".log") for file in listed(folder, "*.log"))[number]
        segment = LogFiles._segment

        def swapped(self: LogFiles, path: str, stem: SegmentStem) -> Segment | None:
            if str(stem) == old:
                for file in listed(folder, f"{old}.*"):
                    file.rename(folder / f"{old}-000001{file.suffix}")
            return segment(self, path, stem)

        files = LogFiles(broker.path)
        [log_id] = (log_id for log_id in files.ends() if files.folder(log_id) == str(folder))
        monkeypatch.setattr(LogFiles, "_segment", swapped)
        cut = files.slices(log_id, 0, 1200, 1 << 62)
        assert [n for piece in cut for n in range(piece.base_offset, piece.next_offset)] == list(range(1200))
    finally:
        broker.close()
