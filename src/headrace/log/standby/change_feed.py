"""The change feed of a data folder: everything that a standby is sent, in order.

A feed begins with a copy of the folder, made while the folder is being written to. Its sender alternates between
changes and chunks of files, and reads a chunk only when everything taken before it has been sent. So a chunk includes
the changes sent before it, and perhaps some that follow, which the standby then applies again. That is harmless,
because a change says which bytes are where. The copy is complete once all changes that were made before its last chunk
was read have been sent: then the standby is in step.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.watcher import Bytes, OpenPaths
from headrace.log.standby.frames import PIECE_BYTES, Kind, are_zeros, checksum, pack, zero_count
from headrace.record.batch.crc32c import crc32c

QUEUE_BYTES_MAX = 256 << 20
SILENT_BYTES_MAX = 64 * PIECE_BYTES  # bytes compared with the standby's copy between two heartbeats
ITEM_BYTES = 200  # memory that a change takes besides its data
# Not replicated: they belong to the process or disk that has the folder, or are rebuilt from other files.
LEFT_OUT = frozenset(
    {
        *(paths.LOCK, paths.STAGING, paths.HELD, paths.SPILL, paths.KEYS, paths.LOST_AND_FOUND),
        *(paths.STANDBY, paths.STANDBY + paths.UNFINISHED),
    }
)
# Other processes write here, so the observer does not know the content of files that come from there.
WRITTEN_BY_OTHERS = frozenset({paths.STAGING, paths.TIERS})


class Change(NamedTuple):
    sequence: int
    kind: Kind
    number: int
    path: bytes
    data: bytes
    crc: int


class FileContent(NamedTuple):
    """A file whose content is sent at this place in the queue."""

    path: bytes
    file: int


class RetainedChange(NamedTuple):
    """A file that the standby says it already has."""

    size: int
    crc: int


class SentMark(NamedTuple):
    sequence: int
    bytes: int
    at_s: float


class Changes:
    """Observes a disk and puts every change into the feeds. Without a feed it only counts changes."""

    def __init__(self, disk: Disk, names: OpenPaths, root: str, monotonic: Callable[[], float], first: int = 1) -> None:
        self.disk = disk
        self.root = root
        self.monotonic = monotonic
        self._names = names
        self.lock = names.lock
        self._inside = root + "/"
        self.feeds: tuple[StandbyFeed, ...] = ()
        self.sequence = first  # of the last change

    def attach(self, feed: "StandbyFeed") -> None:
        with self.lock:
            feed.sent = self.sequence
            self.feeds = (*self.feeds, feed)

    def detach(self, feed: "StandbyFeed") -> None:
        with self.lock:
            self.feeds = tuple(other for other in self.feeds if other is not feed)

    def relative(self, path: str | None) -> str | None:
        """The path inside the folder; None if it is not replicated."""
        if path == self.root:
            return ""
        if path is None or not path.startswith(self._inside):
            return None
        inner = path[len(self._inside) :]
        return None if inner.partition("/")[0] in LEFT_OUT else inner

    def _put(self, kind: Kind, path: str, number: int = 0, data: bytes = b"", data_crc: int | None = None) -> None:
        """Call with the lock held."""
        self.sequence += 1
        if self.feeds:
            name = path.encode(errors="surrogateescape")
            item = Change(self.sequence, kind, number, name, data, checksum(name, data, data_crc))
            for feed in self.feeds:
                feed.put(item)

    # DiskObserver.

    def created(self, path: str, *, exclusive: bool) -> None:
        self._name(Kind.CREATE, path, int(exclusive))

    def removed(self, path: str) -> None:
        self._name(Kind.REMOVE, path)

    def made_folder(self, path: str) -> None:
        self._name(Kind.MAKE_FOLDER, path)

    def removed_folder(self, path: str) -> None:
        self._name(Kind.REMOVE_FOLDER, path)

    def synced_folder(self, path: str) -> None:
        self._name(Kind.SYNC_FOLDER, path)

    def _name(self, kind: Kind, path: str, number: int = 0) -> None:
        inner = self.relative(path)
        if inner is not None:
            with self.lock:
                self._put(kind, inner, number)

    def wrote(self, file: int, buffers: Sequence[Bytes], position: int) -> None:
        """Copies the buffers: they may be patched for another log next."""
        if self.relative(self._names.path(file)) is None:
            return
        with self.lock:
            if not self.feeds:  # counted nevertheless: StandbyAcks may wait for a standby to connect
                self.sequence += 1
                return
        data = b"".join(buffers)
        for at in range(0, len(data), PIECE_BYTES):
            piece = data if len(data) <= PIECE_BYTES else data[at : at + PIECE_BYTES]
            if are_zeros(piece):
                self._file(Kind.ZEROS, file, position + at, zero_count(piece))
            else:
                self._file(Kind.WRITE, file, position + at, piece)

    def broke_off(self, file: int, size: int, position: int) -> None:
        """Sends the bytes that are there now."""
        if self.feeds:
            try:
                self.wrote(file, [self.disk.pread(file, size, position)], position)
            except OSError as error:
                self.lose_all(f"a file cannot be read back after a failed write: {error}")

    def truncated(self, file: int, size: int) -> None:
        self._file(Kind.TRUNCATE, file, size)

    def synced(self, file: int) -> None:
        self._file(Kind.SYNC, file)

    def _file(self, kind: Kind, file: int, number: int = 0, data: bytes = b"") -> None:
        data_crc = crc32c(data)
        with self.lock:  # includes the lookup of the name, which must not be removed in between
            inner = self.relative(self._names.path(file))
            if inner is not None:
                self._put(kind, inner, number, data, data_crc)

    def synced_filesystem(self) -> None:
        with self.lock:
            self._put(Kind.SYNC_ALL, "")

    def renamed(self, source: str, target: str) -> None:
        new = self.relative(target)
        if new is None:
            if self.relative(source) is not None:
                self.removed(source)
            return
        old = source[len(self._inside) :] if source.startswith(self._inside) else f"{paths.STAGING}/from-elsewhere"
        with self.lock:
            if self.relative(source) is None or old.partition("/")[0] in WRITTEN_BY_OTHERS:
                for feed in self.feeds:
                    self._send_content(feed, old, target)
                self._put(Kind.SYNC, old)  # its writer synced it, unseen by the observer
            self._put(Kind.RENAME, old, data=new.encode(errors="surrogateescape"))
            for feed in self.feeds:
                if feed.is_copying:
                    feed.renamed.append((self.sequence, new))

    def _send_content(self, feed: "StandbyFeed", name: str, path: str) -> None:
        try:
            feed.put(FileContent(name.encode(errors="surrogateescape"), self.disk.open(path, readonly=True)))
        except OSError as error:
            feed.lose(f"{path} cannot be read: {error}")

    def lose_all(self, reason: str) -> None:
        with self.lock:
            for feed in self.feeds:
                feed.lose(reason)


class StandbyFeed:
    """The feed of one standby. All threads call `put`, with the lock held; its one sender calls the rest."""

    def __init__(
        self,
        changes: Changes,
        kept: dict[str, RetainedChange],
        wake: Callable[[], object],
        bytes_max: int = QUEUE_BYTES_MAX,
    ) -> None:
        self._changes = changes
        self._kept = kept
        self._wake = wake
        self._bytes_max = bytes_max
        self._queue: deque[Change | FileContent] = deque()
        self._reading = threading.Lock()
        self._queued_bytes = 0
        self._sent_bytes = 0
        self._marks: deque[SentMark] = deque()  # sent and not confirmed yet
        self._position = 0  # in the Content that is being sent
        self.is_waiting = False  # the sender wants to be woken
        self.renamed: list[tuple[int, str]] = []  # (change, new path) of files renamed since the folder was listed
        self.is_copying = True
        self._copy_end = 0  # the last change before the copy was complete
        self.sent_in_step = False  # the standby was sent IN_STEP
        self.sent = 0
        self.confirmed = 0  # the last change that the standby has synced; 0 until it is in step
        self.copied_bytes = self.copy_bytes = 0
        self.lost: str | None = None  # why the feed has ended
        self._copy: Iterator[bytes] = self._copied()

    def put(self, item: Change | FileContent) -> None:
        if self.lost is not None:
            if isinstance(item, FileContent):
                self._changes.disk.close(item.file)
            return
        self._queue.append(item)
        self._queued_bytes += _size(item)
        if self._queued_bytes > self._bytes_max:
            self.lose(f"the standby was too slow: more than {self._bytes_max:,} bytes were waiting for it")
        elif self.is_waiting:
            self.is_waiting = False
            self._wake()

    def lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            self._queue = deque(
                item for item in self._queue if isinstance(item, FileContent)
            )  # `close` closes their files
            self._queued_bytes = 0
            if self.is_waiting:
                self.is_waiting = False
                self._wake()

    def leave(self) -> None:
        """Stop receiving changes. Call `close` next, on a thread that may wait for the disk."""
        with self._changes.lock:
            self._changes.detach(self)
            self.lose("the standby has disconnected")

    def close(self) -> None:
        with self._reading, self._changes.lock:
            for item in self._queue:
                if isinstance(item, FileContent):
                    self._changes.disk.close(item.file)
            self._queue.clear()

    # For the sender.

    def take(self, bytes_max: int = 4 * PIECE_BYTES) -> bytes:
        """Frames of the queued changes, in order. Empty if there are none, or if a file has to be read first."""
        items: list[Change] = []
        size = 0
        with self._changes.lock:
            while self._queue and size < bytes_max and isinstance(item := self._queue[0], Change):
                self._queue.popleft()
                items.append(item)
                size += _size(item)
            self._queued_bytes -= size
        frames = [pack(i.kind, i.sequence, i.number, i.path, i.data, i.crc) for i in items]
        if items:
            self.sent = items[-1].sequence
        if not self.is_copying and not self.sent_in_step and self.sent >= self._copy_end:
            self.sent_in_step = True
            frames.append(pack(Kind.IN_STEP, self.sent))
        if frames:
            self._sent_bytes += size
            self._mark(size)
        return b"".join(frames)

    def _mark(self, size: int) -> None:
        at_s = self._changes.monotonic()
        if (
            self._marks and not self.sent_in_step
        ):  # one mark for the whole copy, which may take hours: nothing is confirmed during it
            before = self._marks.pop()
            size, at_s = size + before.bytes, before.at_s
        self._marks.append(SentMark(self.sent, size, at_s))

    def wait(self) -> bool:
        """Arrange for the sender to be woken by the next change. False if there is one already."""
        with self._changes.lock:
            self.is_waiting = not self._queue and self.lost is None
            return self.is_waiting

    @property
    def wants_reading(self) -> bool:
        return self.is_copying or (bool(self._queue) and isinstance(self._queue[0], FileContent))

    def read(self) -> bytes:
        """The next chunk of a file. Call it on a thread that may wait for the disk."""
        with self._reading:
            if self.lost is not None:
                return b""
            head = self._queue[0] if self._queue else None
            if isinstance(head, FileContent):
                return self._piece(head)
            return next(self._copy, b"") if self.is_copying else b""

    def _piece(self, content: FileContent) -> bytes:
        data = self._changes.disk.pread(content.file, PIECE_BYTES, self._position)
        frame = self._chunk(self._position, content.path, data)
        if self._position == 0:
            frame = pack(Kind.BEGIN, self.sent, 0, content.path) + frame
        self._position += len(data)
        if len(data) < PIECE_BYTES:
            self._position = 0
            with self._changes.lock:
                if self._queue and self._queue[0] is content:
                    self._queue.popleft()
                    self._queued_bytes -= ITEM_BYTES
                    self._changes.disk.close(content.file)
        return frame

    def _chunk(self, position: int, path: bytes, data: bytes) -> bytes:
        if are_zeros(data):
            return pack(Kind.ZERO_CHUNK, self.sent, position, path, zero_count(data))
        return pack(Kind.CHUNK, self.sent, position, path, data)

    def _copied(self) -> Iterator[bytes]:
        changes = self._changes
        listed = list(_walk(changes, ""))
        files = [path for path in listed if not path.endswith("/")]
        self.copy_bytes = sum(self._file_size(path) or 0 for path in files)
        yield pack(Kind.LISTING, self.sent, self.copy_bytes, b"", json.dumps(listed).encode())
        waiting = deque(files)
        while True:
            while waiting:
                path = waiting.popleft()
                yield from self._file(path)
            with changes.lock:
                if not self.renamed:
                    self._copy_end = changes.sequence
                    self.is_copying = False
                    return
                # Only after the rename was sent: it would replace the file copied under the new name by the standby's
                # file of the old name, which may be incomplete.
                ready = [path for sequence, path in self.renamed if sequence <= self.sent]
                self.renamed = self.renamed[len(ready) :]
            if not ready:
                yield b""
            for path in ready:
                waiting += [found for found in _walk(changes, path) if not found.endswith("/")]

    def _file_size(self, path: str) -> int | None:
        try:
            return self._changes.disk.file_size(f"{self._changes.root}/{path}")
        except FileNotFoundError:
            return None

    def _file(self, path: str) -> Iterator[bytes]:
        """Opens the file for each chunk: if it has been renamed, it is sent under its new name."""
        name = path.encode(errors="surrogateescape")
        kept = self._kept.pop(path, None)
        if kept is not None and kept.size == self._file_size(path):
            crc = 0
            for position, data in self._pieces(path):
                crc = crc32c(data, crc)
                # Otherwise a standby that has most files would get nothing for so long that it disconnects.
                yield b"" if position % SILENT_BYTES_MAX else pack(Kind.HEARTBEAT, self.sent)
            if crc == kept.crc:
                self.copied_bytes += kept.size
                return
        begun = False
        for position, data in self._pieces(path):
            frame = self._chunk(position, name, data)
            yield frame if begun else pack(Kind.BEGIN, self.sent, 0, name) + frame
            begun = True
            self.copied_bytes += len(data)

    def _pieces(self, path: str) -> Iterator[tuple[int, bytes]]:
        disk, position = self._changes.disk, 0
        while True:
            try:
                file = disk.open(f"{self._changes.root}/{path}", readonly=True)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                data = disk.pread(file, PIECE_BYTES, position)
            finally:
                disk.close(file)
            yield position, data
            position += len(data)
            if len(data) < PIECE_BYTES:
                return

    # Confirmations of the standby.

    def confirm(self, sequence: int) -> None:
        self.confirmed = max(self.confirmed, sequence)
        while self._marks and self._marks[0].sequence <= sequence:
            self._sent_bytes -= self._marks.popleft().bytes

    @property
    def is_in_step(self) -> bool:
        """The standby has confirmed that it is in step."""
        return self.lost is None and self.confirmed > 0

    @property
    def bytes_behind(self) -> int:
        return self._queued_bytes + self._sent_bytes

    @property
    def seconds_behind(self) -> float:
        """Age of the oldest change that was sent and is not confirmed."""
        return max(0.0, self._changes.monotonic() - self._marks[0].at_s) if self._marks else 0.0


def _size(item: Change | FileContent) -> int:
    return ITEM_BYTES + len(item.data) if isinstance(item, Change) else ITEM_BYTES


def _walk(changes: Changes, inner: str) -> Iterator[str]:
    """All paths below `inner`, or `inner` itself if it is a file. A folder ends in a slash and precedes its content."""
    path = f"{changes.root}/{inner}" if inner else changes.root
    try:
        names = changes.disk.listdir(path)
    except NotADirectoryError:
        yield inner
        return
    except FileNotFoundError:
        return
    if inner:
        yield inner + "/"
    for name in names:
        below = f"{inner}/{name}" if inner else name
        if changes.relative(f"{changes.root}/{below}") is not None:
            yield from _walk(changes, below)
