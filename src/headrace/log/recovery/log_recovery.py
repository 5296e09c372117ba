"""Recovery of one log; recovery.py has the rules.

Segments before the last checkpoint's active one are known: they were synced, are trusted, and must be there. The rest
is the tail, which is scanned, completed from the journal and copied to new files.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headrace.clock import Clock
from headrace.errors import CorruptLog
from headrace.log.commit.journal_entry import ReplayedPart
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import NO_ROOM, FileCache
from headrace.log.disk.paths import SegmentStem
from headrace.log.log import Log
from headrace.log.recovery.batch_sources import READ_BYTES, BatchSources
from headrace.log.recovery.index_repair import IndexRepair
from headrace.log.recovery.new_files import NewFiles
from headrace.log.recovery.segment_listing import SegmentListing
from headrace.log.segments import epochs, index
from headrace.log.segments.segment import SavedWriter, Segment, SegmentWriter, seal_of
from headrace.log.state.store import DiskStateStore
from headrace.log.state.tables import DAMAGED, ENDS, STARTS, TRUNCATIONS
from headrace.log.tier.location import location_of
from headrace.log.tier.sources import Archives


class _Torn(NamedTuple):
    """The bytes of a file behind its last complete batch."""

    path: str
    position: int
    size: int


class LogRecovery:
    def __init__(
        self,
        log: Log,
        folder: str | None,
        parts: Mapping[int, ReplayedPart],
        evidence: int,
        *,
        files: FileCache,
        archives: Archives,
        state: DiskStateStore,
        clock: Clock,
        batch_bytes_max: int,
    ) -> None:
        """`folder` is None for a log without files. `evidence` is an end up to which records are known to have been
        confirmed; `parts` are the log's parts of the journal."""
        self.log = log
        self._disk: Disk = files.disk
        self._files = files
        self._state = state
        self._clock = clock
        self._key = log.id.to_bytes(8, "big")
        self._epochs = epochs.unpack(state.get(epochs.TABLE, self._key) or b"")
        self._sources = BatchSources(files, parts, batch_bytes_max, self._epochs, state.marker.epoch)
        self._settings = log.settings
        self._tail = log.tail
        if folder is not None:
            self._tail.folder = folder
            self._tail.created = True
        self._folder = self._tail.folder
        saved = state.get(ENDS, self._key)
        self._saved = SavedWriter.unpack(saved) if saved else None
        self._truncation = self._state_number(TRUNCATIONS)
        self._evidence = max(evidence, self._saved.next_offset if self._saved else 0, self._state_number(DAMAGED) or 0)
        if self._truncation is not None:
            self._evidence = min(self._evidence, self._truncation)
        self._start = self._state_number(STARTS) or 0
        self._segments: list[Segment] = []
        self._unlink: list[str] = []
        self._truncate: list[tuple[str, int]] = []
        self._torn: list[_Torn] = []
        self._as_found: dict[Segment, Segment] = {}  # new segment -> the old one, up to its last complete batch
        self._listing = SegmentListing(
            self._disk, self._folder, archives, self._sources, self._saved, self._start, self._settings.index_interval
        )
        self.new_files = NewFiles(self._disk, self._files, self._tail)
        self.records = self.bytes_kept = self.bytes_cut = 0
        self.indexes = IndexRepair(files, self._settings.index_interval)

    def _state_number(self, table: str) -> int | None:
        raw = self._state.get(table, self._key)
        return None if raw is None else int.from_bytes(raw, "big")

    def run(self, *, trust: bool) -> None:
        """Find out what survived. `trust` after a clean stop: files of the expected size are not scanned."""
        self.indexes.are_trusted = trust
        try:
            self._run(trust=trust)
        except CorruptLog as damage:  # of a manifest: without it the offsets of a segment are unknown
            self._damaged(damage.path, damage.position, damage.reason)
            self._finish()

    def _run(self, *, trust: bool) -> None:
        stems = self._listing.stems() if self._tail.created else []
        self._unlink += self._listing.unwanted
        known = [stem for stem in stems if self._saved is not None and stem.base < self._saved.base]
        rest = stems[len(known) :]
        # The active segment of the checkpoint follows them, even if its file has no name yet; unless a truncation
        # was interrupted, which removes the last segments first.
        active = [] if self._saved is None or self._truncation is not None else [self._saved.base]
        if self._take_known(known, [*(stem.base for stem in known[1:]), *active]):
            self._take_tail(rest, trust=trust)
        self._finish()

    # Known segments: trusted, but they have to be there.

    def _take_known(self, stems: list[SegmentStem], following: list[int]) -> bool:
        """`following` lists where the segment behind each of them must begin."""
        first = stems[0].base if stems else min(following, default=0)
        if first > self._start:
            path = self._listing.path(stems[0]) if stems else self._folder
            self._damaged(path, 0, f"the segment at offset {self._start:,} is missing")
            return False
        for at, stem in enumerate(stems):
            segment = self._listing.sealed(stem) or self._seal_again(stem, stems[at + 1 : at + 2])
            if segment is None:
                return False
            problem = segment.source.problem(self._disk, segment)
            if problem is not None:
                self._damaged(segment.path(), problem.position, problem.reason)
                return False
            self._segments.append(segment)
            if at < len(following) and following[at] != segment.next_offset:
                reason = f"the segment at offset {segment.next_offset:,} is missing"
                self._damaged(self._listing.path(stem), segment.size, reason)
                return False
        return True

    def _seal_again(self, stem: SegmentStem, following: list[SegmentStem]) -> Segment | None:
        """Seal a known segment that has lost its seal. It was synced, so every batch must be complete. A rewritten
        segment may have lost its last records to compaction: it reaches to the next segment."""
        path = self._listing.path(stem)
        size = self._disk.file_size(path)
        walker = index.Walker(stem.base, self._settings.index_interval)
        for data in self._sources.whole(path, 0, size, -1):
            walker.walk(data)
        if walker.position < size:
            self._damaged(path, walker.position, "a synced batch is damaged")
            return None
        end = walker.next_offset
        if stem.generation and self._saved is not None:
            end = max(end, following[0].base if following else self._saved.base)
        seal = seal_of(walker, end)
        self._files.write(self._listing.path(stem, paths.SEAL), [seal.pack()], 0, create=True)
        return Segment.sealed(self._folder, stem.generation, seal)

    # The tail: written since the last checkpoint.

    def _take_tail(self, stems: list[SegmentStem], *, trust: bool) -> None:
        saved = self._saved
        if stems and saved is not None and stems[0] == (saved.base, saved.generation):
            path = self._listing.path(stems[0])
            size = self._disk.file_size(path)
            if size < saved.position:
                self._damaged(path, size, f"{saved.position:,} bytes were synced")
                return
            segment = self._known_prefix(stems[0], saved)
            if trust and len(stems) == 1 and size == saved.position:
                return  # a clean stop: nothing to scan
            end = stems[1].base if len(stems) > 1 else None
            same_name = stems[0] if saved.next_offset == stems[0].base else None
            self._rescue(path, saved.position, size, saved.next_offset, end, same_name, segment)
            if segment not in self._segments:
                self._unlink += segment.paths  # it was empty, and the new segment took its place
            elif size > saved.position:
                self._truncate.append((path, saved.position))
            stems = stems[1:]
        self._take_unknown(stems)

    def _known_prefix(self, stem: SegmentStem, saved: SavedWriter) -> Segment:
        """The active segment of the checkpoint, up to where it was synced then."""
        segment = Segment(self._folder, stem.base, stem.generation)
        segment.size, segment.next_offset = saved.position, saved.next_offset
        segment.records, segment.max_timestamp = saved.records, saved.max_timestamp
        self._segments.append(segment)
        has_index = self.indexes.has(segment, saved.index_size)
        if has_index:
            self._truncate += self.indexes.leftovers(segment, saved.index_size)
        self._tail.writer = SegmentWriter(
            self._files,
            segment,
            saved.restore(self._settings.index_interval),
            saved.index_size if has_index else 0,
        )
        if not has_index and saved.position:
            self._tail.writer = SegmentWriter(
                self._files, segment, saved.restore(self._settings.index_interval), self.indexes.rebuild(segment)
            )
        return segment

    def _take_unknown(self, stems: list[SegmentStem]) -> None:
        for at, stem in enumerate(stems):
            if self._listing.is_archived(stem):
                path = self._listing.path(stem, paths.TIER)
                raise CorruptLog(path, 0, "it is archived, but the last checkpoint does not cover it")
            path = self._listing.path(stem)
            size = self._disk.file_size(path)
            if stem.base > self._end:
                # The file name of a segment was lost, and that of a later one kept. The journal may have the records.
                self._rescue_from_journal(stem.base)
            expected = self._end if self._segments else min(stem.base, self._end)
            self._unlink += [
                self._listing.path(stem, s) for s in (paths.DATA, paths.INDEX, paths.TIME_INDEX, paths.SEAL)
            ]
            if stem.base != expected:
                # Behind the first bad batch: its records were never confirmed, unless `_evidence` says otherwise.
                self._torn.append(_Torn(path, 0, size))
                continue
            end = stems[at + 1].base if at + 1 < len(stems) else None
            found = Segment(self._folder, stem.base, stem.generation)
            self._rescue(path, 0, size, stem.base, end, stem, found)
        self._rescue_from_journal(None)

    def _rescue_from_journal(self, end: int | None) -> None:
        rest = self._sources.replayed(self._end, end, may_begin_inside=not self._segments)
        if rest is not None:
            self._rescue(None, 0, 0, int.from_bytes(rest[:8], "big"), end, None, None)

    @property
    def _end(self) -> int:
        """The end of the records found so far."""
        end = self._segments[-1].next_offset if self._segments else self._start
        # The active segment of the checkpoint may have had an end but no batch, and so no file.
        return max(end, self._saved.next_offset) if self._saved and not self._saved.position else end

    def _rescue(
        self,
        path: str | None,
        position: int,
        size: int,
        offset: int,
        end: int | None,
        stem: SegmentStem | None,
        found: Segment | None,
    ) -> None:
        """Copy complete batches, first from the file and then from the journal, to a new segment that begins at
        `offset` and ends before `end`. `found` is the segment of the file."""
        target = Segment(self._folder, offset, stem.generation + 1 if stem else 0, created_ms=self._clock.now_ms())
        walker = index.Walker(offset, self._settings.index_interval)
        copy = self.new_files.begin(target, walker)
        if path is not None and (end is None or offset < end):
            for data in self._sources.whole(path, position, size, offset, end):
                copy.write(data)
        at = position + walker.position
        if found is not None and walker.position:
            self._as_found[target] = _extended(found, at, walker)
        while (end is None or walker.next_offset < end) and (
            rest := self._sources.replayed(walker.next_offset, end, may_begin_inside=not self._segments)
        ) is not None:
            copy.write(rest)
        copy.close()
        if path is not None and at < size and (end is None or walker.next_offset < end):
            self._torn.append(_Torn(path, at, size))
        self.records += walker.records
        self.bytes_kept += walker.position
        if walker.position == 0:
            return
        if self._segments and self._segments[-1].base == offset:
            self._segments.pop()
            self._tail.writer = None
        self._segments.append(target)
        target.size, target.next_offset = walker.position, walker.next_offset
        target.records, target.max_timestamp = walker.records, walker.max_timestamp
        if self._tail.writer is not None:
            self.new_files.seal_later(self._tail.writer)
        self._tail.writer = SegmentWriter(self._files, target, walker)

    def _save_torn(self, torn: _Torn) -> None:
        """Keep the bytes that are cut in a file beside the log. They were never confirmed, but may help to debug."""
        path, position, size = torn
        self.bytes_cut += size - position
        name = f"{path.removesuffix(paths.DATA)}-{position}{paths.CUT}"
        file = self._disk.open(name, create=True)
        try:
            for at in range(position, size, READ_BYTES):
                self._disk.pwrite(file, [self._files.read(path, min(READ_BYTES, size - at), at)], at - position)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._disk.unlink(name)  # a start on a full disk has better uses for the room
        finally:
            self._disk.close(file)

    # Deciding whether the log is damaged.

    def _damaged(self, path: str, position: int, reason: str) -> None:
        if self.log.damage is None:
            self.log.damage = CorruptLog(path, position, reason)

    def _finish(self) -> None:
        if self.log.damage is None and self._end < self._evidence:
            last = self._segments[-1] if self._segments else None
            found = self._as_found.get(last, last) if last else None
            path, position = (found.path(), found.size) if found else (self._folder, 0)
            self._damaged(
                path, position, f"records {self._end:,} to {self._evidence - 1:,} were confirmed and are gone"
            )
        if self.log.damage is not None:
            self._leave_everything()
        for torn in self._torn:
            self._save_torn(torn)
        log = self.log
        self._tail.segments = tuple(self._segments)
        log.start_offset = self._start
        log.next_offset = log.visible_end = log.durable_end = max(self._end, self._start)
        log.epochs = [entry for entry in self._epochs if entry[1] <= log.next_offset]

    @property
    def pending_truncation(self) -> int | None:
        """The offset of a truncation that a crash interrupted, and that has to be finished."""
        return self._truncation if self.log.damage is None else None

    def _leave_everything(self) -> None:
        """A damaged log is evidence: none of its files is changed, and its batches in the journal are saved beside
        them."""
        self.new_files.discard()
        self._unlink, self._truncate, self._torn = [], [], []
        self._segments = _before_gap([self._as_found.get(segment, segment) for segment in self._segments], self._disk)
        self._tail.writer = None
        self.records = self.bytes_kept = 0
        rescued = self._sources.replayed_past(self._end)
        if rescued and self._tail.created:
            file = self._disk.open(f"{self._folder}/journal-{self._end}.rescued", create=True)
            try:
                self._disk.pwrite(file, rescued, 0)
                self._disk.sync(file)
            finally:
                self._disk.close(file)

    # Making the result durable.

    def record_state(self) -> None:
        if self.log.damage is not None:
            end = max(self._evidence, self.log.visible_end)
            self._state.apply_put(DAMAGED, self._key, end.to_bytes(8, "big"))
            return
        saved = self._tail.saved_writer()
        if saved is not None and (self._saved is None or saved != self._saved):
            self._state.apply_put(ENDS, self._key, saved.pack())

    @property
    def folder(self) -> str:
        return self._folder

    def clean_up(self) -> bool:
        """Remove the files that new ones replaced, and repair indexes; True if a file was removed."""
        if self.log.damage is None and self._saved is not None:
            self.indexes.repair([segment for segment in self._segments if segment.base < self._saved.base])
        for path, size in self._truncate:
            self._files.truncate(path, size)
        here = [path for path in self._unlink if path.startswith(self._folder + "/")]
        gone = [path for path in here if self._disk.exists(path)]
        self._files.forget(self._unlink)
        for path in gone:
            self._disk.unlink(path)
        for path in set(self._unlink).difference(here):
            # In the tier. A file that stays there without a manifest is removed by a later start.
            location_of(self._disk, path).remove(path)
        return bool(gone)


def _extended(found: Segment, size: int, walker: index.Walker) -> Segment:
    """The old segment up to its last complete batch."""
    seen = Segment(found.folder, found.base, found.generation)
    seen.size, seen.next_offset = size, walker.next_offset
    seen.records = found.records + walker.records
    seen.max_timestamp = max(found.max_timestamp, walker.max_timestamp)
    return seen


def _before_gap(segments: list[Segment], disk: Disk) -> list[Segment]:
    """The readable segments of a damaged log: those before the first that existed only as a new file."""
    kept: list[Segment] = []
    for segment in segments:
        if not disk.exists(segment.path()):
            break
        if kept and kept[-1].base == segment.base:
            kept.pop()  # the same file, up to a later batch
        kept.append(segment)
    return kept


__all__ = ["DAMAGED", "STARTS", "TRUNCATIONS", "LogRecovery"]
