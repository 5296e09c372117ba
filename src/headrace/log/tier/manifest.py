"""What the log knows of a segment that lives in the tier: a Parquet file, and how its row groups read as batches.

The manifest, `<stem>.tier` in the log's folder, is what makes the Parquet file a part of the log; a file without one
is nobody's. It lists the row groups: which offsets each holds, where its batches would lie in a segment file, and the
checksum of its bytes, so that what has rotted is found before anything is made of it. Positions in an archived segment
are those of its batches laid end to end, uncompressed: nobody has stored them so, but everybody can count in them.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import CorruptLog
from headrace.log.disk.disk import Disk, read_whole, write_atomically
from headrace.record.batch.crc32c import crc32c

VERSION = 1


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    file: str  # relative to the data folder, or absolute where the tier is somewhere else
    file_bytes: int
    footer_start: int
    footer_crc: int
    base: int
    next_offset: int
    records: int
    max_timestamp: int
    size: int
    groups: list[tuple[int, int, int, int, int]]  # first offset, position, where in the file, checksum, max timestamp


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group. `size` is that of its batches, `file_size` that of its bytes in the file."""

    number: int
    first_offset: int
    position: int
    size: int
    file_start: int
    file_size: int
    crc: int


class Tier:
    """The row groups of one archived segment, as columns: there may be thousands of segments."""

    __slots__ = (
        "base", "file_bytes", "first_offsets", "footer_crc", "footer_start", "max_timestamp", "max_timestamps",
        "next_offset", "path", "positions", "records", "size", "starts", "sums",
    )  # fmt: skip

    def __init__(self, path: str, stored: _Stored) -> None:
        self.path = path
        self.file_bytes = stored.file_bytes
        self.footer_start, self.footer_crc = stored.footer_start, stored.footer_crc
        self.base, self.next_offset = stored.base, stored.next_offset
        self.records, self.max_timestamp, self.size = stored.records, stored.max_timestamp, stored.size
        columns = list(zip(*stored.groups, strict=True)) or [()] * 5
        self.first_offsets, self.positions, self.starts, self.sums, self.max_timestamps = (
            array("q", column) for column in columns
        )

    def __len__(self) -> int:
        return len(self.positions)

    def group(self, number: int) -> RowGroup:
        is_last = number + 1 == len(self.positions)
        end = self.size if is_last else self.positions[number + 1]
        file_end = self.footer_start if is_last else self.starts[number + 1]
        position, start = self.positions[number], self.starts[number]
        return RowGroup(
            number, self.first_offsets[number], position, end - position, start, file_end - start, self.sums[number]
        )

    def groups(self) -> Iterator[RowGroup]:
        return (self.group(number) for number in range(len(self)))

    def at_position(self, position: int) -> RowGroup:
        return self.group(max(bisect_right(self.positions, position) - 1, 0))

    def at_offset(self, offset: int) -> RowGroup:
        """The one to begin with when looking for offset."""
        return self.group(max(bisect_right(self.first_offsets, offset) - 1, 0))

    def first_offset_at(self, timestamp_ms: int) -> int:
        """Where to begin looking for a time: no record before is as late."""
        for number, latest in enumerate(self.max_timestamps):
            if latest >= timestamp_ms:
                return int(self.first_offsets[number])
        return self.next_offset

    def group_cuts(self, start: int, end: int, split_bytes: int) -> list[tuple[int, int, int, int]]:
        """(position, length, first offset, next offset) of whole row groups that hold [start, end), about split_bytes
        each: a group read for two tasks would be unpacked twice."""
        cuts: list[tuple[int, int, int, int]] = []
        last = bisect_left(self.first_offsets, end)
        begin = number = self.at_offset(start).number
        while number < last:
            number += 1
            behind = self.group(number).position if number < len(self) else self.size
            if behind - self.positions[begin] < split_bytes and number < last:
                continue
            until = self.first_offsets[number] if number < len(self) else self.next_offset
            position = self.positions[begin]
            cuts.append((position, behind - position, self.first_offsets[begin], min(until, end)))
            begin = number
        return cuts


def read_tier(disk: Disk, path: str, file: str | None = None) -> Tier:
    """The manifest at a path in a log's folder, or anywhere when `file` says where its Parquet file is. CorruptLog
    when it is not one."""
    raw = read_whole(disk, path)
    body, _, checksum = raw.rstrip(b"\n").rpartition(b"\n")
    if checksum != b"%08x" % crc32c(body):
        raise CorruptLog(path, 0, "the manifest of an archived segment fails its checksum")
    try:
        stored = msgspec.json.decode(body, type=_Stored)
    except msgspec.DecodeError as error:
        raise CorruptLog(path, 0, f"the manifest of an archived segment makes no sense: {error}") from error
    if stored.version != VERSION:
        raise CorruptLog(
            path, 0, f"the manifest of an archived segment has version {stored.version}, {VERSION} is known"
        )
    if file is None:
        root = path.rsplit("/", 3)[0]  # of the data folder: DIR/logs/<log>/<stem>.tier
        file = stored.file if stored.file.startswith("/") else f"{root}/{stored.file}"
    return Tier(file, stored)


def write_tier(disk: Disk, path: str, tier: Tier) -> None:
    """Durable on return: from now on the Parquet file is the segment."""
    root = path.rsplit("/", 3)[0]
    groups: list[Any] = [
        (group.first_offset, group.position, group.file_start, group.crc, tier.max_timestamps[group.number])
        for group in tier.groups()
    ]
    body = msgspec.json.encode(
        _Stored(
            VERSION,
            tier.path.removeprefix(root + "/"),
            tier.file_bytes,
            tier.footer_start,
            tier.footer_crc,
            tier.base,
            tier.next_offset,
            tier.records,
            tier.max_timestamp,
            tier.size,
            groups,
        )
    )
    write_atomically(disk, path, body + b"\n%08x\n" % crc32c(body))


def make_tier(
    path: str,
    *,
    file_bytes: int,
    footer: tuple[int, int],
    base: int,
    next_offset: int,
    records: int,
    max_timestamp: int,
    size: int,
    groups: list[tuple[int, int, int, int, int]],
) -> Tier:
    return Tier(
        path,
        _Stored(VERSION, path, file_bytes, *footer, base, next_offset, records, max_timestamp, size, groups),
    )
