"""The replication stream from a leader to its standbys, as bytes: frames, each with its own checksum.

    frame = crc32c of the rest, kind, sequence, number, path bytes, data bytes, path, data

The checksum covers the data, then the path, then the head. `number` is a position, a size or a flag, depending on the
kind. Changes have consecutive sequence numbers; other frames have the number of the change before them.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.record.batch.crc32c import crc32c

_HEAD = struct.Struct("<IBQQHI")
_CRC_BYTES = 4
PIECE_BYTES = 1 << 20  # bytes of a file in one frame
FILE_BYTES_MAX = 1 << 44
FORMAT = 1


class Kind(IntEnum):
    # Not changes: the initial copy, and control frames.
    HELLO = 1  # data: the leader's identity, as JSON (follower.Hello)
    LISTING = 2  # data: all paths of the folder as JSON, those of folders ending in a slash; number: their total bytes
    BEGIN = 3  # start of a file's content, which replaces a file of that name
    CHUNK = 4  # number: position
    IN_STEP = 5
    HEARTBEAT = 6
    ZERO_CHUNK = 7  # a chunk of zeros; see ZEROS
    # Changes.
    CREATE = 16  # number: 1 if the file is new
    WRITE = 17  # number: position
    TRUNCATE = 18  # number: size
    SYNC = 19
    SYNC_ALL = 20
    RENAME = 21  # data: the new path
    REMOVE = 22
    MAKE_FOLDER = 23
    REMOVE_FOLDER = 24
    SYNC_FOLDER = 25
    ZEROS = 26  # a write of zeros, which new journal files consist of; number: position, data: how many


_ZEROS = bytes(PIECE_BYTES)
_ZEROS_MIN = 4096
_COUNT = struct.Struct("<I")
_DATA_BYTES_MAX: dict[int, int] = {
    **{int(kind): 0 for kind in Kind},
    Kind.HELLO: 1 << 16,
    Kind.LISTING: 1 << 28,
    Kind.CHUNK: PIECE_BYTES,
    Kind.ZERO_CHUNK: _COUNT.size,
    Kind.WRITE: PIECE_BYTES,
    Kind.ZEROS: _COUNT.size,
    Kind.RENAME: 1 << 16,
}
_AT_POSITIONS = frozenset({Kind.CHUNK, Kind.ZERO_CHUNK, Kind.WRITE, Kind.ZEROS, Kind.TRUNCATE})
SYNCS = frozenset({Kind.SYNC, Kind.SYNC_ALL, Kind.SYNC_FOLDER})


class Frame(NamedTuple):
    kind: int
    sequence: int
    number: int
    path: str
    data: bytes

    @property
    def is_change(self) -> bool:
        return self.kind >= Kind.CREATE


class BadFrame(HeadraceError):
    """A received frame was damaged in transit, or was not sent by a broker."""


def checksum(path: bytes, data: bytes, data_crc: int | None = None) -> int:
    return crc32c(path, crc32c(data) if data_crc is None else data_crc)


def pack(
    kind: int, sequence: int, number: int = 0, path: bytes = b"", data: bytes = b"", crc: int | None = None
) -> bytes:
    """`crc`: of path and data, if it is known already."""
    head = _HEAD.pack(0, kind, sequence, number, len(path), len(data))[_CRC_BYTES:]
    whole = crc32c(head, checksum(path, data) if crc is None else crc)
    return b"".join((whole.to_bytes(_CRC_BYTES, "little"), head, path, data))


def are_zeros(data: bytes) -> bool:
    """Whether data is a run of zeros long enough to be sent as a count."""
    return _ZEROS_MIN <= len(data) <= len(_ZEROS) and data[-1] == 0 and data == _ZEROS[: len(data)]


def zero_count(data: bytes) -> bytes:
    """The data of a frame of zeros."""
    return _COUNT.pack(len(data))


def zeros(data: bytes) -> bytes:
    """The bytes that a frame of zeros stands for."""
    if len(data) != _COUNT.size or (size := _COUNT.unpack(data)[0]) > len(_ZEROS):
        raise BadFrame("a frame of zeros has no valid count")
    return _ZEROS[:size]


def _check(kind: int, number: int, data_bytes: int) -> None:
    """Check a frame's head before buffering its data, which may take long to arrive."""
    if data_bytes > _DATA_BYTES_MAX.get(kind, -1):
        raise BadFrame(
            f"a frame of kind {kind} with {data_bytes:,} bytes: it was damaged in transit, or the leader's version of "
            "Headrace differs"
        )
    if kind in _AT_POSITIONS and number > FILE_BYTES_MAX:
        raise BadFrame(f"a frame for byte {number:,} of a file: it was damaged in transit, or not sent by a broker")


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        self._rest += data
        at = 0
        try:
            while len(self._rest) - at >= _HEAD.size:
                crc, kind, sequence, number, path_bytes, data_bytes = _HEAD.unpack_from(self._rest, at)
                _check(kind, number, data_bytes)
                path_at = at + _HEAD.size
                data_at = path_at + path_bytes
                end = data_at + data_bytes
                if end > len(self._rest):
                    break
                path, content = bytes(self._rest[path_at:data_at]), bytes(self._rest[data_at:end])
                if crc32c(bytes(self._rest[at + _CRC_BYTES : path_at]), checksum(path, content)) != crc:
                    raise BadFrame(f"the frame after change {sequence} was damaged in transit")
                at = end
                yield Frame(kind, sequence, number, path.decode(errors="surrogateescape"), content)
        finally:
            del self._rest[:at]
