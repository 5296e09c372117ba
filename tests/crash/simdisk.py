"""A disk in memory that can lose everything that was not synced.

It implements `headrace.log.disk.disk.Disk`. Besides the operations of a file system, it tracks which writes
and name changes a power cut could still undo, and produces the disks that a crash could leave. It may do
the following to a caller, and nothing else:

Bytes
- `sync(file)` makes the bytes and the size of that file durable. Not its name.
- After a power cut, an unsynced file consists of sectors of 512 bytes. Each sector has its content of
  some moment since the last sync, independently of the others: kept, lost, torn, out of order.
  One sector of a file may also be torn inside, at any byte.
- The size is one that the file had since the last sync, independently of the bytes. Bytes within the size
  that were never written read as zeros, or as noise (a file system that does not order data before size).
- With `stale=True` they may also read as the same sectors of another file: reused blocks.
- A crash never changes bytes that were synced and not written since. For bit rot, see `flip`, `replace`
  and `remove`.

Names
- Creating, renaming and removing a name is durable after `sync_dir` of its folder, or `sync_filesystem`.
  Syncing a file does not make its name durable, and syncing a folder does not make the folder's own name
  in its parent durable.
- Unsynced name changes are kept or lost individually, in any combination. Each is atomic: a rename that
  is kept has removed the old name and set the new one.

Crashes
- `kill()`: the process died, the machine did not. Everything is visible, and unsynced changes are still
  unsynced: a later power cut may undo them.
- `power_cut(rng, mode)`: see above. `lost` and `kept` are the two extremes, `prefix` keeps all operations
  up to one moment, `mixed` decides for every file and name.

Errors
- `Fault`: the Nth call of a kind raises. A write may have written a part, a sync all or some of its work.
  After a failed sync the unsynced bytes count as clean: later syncs succeed and write nothing. Reads
  still return these bytes (`cached`), or those of the device (`dropped`).
- `capacity`: a write beyond it writes what fits and raises ENOSPC. It can be changed at any time.
- `read_only`: EROFS for every call that changes the disk. `files_limit`: EMFILE.
"""

import errno
import os
import posixpath
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from headrace.errors import DataFolderLocked
from tests.crash import crashes
from tests.crash.inodes import File, Folder, NameChange, put, replay
from tests.crash.tree import Tree

