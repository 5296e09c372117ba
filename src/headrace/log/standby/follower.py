"""The standby's side of replication: applies the changes of a leader's data folder to a folder of its own.

The folder has a marker file from the first change on. While the marker says `copying`, the folder is unusable, because
some files are newer than others. Once it says `in step`, the folder is at any moment a state that a kill could have
left of the leader's folder. A broker that is started on it removes the marker: a folder without one may contain records
that the leader never had.

Each sync of the leader is repeated at the same place in the order of changes. If syncs were combined, a power cut could
leave a slot that vouches for a journal entry which is not there.
"""

import errno
import json
import sys
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple, Self

import msgspec

from headrace.errors import Conflict, StorageError
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId, make_folder, read_whole, write_atomically
from headrace.log.standby.change_feed import WRITTEN_BY_OTHERS, RetainedChange
from headrace.log.standby.frames import SYNCS, BadFrame, Frame, Kind, zeros
from headrace.record.batch.crc32c import crc32c

COPYING, IN_STEP = "copying", "in step"
OWN = frozenset({paths.LOCK, paths.STANDBY, paths.STANDBY + paths.UNFINISHED, paths.LOST_AND_FOUND})
OPEN_FILES_MAX = 256
READ_BYTES = 1 << 20
SYNC_BYTES = 32 << 20
PATH_CHARS_SHOWN = 200
# Errors that mean that the change does not fit this folder; all others come from the disk.
IMPOSSIBLE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EINVAL}
)


