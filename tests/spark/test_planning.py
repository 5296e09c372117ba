"""Planning without Spark: division of limits, lag, and options."""

from pathlib import Path

import pytest

from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.errors import CorruptCatalog, InvalidInput
from headrace.log.disk.disk import RealDisk
from headrace.pipelines.progress import lag_of
from headrace.spark.access import DataLoss, State
from headrace.spark.broker_access import BrokerAccess
from headrace.spark.folder_access import FolderAccess
from headrace.spark.limits import divide_limit
from headrace.spark.offsets import Partition, Position, from_json, to_json
from headrace.spark.options import BadOption, read_options, write_options
from headrace.spark.plan import SPLIT_BYTES_MAX, SPLIT_BYTES_MIN, Planner, split_for

A, B, C = Partition("a", 0), Partition("a", 1), Partition("b", 0)


def test_a_limit_is_divided_by_backlog_without_starvation() -> None:
    assert divide_limit({A: 10, B: 0}, 100) == {A: 10}
    assert divide_limit({A: 900, B: 100}, 100) == {A: 90, B: 10}
    shares = divide_limit({A: 1_000_000, B: 1, C: 1}, 10)
    assert sum(shares.values()) == 10 and shares[B] == 1 and shares[C] == 1
    assert divide_limit({A: 5, B: 5, C: 5}, 2) in ({A: 1, B: 1}, {A: 1, C: 1}, {B: 1, C: 1})


def test_shares_do_not_exceed_the_backlog_and_add_up_to_the_limit() -> None:
    for limit in range(1, 40):
        waiting = {A: 7, B: 13, C: 17}
        shares = divide_limit(waiting, limit)
        assert sum(shares.values()) == min(limit, 37)
        assert all(0 < share <= waiting[place] for place, share in shares.items())


def test_with_more_partitions_than_the_limit_every_partition_is_read_eventually() -> None:
    """The first partitions always have new records: the others must not wait for ever."""
    waiting = dict.fromkeys([A, B, C], 0)
    read = dict.fromkeys([A, B, C], 0)
    for _ in range(30):
        waiting = {place: size + 1 for place, size in waiting.items()}
        for place, share in divide_limit(waiting, 2).items():
            waiting[place] -= share
            read[place] += share
    assert sum(read.values()) == 60 and min(read.values()) > 10


def test_tasks_are_as_few_as_keep_the_cores_busy() -> None:
    assert split_for(600 << 20, cores=2) == 165 << 20
    assert split_for(600 << 20, cores=3) == 110 << 20
    assert split_for(1, cores=2) == split_for(600 << 20, cores=64) == SPLIT_BYTES_MIN
    assert split_for(1 << 50, cores=2) == SPLIT_BYTES_MAX


def test_positions_go_to_json_and_back() -> None:
    positions = {A: Position(5, 17, 2), B: Position(0, 18, -1)}
    assert from_json(to_json(positions)) == positions
    with pytest.raises(InvalidInput, match="not a valid offset of this source"):
        from_json({"a": {"0": 5}})


def test_lag_is_the_difference_between_end_and_latest_offsets() -> None:
    reached, latest = to_json({A: Position(5, 1, 0)}), to_json({A: Position(12, 1, 0), B: Position(4, 2, 0)})
    assert lag_of({"endOffset": reached, "latestOffset": latest}) == 7
    assert lag_of({"endOffset": "12", "latestOffset": "15"}) is None


def test_option_names_are_case_insensitive() -> None:
    chosen = read_options({"path": "/x", "topic": "t", "splitbytes": "2MB", "startingtimestamp": "1970-01-01T00:00:01"})
    assert (chosen.split_bytes, chosen.starting_ms, chosen.isolation) == (2 << 20, 1000, "read_committed")
    assert write_options({"bootstrap": "h:1", "compression": "zstd"}).codec == 4
    with pytest.raises(BadOption, match="'writeBatch': needs a 'writeId'"):
        write_options({"bootstrap": "h:1", "writeBatch": "3"})


def test_a_topic_with_a_damaged_document_is_not_read(tmp_path: Path) -> None:
    """With a flipped digit in the id of a log, the messages of another topic would be read."""
    (tmp_path / "logs").mkdir()
    document = {"vhost": "/", "name": "a", "kind": "topic", "logs": [2], "config": {}, "created_ms": 1}
    FileCatalog(RealDisk(), str(tmp_path)).put("streams", ("/", "a"), document)
    assert list(FolderAccess(str(tmp_path), committed=True, fail_on_data_loss=True).topics()) == ["a"]
    (file,) = (tmp_path / "catalog" / "streams").iterdir()
    file.write_bytes(file.read_bytes().replace(b"    2\n", b"    3\n"))
    with pytest.raises(CorruptCatalog, match=file.name):
        FolderAccess(str(tmp_path), committed=True, fail_on_data_loss=True).topics()


@pytest.mark.parametrize("limit", [{"rows": 10}, {"size": 10}])
def test_a_limited_stream_continues_at_the_end_of_a_truncated_log(limit: dict[str, int]) -> None:
    """A power failure removed the last records and failOnDataLoss is off: the records that replace them are read."""
    access = BrokerAccess("127.0.0.1:1", committed=True, fail_on_data_loss=False)
    chosen = read_options({"bootstrap": "127.0.0.1:1", "topic": "a", "failOnDataLoss": "false"})
    planner, states = Planner(chosen, access), {A: State(1, 1, 0, 80)}
    start = {A: Position(100, 1, 0)}
    end = planner.limited(start, planner.latest(start, states), states, **limit)
    assert end == {A: Position(80, 1, 1)}


def test_a_limited_stream_does_not_count_deleted_records() -> None:
    """Counting deleted records against the limit would produce many empty batches."""
    access = BrokerAccess("127.0.0.1:1", committed=True, fail_on_data_loss=False)
    chosen = read_options({"bootstrap": "127.0.0.1:1", "topic": "a", "failOnDataLoss": "false"})
    planner, states = Planner(chosen, access), {A: State(1, 0, 5_000_000, 6_000_000)}
    start = {A: Position(100, 1, 0)}
    end = planner.limited(start, planner.latest(start, states), states, rows=10)
    assert end == {A: Position(5_000_010, 1, 0)}


@pytest.mark.parametrize("is_planned", [False, True])
def test_records_of_a_new_partition_deleted_before_they_were_read_are_reported(is_planned: bool) -> None:
    """The partition was created while the query was down, and retention deleted records before it started."""
    access = BrokerAccess("127.0.0.1:1", committed=True, fail_on_data_loss=True)
    chosen = {"bootstrap": "127.0.0.1:1", "topic": "a"}
    start, states = {A: Position(5, 1, 0)}, {A: State(1, 0, 0, 5), B: State(2, 0, 10, 50)}

    def follow(planner: Planner) -> object:
        return (
            planner.tasks(start, {A: start[A], B: Position(50, 2, 0)}, states)
            if is_planned
            else planner.latest(start, states)
        )

    with pytest.raises(DataLoss, match="partition 1 of 'a' is new to this stream but starts at 10"):
        follow(Planner(read_options(chosen), access))
    assert follow(Planner(read_options({**chosen, "failOnDataLoss": "false"}), access))
