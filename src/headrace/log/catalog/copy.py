"""The catalog's copy: every document as a line of one file, in the order of the changes.

A line is the CRC32C of the rest in eight hex digits, a space, and JSON: kind, file, and the document's text, or null if
it was removed. The last line of a document is the valid one.

A document becomes durable before its line does, and is removed after the line that records it. So the copy never names
a document that was not written: a document that is missing or cannot be trusted was damaged later, and the copy can
restore it. The copy lacks at most a change that was never confirmed. When this cannot be guaranteed, the copy is
removed for a while.
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
_REWRITE_BYTES_MIN = 1 << 20


class _Line(msgspec.Struct, frozen=True):
    kind: str
    file: str
    text: str | None


@dataclass(slots=True)
class CopyContent:
    texts: dict[Name, bytes] = field(default_factory=dict)
    is_there: bool = False
    is_sound: bool = False  # intact to its end: no line that may have replaced another is lost
    size: int = 0


class CatalogCopy:
    """Not thread-safe: the catalog calls it with a lock held."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self.path = f"{folder}/{paths.CATALOG_COPY}"
        self._size: int | None = None  # None: no line may be appended
        self._live_bytes = 0

    def read(self) -> CopyContent:
        if not self._disk.exists(self.path):
            return CopyContent()
        data = read_whole(self._disk, self.path)
        content = CopyContent(is_there=True, is_sound=data.startswith(HEADER + b"\n"), size=len(data))
        *lines, rest = data.split(b"\n")
        if rest:
            content.is_sound = False  # perhaps torn by a crash
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
        """Whether a change can be appended; if not, call `settle` first."""
        return self._size is not None and not _needs_rewrite(self._size, self._live_bytes)

    def settle(self, content: CopyContent, texts: Mapping[Name, bytes]) -> None:
        """Bring the copy up to date with the catalog's documents."""
        self._live_bytes = sum(map(len, texts.values()))
        if content.is_sound and content.texts == texts and not _needs_rewrite(content.size, self._live_bytes):
            self._update_or_remove(lambda: self._sync(content.size))
        elif texts or content.is_there:
            self._update_or_remove(lambda: self._write(texts))

    def _sync(self, size: int) -> int:
        """After a kill the last line may be in the page cache only."""
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

    def add(self, kind: str, texts: Mapping[str, bytes | None], replaced_bytes: int) -> None:
        """Append changes; None removes a file. On return they are durable, or the copy has been removed."""
        assert self._size is not None
        self._live_bytes += sum(len(text or b"") for text in texts.values()) - replaced_bytes
        size = self._size
        lines = b"".join(_line(kind, file, text) + b"\n" for file, text in texts.items())
        self._update_or_remove(lambda: self._append(lines, size))

    def _append(self, lines: bytes, size: int) -> int:
        file = self._disk.open(self.path)
        try:
            self._disk.pwrite(file, [lines], size)
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        return size + len(lines)

    def _update_or_remove(self, work: Callable[[], int]) -> None:
        """Update the copy, or remove it if the disk fails. The change is durable in its document already and cannot be
        refused, and a copy that lacks it would restore an old version. The removal must be durable; the next change
        tries to write the copy again."""
        self._size = None
        try:
            self._size = work()
        except OSError:
            for path in (self.path + paths.UNFINISHED, self.path):
                if self._disk.exists(path):
                    self._disk.unlink(path)
            self._disk.sync_dir(self._folder)


def _needs_rewrite(size: int, live_bytes: int) -> bool:
    return size > 4 * live_bytes + _REWRITE_BYTES_MIN


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
