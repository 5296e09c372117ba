"""Telling records replaced after an unclean stop from records removed by compaction."""

from pathlib import Path

import pytest

from headrace.spark.access import loss_reason
from headrace.spark.offsets import Partition, Position
from headrace.spark.options import read_options
from headrace.spark.source import open_access
from tests.spark.test_size import publish_all_keys, rewrite
from tests.spark.world import RunningBroker


@pytest.mark.parametrize("way", ["path", "bootstrap"])
def test_compacted_records_before_a_position_are_not_reported_as_replaced(tmp_path: Path, way: str) -> None:
    """All records read so far were compacted away, and the next existing record was written after the kill."""
    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("keyed", segment_size="64KB", cleanup_policy="compact", compaction_dirty_percent="1")
        publish_all_keys(broker, "keyed")
        [log] = broker.ok("GET", "/topics/keyed/log")["partitions"]
        reached = Position(log["end"], log["log"], log["epoch"])
        broker.kill()
        broker.start()
        rewrite(broker, "keyed")
        where = {"path": broker.path} if way == "path" else {"bootstrap": broker.url}
        access = open_access(read_options(where | {"topic": "keyed"}))
        place = Partition("keyed", 0)
        state = access.states(["keyed"])[place]
        assert state.epoch > reached.epoch and state.start < reached.offset
        assert broker.messages("keyed")[0]["offset"] >= reached.offset, "something is left of what was read"
        assert loss_reason(access, place, reached, state) is None
        access.close()
    finally:
        broker.close()