class Hello(msgspec.Struct):
    """A leader's identity."""

    folder: str
    id: str = ""  # of the connection
    version: str = ""
    waits: bool = False  # clients of the leader wait for this standby's confirmations

    @classmethod
    def of(cls, frame: Frame) -> Self:
        try:
            return msgspec.json.decode(frame.data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadFrame(f"the leader does not say who it is: {error}") from None


class OutOfStep(BadFrame):
    """A change cannot be applied, because the folder differs from what the leader assumes. A new copy is needed."""


class IncompleteCopy(StorageError):
    """The data folder is an unfinished copy."""


def state_of(disk: Disk, root: str) -> str | None:
    """The state in the marker; None without a marker. An unreadable marker does not prove a complete copy."""
    return _marker(disk, root).state


class _Marker(NamedTuple):
    state: str | None
    folder: str = ""  # id of the leader's folder; empty if unknown
    copy: str = ""  # id of this copy, so that a leader can count its standbys


def _marker(disk: Disk, root: str) -> _Marker:
    path = f"{root}/{paths.STANDBY}"
    if not disk.exists(path):
        return _Marker(None)
    try:
        said = json.loads(read_whole(disk, path))
        state = IN_STEP if said["state"] == IN_STEP else COPYING
        return _Marker(state, str(said.get("folder", "")), str(said.get("copy", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Marker(COPYING)


def folder_id(disk: Disk, root: str) -> str:
    """The id that a leader's folder and all of its copies share."""
    path = f"{root}/{paths.FOLDER_ID}"
    if not disk.exists(path):
        write_atomically(disk, path, uuid.uuid4().hex.encode())
    return read_whole(disk, path).decode("ascii", "replace")


def check_whole(disk: Disk, root: str) -> None:
    """Raise if the folder is an unfinished copy. Call this before reading the files of a data folder."""
    if state_of(disk, root) == COPYING:
        raise IncompleteCopy(
            f"{root} is an unfinished copy of another broker's data folder: start `headrace standby` on it again, and "
            "wait until it reports that it is in step"
        )


def promote(disk: Disk, root: str) -> bool:
    """Turn a standby's folder into an ordinary one; returns whether it was one. The caller holds its lock and is about
    to change it."""
    check_whole(disk, root)
    if state_of(disk, root) is None:
        return False
    disk.unlink(f"{root}/{paths.STANDBY}")
    disk.sync_dir(root)
    return True


def _mark(disk: Disk, root: str, marker: _Marker) -> None:
    write_atomically(disk, f"{root}/{paths.STANDBY}", json.dumps(marker._asdict()).encode())


def prepare(disk: Disk, root: str, *, overwrite: bool = False) -> FileId:
    """Lock a folder that is, or may become, a standby's."""
    make_folder(disk, root)
    lock = disk.lock(f"{root}/{paths.LOCK}")
    try:
        strangers = [name for name in disk.listdir(root) if name not in (paths.LOCK, paths.LOST_AND_FOUND)]
        if strangers and state_of(disk, root) is None and not overwrite:
            raise Conflict(
                f"{root} is not a standby's folder, or a broker has served it since: it may contain messages that the "
                "leader never had. Use --overwrite to replace all of it by the leader's folder"
            )
        if overwrite:
            _check_links(disk, root)
    except BaseException:
        disk.close(lock)
        raise
    return lock


def _check_links(disk: Disk, folder: str) -> None:
    """Refuse symbolic links to folders: their content may belong to someone else and must not be replaced."""
    for name in disk.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(NotADirectoryError, FileNotFoundError):  # a file, or a dangling link
            if disk.is_link(path):
                disk.listdir(path)
                raise Conflict(
                    f"{path} is a symbolic link: --overwrite would replace the content of the folder it points to. "
                    "Remove the link first"
                )
            _check_links(disk, path)


def _listed(data: bytes) -> list[str]:
    """The paths of a leader's folder. Not decoded by msgspec, because names that are not UTF-8 contain surrogates."""
    try:
        listed = json.loads(data)
        if type(listed) is not list:
            raise TypeError
        for path in listed:
            path.encode(errors="surrogateescape")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise BadFrame("the leader's listing is not a list of paths") from None
    return listed


class Standby:
    """Used by one thread. `position` is the last change that was applied, including the syncs among the changes."""

    def __init__(self, disk: Disk, root: str, lock: FileId, *, overwrite: bool = False) -> None:
        marker = _marker(disk, root)
        self._folder = "" if overwrite else marker.folder
        self.copy = marker.copy or uuid.uuid4().hex
        self._disk = disk
        self._root = root
        self._lock = lock
        self._files: OrderedDict[str, FileId] = OrderedDict()
        self._unsynced: set[str] = set()
        self._known: dict[str, tuple[int, RetainedChange]] = {}  # modification time, and the file at that time
        self.position = 0
        self.is_in_step = self._is_listed = False
        self.copy_bytes = self.copied_bytes = self._copied_unsynced = 0

    def _mark(self, state: str) -> None:
        _mark(self._disk, self._root, _Marker(state, self._folder, self.copy))

    # Files that are here already.

    def kept(self) -> dict[str, RetainedChange]:
        """Sealed and archived segments, which are large and never change: the leader does not send identical ones
        again."""
        if state_of(self._disk, self._root) is None:
            return {}
        found = {}
        for path, size in self._segments():
            modified_ms = self._disk.modified_ms(f"{self._root}/{path}")
            known = self._known.get(path)
            if known is None or known[0] != modified_ms or known[1].size != size:
                known = self._known[path] = (modified_ms, RetainedChange(size, self._checksum(path)))
            found[path] = known[1]
        return found

    def _segments(self) -> Iterator[tuple[str, int]]:
        paths_ = set(self._walk(""))
        for path in sorted(paths_):
            stem, dot, suffix = path.rpartition(".")
            if f".{suffix}" == paths.PARQUET or (dot + suffix == paths.DATA and stem + paths.SEAL in paths_):
                yield path, self._disk.file_size(f"{self._root}/{path}")

    def _checksum(self, path: str) -> int:
        file = self._disk.open(f"{self._root}/{path}", readonly=True)
        try:
            crc = position = 0
            while data := self._disk.pread(file, READ_BYTES, position):
                crc = crc32c(data, crc)
                position += len(data)
            return crc
        finally:
            self._disk.close(file)

    def _walk(self, inner: str) -> Iterator[str]:
        """Paths of files, then of the folders that contain them, with a trailing slash."""
        for name in self._disk.listdir(self._at(inner)):
            path = f"{inner}/{name}" if inner else name
            if not inner and name in OWN:
                continue
            try:
                yield from self._walk(path)
            except NotADirectoryError:
                yield path
            else:
                yield path + "/"

    # Received frames.

    def apply(self, frame: Frame) -> None:
        """Raises BadFrame for a frame that cannot be right, and OSError if the disk fails."""
        if frame.is_change and frame.sequence != self.position + 1:
            raise OutOfStep(f"change {frame.sequence:,} was received, {self.position + 1:,} was expected")
        try:
            self._apply(frame)
        except OSError as error:
            if error.errno not in IMPOSSIBLE:
                raise
            if self.is_in_step or not (frame.is_change and isinstance(error, FileNotFoundError)):
                self._mark(COPYING)
                self.is_in_step = False
                raise OutOfStep(f"change {frame.sequence:,} does not fit this folder: {error}") from error
        if frame.is_change:
            self.position = frame.sequence

    def _apply(self, frame: Frame) -> None:
        if frame.is_change:
            self._change(frame)
        elif frame.kind == Kind.HELLO:
            self._begin_copy(frame)
        elif frame.kind == Kind.LISTING:
            self.copy_bytes = frame.number
            self._remove_unlisted(_listed(frame.data))
            self._is_listed = True
        elif frame.kind == Kind.BEGIN:
            self._make_empty(frame.path)
        elif frame.kind in (Kind.CHUNK, Kind.ZERO_CHUNK):
            self._copied(frame.path, self._write(frame))
        elif frame.kind == Kind.IN_STEP:
            self._finish_copy()
        elif frame.kind != Kind.HEARTBEAT:
            raise BadFrame(f"unknown frame kind {frame.kind}: the leader's version of Headrace differs")

    def _copied(self, path: str, size: int) -> None:
        """Syncs after every 32 MB: one sync at the end would take so long that the leader disconnects."""
        self.copied_bytes += size
        self._copied_unsynced += size
        if self._copied_unsynced >= SYNC_BYTES:
            self._copied_unsynced = 0
            self._disk.sync(self._file(path))

    def _begin_copy(self, frame: Frame) -> None:
        folder = Hello.of(frame).folder
        if self._folder not in ("", folder):
            # Most likely the leader was started on an empty folder by mistake, and this copy is all there is.
            raise Conflict(
                f"{self._root} is a copy of a data folder other than this leader's and was not changed. "
                "Use --overwrite to replace all of it"
            )
        self._folder = folder
        self._close_files()
        self.is_in_step = self._is_listed = False
        self.position = frame.sequence
        self.copied_bytes = self.copy_bytes = 0
        self._mark(COPYING)

    def _finish_copy(self) -> None:
        """Sync everything, then mark the copy as complete."""
        if not self._is_listed:
            raise BadFrame("the leader reported a complete copy without having sent a listing")
        self._unsynced.update(path for path in self._walk("") if not path.endswith("/"))
        self._sync_all()
        self._mark(IN_STEP)
        self.is_in_step = True

    def _remove_unlisted(self, listed: list[str]) -> None:
        wanted = set(listed)
        for path in list(self._walk("")):
            if path in wanted:
                continue
            if path.endswith("/"):
                self._disk.rmdir(self._at(path.rstrip("/")))
            else:
                self._disk.unlink(self._at(path))
        for path in listed:
            if path.endswith("/"):
                self._disk.mkdir(self._at(path.rstrip("/")))

    def _change(self, frame: Frame) -> None:
        kind, path = frame.kind, frame.path
        if kind in (Kind.WRITE, Kind.ZEROS):
            self._write(frame)
        elif kind == Kind.CREATE:
            if frame.number:
                self._make_empty(path)
            else:
                self._file(path, create=True)
        elif kind == Kind.TRUNCATE:
            self._disk.truncate(self._file(path, create=not self.is_in_step), frame.number)
            self._changed(path)
        elif kind in SYNCS:
            if self.is_in_step:  # during the copy everything is synced at the end
                self._apply_sync(kind, path)
        else:
            self._change_name(frame)

    def _change_name(self, frame: Frame) -> None:
        kind, path = frame.kind, frame.path
        if kind == Kind.RENAME:
            self._rename(path, frame.data.decode(errors="surrogateescape"))
        elif kind == Kind.REMOVE:
            self._forget(path)
            with suppress(FileNotFoundError):  # another process may have made it: see WRITTEN_BY_OTHERS
                self._disk.unlink(self._at(path))
        elif kind == Kind.MAKE_FOLDER:
            self._disk.mkdir(self._at(path))
        elif kind == Kind.REMOVE_FOLDER:
            with suppress(FileNotFoundError):
                self._remove_folder(path)
        else:
            raise BadFrame(f"unknown kind of change {kind}: the leader's version of Headrace differs")

    def _remove_folder(self, path: str) -> None:
        if path.partition("/")[0] in WRITTEN_BY_OTHERS:
            # Copies of files that another process wrote and removed again, unseen by the leader's observer.
            for name in self._disk.listdir(self._at(path)):
                self._forget(f"{path}/{name}")
                self._disk.unlink(self._at(f"{path}/{name}"))
        self._disk.rmdir(self._at(path))

    def _apply_sync(self, kind: int, path: str) -> None:
        if kind == Kind.SYNC:
            self._sync(path)
        elif kind == Kind.SYNC_ALL:
            self._sync_all()
        else:
            with suppress(FileNotFoundError):  # another thread removed it, and that was reported first
                self._disk.sync_dir(self._at(path))

    def _sync(self, path: str) -> None:
        if path in self._unsynced:
            self._disk.sync(self._file(path))
            self._unsynced.discard(path)

    def _sync_all(self) -> None:
        if self._disk.sync_each_max < sys.maxsize:
            self._disk.sync_filesystem(self._lock)
            self._unsynced.clear()
        else:
            for path in sorted(self._unsynced):
                self._sync(path)
            for path in [*self._walk(""), "/"]:
                if path.endswith("/"):
                    self._disk.sync_dir(self._at(path.rstrip("/")))

    def _write(self, frame: Frame) -> int:
        data = zeros(frame.data) if frame.kind in (Kind.ZEROS, Kind.ZERO_CHUNK) else frame.data
        file = self._file(frame.path, create=not self.is_in_step)
        self._disk.pwrite(file, [data], frame.number)
        self._changed(frame.path)
        return len(data)

    def _changed(self, path: str) -> None:
        self._unsynced.add(path)
        self._known.pop(path, None)

    def _make_empty(self, path: str) -> None:
        """Make an empty file, in place of any old one."""
        self._forget(path)
        self._make_folder_of(path)
        with suppress(FileNotFoundError):
            self._disk.unlink(self._at(path))
        self._file(path, create=True)

    def _rename(self, source: str, target: str) -> None:
        self._make_folder_of(target)
        moved = [source] if source in self._files else self._known_in(source)
        unsynced = [path for path in moved if path in self._unsynced]
        self._forget(target, *moved)
        self._disk.rename(self._at(source), self._at(target))
        self._unsynced.update(target + path[len(source) :] for path in unsynced)

    def _known_in(self, path: str) -> list[str]:
        """Known paths of a file, or of the files in a folder."""
        inside = path + "/"
        known = {*self._files, *self._unsynced, *self._known}
        return [name for name in known if name == path or name.startswith(inside)]

    def _make_folder_of(self, path: str) -> None:
        """Make the folder of a file if it is missing: other processes of the leader make folders unseen by its
        observer."""
        folder = path.rpartition("/")[0]
        if folder and not self._disk.exists(self._at(folder)):
            self._disk.mkdir(self._at(folder))

    # Open files.

    def _at(self, path: str) -> str:
        if not path:
            return self._root
        parts = path.split("/")
        if parts[0] in OWN or any(part in ("", ".", "..") or "\0" in part for part in parts):
            raise BadFrame(f"{path[:PATH_CHARS_SHOWN]!r} is not a path in a data folder")
        return f"{self._root}/{path}"

    def _file(self, path: str, *, create: bool = False) -> FileId:
        file = self._files.get(path)
        if file is None:
            if create:
                self._make_folder_of(path)
            while len(self._files) >= OPEN_FILES_MAX:
                self._disk.close(self._files.popitem(last=False)[1])
            file = self._files[path] = self._disk.open(self._at(path), create=create)
        else:
            self._files.move_to_end(path)
        return file

    def _forget(self, *gone: str) -> None:
        """Close files whose names are about to be removed or replaced."""
        for path in gone:
            file = self._files.pop(path, None)
            if file is not None:
                self._disk.close(file)
            self._unsynced.discard(path)
            self._known.pop(path, None)

    def _close_files(self) -> None:
        while self._files:
            self._disk.close(self._files.popitem()[1])
        self._unsynced.clear()

    def close(self) -> None:
        self._close_files()
        self._disk.close(self._lock)
