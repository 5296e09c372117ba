"""The disk: the interface through which the log uses files. Its users are handed a Disk, so that tests can pass a
simulated one that loses, tears and reorders everything that was not synced.

These modules may call the operating system for files of the log, and no others:
- disk.py, for everything that RealDisk does;
- io_chain.pyx, which writes and syncs every production round without the GIL. `run_chain` and the I/O thread in
  workers.py use it only for an unmodified RealDisk; on any other disk the same steps are Disk calls;
- pread.pyx, for reads that must not wait for the disk (called here and by read/file_range.py);
- read/file_range.py, which duplicates descriptors, and the Kafka listener, which passes them to sendfile.

Rules that callers rely on:
- `pwrite` writes everything or raises; a short write is completed or becomes an OSError.
- A name is durable only after `sync_dir` of its folder; bytes are durable only after `sync` of their file.
- A failed sync is never retried: after EIO the kernel drops the dirty pages, and the next sync reports success.
"""

import ctypes
import errno
import fcntl
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, Self, TypeGuard

from headrace.errors import DataFolderLocked
from headrace.log.disk import io_chain
from headrace.log.disk.io_chain import Step
from headrace.log.disk.pread import pread_nowait
from headrace.log.disk.watcher import DiskObserver, OpenPaths

FileId = int
IOV_MAX = 512  # buffers per call; Linux allows 1,024

# Syncs one filesystem. Python does not wrap it, and os.sync(), for the whole machine, reports no errors.
_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def _syncfs_reports_errors() -> bool:
    """Since Linux 5.8 syncfs reports write-back errors; before that it always reported success."""
    version = platform.release().split(".")[:2]
    return sys.platform == "linux" and [int(part) for part in version if part.isdecimal()] >= [5, 8]


class Ran(NamedTuple):
    """Result of an I/O chain, which stops at the first step that fails."""

    done: int  # steps that were carried out in full
    error: OSError | None
    sync_s: float = 0.0