CHANGES = frozenset(
    "create pwrite truncate sync sync_dir sync_filesystem rename unlink mkdir rmdir".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Fault:
    """The `nth` call (from 1, counted since `arm`) of `kind` raises OSError(error); all later ones too if `forever`.

    `kind` may be "any". A failing write first writes `share` of its bytes. `outcome` is the result of a failed
    sync: cached, dropped, partial or written.
    """

    kind: str
    nth: int
    error: int = errno.EIO
    share: float = 0.0
    outcome: str = "cached"
    forever: bool = False
    within: str = ""  # only for paths that contain this text


class SimulatedDisk(Tree):
    sync_each_max = 64
    tells_cached = True

    def __init__(self, *, capacity: int = 1 << 50, files_limit: int = 1 << 30, stale: bool = False) -> None:
        super().__init__()
        self.sequence = 0
        self.capacity = capacity
        self.files_limit = files_limit
        self.stale = stale
        self.read_only = False
        self.before: Callable[[str, str], None] | None = None  # called before each call that changes the disk
        self.calls: Counter[str] = Counter()
        self.trace: list[tuple[str, str]] | None = None
        self._faults: list[tuple[Fault, int]] = []
        self._seen: Counter[int] = Counter()
        self._next_file = 3

    # -- the Disk protocol ------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        folder, name = self._parent(path)
        node = folder.names.get(name)
        if node is None and create:
            self._step("create", path)
        else:
            self._step("open", path)
        self._take_descriptor(path)
        if node is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = File()
            self._change(NameChange(self._tick(), node, folder, name))
            folder.names[name] = node
        elif exclusive and create:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        file = self._next_file
        self._next_file += 1
        node.opened += 1
        self._files[file] = (node, path, readonly)
        return file

    def _take_descriptor(self, path: str) -> None:
        """A folder also needs a descriptor while it is synced or listed."""
        if len(self._files) + len(self._open_folders) >= self.files_limit:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    def close(self, file: int) -> None:
        if self._open_folders.pop(file, None) is not None:
            return
        node, _, _ = self._open_file(file)
        del self._files[file]
        node.opened -= 1
        if node.locked:
            node.locked = False
        self._forget(node)

    def pread(self, file: int, size: int, position: int) -> bytes:
        node, path, _ = self._open_file(file)
        self._step("pread", path)
        return bytes(node.data[position : position + size])

    def pread_into(self, file: int, buffer: memoryview, position: int) -> int:
        node, path, _ = self._open_file(file)
        self._step("pread", path)
        data = node.data[position : position + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def pread_cached(self, file: int, size: int, position: int) -> bytes | None:
        return self.pread(file, size, position)

    def pwrite(self, file: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
        node, path, readonly = self._open_file(file)
        if readonly:
            raise OSError(errno.EBADF, "opened for reading only", path)
        data = b"".join(buffers)
        fault = self._step("pwrite", path, raising=False)
        if fault is not None:
            self._write(node, position, data[: int(len(data) * fault.share)])
            raise OSError(fault.error, os.strerror(fault.error), path)
        growth = position + len(data) - len(node.data)
        if growth > 0 and self.used + growth > self.capacity:
            fits = max(0, len(data) - (self.used + growth - self.capacity))
            self._write(node, position, data[:fits])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self._write(node, position, data)
        return len(data)

    def sync(self, file: int) -> None:
        node, path, _ = self._open_file(file)
        fault = self._step("sync", path, raising=False)
        if fault is not None:
            self._fail_sync(node, fault)
            raise OSError(fault.error, os.strerror(fault.error), path)
        self._sync_node(node)

    def start_writing_back(self, file: int) -> None:
        """Does nothing: a simulated crash may keep any unsynced write anyway."""
        self._open_file(file)

    def sync_filesystem(self, file: int) -> None:
        """`file` may be a folder, as on Linux."""
        path = self._open_folders.get(file) or self._open_file(file)[1]
        fault = self._step("sync_filesystem", path, raising=False)
        nodes = [node for _, node in self.walk() if isinstance(node, File)]
        if fault is not None:
            for node in nodes:
                self._fail_sync(node, fault)
            raise OSError(fault.error, os.strerror(fault.error), path)
        for node in nodes:
            self._sync_node(node)
        for change in self.name_changes:
            change.apply()
        self.name_changes = []

    def truncate(self, file: int, size: int) -> None:
        node, path, _ = self._open_file(file)
        self._step("truncate", path)
        growth = size - len(node.data)
        if growth > 0 and self.used + growth > self.capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.used += growth
        data = node.data = bytearray(node.data)
        put(data, size, None)
        node.pending.append((self._tick(), size, None))

    def size(self, file: int) -> int:
        return len(self._open_file(file)[0].data)

    def rename(self, source: str, target: str) -> None:
        self._step("rename", source)
        folder, name = self._parent(source)
        target_folder, target_name = self._parent(target)
        node = self._node(source)
        replaced = target_folder.names.get(target_name)
        if isinstance(replaced, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
        self._change(NameChange(self._tick(), node, target_folder, target_name, folder, name))
        self._drop_name(folder, name)
        target_folder.names[target_name] = node
        if isinstance(replaced, File) and replaced is not node:
            replaced.links = 0
            self._forget(replaced)

    def unlink(self, path: str) -> None:
        self._step("unlink", path)
        folder, name = self._parent(path)
        node = self._node(path)
        if isinstance(node, Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._change(NameChange(self._tick(), node, None, "", folder, name))
        self._drop_name(folder, name)
        node.links = 0
        self._forget(node)

    def mkdir(self, path: str) -> None:
        folder = self.root
        for part in path.strip("/").split("/"):
            node = folder.names.get(part)
            if node is None:
                self._step("mkdir", path)
                node = Folder()
                self._change(NameChange(self._tick(), node, folder, part))
                folder.names[part] = node
            if isinstance(node, File):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
            folder = node

    def rmdir(self, path: str) -> None:
        self._step("rmdir", path)
        node = self._node(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if node.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        folder, name = self._parent(path)
        self._change(NameChange(self._tick(), node, None, "", folder, name))
        self._drop_name(folder, name)

    def listdir(self, path: str) -> list[str]:
        self._step("listdir", path)
        node = self._node(path)
        self._take_descriptor(path)
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return sorted(node.names)

    def exists(self, path: str) -> bool:
        return self._find(path) is not None

    def file_size(self, path: str) -> int:
        node = self._node(path)
        return 4096 if isinstance(node, Folder) else len(node.data)

    def modified_ms(self, path: str) -> int:
        self._node(path)
        return 0  # this disk has no clock, and all that is written to it has a time

    def is_link(self, path: str) -> bool:
        return False

    def open_dir(self, path: str) -> int:
        self._step("open", path)
        self._node(path)
        self._take_descriptor(path)
        file = self._next_file
        self._next_file += 1
        self._open_folders[file] = path
        return file

    def sync_dir(self, path: str, folder: int | None = None) -> None:
        self._step("sync_dir", path)
        node = self._node(path)
        if folder is None:
            self._take_descriptor(path)
        else:
            assert self._open_folders[folder] == path, "the descriptor is not of this folder"
        if not isinstance(node, Folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        later = []
        for change in self.name_changes:
            if change.touches(node):
                change.apply()
            else:
                later.append(change)
        self.name_changes = later

    def free_bytes(self, path: str) -> int:
        self._step("free_bytes", path)
        return max(0, self.capacity - self.used)

    def open_files_max(self) -> int:
        return self.files_limit

    def lock(self, path: str) -> int:
        file = self.open(path, create=True)
        node = self._files[file][0]
        if node.locked:
            del self._files[file]
            node.opened -= 1
            raise DataFolderLocked(f"{posixpath.dirname(path)} is in use by another broker (process 1)")
        node.locked = True
        return file

    # -- crashes ----------------------------------------------------------------------------------

    @property
    def unsynced_count(self) -> int:
        """The number of operations that a power cut could still undo."""
        return len(self.name_changes) + sum(len(n.pending) for _, n in self.walk() if isinstance(n, File))

    def kill(self) -> "SimulatedDisk":
        """The disk that the next process finds if this process is killed now."""
        found = self._like()
        crashes.killed(self, found)
        found._count_used()
        return found

    def power_cut(self, rng: Random, mode: str = "mixed") -> "SimulatedDisk":
        """One of the disks that a power cut at this moment could leave."""
        found = self._like()
        crashes.cut(self, found, rng, mode, stale=self.stale)
        found._count_used()
        return found

    def _like(self) -> "SimulatedDisk":
        disk = SimulatedDisk(capacity=self.capacity, files_limit=self.files_limit, stale=self.stale)
        disk.sequence = self.sequence
        disk.sync_each_max = self.sync_each_max
        return disk

    # -- faults -----------------------------------------------------------------------------------

    def arm(self, *faults: Fault) -> None:
        self._faults = [(fault, i) for i, fault in enumerate(faults)]
        self._seen = Counter()

    def disarm(self) -> None:
        self._faults = []

    def _step(self, kind: str, path: str, *, raising: bool = True) -> Fault | None:
        self.calls[kind] += 1
        if self.trace is not None:
            self.trace.append((kind, path))
        if kind in CHANGES:
            if self.before is not None:
                self.before(kind, path)
            if self.read_only:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        for fault, index in self._faults:
            if (fault.kind != kind and fault.kind != "any") or fault.within not in path:
                continue
            self._seen[index] += 1
            if self._seen[index] == fault.nth or (fault.forever and self._seen[index] > fault.nth):
                if raising:
                    raise OSError(fault.error, os.strerror(fault.error), path)
                return fault
        return None

    def _fail_sync(self, node: File, fault: Fault) -> None:
        pending, node.pending = node.pending, []
        if not pending:
            return
        if fault.outcome == "written":
            node.durable = bytes(replay(node.durable, pending))
        elif fault.outcome == "partial":
            node.durable = bytes(replay(node.durable, pending[: len(pending) // 2]))
        if fault.outcome == "dropped":
            self.used -= len(node.data) - len(node.durable)
            node.data = node.durable
        node.diverged = node.data != node.durable

    # -- helpers ----------------------------------------------------------------------------------

    def _tick(self) -> int:
        self.sequence += 1
        return self.sequence

    def _write(self, node: File, position: int, data: bytes) -> None:
        if not data:
            return
        content = node.data
        if isinstance(content, bytes):
            content = node.data = bytearray(content)
        before = len(content)
        put(content, position, data)
        self.used += len(content) - before
        node.pending.append((self._tick(), position, data))

    def _sync_node(self, node: File) -> None:
        if not node.pending:
            return
        if node.diverged:
            node.durable = bytes(replay(node.durable, node.pending))
            node.diverged = node.data != node.durable
        else:
            node.durable = node.data = bytes(node.data)
        node.pending = []

    def _change(self, change: NameChange) -> None:
        self.name_changes.append(change)

    def _forget(self, node: File) -> None:
        """Free the space of a file that has no name and no open descriptor."""
        if node.links == 0 and node.opened == 0:
            self.used -= len(node.data)
            node.links = -1

    def _open_file(self, file: int) -> tuple[File, str, bool]:
        entry = self._files.get(file)
        if entry is None:
            raise OSError(errno.EBADF, "the file is not open")
        return entry
