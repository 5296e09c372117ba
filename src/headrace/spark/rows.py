"""From batches to Arrow: the compiled decoder fills the columns, this puts names and types on them."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headrace.errors import CorruptBatch, CorruptLog, CorruptProperties
from headrace.log.read.external import SegmentGone, aborted_ranges
from headrace.record import codec
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER
from headrace.record.types import BinaryColumn, Columns, HeadersColumn
from headrace.spark.access import Access, DataLoss, Feed, Piece
from headrace.spark.schema import wanted

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_MAX = 65_536
BYTES_MAX = 1 << 20  # larger ones leave the caches, and past 2 MB the JVM takes new memory for each


class Rows:
    """Turns the pieces of a plan into record batches. Made on the driver, used on executors."""

    def __init__(self, access: Access, columns: Sequence[str], *, verify_crc: bool, committed: bool) -> None:
        self._access = access
        self._columns = tuple(columns)
        self._verify_crc = verify_crc
        self._committed = committed

    def read(self, piece: Piece, schema: "pa.Schema") -> "Iterator[pa.RecordBatch]":
        for start, end, feed in self._access.feeds(piece):
            try:
                for columns in self._decode(feed, start, end):
                    yield from _record_batches(columns, piece, self._columns, schema)
            finally:
                feed.close()

    def _decode(self, feed: Feed, start: int, end: int) -> Iterator[Columns]:
        offset = start
        aborted: list[tuple[int, int, int]] | None = None
        want = wanted(self._columns)
        fresh = True
        while offset < end:
            data = feed.read(offset)
            if not data:
                return  # the rest was compacted away
            try:
                columns = self._columns_of(data, offset, end, want, aborted)
                if columns.transactional and self._committed and aborted is None:
                    aborted = self._aborted(feed, offset, end)
                    columns = self._columns_of(data, offset, end, want, aborted)
            except CorruptBatch as error:
                if fresh and feed.recover():  # an index that is wrong, not the data
                    fresh = False
                    continue
                raise CorruptLog(getattr(feed, "path", "a batch"), error.position or 0, error.reason) from error
            if columns.position == 0:
                if columns.next_offset > offset or _begins_at(data) >= end:
                    return
                feed.need_more(data)
                continue
            fresh = False
            feed.used(columns.position)
            offset = columns.next_offset
            if columns.count:
                yield columns

    @staticmethod
    def _aborted(feed: Feed, offset: int, end: int) -> list[tuple[int, int, int]]:
        try:
            return aborted_ranges(feed.headers(offset), end)
        except SegmentGone as gone:  # while it was being read; its records might be of an aborted transaction
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


def _begins_at(data: memoryview) -> int:
    return int.from_bytes(data[:8], "big") if len(data) >= 8 else 0


def _record_batches(
    columns: Columns, piece: Piece, names: Sequence[str], schema: "pa.Schema"
) -> "Iterator[pa.RecordBatch]":
    """A stored batch is never cut by the decoder, so a large one is cut here, without copying."""
    import pyarrow as pa

    kinds = dict(zip(names, schema.types, strict=True))
    decoded = {name: _array(name, columns, kinds[name]) for name in names if name not in _REPEATED}
    for at in range(0, columns.count, ROWS_MAX):
        count = min(columns.count - at, ROWS_MAX)
        arrays = [
            _repeated(_REPEATED[name](piece), count, kind) if name in _REPEATED else decoded[name].slice(at, count)
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
    """The same value in every row, made once for as many rows as there may be.

    Not by pa.scalar: that imports pandas where it is installed, which is half a second and 40,000 objects.
    """
    return _repeated_often(value, 1 << (count - 1).bit_length(), kind).slice(0, count)


@lru_cache(maxsize=4)  # up to 16 MB each, if names are as long as they may be
def _repeated_often(value: str | int, count: int, kind: "pa.DataType") -> "pa.Array":
    import pyarrow as pa

    if isinstance(value, int):
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(array("i", [value]) * count)])
    text = value.encode()
    ends = array("i", range(0, (count + 1) * len(text), len(text)))
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(ends), pa.py_buffer(text * count)])


_REPEATED: dict[str, Callable[[Piece], str | int]] = {
    "topic": lambda piece: piece.place.topic,
    "partition": lambda piece: piece.place.number,
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
    except pa.ArrowInvalid:  # a client may send any bytes for a name
        texts = pa.array([raw.decode(errors="replace") for raw in names.to_pylist()], pa.string())
    values = _binary(column.values, total, pa.binary())
    pairs = pa.StructArray.from_arrays([texts, values], fields=[struct.field(0), struct.field(1)])
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(column.offsets)], children=[pairs])


def _amqp(name: str, columns: Columns, kind: "pa.DataType") -> "pa.Array":
    """What an AMQP message brought along; null for records that came by another listener."""
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
    """Every property as text; tables and lists as JSON. None where they cannot be read: at every listener such a
    message
    goes as one without."""
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
