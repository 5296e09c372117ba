"""Which of the files in a log's folder count: the newest generation of every segment that is still wanted."""

from contextlib import suppress

from headrace.errors import CorruptLog
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.paths import SegmentStem
from headrace.log.recovery.batch_sources import Sources
from headrace.log.segments import index
from headrace.log.segments.segment import SavedWriter, Seal, read_seal
from headrace.log.tier.manifest import Tier, read_tier

_SUFFIXES = (paths.DATA, paths.INDEX, paths.TIME_INDEX, paths.SEAL, paths.TIER)


class SegmentListing:
    def __init__(
        self, disk: Disk, folder: str, sources: Sources, saved: SavedWriter | None, start: int, index_interval: int
    ) -> None:
        self._disk = disk
        self._folder = folder
        self._sources = sources
        self._saved = saved
        self._start = start
        self._index_interval = index_interval
        self._manifests: dict[SegmentStem, Tier] = {}
        self.unwanted: list[str] = []

    def stems(self) -> list[SegmentStem]:
        """In order; whatever is not among them is unwanted. CorruptLog when a manifest has rotted."""
        newest: dict[int, int] = {}
        names = self._disk.listdir(self._folder)
        for name in names:
            stem = paths.parse_segment(name)
            if stem is not None:
                newest[stem.base] = max(newest.get(stem.base, 0), stem.generation)
        stems = [SegmentStem(base, newest[base]) for base in sorted(newest)]
        stems = self._without_superseded(stems)
        while len(stems) > 1 and stems[1].base <= self._start:
            stems.pop(0)  # retention had decided, and was interrupted
        if stems and stems[0].base < self._start and not self._reaches_start(stems[0]):
            stems.pop(0)  # a name that came back, with those behind it gone
        self._note_unwanted(names, {str(stem) for stem in stems})
        return stems

    def _note_unwanted(self, names: list[str], wanted: set[str]) -> None:
        for name in names:
            base, _, suffix = name.partition(".")
            if "." + suffix in _SUFFIXES and base not in wanted:
                self.unwanted.append(f"{self._folder}/{name}")
                if "." + suffix == paths.TIER:
                    with suppress(CorruptLog):  # its file is then found by its place in the tier
                        self.unwanted.append(read_tier(self._disk, f"{self._folder}/{name}").path)

    def path(self, stem: SegmentStem, suffix: str = paths.DATA) -> str:
        return f"{self._folder}/{stem}{suffix}"

    def is_archived(self, stem: SegmentStem) -> bool:
        return self._disk.exists(self.path(stem, paths.TIER))

    def seal(self, stem: SegmentStem) -> Seal | Tier | None:
        """What says how far a segment reaches. CorruptLog when that is a manifest and has rotted."""
        if stem in self._manifests or self.is_archived(stem):
            if stem not in self._manifests:
                self._manifests[stem] = read_tier(self._disk, self.path(stem, paths.TIER))
            return self._manifests[stem]
        return read_seal(self._disk, self.path(stem, paths.SEAL))

    def _reaches_start(self, stem: SegmentStem) -> bool:
        position, offset = 0, stem.base
        if self._saved is not None and stem == (self._saved.base, self._saved.generation):
            # Its seal, if there is one, is that of a recovery which did not come to its end.
            position, offset = self._saved.position, self._saved.next_offset
        else:
            seal = self.seal(stem)
            if seal is not None:
                return seal.next_offset > self._start
        path = self.path(stem)
        walker = index.Walker(offset, self._index_interval)
        for data in self._sources.whole(path, position, self._disk.file_size(path), offset):
            walker.walk(data)
        end = walker.next_offset
        return end > self._start or self._sources.replayed(end, may_begin_inside=True) is not None

    def _without_superseded(self, stems: list[SegmentStem]) -> list[SegmentStem]:
        """A rewritten segment may cover several old ones: its seal says how far it reaches."""
        kept: list[SegmentStem] = []
        covered = -1
        for stem in stems:
            if stem.base < covered:
                continue
            kept.append(stem)
            if stem.generation:
                seal = self.seal(stem)
                covered = seal.next_offset if seal is not None else covered
        return kept
