"""Open files, shared by all logs of a shard: an LRU, because a broker may have far more files than descriptors.

Used by the owner thread (reads), the worker (writes) and the keeper (checkpoints), hence the lock. A file in
use is never closed; a dirty one is synced before it is closed, since nobody could sync it afterwards
and hear of a failed write-back.
"""

import errno
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.log.disk import Disk, FileId
from headrace.log.tiered import GroupCache

if TYPE_CHECKING:
    from headrace.log.segment import Segment

Bytes = bytes | bytearray | memoryview
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OpenFile:
    __slots__ = ("file", "path", "users")

    def __init__(self, path: str, file: FileId) -> None:
        self.path = path
        self.file = file
        self.users = 0


class Files:
    def __init__(self, disk: Disk, open_files_max: int) -> None:
        self.disk = disk
        self.groups = GroupCache(disk)
        self._max = max(open_files_max, 8)
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenFile] = OrderedDict()
        self._dirty: set[str] = set()
        # Folder -> number of its last change. It stays until a sync that began after that change has ended:
        # a round must not take a folder for synced while a checkpoint is only about to sync it.
        self._dirty_folders: dict[str, int] = {}
        self._folder_changes = 0
        # Set by the thread that saw it, at once: descriptors are shared and an error is reported to one caller
        # only, so after a failed sync the next one's OK means nothing, whoever asks.
        self.failure: OSError | None = None

    def _acquire(self, path: str, create: bool = False) -> OpenFile:
        with self._lock:
            entry = self._open.get(path)
            if entry is not None:
                self._open.move_to_end(path)
                entry.users += 1
                return entry
            self._evict(self._max - 1)
            entry = OpenFile(path, self._open_file(path, create))
            entry.users = 1
            self._open[path] = entry
            return entry

    def _open_file(self, path: str, create: bool) -> FileId:
        try:
            return self.disk.open(path, create=create)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        # Somebody else took the descriptors: make do with half of ours rather than fail.
        self._evict(len(self._open) // 2)
        return self.disk.open(path, create=create)

    def _release(self, entry: OpenFile, *, dirty: bool = False) -> None:
        with self._lock:
            entry.users -= 1
            if dirty:
                self._dirty.add(entry.path)
            if entry.users == 0 and self._open.get(entry.path) is not entry:
                self.disk.close(entry.file)  # forgotten while it was in use

    def _evict(self, keep: int) -> None:
        excess = len(self._open) - keep
        if excess <= 0:
            return
        for path, entry in list(self._open.items()):
            if excess <= 0:
                return
            if entry.users:
                continue
            if path in self._dirty:
                self._sync(entry)
                self._dirty.discard(path)
            self.disk.close(entry.file)
            del self._open[path]
            excess -= 1

    def read(self, path: str, size: int, position: int) -> bytes:
        entry = self._acquire(path)
        try:
            return self.disk.pread(entry.file, size, position)
        finally:
            self._release(entry)

    def read_segment(self, segment: "Segment", size: int, position: int) -> bytes:
        """Bytes of a segment's batches, wherever they are; of an archived one only up to the end of a row group."""
        if segment.tier is None:
            return self.read(segment.data_path, size, position)
        return self.groups.read(segment.tier, size, position)

    def read_cached(self, path: str, size: int, position: int) -> bytes | None:
        """None when the bytes are not in the page cache and reading would wait for the disk."""
        entry = self._acquire(path)
        try:
            return self.disk.pread_cached(entry.file, size, position)
        finally:
            self._release(entry)

    def write(self, path: str, buffers: Sequence[Bytes], position: int, *, create: bool = False) -> int:
        entry = self._acquire(path, create)
        try:
            return self.disk.pwrite(entry.file, buffers, position)
        finally:
            # Only now, and also if it failed half-way: a checkpoint that syncs the file while it is being written
            # takes the mark away, and nobody would sync what came after.
            self._release(entry, dirty=True)

    def hold(self, path: str) -> OpenFile | None:
        """A file that is open anyway, kept open until `let_go`; None rather than open it."""
        with self._lock:
            entry = self._open.get(path)
            if entry is not None:
                self._open.move_to_end(path)
                entry.users += 1
            return entry

    def let_go(self, held: OpenFile) -> None:
        """It has been written, or a part of it: see `write`."""
        self._release(held, dirty=True)

    def write_derived(self, path: str, data: Bytes, position: int) -> None:
        """Write what can be made again from other files: never dirty, so never worth a sync."""
        entry = self._acquire(path, create=True)
        try:
            self.disk.pwrite(entry.file, [data], position)
        finally:
            self._release(entry)

    def sync(self, path: str) -> None:
        entry = self._acquire(path)
        try:
            self._dirty.discard(path)
            self._sync(entry)
        finally:
            self._release(entry)

    def _sync(self, entry: OpenFile) -> None:
        self.check()
        try:
            self.disk.sync(entry.file)
        except OSError as error:
            self.failure = error
            raise

    def check(self) -> None:
        """Raise if a sync has failed: nothing may be called durable any more."""
        if self.failure is not None:
            raise OSError(self.failure.errno, f"an earlier sync failed: {self.failure}") from self.failure

    def truncate(self, path: str, size: int) -> None:
        entry = self._acquire(path)
        try:
            self.disk.truncate(entry.file, size)
        finally:
            self._release(entry, dirty=True)

    def size(self, path: str) -> int:
        entry = self._acquire(path)
        try:
            return self.disk.size(entry.file)
        finally:
            self._release(entry)

    def folder_changed(self, folder: str) -> None:
        with self._lock:
            self._folder_changes += 1
            self._dirty_folders[folder] = self._folder_changes

    def sync_folder(self, folder: str) -> None:
        change = self._dirty_folders.get(folder)
        with suppress(FileNotFoundError):  # its log was deleted meanwhile
            self.disk.sync_dir(folder)
        with self._lock:
            if self._dirty_folders.get(folder) == change:
                self._dirty_folders.pop(folder, None)

    def is_folder_dirty(self, folder: str) -> bool:
        return folder in self._dirty_folders

    def take_dirty(self) -> tuple[list[str], list[str]]:
        """Files and folders changed since the last call; the caller syncs them."""
        with self._lock:
            files, self._dirty = sorted(self._dirty), set()
            return files, sorted(self._dirty_folders)

    def forget(self, paths: Iterable[str]) -> None:
        """Close files that are about to be removed or replaced; users of the moment keep theirs."""
        with self._lock:
            for path in paths:
                self.groups.forget(path)  # a name may come back, after a truncation, for other records
                self._dirty.discard(path)
                entry = self._open.pop(path, None)
                if entry is not None and entry.users == 0:
                    self.disk.close(entry.file)

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        with self._lock:
            for entry in self._open.values():
                self.disk.close(entry.file)
            self._open.clear()
