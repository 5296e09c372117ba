"""Who is told of every change of a disk, and by which name.

A watcher is told after a change was made and before whoever asked for it goes on, in that thread. So what one thread
does because of what another did is told after it, and the order in which a watcher is told of changes is one in which
a single process could have made them: every beginning of it is a state that a kill could have left.

That needs two things of the callers, and they keep to them. A file is written by one thread at a time: segments,
journal and slots in the worker's turn (see work.Lane), a file that is being made (journal, state, compaction, catalog)
by whoever makes it, before anybody else knows its name. And a chain's steps, which no interpreter sees, are told in the
order of the chain when the owner hears of its end, before it tells anybody.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

Bytes = bytes | bytearray | memoryview


class DiskObserver(Protocol):
    """Called with `OpenPaths.lock` held where names are concerned: nothing here may wait."""

    def created(self, path: str, *, exclusive: bool) -> None: ...
    def wrote(self, file: int, buffers: Sequence[Bytes], position: int) -> None: ...
    def broke_off(self, file: int, size: int, position: int) -> None:
        """A write that failed, and may have written any part of its bytes."""

    def truncated(self, file: int, size: int) -> None: ...
    def synced(self, file: int) -> None: ...
    def synced_filesystem(self) -> None: ...
    def renamed(self, source: str, target: str) -> None: ...
    def removed(self, path: str) -> None: ...
    def made_folder(self, path: str) -> None: ...
    def removed_folder(self, path: str) -> None: ...
    def synced_folder(self, path: str) -> None: ...


class OpenPaths:
    """What open files are called by now. One that was removed has no name: what is written to it, nobody finds.

    A folder that gets another name has files in it and no folders, as those of logs do. Looked up by folder, since
    every change of the catalog is a rename, and thousands of files may be open.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._paths: dict[int, str] = {}
        self._folders: dict[str, dict[str, set[int]]] = {}  # folder -> name -> open files

    def __reduce__(self) -> tuple[type["OpenPaths"], tuple[()]]:
        """A disk is sent to Spark's workers; what is open here is not open there."""
        return OpenPaths, ()

    def path(self, file: int) -> str | None:
        return self._paths.get(file)

    def opened(self, file: int, path: str) -> None:
        folder, _, name = path.rpartition("/")
        with self.lock:
            self._paths[file] = path
            self._folders.setdefault(folder, {}).setdefault(name, set()).add(file)

    def closed(self, file: int) -> None:
        """Before it is: the next one to be opened may get its number. The child of a fork closes the lock of its
        parent's folder, which is not known here, and must not wait: who had the lock is not there any more."""
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