class Disk(Protocol):
    """The filesystem operations that the log needs. Paths are absolute strings; files are descriptors."""

    sync_each_max: int  # above this number of files, one sync of the whole filesystem is cheaper
    tells_cached: (
        bool  # `pread_cached` returns only bytes that were in memory; if False, it may have waited for the disk
    )

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> FileId: ...
    def close(self, file: FileId) -> None: ...
    def pread(self, file: FileId, size: int, position: int) -> bytes: ...
    def pread_into(self, file: FileId, buffer: memoryview, position: int) -> int: ...
    def pread_cached(self, file: FileId, size: int, position: int) -> bytes | None: ...
    def pwrite(self, file: FileId, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int: ...
    def sync(self, file: FileId) -> None: ...
    def start_writing_back(self, file: FileId) -> None: ...
    def sync_filesystem(self, file: FileId) -> None: ...
    def truncate(self, file: FileId, size: int) -> None: ...
    def size(self, file: FileId) -> int: ...
    def rename(self, source: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def mkdir(self, path: str) -> None: ...
    def rmdir(self, path: str) -> None: ...
    def listdir(self, path: str) -> list[str]: ...
    def exists(self, path: str) -> bool: ...
    def file_size(self, path: str) -> int: ...
    def modified_ms(self, path: str) -> int: ...
    def is_link(self, path: str) -> bool: ...
    def open_dir(self, path: str) -> FileId: ...
    def sync_dir(self, path: str, folder: FileId | None = None) -> None: ...
    def free_bytes(self, path: str) -> int: ...
    def open_files_max(self) -> int: ...
    def lock(self, path: str) -> FileId: ...


class RealDisk:
    """The operating system's files. Files are 0600 and folders 0700, because messages are private.

    Files and folders that root makes (maintenance commands beside a broker of another user) get the owner of the folder
    they are in; otherwise the broker could not read its own segments.
    """

    # To sync 64 new files took 14 ms one by one and 2 ms with their filesystem; 1,000 files took 241 and 19 ms.
    sync_each_max = 64 if _syncfs is not None and _syncfs_reports_errors() else sys.maxsize
    tells_cached = True
    watcher: DiskObserver | None = None  # is notified of every change; see watcher.py
    names: OpenPaths

    def __new__(cls, *_arguments: object, **_options: object) -> Self:
        disk = super().__new__(cls)
        disk.names = OpenPaths()  # not in __init__, which subclasses need not call
        return disk

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> FileId:
        flags = os.O_CLOEXEC | (os.O_RDONLY if readonly else os.O_RDWR)
        if create:
            flags |= os.O_CREAT
        if exclusive:
            flags |= os.O_EXCL
        file = os.open(path, flags, 0o600)
        if exclusive:  # just made: an existing file may be a link to anything, so its owner stays
            _set_owner(file, path)
        if not readonly:
            self.names.opened(file, path)
        if create and self.watcher is not None:
            self.watcher.created(path, exclusive=exclusive)
        return file

    def close(self, file: FileId) -> None:
        self.names.closed(file)
        os.close(file)

    def pread(self, file: FileId, size: int, position: int) -> bytes:
        return os.pread(file, size, position)

    def pread_into(self, file: FileId, buffer: memoryview, position: int) -> int:
        return os.preadv(file, [buffer], position)

    def pread_cached(self, file: FileId, size: int, position: int) -> bytes | None:
        """The bytes if they are in the page cache; None if reading them would wait for the disk."""
        try:
            data = pread_nowait(file, size, position)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # RWF_NOWAIT is not supported: read, even if that waits
                self.tells_cached = False
                return os.pread(file, size, position)
            raise
        if len(data) < size and position + len(data) < os.fstat(file).st_size:
            return None
        return data

    def pwrite(self, file: FileId, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        written = 0
        try:
            for start in range(0, len(buffers), IOV_MAX):
                written += self._pwrite_all(file, buffers[start : start + IOV_MAX], position + written)
        except OSError:
            if self.watcher is not None:
                self.watcher.broke_off(file, sum(map(len, buffers)), position)
            raise
        if self.watcher is not None:
            self.watcher.wrote(file, buffers, position)
        return written

    @staticmethod
    def _pwrite_all(file: FileId, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        total = sum(map(len, buffers))
        written = os.pwritev(file, buffers, position)
        if written == total:
            return total
        # A full disk causes a short write first, then ENOSPC: continue until everything is written or an error is
        # raised.
        rest = memoryview(b"".join(buffers))[written:]
        while rest:
            step = os.pwrite(file, rest, position + written)
            if step <= 0:
                raise OSError(errno.EIO, "write made no progress")
            written += step
            rest = rest[step:]
        return written

    def sync(self, file: FileId) -> None:
        os.fdatasync(file)
        if self.watcher is not None:
            self.watcher.synced(file)

    def start_writing_back(self, file: FileId) -> None:
        io_chain.start_writing_back(file)

    def sync_filesystem(self, file: FileId) -> None:
        """`file` should have been opened early: errors from before it was opened may not be reported to it."""
        assert _syncfs is not None, "more files than sync_each_max"
        if _syncfs(file) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if self.watcher is not None:
            self.watcher.synced_filesystem()

    def truncate(self, file: FileId, size: int) -> None:
        os.ftruncate(file, size)
        if self.watcher is not None:
            self.watcher.truncated(file, size)

    def size(self, file: FileId) -> int:
        return os.fstat(file).st_size

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)
        with self.names.lock:  # otherwise a write could be reported under the old name
            self.names.renamed(source, target)
            if self.watcher is not None:
                self.watcher.renamed(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)
        with self.names.lock:
            self.names.removed(path)
            if self.watcher is not None:
                self.watcher.removed(path)

    def mkdir(self, path: str) -> None:
        above = os.path.dirname(path.rstrip("/"))
        if above and not os.path.exists(above):
            self.mkdir(above)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
            return
        if _owner_of_parent(path) is not None:
            try:
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                os.rmdir(path)  # a retry makes it again: else it would stay root's, and unknown to the watcher
                raise
            try:
                _set_owner(folder, path)
            finally:
                os.close(folder)
        if self.watcher is not None:
            self.watcher.made_folder(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)
        if self.watcher is not None:
            self.watcher.removed_folder(path)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def file_size(self, path: str) -> int:
        return os.stat(path).st_size

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def is_link(self, path: str) -> bool:
        return os.path.islink(path)

    def open_dir(self, path: str) -> FileId:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def sync_dir(self, path: str, folder: FileId | None = None) -> None:
        """With `folder`, an open descriptor of `path`, no other descriptor is needed."""
        file = self.open_dir(path) if folder is None else folder
        try:
            os.fsync(file)
        finally:
            if folder is None:
                os.close(file)
        if self.watcher is not None:
            self.watcher.synced_folder(path)

    def free_bytes(self, path: str) -> int:
        stats = os.statvfs(path)
        return stats.f_bavail * stats.f_frsize

    def open_files_max(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def lock(self, path: str) -> FileId:
        """Lock path against all other processes until the file is closed or this process ends."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(file)
            raise DataFolderLocked(f"{os.path.dirname(path)} is in use by another broker (process {holder})") from None
        # Overwritten in place, padded to the width of any process id: a full disk may have no room for another block.
        os.pwrite(file, f"{os.getpid():<10}\n".encode(), 0)
        return file


def _owner_of_parent(path: str) -> os.stat_result | None:
    """The owner that `path` gets if this process is root; None to leave it as it is."""
    if os.geteuid() != 0:
        return None
    owner = os.stat(os.path.dirname(path.rstrip("/")) or ".")
    return owner if owner.st_uid != 0 else None


def _set_owner(file: FileId, path: str) -> None:
    owner = _owner_of_parent(path)
    if owner is not None:
        with suppress(PermissionError):  # root without CAP_CHOWN: the file stays root's
            os.fchown(file, owner.st_uid, owner.st_gid)


def is_untouched(disk: Disk) -> TypeGuard[RealDisk]:
    """Whether I/O may bypass the Disk interface and go to the operating system directly. False for simulated disks and
    subclasses, which must see every call."""
    return type(disk) is RealDisk


def ran(result: tuple[int, int, float]) -> Ran:
    done, error, sync_s = result
    return Ran(done, OSError(error, os.strerror(error)) if error else None, sync_s)


def sync_noting(disk: Disk, file: FileId, failure: io_chain.SyncFailure) -> None:
    """Sync a file that other threads may be syncing, too. The kernel reports a failure to one of them only, so it is
    noted in `failure` for all."""
    if is_untouched(disk):
        io_chain.sync(file, failure)  # notes a failure before it waits for the GIL
        if disk.watcher is not None:
            disk.watcher.synced(file)
        return
    try:
        disk.sync(file)
    except OSError as error:
        failure.note(error.errno or errno.EIO)
        raise


def run_chain(disk: Disk, steps: Sequence[Step], failure: io_chain.SyncFailure) -> Ran:
    if not is_untouched(disk):
        return run_one_by_one(disk, steps, failure)
    result = io_chain.run(steps, failure)
    if disk.watcher is not None:
        report_chain(disk.watcher, steps, result)
    return ran(result)


def report_chain(watcher: DiskObserver, steps: Sequence[Step], result: tuple[int, int, float]) -> None:
    """Notify the watcher of the steps that a chain carried out, and of a write that failed half-way."""
    done, error, _ = result
    for step in steps[:done]:
        if step.buffers is None:
            watcher.synced(step.file)
        else:
            watcher.wrote(step.file, step.buffers, step.position)
    if error and (broken := steps[done]).buffers is not None:
        watcher.broke_off(broken.file, sum(map(len, broken.buffers)), broken.position)


def run_one_by_one(disk: Disk, steps: Sequence[Step], failure: io_chain.SyncFailure) -> Ran:
    for number, step in enumerate(steps):
        try:
            if step.buffers is None:
                sync_noting(disk, step.file, failure)
                if failure.errno:  # the failure was reported to another thread; see io_chain.pyx
                    raise OSError(failure.errno, os.strerror(failure.errno))
            else:
                disk.pwrite(step.file, step.buffers, step.position)
        except OSError as error:
            return Ran(number, error)
    return Ran(len(steps), None)


def write_atomically(disk: Disk, path: str, data: bytes | bytearray) -> None:
    """Replace path with data: readers, and starts after a crash, see the old content or the new, never a part."""
    above, name = os.path.split(path)
    write_all_atomically(disk, above, {name: data})


def write_all_atomically(disk: Disk, above: str, contents: Mapping[str, bytes | bytearray]) -> None:
    """Replace these files of the folder `above`, each atomically: after a crash some may be old and others new.

    Both syncs matter: without the first a name can point at bytes that never reached the disk, and without the second
    an old file can come back. The folder is opened first, because there may be no free descriptor for it later, when
    the files can no longer be refused, and because a sync of the filesystem reports errors since that.
    """
    folder = disk.open_dir(above)
    each = len(contents) <= disk.sync_each_max
    try:
        for name, data in contents.items():
            _write_temporary(disk, f"{above}/{name}.tmp", data, sync=each)
        if not each:
            disk.sync_filesystem(folder)
        for name in contents:
            disk.rename(f"{above}/{name}.tmp", f"{above}/{name}")
        disk.sync_dir(above, folder)
    finally:
        disk.close(folder)


def _write_temporary(disk: Disk, path: str, data: bytes | bytearray, *, sync: bool) -> None:
    if disk.exists(path):
        disk.unlink(path)
    file = disk.open(path, create=True, exclusive=True)
    try:
        disk.pwrite(file, [data], 0)
        if sync:
            disk.sync(file)
    finally:
        disk.close(file)


def make_folder(disk: Disk, path: str) -> None:
    """Make path and its missing parents, and make their names durable.

    The last name is synced even if it exists: the process that made it may have been killed before the sync.
    """
    parents = [os.path.dirname(path)]
    while not disk.exists(parents[-1]):
        parents.append(os.path.dirname(parents[-1]))
    disk.mkdir(path)
    for parent in parents:
        disk.sync_dir(parent)


def read_whole(disk: Disk, path: str) -> bytes:
    file = disk.open(path, readonly=True)
    try:
        size = disk.size(file)
        data = disk.pread(file, size, 0)
        # Linux reads at most 4 KB less than 2 GB per call, and a journal file may be that large.
        while len(data) < size and (more := disk.pread(file, size - len(data), len(data))):
            data += more
        return data
    finally:
        disk.close(file)
