"""Where the files of archived segments are stored: the interface, and the folder that is used today.

To store them elsewhere, in an object store for example, implement `ArchiveLocation` in a module of its own and register
the scheme of its paths in `LOCATIONS`. Nothing else knows where an archived file is: manifests contain its path, and
all code that reads, writes or removes it asks `location_of(disk, path)`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from headrace.log.disk.disk import Disk, FileId, make_folder

SCHEME = "://"


class ArchiveReader(Protocol):
    """An archived file, open for reading. It stays readable after the file has been removed."""

    def size(self) -> int: ...
    def read(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""

    def close(self) -> None: ...


class ArchiveWriter(Protocol):
    """An archived file that is being written, under a name at which nothing looks for it yet."""

    def write(self, data: memoryview) -> None: ...
    def finish(self) -> None:
        """Close the file; durable on return."""

    def abandon(self) -> None:
        """Close and remove the file. Errors are ignored: a start of the broker removes what is left."""


class ArchiveLocation(ABC):
    """Files are complete when they get their name, and never change. Used from any thread.

    Methods raise OSError, and FileNotFoundError for a missing file, except where they say otherwise: a location may be
    another disk or another machine, unreachable for a while, which is no reason to stop confirming writes.
    """

    @abstractmethod
    def create(self, path: str) -> ArchiveWriter:
        """Begin a file, in place of one that an earlier attempt left at this path."""

    @abstractmethod
    def adopt(self, source: str, path: str) -> None:
        """Give a finished file its final name. Durable after `sync`."""

    @abstractmethod
    def sync(self, path: str) -> None:
        """Return once the content and the name of an adopted file survive a crash."""

    @abstractmethod
    def open(self, path: str) -> ArchiveReader: ...

    @abstractmethod
    def size(self, path: str) -> int:
        """The size of a file, 0 if it is missing."""

    @abstractmethod
    def modified_ms(self, path: str) -> int: ...

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder; empty if the location cannot be listed at the moment."""

    @abstractmethod
    def remove(self, path: str) -> bool:
        """Whether the file is gone. False: the location refuses at the moment, try again later."""

    @abstractmethod
    def remove_folder(self, folder: str) -> bool:
        """Remove a folder and its files. False as in `remove`."""

    @abstractmethod
    def hold(self, path: str, target: str) -> bool:
        """Keep a file readable for a reader in another process, even after the broker removes it, until that reader
        removes the local file `target`. False if this location cannot: the reader then opens the file itself."""

    @abstractmethod
    def held(self, path: str, target: str) -> str:
        """The path at which a reader finds a file that `hold` has kept as `target`."""


class FolderLocation(ArchiveLocation):
    """Files in a folder: in the data folder, or in `tier_dir` on another disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def create(self, path: str) -> ArchiveWriter:
        make_folder(self._disk, path.rpartition("/")[0])
        with suppress(FileNotFoundError):
            self._disk.unlink(path)
        return _FolderWriter(self._disk, path, self._disk.open(path, create=True, exclusive=True))

    def adopt(self, source: str, path: str) -> None:
        self._disk.rename(source, path)

    def sync(self, path: str) -> None:
        file = self._disk.open(path)
        try:
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        self._disk.sync_dir(path.rpartition("/")[0])

    def open(self, path: str) -> ArchiveReader:
        return _FolderReader(self._disk, self._disk.open(path, readonly=True))

    def size(self, path: str) -> int:
        return self._disk.file_size(path) if self._disk.exists(path) else 0

    def modified_ms(self, path: str) -> int:
        return self._disk.modified_ms(path)

    def names(self, folder: str) -> list[str]:
        try:
            return self._disk.listdir(folder) if self._disk.exists(folder) else []
        except OSError:
            return []

    def remove(self, path: str) -> bool:
        try:
            self._disk.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def remove_folder(self, folder: str) -> bool:
        try:
            if not self._disk.exists(folder):
                return True
            removed = [self.remove(f"{folder}/{name}") for name in self._disk.listdir(folder)]
            if all(removed):
                self._disk.rmdir(folder)
            return all(removed)
        except OSError:  # unreachable, or an archiving command has just written a file there
            return False

    def hold(self, path: str, target: str) -> bool:
        try:
            os.link(path, target)
        except FileNotFoundError:
            raise
        except OSError:
            return False  # on another filesystem, or on one without hard links
        return True

    def held(self, path: str, target: str) -> str:
        return target


class _FolderReader:
    def __init__(self, disk: Disk, file: FileId) -> None:
        self._disk = disk
        self._file = file

    def size(self) -> int:
        return self._disk.size(self._file)

    def read(self, size: int, position: int) -> bytes:
        return self._disk.pread(self._file, size, position)

    def close(self) -> None:
        self._disk.close(self._file)


class _FolderWriter:
    def __init__(self, disk: Disk, path: str, file: FileId) -> None:
        self._disk = disk
        self._path = path
        self._file: FileId | None = file
        self._size = 0

    def write(self, data: memoryview) -> None:
        assert self._file is not None, "the file is finished"
        self._size += self._disk.pwrite(self._file, [data], self._size)

    def finish(self) -> None:
        assert self._file is not None, "the file is finished"
        self._disk.sync(self._file)
        self._disk.close(self._file)
        self._file = None
        self._disk.sync_dir(self._path.rpartition("/")[0])

    def abandon(self) -> None:
        with suppress(OSError):
            self._disk.unlink(self._path)
        if self._file is not None:
            self._disk.close(self._file)


# By the scheme of a path, as in `s3://bucket/key`; a path without a scheme is that of a file.
LOCATIONS: dict[str, Callable[[Disk], ArchiveLocation]] = {"": FolderLocation}


def location_of(disk: Disk, path: str) -> ArchiveLocation:
    """The location of an archived file or folder. FileNotFoundError if this version has none for the scheme."""
    scheme = path.partition(SCHEME)[0] if SCHEME in path else ""
    try:
        return LOCATIONS[scheme](disk)
    except KeyError:
        raise FileNotFoundError(2, f"no storage is known for {scheme}{SCHEME}", path) from None


def absolute_path(path: str) -> str:
    return path if path.partition(SCHEME)[0] in LOCATIONS and SCHEME in path else os.path.abspath(path)
