"""A record and the facts about a batch, as the rest of Headrace passes them around."""

import msgspec

from headrace.record.layout import (
    CODEC_MASK,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
)

# Anything whose bytes lie in a row.
Buffer = bytes | bytearray | memoryview
Header = tuple[str, bytes | None]


class Record(msgspec.Struct, frozen=True, gc=False):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class BatchInfo(msgspec.Struct, frozen=True, gc=False):
    """What the header of one batch says. Position counts from the start of the buffer it was found in."""

    position: int
    size: int  # the whole batch, with the 12 bytes that its length field does not count
    base_offset: int
    last_offset: int
    count: int
    base_timestamp: int  # what the records' deltas count from: not always the first one's time, see delete_horizon_ms
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
        """From when on compaction removes its tombstones, or the end of a transaction that it is. None when compaction
        has not given it such a time yet."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last record; sequences wrap at 2^31 back to 0."""
        if self.base_sequence < 0:
            return self.base_sequence
        return (self.base_sequence + self.last_offset - self.base_offset) & 0x7FFFFFFF


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
    """Records as columns, in the machine's byte order; None for a column that was not wanted.

    The buffers are ready for pyarrow.py_buffer and stay alive as long as anybody holds them.
    """

    count: int
    offsets: memoryview | None  # int64
    timestamps: memoryview | None  # int64, milliseconds unless asked for microseconds
    timestamp_types: memoryview | None  # int32: 0 create time, 1 log append time
    keys: BinaryColumn | None
    values: BinaryColumn | None
    headers: HeadersColumn | None
    next_offset: int  # every record of the buffer below it, from from_offset on, has been looked at
    position: int  # where the next call goes on
    transactional: bool = False  # some of the records belong to transactions, committed or not
