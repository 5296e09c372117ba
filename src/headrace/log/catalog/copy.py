"""The second copy of the catalog: every document again, as a line of one file, in the order of the changes.

A line is the CRC32C of the rest, in eight digits, a space, and JSON: kind, file, and the document's text, or null when
it was removed. The last line of a document counts.

A document is durable before its line is, and is removed after its line says so. So the copy never names a document
that is not there: one that is missing, or cannot be believed, was damaged since, and the copy has it. What the copy
lacks is at most a change that nobody was told of. Where that cannot be kept up, there is no copy for a while.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, read_whole, write_atomically
from headrace.record.batch.crc32c import crc32c

HEADER = b"headrace catalog copy 1"
Name = tuple[str, str]  # kind and file

_CRC_DIGITS = 8
_STUFFED_BYTES_MIN = 1 << 20


class _Line(msgspec.Struct, frozen=True):
    kind: str
    file: str
    text: str | None


@dataclass(slots=True)
class CopyContent:
    texts: dict[Name, bytes] = field(default_factory=dict)
    is_there: bool = False
    is_sound: bool = False  # up to its end: nothing that it says was replaced by a line that is lost
    size: int = 0


class CatalogCopy:
    """Not safe for threads: the catalog has a lock around it."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self.path = f"{folder}/{paths.CATALOG_COPY}"
        self._size: int | None = None  # None: not to be added to
        self._live_bytes = 0

    def read(self) -> CopyContent:
        if not self._disk.exists(self.path):
            return CopyContent()
        data = read_whole(self._disk, self.path)
        content = CopyContent(is_there=True, is_sound=data.startswith(HEADER + b"\n"), size=len(data))
        *lines, rest = data.split(b"\n")
        if rest:
            content.is_sound = False  # torn by a crash, perhaps
        for raw in lines[1:] if content.is_sound else lines:
            line = _parse(raw)
            if line is None:
                content.is_sound = False
            elif line.text is None:
                content.texts.pop((line.kind, line.file), None)
            else:
                content.texts[line.kind, line.file] = line.text.encode()
        return content

    @property
    def is_ready(self) -> bool:
        """Whether a change can be added; otherwise it is to be settled first."""
        return self._size is not None and not _is_stuffed(self._size, self._live_bytes)

    def settle(self, content: CopyContent, texts: Mapping[Name, bytes]) -> None:
        """Have it say what the catalog says."""
        self._live_bytes = sum(map(len, texts.values()))
        if content.is_sound and content.texts == texts and not _is_stuffed(content.size, self._live_bytes):
            self._keep(lambda: self._sync(content.size))
        elif texts or content.is_there:
            self._keep(lambda: self._write(texts))

    def _sync(self, size: int) -> int:
        """After a kill its last line may be in the page cache only."""
        file = self._disk.open(self.path)
        try:
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        return size

    def _write(self, texts: Mapping[Name, bytes]) -> int:
        lines = [_line(kind, file, text) for (kind, file), text in texts.items()]
        data = b"\n".join([HEADER, *lines, b""])
        write_atomically(self._disk, self.path, data)
        return len(data)

    def add(self, kind: str, file: str, text: bytes | None, replaced_bytes: int) -> None:
        """On return it is durable, or there is no copy."""
        assert self._size is not None
        self._live_bytes += len(text or b"") - replaced_bytes
        size = self._size
        self._keep(lambda: self._append(_line(kind, file, text) + b"\n", size))

    def _append(self, line: bytes, size: int) -> int:
        file = self._disk.open(self.path)
        try:
            self._disk.pwrite(file, [line], size)
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        return size + len(line)

    def _keep(self, work: Callable[[], int]) -> None:
        """A disk that is full is no reason to refuse a change that is durable already, and a copy that lacks it would
        bring back the past: none is better, and the next change tries again. That it is gone must be certain."""
        self._size = None
        try:
            self._size = work()
        except OSError:
            for path in (self.path + paths.UNFINISHED, self.path):
                if self._disk.exists(path):
                    self._disk.unlink(path)
            self._disk.sync_dir(self._folder)


def _is_stuffed(size: int, live_bytes: int) -> bool:
    return size > 4 * live_bytes + _STUFFED_BYTES_MIN


def _line(kind: str, file: str, text: bytes | None) -> bytes:
    body = msgspec.json.encode(_Line(kind, file, None if text is None else text.decode()))
    return b"%08x %b" % (crc32c(body), body)


def _parse(raw: bytes) -> _Line | None:
    body = raw[_CRC_DIGITS + 1 :]
    if raw[: _CRC_DIGITS + 1] != b"%08x " % crc32c(body):
        return None
    try:
        return msgspec.json.decode(body, type=_Line)
    except msgspec.MsgspecError:
        return None
