"""Copies the records of a topic to another topic, in this process or on Spark (`headrace log replay`)."""

from typing import TYPE_CHECKING

from headrace.spark import options as parsing
from headrace.spark.access import Lease, ReadTask
from headrace.spark.broker import BrokerLink
from headrace.spark.folder_access import FolderAccess
from headrace.spark.plan import LEASE_MS, Planner, plan_with_lease
from headrace.spark.rows import RowDecoder
from headrace.spark.writer import TaskUploads, WriteTask, discard_uploads

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = ("key", "value", "timestamp", "headers")


def replay(url: str, folder: str, topic: str, target: str, *, start: str, write_id: str) -> int:
    """Copies in this process, in one atomic commit, and returns the number of records stored under that id.

    Like a Spark task it reads the leased files, even if compaction or retention replace them meanwhile.
    """
    import pyarrow as pa

    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    kinds = pa.binary(), pa.binary(), pa.timestamp("us", "UTC"), pa.list_(pair)
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
    chosen = parsing.read_options({"path": folder, "topic": topic, "startingOffsets": start})
    access = FolderAccess(folder, committed=True, fail_on_data_loss=True, bootstrap=url)
    planner = Planner(chosen, access)
    rows = RowDecoder(access, COLUMNS, verify_crc=True, committed=True)
    link = BrokerLink(url)
    staged = TaskUploads()
    output = WriteTask(link, parsing.write_options({"bootstrap": url, "topic": target}), staged, 0)

    def plan() -> list[ReadTask]:
        states = planner.states()
        return planner.tasks(planner.start_positions(states, "earliest"), planner.end_positions(states), states)

    lease: Lease | None = None
    try:
        tasks, lease = plan_with_lease(access, plan, LEASE_MS)
        for task in tasks:
            for batch in rows.read(task, schema):
                output.add(batch)
        output.upload(everything=True)
        return int(link.commit(f"write:{write_id}", 0, staged.parts)["records"])
    except BaseException:
        discard_uploads(url, staged.names)
        raise
    finally:
        if lease is not None:
            lease.release()
        access.close()
        link.close()


def replay_on_spark(
    session: "SparkSession", url: str, folder: str, topic: str, target: str, *, start: str, write_id: str
) -> int:
    """Like `replay`, with the Spark source and sink: tasks upload what they read, one commit stores it."""
    reading = {"path": folder, "bootstrap": url, "topic": topic, "startingOffsets": start, "columns": ",".join(COLUMNS)}
    rows = session.read.format("headrace").options(**reading).load()
    rows.write.format("headrace").mode("append").options(bootstrap=url, topic=target, writeId=write_id).save()
    link = BrokerLink(url)
    try:
        return int(link.get("sinks", f"write:{write_id}")["records"])
    finally:
        link.close()
