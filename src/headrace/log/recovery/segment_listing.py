"""Which files of a log's folder recovery uses: the newest generation of every segment at or after the log's start."""

from contextlib import suppress

from headrace.errors import CorruptLog
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.paths import SegmentStem
from headrace.log.recovery.batch_sources import BatchSources
from headrace.log.segments import index
from headrace.log.segments.segment import SavedWriter, Segment, read_seal
from headrace.log.tier.sources import Archives

_SUFFIXES = (paths.DATA, paths.INDEX, paths.TIME_INDEX, paths.SEAL, paths.TIER)


class SegmentListing:
    """The segments of one log. `saved` is the writer of the active segment at the last checkpoint."""

    def __init__(
        self,
        disk: Disk,
        folder: str,
        archives: Archives,
        sources: BatchSources,
        saved: SavedWriter | None,
        start: int,
        index_interval: int,
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._archives = archives
        self._sources = sources
        self._saved = saved
        self._start = start
        self._index_interval = index_interval
        self._archived: dict[SegmentStem, Segment] = {}
        self.unwanted: list[str] = []  # files that `stems` leaves out

    def stems(self) -> list[SegmentStem]:
        """The segments to use, in order. CorruptLog when a manifest is damaged."""
        newest: dict[int, int] = {}
        names = self._disk.listdir(self._folder)
        for name in names:
            stem = paths.parse_segment(name)
            if stem is not None:
                newest[stem.base] = max(newest.get(stem.base, 0), stem.generation)
        stems = [SegmentStem(base, newest[base]) for base in sorted(newest)]
        stems = self._without_superseded(stems)
        while len(stems) > 1 and stems[1].base <= self._start:
            stems.pop(0)  # retention had moved the start, and was interrupted before it removed the file
        if stems and stems[0].base < self._start and not self._reaches_start(stems[0]):
            stems.pop(0)  # a removed file whose name came back, while those behind it are gone
        self._note_unwanted(names, {str(stem) for stem in stems})
        return stems

    def _note_unwanted(self, names: list[str], wanted: set[str]) -> None:
        for name in names:
            base, _, suffix = name.partition(".")
            if "." + suffix in _SUFFIXES and base not in wanted:
                self.unwanted.append(f"{self._folder}/{name}")
                if "." + suffix == paths.TIER:
                    with suppress(CorruptLog):  # the Parquet file is then found by its place in the tier
                        contents = self._archives.open(f"{self._folder}/{name}").contents
                        assert contents is not None
                        self.unwanted.append(contents.path)

    def path(self, stem: SegmentStem, suffix: str = paths.DATA) -> str:
        return f"{self._folder}/{stem}{suffix}"

    def is_archived(self, stem: SegmentStem) -> bool:
        return self._disk.exists(self.path(stem, paths.TIER))

    def archived(self, stem: SegmentStem) -> Segment | None:
        """The archived segment; None if it is not archived. CorruptLog when its manifest is damaged."""
        if stem not in self._archived:
            segment = self._archives.segment(self._folder, stem)
            if segment is None:
                return None
            self._archived[stem] = segment
        return self._archived[stem]

    def sealed(self, stem: SegmentStem) -> Segment | None:
        """A segment whose seal or manifest says how far it reaches; None if it has neither."""
        archived = self.archived(stem)
        if archived is not None:
            return archived
        seal = read_seal(self._disk, self.path(stem, paths.SEAL))
        return None if seal is None else Segment.sealed(self._folder, stem.generation, seal)

    def _reaches_start(self, stem: SegmentStem) -> bool:
        position, offset = 0, stem.base
        if self._saved is not None and stem == (self._saved.base, self._saved.generation):
            # A seal of this segment would be that of a recovery that was interrupted.
            position, offset = self._saved.position, self._saved.next_offset
        else:
            sealed = self.sealed(stem)
            if sealed is not None:
                return sealed.next_offset > self._start
        path = self.path(stem)
        walker = index.Walker(offset, self._index_interval)
        for data in self._sources.whole(path, position, self._disk.file_size(path), offset):
            walker.walk(data)
        end = walker.next_offset
        return end > self._start or self._sources.replayed(end, may_begin_inside=True) is not None

    def _without_superseded(self, stems: list[SegmentStem]) -> list[SegmentStem]:
        """Drop segments that a rewritten one covers: its seal says how far it reaches."""
        kept: list[SegmentStem] = []
        covered = -1
        for stem in stems:
            if stem.base < covered:
                continue
            kept.append(stem)
            if stem.generation:
                sealed = self.sealed(stem)
                covered = sealed.next_offset if sealed is not None else covered
        return kept
