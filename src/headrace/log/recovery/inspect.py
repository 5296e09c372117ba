"""Inspecting a data folder from outside the broker: list, dump, verify, rebuild indexes.

Listing, dumping and verifying only read, and work next to a running broker, up to each log's visible end. Rebuilding
indexes takes the folder's lock.
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
from headrace.log.segments import index
from headrace.log.segments.batches import batches
from headrace.log.segments.segment import Segment, read_seal, rebuild_index
from headrace.log.standby import follower
from headrace.log.tier.sources import Archives
from headrace.record.types import BatchInfo

Progress = Callable[[int], object]  # receives the bytes processed since the last call

INDEX_INTERVAL = 4096
OPEN_FILES = 64
LISTINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class LogFacts:
    id: int
    slug: str
    folder: str
    start: int
    visible_end: int | None  # None when the log has no slot
    segments: tuple[Segment, ...]

    @property
    def size_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.segments)

    @property
    def batch_bytes(self) -> int:
        """The size of all batches, those of archived segments uncompressed: the work of reading everything."""
        return sum(segment.size for segment in self.segments)

    @property
    def archived(self) -> int:
        """The number of archived segments."""
        return sum(segment.is_archived for segment in self.segments)


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
    """The report of one segment, and where the next one has to begin; None if that is unknown."""

    report: VerifyReport
    next_base: int | None


class Inspector:
    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or RealDisk()
        follower.check_whole(self._disk, root)
        self._files = FileCache(self._disk, OPEN_FILES)
        self._archives = Archives(self._disk)
        self._unreadable: dict[str, str] = {}  # damaged manifests -> reason
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
        """The segments of a folder; None when the log was deleted. Listed again when the broker removes a segment
        meanwhile."""
        for _ in range(LISTINGS_MAX):
            try:
                return self._segments(folder)
            except FileNotFoundError:
                if not self._disk.exists(folder):
                    return None
        raise StorageError(f"the segments of {folder} are removed faster than they can be listed")

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
                continue  # superseded by a rewritten segment, and about to be removed
            try:
                archived = self._archives.segment(folder, stem)
            except CorruptLog as error:
                self._unreadable[f"{folder}/{stem}{paths.TIER}"] = str(error)
                continue
            if archived is not None:
                found.append(archived)
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
        """Every batch with an offset at or after `start`, up to the visible end, with its checksum verified."""
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
                return  # behind the end of the active segment there may be leftovers of a crash

    def verify(self, log_ids: set[int] | None = None, progress: Progress | None = None) -> VerifyReport:
        """Verify every checksum, the order of offsets, and every seal and index against the data."""
        report = VerifyReport()
        for log in self.logs():
            if log_ids is not None and log.id not in log_ids:
                continue
            report.add(self.joined(log, (self.check(s, log.visible_end, progress) for s in log.segments)))
        return report

    def joined(self, log: LogFacts, segments: Iterable[Checked]) -> VerifyReport:
        """Combine the reports of a log's segments, which must be in order."""
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
        """Verify one segment on its own, so that those of a large log can be verified in parallel."""
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
            return None  # not listed any more: the broker has rewritten or removed it meanwhile
        except CorruptLog as error:
            if segment.is_sealed or visible_end is None or walker.next_offset < visible_end:
                report.problems.append(str(error))
                return None
        known = len(report.problems)
        self._verify_derived(segment, walker, positions, report)
        if len(report.problems) > known and not self._is_listed(segment):
            del report.problems[known:]  # the segment was removed meanwhile, with its indexes
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
                break  # entries of batches that are being written
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
        """Rebuild every index from the data; returns the number of segments. The broker must be stopped."""
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
        """Hold the data folder's lock."""
        lock = self._disk.lock(f"{self.root}/{paths.LOCK}")
        try:
            yield
        finally:
            self._disk.close(lock)

    def indexed(self, log_ids: set[int] | None = None) -> Iterator[tuple[int, Segment]]:
        """(log id, segment) for all segments whose index can be rebuilt: archived ones have none, and that of the
        active one is checked and repaired by every start."""
        for log in self.logs():
            if log_ids is None or log.id in log_ids:
                yield from ((log.id, s) for s in log.segments if s.is_sealed and not s.is_archived)

    def rebuild(self, segment: Segment) -> int:
        """Rebuild the indexes of a sealed segment; returns the segment's size."""
        rebuild_index(self._files, segment, INDEX_INTERVAL)
        return segment.size

    def close(self) -> None:
        self._files.close()
