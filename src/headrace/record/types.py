"""Values that describe records and batches: Record, BatchInfo, Slice and Arrow columns."""

import msgspec

from headrace.record.layout import (
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
)

# Contiguous bytes.
Buffer = bytes | bytearray | memoryview
Header = tuple[str, bytes | None]


class Record(msgspec.Struct, frozen=True, gc=False):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class BatchInfo(msgspec.Struct, frozen=True, gc=False):
    """The header of one batch. Position counts from the start of the buffer that was scanned."""

    position: int
    size: int  # of the whole batch, including the 12 bytes that its length field does not count
    base_offset: int
    last_offset: int
    count: int
    base_timestamp: int  # base of the records' deltas; not always the first record's time, see delete_horizon_ms
    max_timestamp: int
    attributes: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    leader_epoch: int

    @property
    def end(self) -> int:
        return self.position + self.size

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_MASK

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_BIT != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_BIT != 0

    @property
    def timestamp_type(self) -> int:
        return LOG_APPEND_TIME if self.attributes & LOG_APPEND_TIME_BIT else 0

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time after which compaction removes the batch's tombstones or its transaction marker. None if
        compaction has not set it yet."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last record; sequences wrap at 2^31 back to 0."""
        if self.base_sequence < 0:
            return self.base_sequence
        return (self.base_sequence + self.last_offset - self.base_offset) & 0x7FFFFFFF


class Slice(msgspec.Struct, frozen=True, gc=False):
    """The position of consecutive whole batches in a segment. It does not say which file or machine holds the bytes.

    Reads return slices, and Slice can be pickled, so that Spark executors can open them. A generation identifies one
    version of a segment: compaction rewrites segments, and positions in the old version mean nothing in the new one.
    """

    log_id: int
    segment: int  # the segment's base offset
    generation: int
    position: int
    length: int
    base_offset: int
    next_offset: int

    @property
    def end(self) -> int:
        return self.position + self.length


class BinaryColumn(msgspec.Struct, frozen=True):
    """An Arrow binary column: int32 offsets, one more than rows; a validity bitmap, or None without nulls."""

    offsets: memoryview
    data: memoryview
    validity: memoryview | None
    nulls: int


class HeadersColumn(msgspec.Struct, frozen=True):
    """An Arrow list of (name, value): the headers of row i are those from offsets[i] to offsets[i + 1].

    Names are the bytes as stored. They should be UTF-8, but a client may send anything.
    """

    offsets: memoryview
    names: BinaryColumn
    values: BinaryColumn


class Columns(msgspec.Struct, frozen=True):
    """Records as columns in native byte order; None for a column that was not requested.

    The buffers can be passed to pyarrow.py_buffer and own their memory.
    """

    count: int
    offsets: memoryview | None  # int64
    timestamps: memoryview | None  # int64, in milliseconds unless microseconds were requested
    timestamp_types: memoryview | None  # int32: 0 create time, 1 log append time
    keys: BinaryColumn | None
    values: BinaryColumn | None
    headers: HeadersColumn | None
    next_offset: int  # all records of the buffer from from_offset up to here have been read
    position: int  # where the next call continues
    transactional: bool = False  # some of the records belong to transactions, committed or aborted
