"""Open files, shared by all logs of a shard: an LRU, because a broker may have far more files than descriptors.

Used by the owner thread (reads), the worker (writes) and the keeper (checkpoints), hence the lock. Nobody waits for the
disk while holding it: the owner, who needs it for every read, would wait as well, and with it every connection.

A file in use is never closed, nor is a dirty one before it is synced, since nobody could sync it afterwards and hear of
a failed write-back. When dirty files leave no room for others, whoever writes syncs all of them at once.
"""

import errno
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from headrace.log.disk.disk import Disk, FileId, sync_noting
from headrace.log.disk.file_ends import OpenFile, OpenFiles
from headrace.log.disk.io_chain import SyncFailure

Bytes = bytes | bytearray | memoryview
T = TypeVar("T")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_FILES = (errno.EMFILE, errno.ENFILE)
CROWD_SYNCED = 64  # where files can only be synced one by one, so many to make room


class Dirty(NamedTuple):
    """What is to be synced: files, kept open until then, and folders with the number of their last change."""

    files: list[OpenFile]
    folders: dict[str, int]


class FileCache(OpenFiles):
    def __init__(self, disk: Disk, open_files_max: int) -> None:
        super().__init__(disk, threading.Lock(), OrderedDict())
        self.sync_filesystem: Callable[[], None] | None = None  # of a shard: syncs everything at once
        self._max = max(open_files_max, 8)
        self.held_max = self._max // 2  # at once: others need some as well
        self._being_synced: Counter[str] = Counter()  # no longer dirty, and not known to be synced yet
        self._forgets = 0
        self.is_ending = False  # no work is to be begun, or gone on with, that can as well be done another time
        # Folder -> number of its last change. It stays until a sync that began after that change has ended:
        # a round must not take a folder for synced while a checkpoint is only about to sync it.
        self._dirty_folders: dict[str, int] = {}
        self._folder_changes = 0
        self._folders: dict[str, list[OpenFile]] = {}  # held, see `folder_held`
        # Set by the thread that saw it, at once: descriptors are shared and an error is reported to one caller
        # only, so after a failed sync the next one's OK means nothing, whoever asks.
        self.failure: OSError | None = None
        self.sync_failure = SyncFailure()  # the same, from the moment the system said so, and in chains

    def _acquire(self, path: str, create: bool = False, *, writes: bool = False) -> OpenFile:
        while True:
            with self._lock:
                entry = self._open.get(path)
                if entry is not None:
                    return self._use(entry)
                self._close_idle(self._max - 1)
                # Files that a checkpoint is about to sync are no crowd: they make room by themselves soon.
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
            self.disk.close(file)  # somebody else opened it, or it is not what has that name any more

    acquire = _acquire  # for readers; pair it with `let_go`

    def _open_file(self, path: str, create: bool, writes: bool) -> FileId:
        return self._making_do(lambda: self.disk.open(path, create=create), writes=writes)

    def _making_do(self, opening: Callable[[], T], *, writes: bool = False) -> T:
        """When somebody else took the descriptors: make do with half of ours rather than fail."""
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
        """Only for those who write, and so wait for the disk anyway."""
        with self._lock:
            count = len(self._dirty)
            crowd = self._take(sorted(self._dirty)[: count if self._is_cheaper_at_once(count) else CROWD_SYNCED])
        self._sync_taken(crowd)

    def _take(self, paths: list[str]) -> list[OpenFile]:
        """Kept open until `_sync_taken`. No longer dirty before they are synced: what is written meanwhile makes
        them dirty again."""
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
            self._let_go_taken(taken)

    def _let_go_taken(self, taken: list[OpenFile]) -> None:
        with self._lock:
            for entry in taken:
                self._being_synced[entry.path] -= 1
                if not self._being_synced[entry.path]:
                    del self._being_synced[entry.path]
        for entry in taken:
            self.let_go(entry)

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
            self.let_go(entry)

    def read_cached(self, path: str, size: int, position: int) -> bytes | None:
        """None when the bytes are not in the page cache and reading would wait for the disk."""
        entry = self._acquire(path)
        try:
            return self.disk.pread_cached(entry.file, size, position)
        finally:
            self.let_go(entry)

    def write(self, path: str, buffers: Sequence[Bytes], position: int, *, create: bool = False) -> int:
        entry = self._acquire(path, create, writes=True)
        try:
            return self.disk.pwrite(entry.file, buffers, position)
        finally:
            # Only now, and also if it failed half-way: a checkpoint that syncs the file while it is being written
            # takes the mark away, and nobody would sync what came after.
            self.let_go(entry, dirty=True)

    @contextmanager
    def held(self, path: str) -> Iterator[None]:
        held = self.hold(path)
        try:
            yield
        finally:
            if held is not None:
                self.let_go(held, dirty=False)

    def start_writing_back(self, paths: Iterable[str]) -> None:
        """Of those that are still open; one that is not was synced when it was closed."""
        for path in paths:
            held = self.hold(path)
            if held is not None:
                try:
                    self.disk.start_writing_back(held.file)
                finally:
                    self.let_go(held)

    def write_derived(self, path: str, data: Bytes, position: int) -> None:
        """Write what can be made again from other files: never dirty, so never worth a sync."""
        entry = self._acquire(path, create=True)
        try:
            self.disk.pwrite(entry.file, [data], position)
        finally:
            self.let_go(entry)

    def sync(self, path: str) -> None:
        entry = self._acquire(path, writes=True)
        with self._lock:
            self._dirty.discard(path)
            self._being_synced[path] += 1
        try:
            self._sync_file(entry)
        finally:
            self._let_go_taken([entry])

    def _sync_file(self, entry: OpenFile) -> None:
        self._sync(lambda: sync_noting(self.disk, entry.file, self.sync_failure))

    def _sync(self, sync: Callable[[], None]) -> None:
        self.check()
        try:
            sync()
        except OSError as error:
            self.failure = error
            self.sync_failure.note(error.errno or errno.EIO)  # chains look at nothing else
            raise
        self.check()  # of two who sync a file at once, only one is told

    def sync_failed(self, error: OSError) -> None:
        """In a chain that has ended."""
        if self.failure is None:
            self.failure = error

    def check(self) -> None:
        """Raise if a sync has failed: nothing may be called durable any more."""
        if self.failure is None and self.sync_failure.errno:
            self.failure = OSError(self.sync_failure.errno, os.strerror(self.sync_failure.errno))
        if self.failure is not None:
            raise OSError(self.failure.errno, f"an earlier sync failed: {self.failure}") from self.failure

    def truncate(self, path: str, size: int) -> None:
        entry = self._acquire(path)
        try:
            self.disk.truncate(entry.file, size)
        finally:
            self.let_go(entry, dirty=True)

    def size(self, path: str) -> int:
        entry = self._acquire(path)
        try:
            return self.disk.size(entry.file)
        finally:
            self.let_go(entry)

    def folder_changed(self, folder: str) -> None:
        with self._lock:
            self._folder_changes += 1
            self._dirty_folders[folder] = self._folder_changes

    @contextmanager
    def folder_held(self, folder: str) -> Iterator[None]:
        """Meanwhile a sync of this folder takes no descriptor: for who can do no more about it when there is none."""
        held = OpenFile(folder, self._making_do(lambda: self.disk.open_dir(folder), writes=True))
        with self._lock:
            self._folders.setdefault(folder, []).append(held)
        try:
            yield
        finally:
            with self._lock:
                self._folders[folder].remove(held)
                if not self._folders[folder]:
                    del self._folders[folder]
            self.let_go(held)

    def sync_folder(self, folder: str) -> None:
        change = self._dirty_folders.get(folder)
        with self._lock:
            held = self._folders[folder][-1] if folder in self._folders else None
            if held is not None:
                held.users += 1  # another thread's, perhaps, which may let go of it meanwhile
        try:
            if held is not None:
                self.disk.sync_dir(folder, held.file)
            else:
                with suppress(FileNotFoundError):  # its log was deleted meanwhile
                    self._making_do(lambda: self.disk.sync_dir(folder), writes=True)
        finally:
            if held is not None:
                self.let_go(held)
        self._folder_synced(folder, change)

    def listdir(self, folder: str) -> list[str]:
        return self._making_do(lambda: self.disk.listdir(folder))

    def _folder_synced(self, folder: str, change: int | None) -> None:
        with self._lock:
            if self._dirty_folders.get(folder) == change:
                self._dirty_folders.pop(folder, None)

    def is_folder_dirty(self, folder: str) -> bool:
        return folder in self._dirty_folders

    def take_dirty(self) -> Dirty:
        """Everything changed since the last call, for `sync_all`; and what somebody else is just syncing, since nobody
        knows yet how that ends."""
        with self._lock:
            changed = self._dirty.union(path for path in self._being_synced if path in self._open)
            return Dirty(self._take(sorted(changed)), dict(sorted(self._dirty_folders.items())))

    def sync_all(self, dirty: Dirty) -> None:
        """Many are synced with the whole filesystem, names included."""
        if self._is_cheaper_at_once(len(dirty.files) + len(dirty.folders)):
            try:
                self._sync_everything()
            finally:
                self._let_go_taken(dirty.files)
            for folder, change in dirty.folders.items():
                self._folder_synced(folder, change)
        else:
            self._sync_taken(dirty.files)
            for folder in dirty.folders:
                self.sync_folder(folder)
        self.check()  # a round's sync may have failed since the list was made

    def forget(self, paths: Iterable[str]) -> None:
        """Close files that are about to be removed or replaced; users of the moment keep theirs."""
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
