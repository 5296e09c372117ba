"""The writing half: tasks encode rows and upload them, then the driver commits them all in one call.

What a task uploads nobody sees until the commit. The commit is keyed by query and batch, so doing it again, as
Spark does after a failure, stores nothing twice. Abort throws uploads away, never records: Spark calls it
even after a commit that took effect and whose answer was lost.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from headrace.errors import BrokerUnreachable, HeadraceError, InvalidInput, Unconfirmed
from headrace.record.arrow.write import BinaryRows, PartitionedWriter
from headrace.record.codec import encode_headers
from headrace.spark.broker import BrokerLink
from headrace.spark.options import BadOption, WriteOptions
from headrace.spark.workers import prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

STAGE_BYTES = 16 << 20  # one upload, or one batch if that is larger; the broker takes 64 MB
THROW_AWAY_RETRY_S = 1.0
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"

# Columns that are written, with the types they may have. What only the source gives is allowed and ignored, so
# that rows can go from a topic to another as they are.
TYPES = {
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "timestamp": ("timestamp",),
    "headers": ("array<struct<key:string,value:binary>>",),
}
IGNORED = ("offset", "timestampType", "exchange", "routing_key", "properties")


def check_columns(schema: "StructType", topic: str | None) -> None:
    for column in schema.fields:
        allowed = TYPES.get(column.name)
        given = column.dataType.simpleString()
        if allowed is None and column.name not in IGNORED:
            raise BadOption("schema", f"the sink has no column {column.name!r}; it has {', '.join(TYPES)}")
        if allowed is not None and given not in allowed:
            raise BadOption("schema", f"column {column.name!r} is {' or '.join(allowed)}, not {given}: cast it")
    names = schema.fieldNames()
    if "value" not in names:
        raise BadOption("schema", "a column 'value' is needed")
    if topic is None and "topic" not in names:
        raise BadOption("topic", "or a column 'topic' says where rows go")


@dataclass
class Staged(WriterCommitMessage):
    """What one task uploaded: names, and which bytes are for which partition."""

    query: str | None = None
    names: list[str] = field(default_factory=list)
    parts: list[dict[str, object]] = field(default_factory=list)


class _Writing:
    def __init__(self, options: WriteOptions, columns: Sequence[str]) -> None:
        self._options = options
        self._columns = tuple(columns)
        self._link = BrokerLink(options.bootstrap)

    def write(self, iterator: "Iterator[pa.RecordBatch]") -> WriterCommitMessage:
        from pyspark import TaskContext

        prepare_worker()
        context = TaskContext.get()
        staged = Staged(query=context.getLocalProperty(QUERY_ID) if context else None)
        task = Task(self._link, self._options, staged, context.partitionId() if context else 0)
        try:
            for batch in iterator:
                task.add(batch)
            task.upload(everything=True)
        except BaseException:
            self._discard([staged])
            raise
        finally:
            self._link.close()
        return staged

    def _commit(self, writer: str, batch: int, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = [part for message in messages if isinstance(message, Staged) for part in message.parts]
        self._link.commit(writer, batch, parts)
        self._link.close()

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        throw_away(
            self._options.bootstrap,
            [name for message in messages if isinstance(message, Staged) for name in message.names],
        )


def throw_away(url: str, names: Iterable[str]) -> None:
    """Uploads that nobody will commit. A broker that is gone is not waited for, least of all at every one of them."""
    link = BrokerLink(url, retry_s=THROW_AWAY_RETRY_S)
    for name in names:
        try:
            link.discard(name)
        except (BrokerUnreachable, Unconfirmed):
            break  # the broker sweeps what is left
        except HeadraceError:
            continue
    link.close()


class BatchWriter(_Writing, DataSourceArrowWriter):
    """df.write: once per `writeId` (and `writeBatch`, for foreachBatch, whose batches are written in order); without
    one every run writes its rows, and a repeated run writes them again."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        write_id = self._options.write_id
        # Without an id nobody can come back as this writer: the broker remembers it for an hour, not for months.
        writer = f"once:{uuid.uuid4().hex}" if write_id is None else f"write:{write_id}"
        self._commit(writer, self._options.write_batch, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """df.writeStream: once per batch of the query, whose id lives in the checkpoint."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        queries = {message.query for message in messages if isinstance(message, Staged)}
        if not queries:
            return  # a batch without a single task has nothing to store
        if len(queries) != 1 or None in queries:  # one name for several would make the batches of one another's repeats
            raise HeadraceError(f"batch {batchId} cannot be stored once: Spark does not say which query it is of")
        self._commit(f"spark:{queries.pop()}", batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._discard(messages)


class Task:
    """One task's rows on their way: a writer per topic, uploads of a bounded size."""

    def __init__(self, link: BrokerLink, options: WriteOptions, staged: Staged, turn: int) -> None:
        self._link = link
        self._options = options
        self._staged = staged
        self._turn = turn
        self._writers: dict[str, PartitionedWriter] = {}
        self._now_ms = int(time.time() * 1000)

    def add(self, batch: "pa.RecordBatch") -> None:
        if batch.num_rows == 0:
            return
        if self._options.topic is not None:
            self._add(self._options.topic, batch)
        else:
            import pyarrow.compute as pc

            topics = batch.column("topic")
            if topics.null_count:
                raise BadOption("topic", "a row has no topic: its column 'topic' is null")
            for topic in pc.unique(topics).to_pylist():
                self._add(topic, batch.filter(pc.equal(topics, topic)))
        if sum(writer.bytes_done for writer in self._writers.values()) >= STAGE_BYTES:
            self.upload(everything=False)

    def _add(self, topic: str, batch: "pa.RecordBatch") -> None:
        writer = self._writers.get(topic)
        if writer is None:
            count = self._link.partitions(topic, create=self._options.create_topics)
            writer = self._writers[topic] = PartitionedWriter(
                count,
                timestamp_ms=self._now_ms,
                batch_bytes=self._options.batch_bytes,
                codec=self._options.codec,
                turn=self._turn,
            )
        names = batch.schema.names
        writer.add(
            _rows(batch.column("key")) if "key" in names else None,
            _rows(batch.column("value")),
            partitions=_numbers(batch.column("partition"), "int32") if "partition" in names else None,
            timestamps=_milliseconds(batch.column("timestamp")) if "timestamp" in names else None,
            headers=_headers(batch.column("headers")) if "headers" in names else None,
        )

    def upload(self, *, everything: bool) -> None:
        """In bodies of up to STAGE_BYTES: Spark may have handed over more at once than the broker takes in one."""
        upload = Upload()
        for topic, writer in self._writers.items():
            for partition, batches in writer.take(all=everything):
                for batch in batches:
                    if upload.parts and upload.size + len(batch) > STAGE_BYTES:
                        self._send(upload)
                        upload = Upload()
                    upload.add(topic, partition, batch)
        if upload.parts:
            self._send(upload)

    def _send(self, upload: "Upload") -> None:
        self._staged.names.append(upload.name)  # before: an upload whose answer got lost is discarded, too
        self._link.stage(upload.name, b"".join(upload.body))
        self._staged.parts += upload.parts


class Upload:
    """Whole batches under one name, neighbours for the same partition as one part."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.body: list[bytearray] = []
        self.size = 0
        self.parts: list[dict[str, object]] = []
        self._length = 0  # of the last part

    def add(self, topic: str, partition: int, batch: bytearray) -> None:
        last = self.parts[-1] if self.parts else {}
        if (last.get("topic"), last.get("partition")) == (topic, partition):
            self._length += len(batch)
            last["length"] = self._length
        else:
            self._length = len(batch)
            self.parts.append(
                {
                    "staged": self.name,
                    "topic": topic,
                    "partition": partition,
                    "position": self.size,
                    "length": self._length,
                }
            )
        self.body.append(batch)
        self.size += len(batch)


def _rows(column: "pa.Array") -> BinaryRows:
    import pyarrow as pa

    if column.type not in (pa.binary(), pa.string()):
        column = column.cast(pa.binary())
    validity, offsets, data = column.buffers()
    return BinaryRows(offsets, data, validity if column.null_count else None, column.offset, len(column))


def _numbers(column: "pa.Array", kind: str) -> Any:
    """A buffer of the numbers alone; nulls become -1."""
    import pyarrow as pa

    plain = pa.concat_arrays([column.cast(kind).fill_null(-1)])  # of its own, so that it begins at zero
    if plain.offset:
        plain = pa.array(plain.to_pylist(), kind)
    width = plain.type.bit_width // 8
    return memoryview(plain.buffers()[1])[: len(plain) * width]


def _milliseconds(column: "pa.Array") -> Any:
    import pyarrow as pa

    return _numbers(column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast("int64"), "int64")


def _headers(column: "pa.Array") -> list[tuple[bytes, int] | None]:
    return [encode_headers(map(_header, pairs)) if pairs else None for pairs in column.to_pylist()]


def _header(pair: dict[str, Any] | None) -> tuple[str, bytes | None]:
    if pair is None or pair["key"] is None:
        raise InvalidInput("a header has no name: in column 'headers' it is null, or its key is")
    return pair["key"], pair["value"]
