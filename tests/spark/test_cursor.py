"""The two ends of a stream, without Spark: what its reader and its writer tell the broker of."""

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from headrace.errors import HeadraceError, NotFound
from headrace.spark.options import read_options, write_options
from headrace.spark.reader import StreamReader
from headrace.spark.source import open_access
from headrace.spark.writer import Staged, StreamWriter
from tests.spark.world import RunningBroker, numbered


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_topic_that_is_deleted_ends_a_stream_only_if_loss_does(shared_broker: RunningBroker, fails: str) -> None:
    """Spark says that a batch is done when one of its topics is gone: the cursor goes on in the others."""
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


def test_a_batch_of_no_known_query_is_not_stored(shared_broker: RunningBroker) -> None:
    """All such queries would be one writer, and the second one's batches taken for repeats of the first one's."""
    options = write_options({"bootstrap": shared_broker.url, "topic": "nameless"})
    with pytest.raises(HeadraceError, match="which query"):
        StreamWriter(options, ["value"]).commit([Staged(query=None)], 0)
