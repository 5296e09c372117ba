"""Plans that retention is faster than, without a JVM."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.spark.access import Hold, Piece
from headrace.spark.folder_access import FolderAccess
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
                wait_until(lambda: not list(broker.data.glob(f"logs/*/{0:020d}.log")), "retention left it there")
            return hold(self, pieces, for_ms)

        monkeypatch.setattr(FolderAccess, "hold", overtaken)
        reader, pieces = planned(broker, topic="short", splitBytes="64KB")
        assert [offset for offset, _ in rows(reader, pieces)] == list(range(1000, 1200))
        assert len(held) > 1
    finally:
        broker.close()
