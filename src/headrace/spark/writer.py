"""The writers of the Spark sink: tasks encode rows and upload them, then the driver commits all uploads in one request.

Uploads are invisible until the commit. The commit is keyed by query and batch, so repeating it, as Spark does after a
failure, stores nothing twice. Abort discards uploads, never records: Spark calls it even after a successful commit
whose response was lost.
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
from headrace.spark.worker_process import prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

STAGE_BYTES = 16 << 20  # per upload, or one batch if that is larger; the broker accepts 64 MB
DISCARD_RETRY_S = 1.0
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"

# Columns of the sink with their accepted types. Columns that only the source has are accepted and ignored, so that rows
# can be copied from topic to topic unchanged.
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
            raise BadOption("schema", f"column {column.name!r} must be {' or '.join(allowed)}, not {given}: cast it")
    names = schema.fieldNames()
    if "value" not in names:
        raise BadOption("schema", "column 'value' is missing")
    if topic is None and "topic" not in names:
        raise BadOption("topic", "is needed, or a column 'topic'")


@dataclass
class TaskUploads(WriterCommitMessage):
    """The uploads of one task: their names, and the parts with topic, partition and byte range."""

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
        staged = TaskUploads(query=context.getLocalProperty(QUERY_ID) if context else None)
        task = WriteTask(self._link, self._options, staged, context.partitionId() if context else 0)
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
        parts = [part for message in messages if isinstance(message, TaskUploads) for part in message.parts]
        self._link.commit(writer, batch, parts)
        self._link.close()

    def _discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        discard_uploads(
            self._options.bootstrap,
            [name for message in messages if isinstance(message, TaskUploads) for name in message.names],
        )


def discard_uploads(url: str, names: Iterable[str]) -> None:
    """Discards uploads that will not be committed. Gives up at the first connection error: the broker removes them."""
    link = BrokerLink(url, retry_s=DISCARD_RETRY_S)
    for name in names:
        try:
            link.discard(name)
        except (BrokerUnreachable, Unconfirmed):
            break  # the broker removes stale uploads
        except HeadraceError:
            continue
    link.close()


class BatchWriter(_Writing, DataSourceArrowWriter):
    """df.write: stores rows once per option writeId and writeBatch (for foreachBatch, whose batches are in order).

    Without a writeId every run stores its rows again.
    """

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        write_id = self._options.write_id
        # Without an id no later run can be the same writer, so the broker forgets `once:` after an hour, not months.
        writer = f"once:{uuid.uuid4().hex}" if write_id is None else f"write:{write_id}"
        self._commit(writer, self._options.write_batch, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._discard(messages)


class StreamWriter(_Writing, DataSourceStreamArrowWriter):
    """df.writeStream: stores rows once per query, whose id is in the checkpoint, and batch."""

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        queries = {message.query for message in messages if isinstance(message, TaskUploads)}
        if not queries:
            return  # a batch without tasks has nothing to store
        if len(queries) != 1 or None in queries:  # under a shared name, batches of one would be repeats of another's
            raise HeadraceError(f"batch {batchId} cannot be stored exactly once: Spark did not provide its query id")
        self._commit(f"spark:{queries.pop()}", batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._discard(messages)


class WriteTask:
    """Encodes and uploads the rows of one task: a writer per topic, uploads of bounded size."""

    def __init__(self, link: BrokerLink, options: WriteOptions, staged: TaskUploads, turn: int) -> None:
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
                raise BadOption("topic", "column 'topic' is null in a row")
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
        """Uploads finished batches, or all rows, in bodies of up to STAGE_BYTES, below the broker's limit."""
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
        self._staged.names.append(
            upload.name
        )  # before the request, so that an upload whose response is lost is discarded, too
        self._link.stage(upload.name, b"".join(upload.body))
        self._staged.parts += upload.parts


class Upload:
    """The body of one upload: whole batches; adjacent batches of the same partition form one part."""

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
    """A buffer with the numbers; nulls become -1."""
    import pyarrow as pa

    plain = pa.concat_arrays([column.cast(kind).fill_null(-1)])  # a copy whose buffer starts at zero
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
        raise InvalidInput("column 'headers' contains a header that is null or whose key is null")
    return pair["key"], pair["value"]
