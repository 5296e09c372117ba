"""Converting batches to rows of a Parquet file and back. The only module that imports pyarrow, when it is first needed.

A row is a record as a reader sees it, together with the fields of its batch, so that the batch can be restored. A row
group holds whole batches in order. See docs/file-format.md.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import CorruptLog, InvalidInput, StorageError
from headrace.record import codec
from headrace.record.arrow.restore import Cells, Numbers, Rows
from headrace.record.layout import CODEC_MASK
from headrace.record.types import BatchInfo, BinaryColumn, Columns

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

GROUP_BYTES = 4 << 20  # of keys, values and headers in a row group, which a read decodes as a whole
GROUP_ROWS = 1 << 16
READ_BYTES = 4 << 20
BATCH_COLUMNS = (
    "batch_offset", "batch_last_offset", "batch_timestamp", "batch_max_timestamp", "attributes", "leader_epoch",
    "producer_id", "producer_epoch", "sequence",
)  # fmt: skip
FORMAT = b"headrace.tier"
FORMAT_VERSION = b"1"
MAGIC = b"PAR1"
FOOTER_BYTES_MAX = 256 << 20


class PyArrowMissing(StorageError):
    """A segment is archived, and pyarrow, which reads Parquet, is not installed."""


def arrow() -> "tuple[Any, Any]":
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise PyArrowMissing(
            f"archived segments are Parquet files, and pyarrow is not installed ({error}): pip install 'headrace[tier]'"
        ) from error
    return pyarrow, pyarrow.parquet


# Writing.


def schema() -> "pa.Schema":
    pa, _ = arrow()
    header = pa.struct([pa.field("key", pa.string(), nullable=False), pa.field("value", pa.binary())])
    return pa.schema(
        [
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
            pa.field("key", pa.binary()),
            pa.field("value", pa.binary()),
            pa.field("headers", pa.list_(pa.field("element", header, nullable=False)), nullable=False),
            *(pa.field(name, pa.int64(), nullable=False) for name in BATCH_COLUMNS),
        ],
        metadata={FORMAT: FORMAT_VERSION},
    )


class GroupWriter:
    """Writes row groups to a sink; the caller syncs and closes the sink."""

    def __init__(self, sink: "ParquetOutput") -> None:
        pa, pq = arrow()
        self._sink = sink
        self._schema = schema()
        self._file = pa.PythonFile(sink, mode="w")
        self._writer = pq.ParquetWriter(
            self._file,
            self._schema,
            compression="zstd",
            use_dictionary=["headers.list.element.key", "key", *BATCH_COLUMNS],
            write_statistics=["offset", "timestamp", "batch_offset"],
            write_page_checksum=True,
        )

    def write(self, infos: list[BatchInfo], columns: Columns) -> None:
        """Write batches and their records as one row group."""
        self._writer.write_batch(self._rows(infos, columns), row_group_size=max(columns.count, 1))

    def _rows(self, infos: list[BatchInfo], columns: Columns) -> "pa.RecordBatch":
        pa, _ = arrow()
        count = columns.count
        numbers: dict[str, Any] = {}
        lengths = [info.count for info in infos]
        for name, values in zip(BATCH_COLUMNS, zip(*map(_batch_row, infos), strict=True), strict=True):
            numbers[name] = _repeated(pa, list(values), lengths)
        kinds = self._schema
        assert columns.offsets is not None and columns.timestamps is not None and columns.headers is not None
        headers = columns.headers
        total = len(headers.names.offsets) // 4 - 1
        header = kinds.field("headers").type.value_type
        pairs = pa.StructArray.from_arrays(
            [_cells(pa, headers.names, total, pa.string()), _cells(pa, headers.values, total, pa.binary())],
            fields=[header.field(0), header.field(1)],
        )
        arrays = [
            pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(columns.offsets)]),
            pa.Array.from_buffers(kinds.field("timestamp").type, count, [None, pa.py_buffer(columns.timestamps)]),
            _cells(pa, columns.keys, count, pa.binary()),
            _cells(pa, columns.values, count, pa.binary()),
            pa.Array.from_buffers(
                kinds.field("headers").type, count, [None, pa.py_buffer(headers.offsets)], children=[pairs]
            ),
            *(numbers[name] for name in BATCH_COLUMNS),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=kinds)

    def close(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        """Write nothing more. pyarrow finishes a file when its writer is garbage-collected, and by then the descriptor
        may belong to another file."""
        self._sink.is_dead = True
        self._writer.close()


class ParquetOutput:
    """A file-like object for pyarrow that passes bytes to a function."""

    closed = False

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self._position = 0
        self.is_dead = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.is_dead:
            self._write(view)
        self._position += len(view)
        return len(view)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def writable(self) -> bool:
        return True


def _batch_row(info: BatchInfo) -> tuple[int, ...]:
    return (
        info.base_offset, info.last_offset, info.base_timestamp, info.max_timestamp, info.attributes,
        info.leader_epoch, info.producer_id, info.producer_epoch, info.base_sequence,
    )  # fmt: skip


def _repeated(pa: Any, values: list[int], lengths: list[int]) -> Any:
    import pyarrow.compute as pc

    ends: list[int] = []
    for length in lengths:
        ends.append(length + (ends[-1] if ends else 0))
    runs = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, pa.int64()))
    return pc.run_end_decode(runs)


def _cells(pa: Any, column: BinaryColumn | None, count: int, kind: Any) -> Any:
    assert column is not None
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, count, buffers, null_count=column.nulls)


def next_group(data: memoryview) -> tuple[int, list[BatchInfo], Columns]:
    """(bytes used, batches, columns) of the next row group, made of the first batches in `data`; 0 bytes when `data`
    does not hold one whole batch."""
    columns = codec.columns(data, rows_max=GROUP_ROWS, bytes_max=GROUP_BYTES, control=True)
    # A batch without records has no rows, and readers would not see it either.
    infos = [info for info in codec.scan(data, 0, columns.position, verify_crc=False) if info.count]
    return columns.position, infos, columns


# Reading.


class Footer(NamedTuple):
    metadata: "pq.FileMetaData"
    start: int  # of the footer in the file; row groups end before it
    group_starts: list[int]

    @property
    def rows(self) -> int:
        return int(self.metadata.num_rows)


def footer_start(tail: bytes, file_bytes: int, path: str) -> int:
    """The position of the footer, from the last eight bytes of a file."""
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or not 0 < length <= min(file_bytes - 12, FOOTER_BYTES_MAX):
        raise CorruptLog(path, max(file_bytes - 8, 0), "it does not end like a Parquet file")
    return file_bytes - 8 - length


def read_footer(raw: bytes, file_bytes: int, path: str) -> Footer:
    """Parse the footer from the bytes between `footer_start` and the end of the file."""
    pa, pq = arrow()
    start = file_bytes - len(raw)
    try:
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + raw))
        kinds = metadata.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise CorruptLog(path, start, f"its footer cannot be decoded: {error}") from error
    if (metadata.metadata or {}).get(FORMAT) != FORMAT_VERSION or kinds.names != schema().names:
        raise InvalidInput(f"{path} is a Parquet file, but not an archived segment")
    starts = [_group_start(metadata.row_group(number)) for number in range(metadata.num_row_groups)]
    if any(b <= a for a, b in zip(starts, [*starts[1:], start], strict=True)) or (starts and starts[0] < len(MAGIC)):
        raise CorruptLog(path, start, "its row groups do not follow each other")
    return Footer(metadata, start, starts)


def _group_start(group: Any) -> int:
    column = group.column(0)
    places = [column.data_page_offset]
    if column.has_dictionary_page:
        places.append(column.dictionary_page_offset)
    return int(min(places))


def codecs_of(footer: Footer, number: int, raw: bytes, path: str) -> dict[int, int]:
    """The compression that each batch of a row group had, by base offset."""
    table = _table(footer, number, raw, path, ["batch_offset", "attributes"])
    pairs = zip(table.column(0).to_pylist(), table.column(1).to_pylist(), strict=True)
    return {base: attributes & CODEC_MASK for base, attributes in pairs}


def batches_of(footer: Footer, number: int, raw: bytes, bytes_max: int, path: str) -> bytes:
    """Decode a row group's bytes to batches, end to end. CorruptLog when they exceed bytes_max."""
    pa, _ = arrow()
    table = _table(footer, number, raw, path, None)
    try:
        return _rows(pa, table).render(bytes_max)
    except InvalidInput as error:
        raise CorruptLog(
            path, footer.group_starts[number], f"row group {number} cannot be decoded to batches: {error}"
        ) from error


