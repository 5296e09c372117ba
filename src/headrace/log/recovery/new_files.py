"""The segment files that recovery writes: under temporary names until all logs are ready to become durable."""

from collections.abc import Callable

from headrace.log.commit.log_writer import Tail
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments import index
from headrace.log.segments.segment import Segment, SegmentWriter


class NewFiles:
    """The new files of one log."""

    def __init__(self, disk: Disk, files: FileCache, tail: Tail) -> None:
        self._disk = disk
        self._files = files
        self._tail = tail
        self._targets: list[str] = []
        self._to_seal: list[SegmentWriter] = []

    def __len__(self) -> int:
        return len(self._targets)

    def begin(self, target: Segment, walker: index.Walker) -> "NewFile":
        return NewFile(self._disk, lambda: self._make(target.path()), walker)

    def _make(self, path: str) -> FileId:
        """Create an empty file that will be renamed to `path`."""
        temporary = path + paths.UNFINISHED
        if not self._tail.created:
            self._disk.mkdir(self._tail.folder)
            self._tail.created = True
        if self._disk.exists(temporary):
            self._disk.unlink(temporary)
        file = self._disk.open(temporary, create=True, exclusive=True)
        self._targets.append(path)
        return file

    def seal_later(self, writer: SegmentWriter) -> None:
        self._to_seal.append(writer)

    # The steps in order; each is done for all logs before the next begins.

    def sync(self) -> None:
        for path in self._targets:
            file = self._disk.open(path + paths.UNFINISHED)
            try:
                self._disk.sync(file)
            finally:
                self._disk.close(file)

    def seal(self) -> None:
        for writer in self._to_seal:
            writer.seal()
            # The state marker that follows makes this a known segment, and only its seal says where it ends.
            self._files.sync(writer.segment.path(paths.SEAL))

    def put_in_place(self) -> None:
        for path in self._targets:
            self._disk.rename(path + paths.UNFINISHED, path)
        self._disk.sync_dir(self._tail.folder)

    # Giving up.

    def abandon(self) -> None:
        """Remove the files that have not been renamed, to free their space."""
        for path in self._targets:
            if self._disk.exists(path + paths.UNFINISHED):
                self._disk.unlink(path + paths.UNFINISHED)

    def discard(self) -> None:
        """Forget all new files, as if nothing had been written."""
        self.abandon()
        self._targets, self._to_seal = [], []


class NewFile:
    """One data file, created with the first write."""

    def __init__(self, disk: Disk, make: Callable[[], FileId], walker: index.Walker) -> None:
        self._disk = disk
        self._make = make
        self._walker = walker
        self._file: FileId | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._file is None:
            self._file = self._make()
        self._disk.pwrite(self._file, [data], self._walker.position)
        end = self._walker.walk(data)
        assert end == len(data), "only whole batches are copied"

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
