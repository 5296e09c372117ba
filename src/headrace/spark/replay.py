"""A topic's records once more, to another topic: what a Spark task does, done here in a loop."""

from typing import TYPE_CHECKING

from headrace.spark import options as parsing
from headrace.spark.access import Hold, Piece
from headrace.spark.broker import BrokerLink
from headrace.spark.folder_access import FolderAccess
from headrace.spark.plan import HOLD_MS, Planner, planned
from headrace.spark.rows import Rows
from headrace.spark.writer import Staged, Task, throw_away

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = ("key", "value", "timestamp", "headers")


def replay(url: str, folder: str, topic: str, target: str, *, start: str, write_id: str) -> int:
    """How many records are stored under that id; one commit, so all of them or none. Like a task of Spark it reads what
    it was planned on, whatever compaction and retention do meanwhile."""
    import pyarrow as pa

    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    kinds = pa.binary(), pa.binary(), pa.timestamp("us", "UTC"), pa.list_(pair)
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)))
    chosen = parsing.read_options({"path": folder, "topic": topic, "startingOffsets": start})
    access = FolderAccess(folder, committed=True, fail_on_data_loss=True, bootstrap=url)
    planner = Planner(chosen, access)
    rows = Rows(access, COLUMNS, verify_crc=True, committed=True)
    link = BrokerLink(url)
    staged = Staged()
    task = Task(link, parsing.write_options({"bootstrap": url, "topic": target}), staged, 0)

    def plan() -> list[Piece]:
        states = planner.states()
        return planner.pieces(planner.first(states, "earliest"), planner.last(states), states)

    hold: Hold | None = None
    try:
        pieces, hold = planned(access, plan, HOLD_MS)
        for piece in pieces:
            for batch in rows.read(piece, schema):
                task.add(batch)
        task.upload(everything=True)
        return int(link.commit(f"write:{write_id}", 0, staged.parts)["records"])
    except BaseException:
        throw_away(url, staged.names)
        raise
    finally:
        if hold is not None:
            hold.release()
        access.close()
        link.close()


def replay_on_spark(
    session: "SparkSession", url: str, folder: str, topic: str, target: str, *, start: str, write_id: str
) -> int:
    """The same by the source and the sink: tasks upload what they read, one commit stores it."""
    reading = {"path": folder, "bootstrap": url, "topic": topic, "startingOffsets": start, "columns": ",".join(COLUMNS)}
    rows = session.read.format("headrace").options(**reading).load()
    rows.write.format("headrace").mode("append").options(bootstrap=url, topic=target, writeId=write_id).save()
    link = BrokerLink(url)
    try:
        return int(link.get("sinks", f"write:{write_id}")["records"])
    finally:
        link.close()