def _table(footer: Footer, number: int, raw: bytes, path: str, columns: list[str] | None) -> "pa.Table":
    pa, pq = arrow()
    start = footer.group_starts[number]
    try:
        file = pq.ParquetFile(pa.PythonFile(_Window(raw, start, footer.start), mode="r"), metadata=footer.metadata)
        return file.read_row_group(number, columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise CorruptLog(path, start, f"row group {number} cannot be read: {error}") from error


def _rows(pa: Any, table: "pa.Table") -> Rows:
    count = table.num_rows
    numbers = {}
    for name in ("offset", "timestamp", *BATCH_COLUMNS):
        array = _whole(pa, table, name)
        if array.null_count or array.type.bit_width != 64:
            raise InvalidInput(f"column {name} does not hold 64-bit integers without nulls")
        numbers[name] = Numbers(array.buffers()[1], array.offset, count)
    headers = _whole(pa, table, "headers")
    pairs = headers.values
    return Rows(
        count,
        numbers,
        _cells_of(_whole(pa, table, "key")),
        _cells_of(_whole(pa, table, "value")),
        headers.buffers()[1],
        headers.offset,
        _cells_of(pairs.field(0)),
        _cells_of(pairs.field(1)),
    )


def _whole(pa: Any, table: "pa.Table", name: str) -> Any:
    array = table.column(name).combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _cells_of(array: Any) -> Cells:
    validity, offsets, data = array.buffers()
    return Cells(offsets, data, validity if array.null_count else None, array.offset, len(array))


class _Window:
    """A file-like object for pyarrow that holds the bytes of one row group only, whose checksum was verified."""

    closed = False

    def __init__(self, raw: bytes, start: int, size: int) -> None:
        self._raw, self._start, self._size = raw, start, size
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        at = self._position - self._start
        if at < 0 or at > len(self._raw):
            raise OSError(f"byte {self._position} is not in the row group")
        data = self._raw[at:] if size < 0 else self._raw[at : at + size]
        self._position += len(data)
        return data

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = position if whence == 0 else position + (self._position if whence == 1 else self._size)
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def flush(self) -> None: ...

    def close(self) -> None: ...
