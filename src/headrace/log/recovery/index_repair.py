"""Checking and rebuilding the indexes of one log after a crash. They are derived from the segments' data."""

from collections.abc import Iterator, Sequence

from headrace.log.disk import paths
from headrace.log.disk.file_cache import NO_ROOM, FileCache
from headrace.log.segments.segment import INDEX_ENTRY, TIME_ENTRY, Segment, indexes_are_sound, rebuild_index

# Sealed segments per log whose indexes are checked after a crash. A checkpoint syncs them once the segment is sealed,
# but recovery seals without a checkpoint, and older versions never synced them.
SEGMENTS_CHECKED = 2


class IndexRepair:
    def __init__(self, files: FileCache, interval: int) -> None:
        self._files = files
        self._interval = interval
        self.are_trusted = False  # after a clean stop
        self.rebuilt = 0  # segments

    def has(self, segment: Segment, size: int) -> bool:
        """Whether the active segment has an index of `size` bytes, as it had at the checkpoint."""
        if self.are_trusted:
            path = segment.path(paths.INDEX)
            return self._files.disk.exists(path) and self._files.disk.file_size(path) >= size
        return indexes_are_sound(self._files, segment, size)

    def leftovers(self, segment: Segment, size: int) -> Iterator[tuple[str, int]]:
        """Index files that hold more, and what to shorten them to: entries of batches that move to a new segment."""
        disk = self._files.disk
        sizes = {paths.INDEX: size, paths.TIME_INDEX: size // INDEX_ENTRY * TIME_ENTRY}
        for path, expected in ((segment.path(suffix), expected) for suffix, expected in sizes.items()):
            if not self.are_trusted and disk.exists(path) and disk.file_size(path) > expected:
                yield path, expected

    def repair(self, segments: Sequence[Segment]) -> None:
        """Rebuild the indexes of the last of these sealed segments if they are wrong."""
        for segment in () if self.are_trusted else segments[-SEGMENTS_CHECKED:]:
            if not segment.is_archived and not indexes_are_sound(self._files, segment):
                self.rebuild(segment)

    def rebuild(self, segment: Segment) -> int:
        """The size of the new index; 0 if there is no room for it. Reads work without one."""
        try:
            entries, _ = rebuild_index(self._files, segment, self._interval)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return 0
        self.rebuilt += 1
        return len(entries)
