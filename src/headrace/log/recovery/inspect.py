"""Looking at a data folder from outside: list, dump, verify, rebuild indexes.

Listing, dumping and verifying only read, and work beside a running broker; what it is just writing is not looked at.
Rebuilding takes the folder's lock.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.errors import CorruptLog, NotFound, StorageError
from headrace.log.commit import slots
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk, read_whole
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.paths import SegmentStem
from headrace.log.maintenance.compaction import batches
from headrace.log.segments import index
from headrace.log.segments.segment import Segment, read_seal, rebuild_index
from headrace.log.standby import follower
from headrace.log.tier.manifest import read_tier
from headrace.record.types import BatchInfo

Progress = Callable[[int], object]  # bytes done since the last call

INDEX_INTERVAL = 4096
OPEN_FILES = 64
LISTINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class LogFacts:
    id: int
    slug: str
    folder: str
    start: int
    visible_end: int | None  # None when no broker has said so yet
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.segments)

    @property
    def batch_bytes(self) -> int:
        """What its batches are, unpacked: what it takes to look at all of them."""
        return sum(segment.size for segment in self.segments)

    @property
    def archived(self) -> int:
        """How many of its segments are in the tier."""
        return sum(segment.tier is not None for segment in self.segments)


@dataclass(slots=True)
class VerifyReport:
    logs: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.problems

    def add(self, part: "VerifyReport") -> None:
        for name in ("logs", "segments", "batches", "records", "bytes"):
            setattr(self, name, getattr(self, name) + getattr(part, name))
        self.problems += part.problems


class Checked(NamedTuple):
    """What was found of a segment, and where the next one has to begin, if that can be said."""

    report: VerifyReport
    next_base: int | None


class Inspector:
    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or RealDisk()
        follower.check_whole(self._disk, root)
        self._files = FileCache(self._disk, OPEN_FILES)
        self._unreadable: dict[str, str] = {}  # manifests, and what is wrong with them
        if not self._disk.exists(f"{root}/{paths.LOGS}"):
            raise NotFound(f"{root} is not a data folder: it has no {paths.LOGS}/")

    def logs(self) -> list[LogFacts]:
        ends = slots.read_all(self._disk, f"{self.root}/{paths.SLOTS}")
        found = []
        for name in self._disk.listdir(f"{self.root}/{paths.LOGS}"):
            log_id = paths.parse_log_folder(name)
            if log_id is None or name.endswith(paths.DELETED):
                continue
            folder = f"{self.root}/{paths.LOGS}/{name}"
            segments = self._listed(folder)
            if segments is None:
                continue
            end = ends.get(log_id)
            start = end.start if end else (segments[0].base if segments else 0)
            found.append(
                LogFacts(log_id, name.partition("-")[2], folder, start, end.visible_end if end else None, segments)
            )
        return sorted(found, key=lambda log: log.id)

    def log(self, log_id: int) -> LogFacts:
        for log in self.logs():
            if log.id == log_id:
                return log
        raise NotFound(f"no log {log_id} in {self.root}")

    def _listed(self, folder: str) -> tuple[Segment, ...] | None:
        """None when the log was deleted. A broker may remove a segment between the listing and the look at it."""
        for _ in range(LISTINGS_MAX):
            try:
                return self._segments(folder)
            except FileNotFoundError:
                if not self._disk.exists(folder):
                    return None
        raise StorageError(f"the segments of {folder} go faster than they can be looked at")

    def _segments(self, folder: str) -> tuple[Segment, ...]:
        newest: dict[int, int] = {}
        for name in self._disk.listdir(folder):
            stem = paths.parse_segment(name)
            if stem is not None:
                newest[stem.base] = max(stem.generation, newest.get(stem.base, 0))
        found: list[Segment] = []
        for base in sorted(newest):
            stem = SegmentStem(base, newest[base])
            if found and found[-1].is_sealed and base < found[-1].next_offset:
                continue  # a rewritten segment covers it, and it is about to go
            manifest = f"{folder}/{stem}{paths.TIER}"
            if self._disk.exists(manifest):
                try:
                    found.append(Segment.archived(folder, stem.generation, read_tier(self._disk, manifest)))
                except CorruptLog as error:
                    self._unreadable[manifest] = str(error)
                continue
            seal = read_seal(self._disk, f"{folder}/{stem}{paths.SEAL}")
            if seal is not None:
                found.append(Segment.sealed(folder, stem.generation, seal))
            else:
                segment = Segment(folder, base, stem.generation)
                segment.size = self._disk.file_size(segment.path())
                found.append(segment)
        return tuple(found)

    def batches(self, log: LogFacts, start: int = 0) -> Iterator[tuple[Segment, memoryview, BatchInfo]]:
        """Every batch with an offset at or after start, checked, up to the visible end."""
        for at, segment in enumerate(log.segments):
            following = log.segments[at + 1].base if at + 1 < len(log.segments) else None
            if following is not None and following <= start:
                continue
            try:
                for data, info in batches(self._files, segment):
                    if log.visible_end is not None and info.base_offset >= log.visible_end:
                        return
                    if info.last_offset >= start:
                        yield segment, data, info
            except CorruptLog:
                if segment.is_sealed or log.visible_end is not None:
                    raise
                return  # behind the end of the active segment lies whatever a crash left there

    def verify(self, log_ids: set[int] | None = None, progress: Progress | None = None) -> VerifyReport:
        """The checksum of every batch, the order of offsets, every seal and index against the data."""
        report = VerifyReport()
        for log in self.logs():
            if log_ids is not None and log.id not in log_ids:
                continue
            report.add(self.joined(log, (self.check(s, log.visible_end, progress) for s in log.segments)))
        return report

    def joined(self, log: LogFacts, segments: Iterable[Checked]) -> VerifyReport:
        """The report of a log from what was found of its segments, in their order."""
        unreadable = [text for path, text in self._unreadable.items() if path.startswith(log.folder + "/")]
        whole = VerifyReport(logs=1, problems=unreadable)
        expected = None
        for segment, (part, next_base) in zip(log.segments, segments, strict=True):
            if expected is not None and segment.base != expected:
                whole.problems.append(f"{segment.path()}: begins at {segment.base}, {expected} was expected")
            whole.add(part)
            expected = next_base
        return whole

    def check(self, segment: Segment, visible_end: int | None, progress: Progress | None = None) -> Checked:
        """One segment by itself, so that those of a large log can be looked at side by side."""
        report = VerifyReport(segments=1)
        return Checked(report, self._check(segment, visible_end, report, progress))

    def _check(
        self, segment: Segment, visible_end: int | None, report: VerifyReport, progress: Progress | None
    ) -> int | None:
        walker = index.Walker(segment.base, INDEX_INTERVAL)
        next_offset = segment.base
        positions = {}
        try:
            for data, info in batches(self._files, segment):
                if visible_end is not None and info.base_offset >= visible_end:
                    break
                if info.base_offset < next_offset:
                    raise CorruptLog(segment.path(), walker.position, f"offset {info.base_offset} comes twice")
                next_offset = info.last_offset + 1
                positions[walker.position] = info.base_offset
                walker.walk(data, info.position, info.position + info.size)
                report.batches += 1
                report.records += info.count
                report.bytes += info.size
                if progress is not None:
                    progress(info.size)
        except FileNotFoundError:
            if self._is_listed(segment):
                report.problems.append(f"{segment.path()}: is gone")
            return None  # otherwise a broker has rewritten or removed it since it was listed: it is not missing
        except CorruptLog as error:
            if segment.is_sealed or visible_end is None or walker.next_offset < visible_end:
                report.problems.append(str(error))
                return None
        known = len(report.problems)
        self._verify_derived(segment, walker, positions, report)
        if len(report.problems) > known and not self._is_listed(segment):
            del report.problems[known:]  # its indexes went with it
        return segment.next_offset if segment.is_sealed else None

    def _is_listed(self, segment: Segment) -> bool:
        now = self._listed(segment.folder) or ()
        return any((other.base, other.generation) == (segment.base, segment.generation) for other in now)

    def _verify_derived(
        self, segment: Segment, walker: index.Walker, positions: dict[int, int], report: VerifyReport
    ) -> None:
        seal = read_seal(self._disk, segment.path(paths.SEAL))
        if seal is not None and (seal.size, seal.records, seal.headers_crc) != (
            walker.position,
            walker.records,
            walker.headers_crc,
        ):
            report.problems.append(f"{segment.path(paths.SEAL)}: does not match the data: a batch header was changed")
        self._verify_times(segment, report)
        path = segment.path(paths.INDEX)
        if not self._disk.exists(path):
            return
        entries = read_whole(self._disk, path)
        for at in range(0, len(entries) - 7, 8):
            position = int.from_bytes(entries[at + 4 : at + 8], "big")
            if position >= walker.position:
                break  # of batches that are just being written
            if positions.get(position) != segment.base + int.from_bytes(entries[at : at + 4], "big"):
                report.problems.append(f"{path}: entry {at // 8} is wrong; `headrace log reindex` rebuilds it")
                break

    def _verify_times(self, segment: Segment, report: VerifyReport) -> None:
        path = segment.path(paths.TIME_INDEX)
        entries = read_whole(self._disk, path) if self._disk.exists(path) else b""
        damaged = index.first_damaged_time_entry(entries, segment.base)
        if damaged >= 0:
            report.problems.append(f"{path}: entry {damaged} is wrong; `headrace log reindex` rebuilds it")

    def reindex(self, log_ids: set[int] | None = None, progress: Progress | None = None) -> int:
        """Write every index anew from the data; the number of segments done. The broker must be stopped."""
        done = 0
        with self.locked():
            for _, segment in self.indexed(log_ids):
                size = self.rebuild(segment)
                done += 1
                if progress is not None:
                    progress(size)
        return done

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else has the folder meanwhile."""
        lock = self._disk.lock(f"{self.root}/{paths.LOCK}")
        try:
            yield
        finally:
            self._disk.close(lock)

    def indexed(self, log_ids: set[int] | None = None) -> Iterator[tuple[int, Segment]]:
        """(log, segment) for all that have an index to be rebuilt: the active one is looked at, and mended, at every
        start; archived ones have none."""
        for log in self.logs():
            if log_ids is None or log.id in log_ids:
                yield from ((log.id, s) for s in log.segments if s.is_sealed and s.tier is None)

    def rebuild(self, segment: Segment) -> int:
        """Write the indexes of a sealed segment anew; how many bytes it has."""
        rebuild_index(self._files, segment, INDEX_INTERVAL)
        return segment.size

    def close(self) -> None:
        self._files.close()
