"""Recovery of one log. See recovery.py for the rules."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.errors import CorruptLog
from headrace.log.commit.journal_entry import ReplayedPart
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.paths import SegmentStem
from headrace.log.log import Log, LogSpec
from headrace.log.recovery.batch_sources import READ_BYTES, Sources
from headrace.log.recovery.new_files import FreshFiles
from headrace.log.recovery.segment_listing import SegmentListing
from headrace.log.segments import epochs
from headrace.log.segments import index as kernel
from headrace.log.segments.segment import SavedWriter, Seal, Segment, SegmentWriter, rebuild_index, seal_of
from headrace.log.state.tables import DAMAGED, ENDS, STARTS, TRUNCATIONS
from headrace.log.tier.archive import remove_file
from headrace.log.tier.manifest import Tier

if TYPE_CHECKING:
    from headrace.log.shard import Shard


class LogRecovery:
    def __init__(
        self,
        shard: "Shard",
        spec: LogSpec,
        folder: str | None,
        parts: Mapping[int, ReplayedPart],
        evidence: int,
    ) -> None:
        self._shard = shard
        self._disk = shard.disk
        self._files = shard.files
        self._key = spec.id.to_bytes(8, "big")
        self._epochs = epochs.unpack(shard.state.get(epochs.TABLE, self._key) or b"")
        self._sources = Sources(
            shard.files, parts, shard.settings.batch_bytes_max, self._epochs, shard.state.marker.epoch
        )
        self._settings = spec.settings
        self.log: Log = shard.new_log(spec)
        self._tail = self.log.tail
        if folder is not None:
            self._tail.folder = folder
            self._tail.created = True
        self._folder = self._tail.folder
        saved = shard.state.get(ENDS, self._key)
        self._saved = SavedWriter.unpack(saved) if saved else None
        self._truncation = self._state_number(TRUNCATIONS)
        self._evidence = max(evidence, self._saved.next_offset if self._saved else 0, self._state_number(DAMAGED) or 0)
        if self._truncation is not None:
            self._evidence = min(self._evidence, self._truncation)
        self._start = self._state_number(STARTS) or 0
        self._segments: list[Segment] = []
        self._unlink: list[str] = []
        self._truncate: list[tuple[str, int]] = []
        self._cuts: list[tuple[str, int, int]] = []
        self._as_found: dict[Segment, Segment] = {}  # fresh segment -> the old one, as far as it is whole
        self._listing = SegmentListing(
            self._disk, self._folder, self._sources, self._saved, self._start, self._settings.index_interval
        )
        self.fresh = FreshFiles(self._disk, self._files, self._tail)
        self.records = self.bytes_kept = self.bytes_cut = self.indexes_rebuilt = 0

    def _state_number(self, table: str) -> int | None:
        raw = self._shard.state.get(table, self._key)
        return None if raw is None else int.from_bytes(raw, "big")

    # What is there.

    def run(self, *, trust: bool) -> None:
        try:
            self._run(trust=trust)
        except CorruptLog as damage:  # a manifest: without it nobody knows which offsets lie where
            self._damaged(damage.path, damage.position, damage.reason)
            self._finish()

    def _run(self, *, trust: bool) -> None:
        stems = self._listing.stems() if self._tail.created else []
        self._unlink += self._listing.unwanted
        known = [stem for stem in stems if self._saved is not None and stem.base < self._saved.base]
        rest = stems[len(known) :]
        # The active segment of the checkpoint follows them, whether or not its file has a name already; unless a
        # truncation was interrupted, which takes the last ones first.
        behind = [] if self._saved is None or self._truncation is not None else [self._saved.base]
        if self._take_known(known, [*(stem.base for stem in known[1:]), *behind]):
            self._take_tail(rest, trust=trust)
        self._finish()

    # What was synced: trusted, but it has to be there.

    def _take_known(self, stems: list[SegmentStem], following: list[int]) -> bool:
        """`following`: where the one behind each of them begins, or the one behind all."""
        first = stems[0].base if stems else min(following, default=0)
        if first > self._start:
            path = self._listing.path(stems[0]) if stems else self._folder
            self._damaged(path, 0, f"the segment at offset {self._start:,} is missing")
            return False
        for at, stem in enumerate(stems):
            path = self._listing.path(stem)
            seal = self._listing.seal(stem) or self._seal_again(stem, stems[at + 1 : at + 2])
            if seal is None:
                return False
            if isinstance(seal, Tier):
                if not self._is_in_tier(seal):
                    return False
                self._segments.append(Segment.archived(self._folder, stem.generation, seal))
            elif self._disk.file_size(path) < seal.size:
                self._damaged(path, self._disk.file_size(path), f"{seal.size:,} bytes were sealed")
                return False
            else:
                self._segments.append(Segment.sealed(self._folder, stem.generation, seal))
            if at < len(following) and following[at] != seal.next_offset:
                self._damaged(path, seal.size, f"the segment at offset {seal.next_offset:,} is missing")
                return False
        return True

    def _is_in_tier(self, tier: Tier) -> bool:
        """Its content is checked when it is read; here only that the file is there, and whole."""
        size = self._disk.file_size(tier.path) if self._disk.exists(tier.path) else 0
        if size != tier.file_bytes:
            self._damaged(tier.path, size, f"{tier.file_bytes:,} bytes were archived there")
        return size == tier.file_bytes

    def _seal_again(self, stem: SegmentStem, following: list[SegmentStem]) -> Seal | None:
        """A known segment without a seal: whole it must be, since it was synced. One that was rewritten may have lost
        its last records: it reaches to the next one."""
        path = self._listing.path(stem)
        size = self._disk.file_size(path)
        walker = kernel.Walker(stem.base, self._settings.index_interval)
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
        return seal

    # What was written since the last checkpoint.

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
                return  # a clean stop: nothing to look at
            end = stems[1].base if len(stems) > 1 else None
            same_name = stems[0] if saved.next_offset == stems[0].base else None
            self._rescue(path, saved.position, size, saved.next_offset, end, same_name, segment)
            if segment not in self._segments:
                self._unlink += segment.paths  # it was empty, and the fresh one took its place
            elif size > saved.position:
                self._truncate.append((path, saved.position))
            stems = stems[1:]
        self._take_unknown(stems)

    def _known_prefix(self, stem: SegmentStem, saved: SavedWriter) -> Segment:
        segment = Segment(self._folder, stem.base, stem.generation)
        segment.size, segment.next_offset = saved.position, saved.next_offset
        segment.records, segment.max_timestamp = saved.records, saved.max_timestamp
        self._segments.append(segment)
        index = segment.path(paths.INDEX)
        has_index = self._disk.exists(index) and self._disk.file_size(index) >= saved.index_size
        self._tail.writer = SegmentWriter(
            self._files,
            segment,
            saved.restore(self._settings.index_interval),
            saved.index_size if has_index else 0,
        )
        if not has_index and saved.position:
            entries, _ = rebuild_index(self._files, segment, self._settings.index_interval)
            self._tail.writer = SegmentWriter(
                self._files, segment, saved.restore(self._settings.index_interval), len(entries)
            )
            self.indexes_rebuilt += 1
        return segment

    def _take_unknown(self, stems: list[SegmentStem]) -> None:
        for at, stem in enumerate(stems):
            if self._listing.is_archived(stem):
                path = self._listing.path(stem, paths.TIER)
                raise CorruptLog(path, 0, "it is archived, and the last checkpoint does not know of it")
            path = self._listing.path(stem)
            size = self._disk.file_size(path)
            if stem.base > self._end:
                # The name of a segment was lost and the later one's kept, but the journal may have its records.
                self._rescue_from_journal(stem.base)
            expected = self._end if self._segments else min(stem.base, self._end)
            self._unlink += [
                self._listing.path(stem, s) for s in (paths.DATA, paths.INDEX, paths.TIME_INDEX, paths.SEAL)
            ]
            if stem.base != expected:
                # Behind the first bad batch: never confirmed, or the evidence says otherwise.
                self._cuts.append((path, 0, size))
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
        end = self._segments[-1].next_offset if self._segments else self._start
        # An active segment without a batch has no file, perhaps, but it had an end.
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
        """Copy what is whole, from the file and then from the journal, to a fresh segment."""
        target = Segment(
            self._folder, offset, stem.generation + 1 if stem else 0, created_ms=self._shard.clock.now_ms()
        )
        walker = kernel.Walker(offset, self._settings.index_interval)
        copy = self.fresh.begin(target, walker)
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
            self._cuts.append((path, at, size))
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
            self.fresh.seal_later(self._tail.writer)
        self._tail.writer = SegmentWriter(self._files, target, walker)

    def _cut(self, path: str, position: int, size: int) -> None:
        """Keep what is cut, beside the log: it was never confirmed, but it may help somebody."""
        self.bytes_cut += size - position
        name = f"{path.removesuffix(paths.DATA)}-{position}{paths.CUT}"
        file = self._disk.open(name, create=True)
        try:
            for at in range(position, size, READ_BYTES):
                self._disk.pwrite(file, [self._files.read(path, min(READ_BYTES, size - at), at)], at - position)
        finally:
            self._disk.close(file)

    # Judgement.

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
        for path, position, size in self._cuts:
            self._cut(path, position, size)
        log = self.log
        self._tail.segments = tuple(self._segments)
        log.start_offset = self._start
        log.next_offset = log.visible_end = log.durable_end = max(self._end, self._start)
        log.epochs = [entry for entry in self._epochs if entry[1] <= log.next_offset]
        if self._truncation is not None and log.damage is None:
            self._shard.pending_truncations.append((log, self._truncation))

    def _leave_everything(self) -> None:
        """A damaged log is evidence: no file of it is changed, and what the journal still has is saved beside it."""
        self.fresh.discard()
        self._unlink, self._truncate, self._cuts = [], [], []
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

    # Making it last.

    def record_state(self) -> None:
        state = self._shard.state
        if self.log.damage is not None:
            state.apply_put(DAMAGED, self._key, max(self._evidence, self.log.visible_end).to_bytes(8, "big"))
            return
        saved = self._tail.saved_writer()
        if saved is not None and (self._saved is None or saved != self._saved):
            state.apply_put(ENDS, self._key, saved.pack())

    @property
    def folder(self) -> str:
        return self._folder

    def clean_up(self) -> bool:
        """Remove what the fresh files replaced; True if a name went."""
        for path, size in self._truncate:
            self._files.truncate(path, size)
        gone = [path for path in self._unlink if self._disk.exists(path)]
        self._files.forget(gone)
        for path in gone:
            if path.startswith(self._folder + "/"):
                self._disk.unlink(path)
            else:
                remove_file(self._disk, path)  # in the tier; what is left there without a manifest, a later start finds
        return bool(gone)


def _extended(found: Segment, size: int, walker: kernel.Walker) -> Segment:
    """The old segment, seen as far as its batches are whole."""
    seen = Segment(found.folder, found.base, found.generation)
    seen.size, seen.next_offset = size, walker.next_offset
    seen.records = found.records + walker.records
    seen.max_timestamp = max(found.max_timestamp, walker.max_timestamp)
    return seen


def _before_gap(segments: list[Segment], disk: Disk) -> list[Segment]:
    """What is readable of a damaged log: segments in a row, without those that only the rescue had made."""
    kept: list[Segment] = []
    for segment in segments:
        if not disk.exists(segment.path()):
            break
        if kept and kept[-1].base == segment.base:
            kept.pop()  # the same file, seen further
        kept.append(segment)
    return kept
