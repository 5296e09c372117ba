"""RowDecoder: decodes stored batches into Arrow record batches.

The compiled decoder in headrace.record fills buffers; this module wraps them in Arrow arrays with names and types.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptBatch, CorruptLog, CorruptProperties
from headrace.log.read.external import SegmentGone, aborted_ranges
from headrace.record import codec
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER
from headrace.record.types import BinaryColumn, Columns, HeadersColumn
from headrace.spark.access import Access, ChunkReader, DataLoss, ReadTask
from headrace.spark.schema import fields_to_decode

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_MAX = 65_536
BYTES_MAX = 1 << 20  # larger ones do not fit the CPU caches, and above 2 MB the JVM allocates new memory for each


class RowDecoder:
    """Turns a ReadTask into Arrow record batches. Created on the driver, pickled, used on executors."""

    def __init__(self, access: Access, columns: Sequence[str], *, verify_crc: bool, committed: bool) -> None:
        self._access = access
        self._columns = tuple(columns)
        self._verify_crc = verify_crc
        self._committed = committed

    def read(self, task: ReadTask, schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
        for start, end, reader in self._access.open_readers(task):
            try:
                for columns in self._decode(reader, start, end):
                    yield from _record_batches(columns, task, self._columns, schema)
            finally:
                reader.close()

    def _decode(self, reader: ChunkReader, start: int, end: int) -> Iterator[Columns]:
        offset = start
        aborted: list[tuple[int, int, int]] | None = None
        want = fields_to_decode(self._columns)
        fresh = True
        while offset < end:
            data = reader.read(offset)
            if not data:
                return  # compaction removed the rest
            try:
                columns = self._columns_of(data, offset, end, want, aborted)
                if columns.transactional and self._committed and aborted is None:
                    aborted = self._aborted(reader, offset, end)
                    columns = self._columns_of(data, offset, end, want, aborted)
            except CorruptBatch as error:
                if fresh and reader.recover():  # the index may be wrong, not the data
                    fresh = False
                    continue
                raise CorruptLog(getattr(reader, "path", "a batch"), error.position or 0, error.reason) from error
            if columns.position == 0:
                if columns.next_offset > offset or _base_offset(data) >= end:
                    return
                reader.need_more(data)
                continue
            fresh = False
            reader.consume(columns.position)
            offset = columns.next_offset
            if columns.count:
                yield columns

    @staticmethod
    def _aborted(reader: ChunkReader, offset: int, end: int) -> list[tuple[int, int, int]]:
        try:
            return aborted_ranges(reader.headers(offset), end)
        except SegmentGone as gone:  # without its headers, records of aborted transactions cannot be recognized
            raise DataLoss(str(gone)) from gone

    def _columns_of(
        self, data: memoryview, start: int, end: int, want: int, aborted: list[tuple[int, int, int]] | None
    ) -> Columns:
        return codec.columns(
            data,
            from_offset=start,
            to_offset=end,
            want=want,
            rows_max=ROWS_MAX,
            bytes_max=BYTES_MAX,
            microseconds=True,
            verify_crc=self._verify_crc,
            aborted=aborted or (),
        )


def _base_offset(data: memoryview) -> int:
    return int.from_bytes(data[:8], "big") if len(data) >= 8 else 0


def _record_batches(
    columns: Columns, task: ReadTask, names: Sequence[str], schema: "pa.Schema"
) -> "Iterator[pa.RecordBatch]":
    """Splits decoded columns into record batches without copying. The decoder itself never splits a stored batch."""
    import pyarrow as pa

    kinds = dict(zip(names, schema.types, strict=True))
    decoded = {name: _array(name, columns, kinds[name]) for name in names if name not in _REPEATED}
    for at in range(0, columns.count, ROWS_MAX):
        count = min(columns.count - at, ROWS_MAX)
        arrays = [
            _repeated(_REPEATED[name](task), count, kind) if name in _REPEATED else decoded[name].slice(at, count)
            for name, kind in kinds.items()
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(name: str, columns: Columns, kind: "pa.DataType") -> "pa.Array":
    import pyarrow as pa

    count = columns.count
    if name in _NUMBERS:
        buffer = getattr(columns, _NUMBERS[name])
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(buffer)])
    if name == "key":
        return _binary(columns.keys, count, kind)
    if name == "value":
        return _binary(columns.values, count, kind)
    assert columns.headers is not None
    if name == "headers":
        return _headers(columns.headers, count, kind)
    return _amqp(name, columns, kind)


def _repeated(value: str | int, count: int, kind: "pa.DataType") -> "pa.Array":
    """An array with the same value in every row, sliced from a cached longer one.

    pa.scalar is avoided because it imports pandas, if installed, which takes half a second and 40,000 objects.
    """
    return _repeated_often(value, 1 << (count - 1).bit_length(), kind).slice(0, count)


@lru_cache(maxsize=4)  # at most 16 MB each, with the longest topic names
def _repeated_often(value: str | int, count: int, kind: "pa.DataType") -> "pa.Array":
    import pyarrow as pa

    if isinstance(value, int):
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(array("i", [value]) * count)])
    text = value.encode()
    ends = array("i", range(0, (count + 1) * len(text), len(text)))
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(ends), pa.py_buffer(text * count)])


_REPEATED: dict[str, Callable[[ReadTask], str | int]] = {
    "topic": lambda task: task.partition.topic,
    "partition": lambda task: task.partition.number,
}
_NUMBERS = {"offset": "offsets", "timestamp": "timestamps", "timestampType": "timestamp_types"}


def _binary(column: BinaryColumn | None, count: int, kind: "pa.DataType") -> "pa.Array":
    import pyarrow as pa

    assert column is not None
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, count, buffers, null_count=column.nulls)


def _headers(column: HeadersColumn, count: int, kind: Any) -> "pa.Array":
    import pyarrow as pa

    struct = kind.value_type
    total = len(column.names.offsets) // 4 - 1
    names = _binary(column.names, total, pa.binary())
    try:
        texts = names.cast(pa.string())
    except pa.ArrowInvalid:  # clients may send any bytes as a header name
        texts = pa.array([raw.decode(errors="replace") for raw in names.to_pylist()], pa.string())
    values = _binary(column.values, total, pa.binary())
    pairs = pa.StructArray.from_arrays([texts, values], fields=[struct.field(0), struct.field(1)])
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(column.offsets)], children=[pairs])


def _amqp(name: str, columns: Columns, kind: "pa.DataType") -> "pa.Array":
    """A column with AMQP properties, exchange or routing key; null for records published over other protocols."""
    import pyarrow as pa

    assert columns.headers is not None
    found = _header_values(
        columns.headers, columns.count, AMQP_PROPERTIES_HEADER if name == "properties" else AMQP_EXCHANGE_HEADER
    )
    if name == "exchange":
        return pa.array([None if raw is None else raw.decode(errors="replace") for raw in found], kind)
    if name == "routing_key":
        keys = _binary(columns.keys, columns.count, pa.binary()).to_pylist()
        texts = [
            None if raw is None or key is None else key.decode(errors="replace")
            for raw, key in zip(found, keys, strict=True)
        ]
        return pa.array(texts, kind)
    return pa.array([None if raw is None else _properties(raw) for raw in found], kind)


def _header_values(headers: HeadersColumn, count: int, name: str) -> list[bytes | None]:
    import pyarrow as pa

    wanted_name = name.encode()
    total = len(headers.names.offsets) // 4 - 1
    names = _binary(headers.names, total, pa.binary()).to_pylist()
    values = _binary(headers.values, total, pa.binary()).to_pylist()
    starts = headers.offsets.cast("i")
    found: list[bytes | None] = []
    for row in range(count):
        at = next((i for i in range(starts[row], starts[row + 1]) if names[i] == wanted_name), None)
        found.append(None if at is None else values[at])
    return found


def _properties(raw: bytes) -> list[tuple[str, str]] | None:
    """Every AMQP property as text, tables and lists as JSON.

    None if the properties are corrupt: the listeners, too, treat such a message as one without properties.
    """
    import msgspec

    from headrace.record.amqp.properties import decode_properties

    def text(value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        return msgspec.json.encode(value, enc_hook=str).decode()

    try:
        return [(name, text(value)) for name, value in decode_properties(raw).items() if value is not None]
    except CorruptProperties:
        return None
