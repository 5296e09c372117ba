"""Plans that retention is faster than, without a JVM."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.errors import SegmentGone
from headrace.log.disk.paths import SegmentStem
from headrace.log.read.external import LogFiles, SliceFile
from headrace.log.segments.segment import Segment
from headrace.record.types import Slice
from headrace.spark.access import Hold, Piece
from headrace.spark.folder_access import FolderAccess
from headrace.spark.offsets import Partition
from tests.listing import listed
from tests.spark.test_size import planned, publish_all_keys, rows
from tests.spark.world import RunningBroker, wait_until


def test_a_batch_from_the_earliest_on_begins_later_when_retention_is_faster_than_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for what is gone: the earliest is what is there by now."""
    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("short", segment_size="64KB")
        publish_all_keys(broker, "short")
        hold, held = FolderAccess.hold, []

        def overtaken(self: FolderAccess, pieces: Sequence[Piece], for_ms: int) -> tuple[list[Piece], Hold | None]:
            held.append(len(pieces))
            if len(held) == 1:
                broker.ok("DELETE", "/topics/short/partitions/0/records?before=1000")
                wait_until(lambda: not listed(broker.data, f"logs/*/{0:020d}.log"), "retention left it there")
            return hold(self, pieces, for_ms)

        monkeypatch.setattr(FolderAccess, "hold", overtaken)
        reader, pieces = planned(broker, topic="short", splitBytes="64KB")
        assert [offset for offset, _ in rows(reader, pieces)] == list(range(1000, 1200))
        assert len(held) > 1
    finally:
        broker.close()


def test_a_look_into_a_segment_that_is_rewritten_just_then_is_taken_again(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction swaps its file between the listing and the opening: no reason to end a stream that only asks how far
    its next batch goes."""
    broker = shared_broker
    broker.create("swapped", retention_ms="forever")
    broker.publish("swapped", ({"value": str(n), "timestamp": 1000 + n} for n in range(10)))
    access = FolderAccess(broker.path, committed=True, fail_on_data_loss=True)
    place = Partition("swapped", 0)
    state = access.states(["swapped"])[place]
    opened, has_been_swapped = LogFiles.open, []

    @contextmanager
    def swapped(self: LogFiles, piece: Slice) -> Iterator[SliceFile]:
        if not has_been_swapped:
            has_been_swapped.append(True)
            raise SegmentGone("it was rewritten")
        with opened(self, piece) as source:
            yield source

    monkeypatch.setattr(LogFiles, "open", swapped)
    for look, found in (
        (lambda: access.reach(place, state, 0, 10, 1), 10),
        (lambda: access.epoch_before(place, state, 10), state.epoch),
        (lambda: access.offset_for_timestamp(place, state, 1005), 5),
    ):
        has_been_swapped.clear()
        assert look() == found
        assert has_been_swapped


@pytest.mark.parametrize("number", [0, 2])
def test_a_segment_that_is_rewritten_while_they_are_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its old file is gone when it is looked at, and its new one came after the listing: its records were missing."""
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
