"""Uploads of exactly-once sinks: files of valid, durable batches that are not committed yet, so no reader sees them.

A file is one upload of whole batches under a random name chosen by its writer. It is removed when it is committed or
aborted, or after a day.
"""

import asyncio
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from headrace.broker.streams.append import check_anonymous
from headrace.clock import Clock, ExpiryClock
from headrace.errors import Conflict, CorruptBatch, InvalidInput, NotFound, StorageError
from headrace.log.disk.disk import Disk, write_atomically
from headrace.log.disk.paths import STAGING, UNFINISHED
from headrace.record import codec
from headrace.record.types import BatchInfo

SUFFIX = ".staged"
NAME = re.compile(r"[0-9a-f]{32}")
MAX_AGE_MS = 24 * 3600 * 1000

T = TypeVar("T")


class Section(NamedTuple):
    """A part of an upload."""

    name: str
    position: int
    length: int


class Staged(NamedTuple):
    bytes: int
    records: int


class Uploads:
    """Used on the event loop; files are accessed in a thread of their own."""

    def __init__(self, disk: Disk, data_dir: str, clock: Clock) -> None:
        self._disk = disk
        self._folder = f"{data_dir}/{STAGING}"
        self._ages = ExpiryClock(clock)
        self._thread = ThreadPoolExecutor(1, "staging")
        self._seen_ms: dict[str, int] = {}
        self._busy: set[str] = set()
        self._is_ready = False

    async def store(
        self, name: str, data: bytes | bytearray, *, batch_bytes_max: int, decompressed_bytes_max: int
    ) -> Staged:
        """Durable on return. An upload may be repeated: the same name replaces the file. Conflict once a commit of it
        has begun."""
        _check_name(name)

        def work() -> Staged:
            if name in self._busy:
                raise Conflict(f"upload {name} is being committed and can no longer be replaced")
            batches = bytearray(data)
            infos = codec.validate(  # repairs batches like those of any producer: a delete horizon is of another log
                batches,
                batch_bytes_max=batch_bytes_max,
                decompressed_bytes_max=decompressed_bytes_max,
                repair=True,
            )
            check_anonymous(infos)
            self._make_folder()
            write_atomically(self._disk, self._path(name), batches)
            return Staged(len(batches), sum(info.count for info in infos))

        self._seen_ms[name] = self._ages.now_ms()
        return await self._in_thread(work)

    async def read(self, section: Section, *, keyed: bool = False) -> tuple[bytearray, list[BatchInfo]]:
        """The batches of a section, checked again. CorruptBatch if it is not cut between batches, or if `keyed` (for a
        compacted topic) and a record has no key."""
        _check_name(section.name)
        if section.position < 0 or section.length <= 0:
            raise InvalidInput("a section of an upload needs a position and a length")
        return await self._in_thread(lambda: self._read(section, keyed))

    def _read(self, section: Section, keyed: bool) -> tuple[bytearray, list[BatchInfo]]:
        path = self._path(section.name)
        if not self._disk.exists(path):
            raise NotFound(f"there is no upload {section.name}: it was committed, aborted or has expired")
        file = self._disk.open(path, readonly=True)
        try:
            data = bytearray(self._disk.pread(file, section.length, section.position))
        finally:
            self._disk.close(file)
        infos = codec.scan(data)
        if len(data) < section.length or not infos or infos[-1].end != len(data):
            raise CorruptBatch(f"bytes {section.position} to {section.position + section.length} are not whole batches")
        if keyed:
            codec.validate(data, keyed=True)
        return data, infos

    def path_of(self, name: str) -> str:
        """The path of an upload, for callers that take it over by renaming it."""
        _check_name(name)
        path = self._path(name)
        if not self._disk.exists(path):
            raise NotFound(f"there is no upload {name}")
        return path

    async def remove(self, names: Iterable[str]) -> None:
        """Missing files are ignored; files of a commit in progress stay."""
        chosen = [name for name in names if name not in self._busy]
        for name in chosen:
            _check_name(name)
            self._seen_ms.pop(name, None)
        await self._in_thread(lambda: self._unlink(chosen))

    def hold(self, names: Iterable[str]) -> None:
        """A commit of these has begun: they are neither removed nor replaced."""
        self._busy.update(names)

    def release(self, names: Iterable[str]) -> None:
        self._busy.difference_update(names)

    async def sweep(self, max_age_ms: int = MAX_AGE_MS) -> list[str]:
        """Remove uploads that were not committed. Their age counts from when this broker first saw them."""
        now_ms = self._ages.now_ms()
        names = await self._in_thread(self._list)
        for name in names:
            self._seen_ms.setdefault(name, now_ms)
        orphans = [n for n in names if n not in self._busy and now_ms - self._seen_ms[n] >= max_age_ms]
        if orphans:
            await self.remove(orphans)
        return orphans

    def close(self) -> None:
        self._thread.shutdown()

    # These run in the thread.

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}{SUFFIX}"

    def _make_folder(self) -> None:
        if not self._is_ready:
            self._disk.mkdir(self._folder)
            self._disk.sync_dir(self._folder.rpartition("/")[0])
            self._is_ready = True

    def _list(self) -> list[str]:
        if not self._disk.exists(self._folder):
            return []
        names = self._disk.listdir(self._folder)
        for name in names:
            # Uploads are written in this thread, so an unfinished one was interrupted by a crash.
            if name.endswith(UNFINISHED):
                self._disk.unlink(f"{self._folder}/{name}")
        return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            if self._disk.exists(self._path(name)):
                self._disk.unlink(self._path(name))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            raise StorageError(f"the upload cannot be accessed: {error.strerror}") from error


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise InvalidInput("the name of an upload must be 32 random hexadecimal digits")
