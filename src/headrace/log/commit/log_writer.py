"""The writing end of a log: rolls segments and appends to the last one. Used by the worker thread only.

The list of segments is replaced, never changed, so that readers on another thread always see a whole one.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple

from headrace.clock import Clock
from headrace.log.commit.file_ends import TailEnd
from headrace.log.disk import paths
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments import index
from headrace.log.segments.segment import AGE_UNKNOWN, SavedWriter, Segment, SegmentWriter
from headrace.log.settings import StreamSettings
from headrace.record.layout import HEADER_BYTES, MAX_TIMESTAMP_AT

Bytes = bytes | bytearray | memoryview


class SavedTail(NamedTuple):
    segments: tuple[Segment, ...]
    writer: SegmentWriter | None
    state: SavedWriter | None
    created: bool


class Undone(NamedTuple):
    """What was taken back, and may come back with a power cut until it is synced."""

    has_bytes: bool
    has_names: bool


class Tail(TailEnd):
    writer: SegmentWriter | None
    _files: FileCache

    def __init__(self, files: FileCache, folder: str, settings: StreamSettings, clock: Clock) -> None:
        super().__init__(files, settings, clock)
        self.folder = folder
        self.segments: tuple[Segment, ...] = ()
        self.created = False  # the folder exists
        self.rotten: set[str] = set()  # data files in which a read met damage
        self._writes = 0

    @property
    def next_offset(self) -> int:
        return self.segments[-1].next_offset if self.segments else 0

    def append(self, data: Sequence[Bytes], size: int, base_offset: int, *, direct: bool) -> int:
        """Write whole batches behind what is there; returns how many segments were rolled."""
        rolled = 0
        if self._begins_segment(size):
            self.roll(base_offset)
            rolled = 1
        assert self.writer is not None
        assert self.writer.walker.next_offset <= base_offset, "offsets only grow"
        if direct:
            self.wrote_past_journal()
        self.writer.append(data)
        return rolled

    def _begins_segment(self, size: int) -> bool:
        if self.writer is not None and self.writer.segment.created_ms == AGE_UNKNOWN:
            self._find_age(self.writer)
        return self.writer is None or self._is_full(self.writer, size)

    def names_held(self, size: int) -> AbstractContextManager[None]:
        """While so many bytes are appended that may have to be taken back: a new file that is removed again is gone for
        good with a sync of the folder, and there may be no descriptor for that any more."""
        if not self._begins_segment(size) and self.writer is not None and self.writer.position:
            return nullcontext()
        self._make_folder()
        return self._files.folder_held(self.folder)

    def wrote_past_journal(self) -> None:
        """To the last segment: only a sync of its file makes that durable."""
        assert self.writer is not None
        self._writes += 1
        self._written[self.writer.segment.path()] = self._writes

    def _find_age(self, writer: SegmentWriter) -> None:
        """As its first batch says: counted from the start, no segment of a broker that is started every day would ever
        be old enough, and retention would never come to its records."""
        segment, now_ms = writer.segment, self._clock.now_ms()
        segment.created_ms = now_ms
        with suppress(OSError):  # who reads it finds out: no reason to write nothing more
            header = self._files.read(segment.data_path, HEADER_BYTES, 0)
            first_ms = int.from_bytes(header[MAX_TIMESTAMP_AT : MAX_TIMESTAMP_AT + 8], "big", signed=True)
            segment.created_ms = min(now_ms, first_ms) if first_ms > 0 else now_ms

    def roll(self, base_offset: int) -> None:
        """Seal the last segment and begin a new one. The new name is durable before anything relies on it:
        until the folder is synced the journal (or the round's own sync) still has the bytes."""
        if self.writer is not None:
            self.writer.seal()
        self._make_folder()
        segment = Segment(self.folder, base_offset, created_ms=self._clock.now_ms())
        self._files.folder_changed(self.folder)
        self.writer = SegmentWriter(self._files, segment, index.Walker(base_offset, self.settings.index_interval))
        self.segments = (*self.segments, segment)

    def _make_folder(self) -> None:
        if not self.created:
            self._files.disk.mkdir(self.folder)
            self._files.folder_changed(self.folder.rpartition("/")[0])
            self.created = True

    def sync(self) -> int:
        """Make what was written past the journal durable, names included; returns the number of syncs."""
        syncs = self.sync_files(self._written)
        self._written = {}  # not before: it may find no descriptor, and is tried again
        return syncs

    def unsynced(self) -> dict[str, int]:
        """For `sync_files` on another thread, and then `synced`."""
        return dict(self._written)

    def synced(self, written: Mapping[str, int]) -> None:
        """What was written since that list was made is not synced: such a file stays on the list."""
        self._written = {path: write for path, write in self._written.items() if written.get(path) != write}

    def sync_files(self, written: Iterable[str]) -> int:
        """On any thread: files and names."""
        syncs = 0
        for path in sorted(written):
            with suppress(FileNotFoundError):  # retention or a truncation took it away
                self._files.sync(path)
            syncs += 1
        for folder in (self.folder.rpartition("/")[0], self.folder):
            if syncs and self._files.is_folder_dirty(folder):
                self._files.sync_folder(folder)
                syncs += 1
        return syncs

    @property
    def has_new_names(self) -> bool:
        """A file or the folder itself could still be lost with its name."""
        return any(map(self._files.is_folder_dirty, (self.folder.rpartition("/")[0], self.folder)))

    def save(self) -> SavedTail:
        return SavedTail(self.segments, self.writer, self.writer.save() if self.writer else None, self.created)

    def grown_since(self, saved: SavedTail) -> str | None:
        """The file that was appended to, if there was one: to take that back it has to be open, others are removed."""
        had_some = saved.state is not None and saved.state.position > 0
        return self.segments[-1].data_path if had_some and self.writer is saved.writer else None

    def mark_torn(self) -> None:
        """A write behind what is there, in a chain: nobody knows how much of it is in the file."""
        assert self.writer is not None
        self.writer.is_torn = True

    def undo_to(self, saved: SavedTail) -> Undone:
        """Take back what was appended since: the disk was full, and the round is refused as a whole."""
        has_names = has_bytes = False
        for segment in self.segments[len(saved.segments) :]:
            self._written.pop(segment.path(), None)
            self._files.forget(segment.paths)
            for path in segment.paths:
                if self._files.disk.exists(path):
                    self._files.disk.unlink(path)
                    has_names = True
        if saved.writer is not None and saved.state is not None:
            segment = saved.writer.segment
            if segment.is_sealed:
                has_names = True
                segment.is_sealed = False
                self._files.forget([segment.path(paths.SEAL)])
                self._files.disk.unlink(segment.path(paths.SEAL))
            has_bytes = saved.writer.undo_to(saved.state)
            has_names |= has_bytes and not saved.state.position
        self.segments, self.writer = saved.segments, saved.writer
        if has_names:
            # A checkpoint may have synced it with them just now: they would come back with a power cut, and hide
            # what another try has written elsewhere.
            self._files.folder_changed(self.folder)
        return Undone(has_bytes, has_names)

    def secure_undo(self, undone: Undone) -> None:
        """Make the undoing last: a power cut must not bring back what was refused. No more than that is opened: what
        was refused for want of a descriptor would find none here."""
        if undone.has_bytes and self.writer is not None and self.writer.position:
            self._files.sync(self.writer.segment.path())
        if undone.has_names and self.created:
            self._files.sync_folder(self.folder)

    def saved_writer(self) -> SavedWriter | None:
        """Where the writer stands, for the checkpoint; its index is flushed, so that it can be trusted."""
        if self.writer is None:
            return None
        self.writer.flush_index()
        return self.writer.save()
