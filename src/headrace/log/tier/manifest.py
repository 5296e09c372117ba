"""The manifest of an archived segment: its extent, its Parquet file, and how that file's row groups read as batches.

The manifest, `<stem>.tier` in the log's folder, makes the Parquet file a part of the log; a Parquet file without a
manifest is a leftover. It lists the row groups: the offsets each holds, where its batches would lie in a segment file,
and the checksum of its bytes, so that damage is found before the bytes are decoded. Positions in an archived segment
are those of its uncompressed batches laid end to end, although they are never stored in that form.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headrace.errors import CorruptLog
from headrace.log.disk.disk import Disk, read_whole, write_atomically
from headrace.log.segments.source import Cut
from headrace.log.tier.location import SCHEME
from headrace.record.batch.crc32c import crc32c

VERSION = 1


class StoredGroup(NamedTuple):
    """A row group as the manifest lists it."""

    first_offset: int
    position: int  # of its first batch in the segment
    file_start: int  # of its bytes in the Parquet file
    crc: int  # of those bytes
    max_timestamp: int


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    file: str  # relative to the data folder; a path or URL with a scheme if tier_dir is outside of it
    file_bytes: int
    footer_start: int
    footer_crc: int
    base: int
    next_offset: int
    records: int
    max_timestamp: int
    size: int
    groups: list[StoredGroup]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group. `size` is that of its batches, `file_size` that of its bytes in the Parquet file."""

    number: int
    first_offset: int
    position: int
    size: int
    file_start: int
    file_size: int
    crc: int


class Manifest:
    """The row groups of one archived segment, stored as columns because there may be thousands of segments."""

    __slots__ = (
        "base", "file_bytes", "first_offsets", "footer_crc", "footer_start", "max_timestamp", "max_timestamps",
        "next_offset", "path", "positions", "records", "size", "starts", "sums",
    )  # fmt: skip

    def __init__(
        self,
        path: str,
        *,
        file_bytes: int,
        footer_start: int,
        footer_crc: int,
        base: int,
        next_offset: int,
        records: int,
        max_timestamp: int,
        size: int,
        groups: Sequence[StoredGroup],
    ) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.footer_start, self.footer_crc = footer_start, footer_crc
        self.base, self.next_offset = base, next_offset
        self.records, self.max_timestamp, self.size = records, max_timestamp, size
        columns = list(zip(*groups, strict=True)) or [()] * 5
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
        """The row group from which to look for an offset."""
        return self.group(max(bisect_right(self.first_offsets, offset) - 1, 0))

    def find_start(self, offset: int) -> tuple[int, int]:
        """(position, base offset of the batch there) from which to look for an offset."""
        group = self.at_offset(offset)
        return group.position, group.first_offset

    def first_offset_at(self, timestamp_ms: int) -> int:
        """Where to begin looking for a time: every record before this offset is older."""
        for number, latest in enumerate(self.max_timestamps):
            if latest >= timestamp_ms:
                return int(self.first_offsets[number])
        return self.next_offset

    def cuts(self, start: int, end: int, split_bytes: int) -> list[Cut]:
        """Whole row groups that hold [start, end), about split_bytes each: a row group that two tasks share would be
        decompressed twice."""
        cuts: list[Cut] = []
        last = bisect_left(self.first_offsets, end)
        first = number = self.at_offset(start).number
        while number < last:
            number += 1
            end_position = self.group(number).position if number < len(self) else self.size
            if end_position - self.positions[first] < split_bytes and number < last:
                continue
            next_offset = self.first_offsets[number] if number < len(self) else self.next_offset
            position = self.positions[first]
            cuts.append(Cut(position, end_position - position, self.first_offsets[first], min(next_offset, end)))
            first = number
        return cuts


def read_manifest(disk: Disk, path: str, file: str | None = None) -> Manifest:
    """Read a manifest. The path of its Parquet file is derived from the log's folder unless `file` gives it.
    CorruptLog when the manifest is damaged."""
    raw = read_whole(disk, path)
    body, _, checksum = raw.rstrip(b"\n").rpartition(b"\n")
    if checksum != b"%08x" % crc32c(body):
        raise CorruptLog(path, 0, "the manifest of an archived segment fails its checksum")
    try:
        stored = msgspec.json.decode(body, type=_Stored)
    except msgspec.DecodeError as error:
        raise CorruptLog(path, 0, f"the manifest of an archived segment cannot be decoded: {error}") from error
    if stored.version != VERSION:
        raise CorruptLog(
            path, 0, f"the manifest of an archived segment has version {stored.version}, only {VERSION} is supported"
        )
    if file is None:
        root = path.rsplit("/", 3)[0]  # the data folder: DIR/logs/<log>/<stem>.tier
        file = stored.file if stored.file.startswith("/") or SCHEME in stored.file else f"{root}/{stored.file}"
    return Manifest(
        file,
        file_bytes=stored.file_bytes,
        footer_start=stored.footer_start,
        footer_crc=stored.footer_crc,
        base=stored.base,
        next_offset=stored.next_offset,
        records=stored.records,
        max_timestamp=stored.max_timestamp,
        size=stored.size,
        groups=stored.groups,
    )


def write_manifest(disk: Disk, path: str, manifest: Manifest) -> None:
    """Durable on return: from then on the Parquet file is the segment."""
    root = path.rsplit("/", 3)[0]
    groups = [
        StoredGroup(
            group.first_offset, group.position, group.file_start, group.crc, manifest.max_timestamps[group.number]
        )
        for group in manifest.groups()
    ]
    body = msgspec.json.encode(
        _Stored(
            VERSION,
            manifest.path.removeprefix(root + "/"),
            manifest.file_bytes,
            manifest.footer_start,
            manifest.footer_crc,
            manifest.base,
            manifest.next_offset,
            manifest.records,
            manifest.max_timestamp,
            manifest.size,
            groups,
        )
    )
    write_atomically(disk, path, body + b"\n%08x\n" % crc32c(body))
