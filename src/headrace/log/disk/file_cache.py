"""An LRU cache of open files, shared by all logs of a shard: a broker may have far more files than descriptors.

The owner thread (reads), the worker (writes) and the keeper (checkpoints) use it, hence the lock. No thread waits for
the disk while it holds the lock: the owner needs it for every read, and would stall all connections.

A file in use is never closed. A dirty file is not closed before it is synced, because a descriptor opened later would
not report a failed write-back. When dirty files fill the cache, the next writer syncs all of them at once.
"""

import errno
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from headrace.log.disk.disk import Disk, FileId, sync_noting
from headrace.log.disk.io_chain import SyncFailure
from headrace.log.disk.open_files import OpenFile, OpenFiles

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_FILES = (errno.EMFILE, errno.ENFILE)
CROWD_SYNCED = 64  # dirty files to sync when the cache is full and files can only be synced one by one


class Dirty(NamedTuple):
    """What a checkpoint has to sync: files, held open until then, and folders with the number of their last change."""

    files: list[OpenFile]
    folders: dict[str, int]


class FileCache(OpenFiles):
    def __init__(self, disk: Disk, open_files_max: int) -> None:
        super().__init__(disk, threading.Lock(), OrderedDict())
        self.sync_filesystem: Callable[[], None] | None = None  # set by a shard: syncs all files at once
        self._max = max(open_files_max, 8)
        self.held_max = self._max // 2  # files that one round may hold open; others need some, too
        self._being_synced: Counter[str] = Counter()  # no longer dirty, but their sync has not ended
        self._forgets = 0
        self.is_ending = False  # work that can be done after the next start is not begun or continued
        # Folder -> number of its last change. An entry stays until a sync that began after that change has ended: a
        # round must not treat a folder as synced while a checkpoint is only about to sync it.
        self._dirty_folders: dict[str, int] = {}
        self._folder_changes = 0
        self._folders: dict[str, list[OpenFile]] = {}  # open descriptors, see `folder_held`
        # Set at once by the thread that saw the failure. Descriptors are shared and the kernel reports an error to one
        # caller only, so after a failed sync no other sync's success means anything.
        self.failure: OSError | None = None
        self.sync_failure = SyncFailure()  # the same without the GIL, also set and read by I/O chains

    def _acquire(self, path: str, create: bool = False, *, writes: bool = False) -> OpenFile:
        while True:
            with self._lock:
                entry = self._open.get(path)
                if entry is not None:
                    return self._use(entry)
                self._close_idle(self._max - 1)
                # Files that a checkpoint is about to sync do not count: they make room soon.
                is_crowded = writes and len(self._open) >= self._max and len(self._dirty) >= self._max // 2
                forgets = self._forgets
            if is_crowded:
                self._sync_crowd()
                continue
            file = self._open_file(path, create, writes)
            with self._lock:
                if path not in self._open and forgets == self._forgets:
                    entry = self._open[path] = OpenFile(path, file)
                    return entry
            self.disk.close(file)  # another thread opened it, or the name now belongs to another file

    acquire = _acquire  # for readers; pair it with `release`

    def _open_file(self, path: str, create: bool, writes: bool) -> FileId:
        return self._open_or_shrink(lambda: self.disk.open(path, create=create), writes=writes)

    def _open_or_shrink(self, opening: Callable[[], T], *, writes: bool = False) -> T:
        """Open a file; if no descriptor is free, close half of the cache and try again."""
        try:
            return opening()
        except OSError as error:
            if error.errno not in NO_FILES:
                raise
        if writes:
            self._sync_crowd()
        with self._lock:
            self._close_idle(len(self._open) // 2)
        return opening()

    def _close_idle(self, keep: int) -> None:
        while len(self._open) > keep and self._idle:
            path, entry = self._idle.popitem(last=False)
            del self._open[path]
            self.disk.close(entry.file)

    def _sync_crowd(self) -> None:
        """Sync dirty files so that they can be closed. Only for writers, which wait for the disk anyway."""
        with self._lock:
            count = len(self._dirty)
            crowd = self._take(sorted(self._dirty)[: count if self._is_cheaper_at_once(count) else CROWD_SYNCED])
        self._sync_taken(crowd)

    def _take(self, paths: list[str]) -> list[OpenFile]:
        """Hold dirty files open until `_sync_taken`. They are unmarked before the sync, so that a write during it marks
        them again."""
        self._dirty.difference_update(paths)
        self._being_synced.update(paths)
        return [self._use(self._open[path]) for path in paths]

    def _sync_taken(self, taken: list[OpenFile]) -> None:
        try:
            if self._is_cheaper_at_once(len(taken)):
                self._sync_everything()
            else:
                for entry in taken:
                    self._sync_file(entry)
        finally:
            self._release_taken(taken)

    def _release_taken(self, taken: list[OpenFile]) -> None:
        with self._lock:
            for entry in taken:
                self._being_synced[entry.path] -= 1
                if not self._being_synced[entry.path]:
                    del self._being_synced[entry.path]
        for entry in taken:
            self.release(entry)

    def _is_cheaper_at_once(self, count: int) -> bool:
        return self.sync_filesystem is not None and count > self.disk.sync_each_max

    def _sync_everything(self) -> None:
        assert self.sync_filesystem is not None
        self._sync(self.sync_filesystem)

    def read(self, path: str, size: int, position: int) -> bytes:
        entry = self._acquire(path)
        try:
            return self.disk.pread(entry.file, size, position)
        finally:
            self.release(entry)

    def read_cached(self, path: str, size: int, position: int) -> bytes | None:
        """None if the bytes are not in the page cache, so that reading them would wait for the disk."""
        entry = self._acquire(path)
        try:
            return self.disk.pread_cached(entry.file, size, position)
        finally:
            self.release(entry)

    def write(self, path: str, buffers: Sequence[Bytes], position: int, *, create: bool = False) -> int:
        entry = self._acquire(path, create, writes=True)
        try:
            return self.disk.pwrite(entry.file, buffers, position)
        finally:
            # Marked dirty only after the write, even if it failed half-way: a checkpoint that syncs the file during the
            # write removes the mark, and the rest of the write would never be synced.
            self.release(entry, dirty=True)

    @contextmanager
    def held(self, path: str) -> Iterator[None]:
        held = self.hold(path)
        try:
            yield
        finally:
            if held is not None:
                self.release(held, dirty=False)

    def start_writing_back(self, paths: Iterable[str]) -> None:
        """Start the write-back of the files that are open; others were synced before they were closed."""
        for path in paths:
            held = self.hold(path)
            if held is not None:
                try:
                    self.disk.start_writing_back(held.file)
                finally:
                    self.release(held)

    def write_derived(self, path: str, data: Bytes, position: int) -> None:
        """Write data that can be rebuilt from other files: it is not marked dirty, so not synced."""
        entry = self._acquire(path, create=True)
        try:
            self.disk.pwrite(entry.file, [data], position)
        finally:
            self.release(entry)

    def sync(self, path: str) -> None:
        entry = self._acquire(path, writes=True)
        with self._lock:
            self._dirty.discard(path)
            self._being_synced[path] += 1
        try:
            self._sync_file(entry)
        finally:
            self._release_taken([entry])

    def _sync_file(self, entry: OpenFile) -> None:
        self._sync(lambda: sync_noting(self.disk, entry.file, self.sync_failure))

    def _sync(self, sync: Callable[[], None]) -> None:
        self.check()
        try:
            sync()
        except OSError as error:
            self.failure = error
            self.sync_failure.note(error.errno or errno.EIO)  # for I/O chains
            raise
        self.check()  # of two threads that sync a file at once, only one gets the error

    def sync_failed(self, error: OSError) -> None:
        """Record the failed sync of an I/O chain."""
        if self.failure is None:
            self.failure = error

    def check(self) -> None:
        """Raise if any sync has failed: nothing may be reported as durable any more."""
        if self.failure is None and self.sync_failure.errno:
            self.failure = OSError(self.sync_failure.errno, os.strerror(self.sync_failure.errno))
        if self.failure is not None:
            raise OSError(self.failure.errno, f"an earlier sync failed: {self.failure}") from self.failure

    def truncate(self, path: str, size: int) -> None:
        entry = self._acquire(path)
        try:
            self.disk.truncate(entry.file, size)
        finally:
            self.release(entry, dirty=True)

    def size(self, path: str) -> int:
        entry = self._acquire(path)
        try:
            return self.disk.size(entry.file)
        finally:
            self.release(entry)

    def folder_changed(self, folder: str) -> None:
        with self._lock:
            self._folder_changes += 1
            self._dirty_folders[folder] = self._folder_changes

    @contextmanager
    def folder_held(self, folder: str) -> Iterator[None]:
        """Within the block, a sync of this folder needs no free descriptor."""
        held = OpenFile(folder, self._open_or_shrink(lambda: self.disk.open_dir(folder), writes=True))
        with self._lock:
            self._folders.setdefault(folder, []).append(held)
        try:
            yield
        finally:
            with self._lock:
                self._folders[folder].remove(held)
                if not self._folders[folder]:
                    del self._folders[folder]
            self.release(held)

    def sync_folder(self, folder: str) -> None:
        change = self._dirty_folders.get(folder)
        with self._lock:
            held = self._folders[folder][-1] if folder in self._folders else None
            if held is not None:
                held.users += 1  # it may be another thread's, which may release it meanwhile
        try:
            if held is not None:
                self.disk.sync_dir(folder, held.file)
            else:
                with suppress(FileNotFoundError):  # its log has been deleted
                    self._open_or_shrink(lambda: self.disk.sync_dir(folder), writes=True)
        finally:
            if held is not None:
                self.release(held)
        self._folder_synced(folder, change)

    def listdir(self, folder: str) -> list[str]:
        return self._open_or_shrink(lambda: self.disk.listdir(folder))

    def _folder_synced(self, folder: str, change: int | None) -> None:
        with self._lock:
            if self._dirty_folders.get(folder) == change:
                self._dirty_folders.pop(folder, None)

    def is_folder_dirty(self, folder: str) -> bool:
        return folder in self._dirty_folders

    def take_dirty(self) -> Dirty:
        """Everything that changed since the last call, for `sync_all`, including files that another thread is syncing:
        that sync may fail."""
        with self._lock:
            changed = self._dirty.union(path for path in self._being_synced if path in self._open)
            return Dirty(self._take(sorted(changed)), dict(sorted(self._dirty_folders.items())))

    def sync_all(self, dirty: Dirty) -> None:
        """Sync files and folders: many of them through one sync of the whole filesystem, which includes names."""
        if self._is_cheaper_at_once(len(dirty.files) + len(dirty.folders)):
            try:
                self._sync_everything()
            finally:
                self._release_taken(dirty.files)
            for folder, change in dirty.folders.items():
                self._folder_synced(folder, change)
        else:
            self._sync_taken(dirty.files)
            for folder in dirty.folders:
                self.sync_folder(folder)
        self.check()  # a round's sync may have failed since the list was made

    def forget(self, paths: Iterable[str]) -> None:
        """Close files that are about to be removed or replaced; current users keep their descriptors."""
        with self._lock:
            self._forgets += 1
            for path in paths:
                self._dirty.discard(path)
                self._idle.pop(path, None)
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
            self._idle.clear()
