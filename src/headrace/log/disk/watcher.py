"""Observation of a disk: notifies one observer of every change, by the current name of the file.

The thread that made a change notifies the observer after the change and before it continues. So a change that depends
on another is reported after it, and the reported order is one in which a single process could have made the changes:
every prefix of it is a state that a kill could have left. Standbys rely on that.

Callers guarantee two things. First, a file is written by one thread at a time: segments, journal and slots in the
worker's turn (workers.SerialExecutor), and a new file (journal, state, compaction, catalog) by the thread that makes
it, before any other knows its name. Second, the steps of an I/O chain are reported in order when the owner thread gets
the chain's result, before it notifies any waiter.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

Bytes = bytes | bytearray | memoryview


class DiskObserver(Protocol):
    """Methods about names are called with `OpenPaths.lock` held, so none may block."""

    def created(self, path: str, *, exclusive: bool) -> None: ...
    def wrote(self, file: int, buffers: Sequence[Bytes], position: int) -> None: ...
    def broke_off(self, file: int, size: int, position: int) -> None:
        """A write failed and may have written any part of its bytes."""

    def truncated(self, file: int, size: int) -> None: ...
    def synced(self, file: int) -> None: ...
    def synced_filesystem(self) -> None: ...
    def renamed(self, source: str, target: str) -> None: ...
    def removed(self, path: str) -> None: ...
    def made_folder(self, path: str) -> None: ...
    def removed_folder(self, path: str) -> None: ...
    def synced_folder(self, path: str) -> None: ...


class OpenPaths:
    """The current paths of open files. A removed file has none: bytes written to it cannot be found again.

    A folder that is renamed contains only files, as the folders of logs do. Paths are indexed by folder, because every
    change of the catalog is a rename and thousands of files may be open.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self._folders: dict[str, dict[str, set[int]]] = {}  # folder -> name -> open files

    def __reduce__(self) -> tuple[type["OpenPaths"], tuple[()]]:
        """A disk may be pickled for Spark executors, where none of these files is open."""
        return OpenPaths, ()

    def path(self, file: int) -> str | None:
        return self._paths.get(file)

    def opened(self, file: int, path: str) -> None:
        folder, _, name = path.rpartition("/")
        with self.lock:
            self._paths[file] = path
            self._folders.setdefault(folder, {}).setdefault(name, set()).add(file)

    def closed(self, file: int) -> None:
        """Call this before closing: the next file may get the same descriptor.

        The child of a fork closes its parent's folder lock, which is not registered here, and must not wait for `lock`:
        the thread that held it does not exist in the child."""
        if file not in self._paths:
            return
        with self.lock:
            path = self._paths.pop(file, None)
            if path is not None:
                folder, _, name = path.rpartition("/")
                names = self._folders[folder]
                names[name].discard(file)
                if not names[name]:
                    self._take(path)

    def removed(self, path: str) -> None:
        for file in self._take(path):
            del self._paths[file]

    def renamed(self, source: str, target: str) -> None:
        self.removed(target)
        for file in self._take(source):
            self.opened(file, target)
        for name, files in self._folders.pop(source, {}).items():
            for file in files:
                self.opened(file, f"{target}/{name}")

    def _take(self, path: str) -> set[int]:
        folder, _, name = path.rpartition("/")
        names = self._folders.get(folder, {})
        files = names.pop(name, set())
        if not names:
            self._folders.pop(folder, None)
        return files
