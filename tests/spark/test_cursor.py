"""Requests of the stream reader and writer to the broker, without Spark."""

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from headrace.errors import HeadraceError, NotFound
from headrace.spark.offsets import Partition, Position, to_json
from headrace.spark.options import read_options, write_options
from headrace.spark.reader import StreamReader
from headrace.spark.source import open_access
from headrace.spark.writer import StreamWriter, TaskUploads
from tests.spark.world import RunningBroker, numbered, wait_until


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_deleted_topic_ends_a_stream_only_with_fail_on_data_loss(shared_broker: RunningBroker, fails: str) -> None:
    """Spark commits a batch after one of its topics was deleted: the cursor must move in the others."""
    broker, name = shared_broker, f"deleted-{fails}"
    for topic in ("a", "b"):
        broker.create(f"{name}.{topic}")
        broker.publish(f"{name}.{topic}", numbered(10))
    options = read_options({
        "bootstrap": broker.url, "topicPattern": f"{name}[.].", "cursor": name, "startingOffsets": "earliest",
        "failOnDataLoss": fails,
    })  # fmt: skip
    schema = StructType([StructField("value", BinaryType())])
    reader = StreamReader(options, open_access(options), ["value"], schema)
    try:
        end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
        broker.ok("DELETE", f"/topics/{name}.a")
        if fails == "true":
            with pytest.raises(NotFound):
                reader.commit(end)
        else:
            reader.commit(end)
            [topic] = broker.ok("GET", f"/cursors/{name}")["topics"]
            assert (topic["topic"], topic["partitions"][0]["offset"]) == (f"{name}.b", 10)
    finally:
        reader.stop()


def test_a_batch_without_a_query_id_is_not_stored(shared_broker: RunningBroker) -> None:
    """Without an id all queries would be one writer, and batches of one would count as repeats of another's."""
    options = write_options({"bootstrap": shared_broker.url, "topic": "nameless"})
    with pytest.raises(HeadraceError, match="did not provide its query id"):
        StreamWriter(options, ["value"]).commit([TaskUploads(query=None)], 0)


def test_an_idle_stream_refreshes_its_cursor(shared_broker: RunningBroker) -> None:
    """Spark commits a batch only when it plans the next one. Until then the cursor of an idle stream would show lag
    where there is none, and would expire."""
    broker = shared_broker
    broker.create("idle")
    broker.publish("idle", numbered(10))
    options = read_options({
        "bootstrap": broker.url, "topic": "idle", "cursor": "idle", "startingOffsets": "earliest", "pin": "true",
        "pinMaxAge": "4ms",
    })  # fmt: skip
    reader = StreamReader(options, open_access(options), ["value"], StructType([StructField("value", BinaryType())]))
    limit = reader.getDefaultReadLimit()
    try:
        end = reader.latestOffset(reader.initialOffset(), limit)
        assert broker.ok("GET", "/cursors/idle")["lag"] == 10, "nothing is done yet"
        assert reader.latestOffset(end, limit) == end
        assert broker.ok("GET", "/cursors/idle")["lag"] == 0

        def is_back() -> bool:
            assert reader.latestOffset(end, limit) == end
            return broker.call("GET", "/cursors/idle")[0] == 200

        broker.ok("DELETE", "/cursors/idle")  # as the broker does with an expired cursor
        wait_until(is_back, "a running stream lost its cursor")
        assert broker.ok("GET", "/cursors/idle")["pin"]
    finally:
        reader.stop()


def test_a_failed_cursor_refresh_does_not_end_the_stream(shared_broker: RunningBroker) -> None:
    broker = shared_broker
    broker.create("kept")
    options = read_options({"path": broker.path, "bootstrap": "http://127.0.0.1:1", "topic": "kept", "cursor": "kept"})
    reader = StreamReader(options, open_access(options), ["value"], StructType([StructField("value", BinaryType())]))
    [log] = broker.ok("GET", "/topics/kept/log")["partitions"]
    start = to_json({Partition("kept", 0): Position(0, log["log"], log["epoch"])})
    try:
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        assert reader.latestOffset(end, reader.getDefaultReadLimit()) == end
    finally:
        reader.stop()
