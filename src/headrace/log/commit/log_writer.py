"""The writing end of a log: rolls segments and appends to the last one. Used in the worker's turn only.

The tuple of segments is replaced, never changed, so that readers on other threads always see a consistent one.
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
    """What `undo_to` removed; a power cut may bring it back until `secure_undo`."""

    has_bytes: bool
    has_names: bool


NONE: frozenset[str] = frozenset()  # each call of frozenset() makes another one of 216 bytes


class Tail(TailEnd):
    """The segments of a log and the writer of the last one."""

    __slots__ = ("__dict__", "_writes", "created", "folder", "rotten", "segments")  # tests replace methods

    writer: SegmentWriter | None
    _files: FileCache

    def __init__(self, files: FileCache, folder: str, settings: StreamSettings, clock: Clock) -> None:
        super().__init__(files, settings, clock)
        self.folder = folder
        self.segments: tuple[Segment, ...] = ()
        self.created = False  # the folder exists
        self.rotten = NONE  # data files in which a read found damage
        self._writes = 0

    @property
    def next_offset(self) -> int:
        return self.segments[-1].next_offset if self.segments else 0

    def append(self, data: Sequence[Bytes], size: int, base_offset: int, *, direct: bool) -> int:
        """Append whole batches; returns the number of segments that were rolled."""
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
        """Keep the folder open while `size` bytes are appended that may have to be undone. If the append makes a new
        file, undoing it needs a sync of the folder, for which there may be no free descriptor then."""
        if not self._begins_segment(size) and self.writer is not None and self.writer.position:
            return nullcontext()
        self._make_folder()
        return self._files.folder_held(self.folder)

    def wrote_past_journal(self) -> None:
        """Record a write to the last segment that only a sync of its file makes durable."""
        assert self.writer is not None
        self._writes += 1
        self._written[self.writer.segment.path()] = self._writes

    def _find_age(self, writer: SegmentWriter) -> None:
        """Take the age of a recovered segment from its first batch. If it counted from the start of the broker, the
        segment of a broker that is restarted daily would never be old enough to roll, and retention would never reach
        it."""
        segment, now_ms = writer.segment, self._clock.now_ms()
        segment.created_ms = now_ms
        with suppress(OSError):  # a reader will report it; appends can continue
            header = self._files.read(segment.data_path, HEADER_BYTES, 0)
            first_ms = int.from_bytes(header[MAX_TIMESTAMP_AT : MAX_TIMESTAMP_AT + 8], "big", signed=True)
            segment.created_ms = min(now_ms, first_ms) if first_ms > 0 else now_ms

    def roll(self, base_offset: int) -> None:
        """Seal the last segment and begin a new one. Its name need not be durable yet: until the folder is synced, the
        journal has the bytes, or the round syncs the folder itself."""
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
        """Sync everything that was written without the journal, including names; returns the number of syncs."""
        syncs = self.sync_files(self._written)
        self._written = {}  # only now: without a free descriptor the sync is retried
        return syncs

    def unsynced(self) -> dict[str, int]:
        """Files for `sync_files` on another thread; `synced` must follow."""
        return dict(self._written)

    def synced(self, written: Mapping[str, int]) -> None:
        """Record that files were synced. A file that was written again since `unsynced` stays on the list."""
        self._written = {path: write for path, write in self._written.items() if written.get(path) != write}

    def sync_files(self, written: Iterable[str]) -> int:
        """Sync files and their names, on any thread."""
        syncs = 0
        for path in sorted(written):
            with suppress(FileNotFoundError):  # retention or a truncation removed it
                self._files.sync(path)
            syncs += 1
        for folder in (self.folder.rpartition("/")[0], self.folder):
            if syncs and self._files.is_folder_dirty(folder):
                self._files.sync_folder(folder)
                syncs += 1
        return syncs

    @property
    def has_new_names(self) -> bool:
        """The name of a file, or of the folder itself, is not durable yet."""
        return any(map(self._files.is_folder_dirty, (self.folder.rpartition("/")[0], self.folder)))

    def save(self) -> SavedTail:
        return SavedTail(self.segments, self.writer, self.writer.save() if self.writer else None, self.created)

    def grown_since(self, saved: SavedTail) -> str | None:
        """The file that an undo would have to truncate, if any; it must stay open. New files are simply removed."""
        had_some = saved.state is not None and saved.state.position > 0
        return self.segments[-1].data_path if had_some and self.writer is saved.writer else None

    def mark_torn(self) -> None:
        """The write of an I/O chain failed half-way: an unknown part of it is in the file."""
        assert self.writer is not None
        self.writer.is_torn = True

    def undo_to(self, saved: SavedTail) -> Undone:
        """Remove everything appended since `saved`: the disk was full, and the round is refused as a whole."""
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
            # A checkpoint may have just synced the folder with these names. After a power cut they would be back, and
            # hide what a retry has written to other files.
            self._files.folder_changed(self.folder)
        return Undone(has_bytes, has_names)

    def secure_undo(self, undone: Undone) -> None:
        """Make the undo durable: a power cut must not bring back refused records. It opens as few files as possible,
        because the round may have been refused for want of a descriptor."""
        if undone.has_bytes and self.writer is not None and self.writer.position:
            self._files.sync(self.writer.segment.path())
        if undone.has_names and self.created:
            self._files.sync_folder(self.folder)

    def saved_writer(self) -> SavedWriter | None:
        """The writer's position for a checkpoint. Flushes its index, so that recovery can trust it."""
        if self.writer is None:
            return None
        self.writer.flush_index()
        return self.writer.save()
