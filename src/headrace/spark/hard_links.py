"""Hard links that keep the files of a plan, so that reading them needs no broker.

A batch, including retries of its tasks, must read the files it was planned on, even if retention or compaction replace
them meanwhile. Creating a hard link either succeeds or fails: no file can disappear between a check and the link. The
links of a plan are in one folder whose name contains its expiry; brokers and readers remove expired folders.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.log.disk.paths import HELD, SegmentStem, held_name, held_until, parse_segment
from headrace.log.read.external import LogFiles, SegmentGone
from headrace.record.types import Slice
from headrace.spark.access import ReadTask


class LinkFolder:
    """The folder with the links of one plan. A Lease."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def release(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)  # leftovers are removed after the expiry


def links_from(link: str, cut: Slice) -> list[tuple[int, str]]:
    """(base offset, link) of the slice's segment and later segments of its log, as far as the same plan links them."""
    folder, prefix = os.path.dirname(link), f"{cut.log_id}-"
    found = []
    with contextlib.suppress(FileNotFoundError):  # expired
        for name in os.listdir(folder):
            stem = parse_segment(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if stem is not None and stem.base >= cut.segment:
                found.append((stem.base, f"{folder}/{name}"))
    return sorted(found)


def _make_folder(folder: Path) -> None:
    """Creates the folder with the owner of the data, even as root: the broker and other readers must write to it."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    if os.geteuid() == 0:
        above = folder.parent.stat()
        with contextlib.suppress(PermissionError):  # root without CAP_CHOWN: the folder stays root's
            os.chown(folder, above.st_uid, above.st_gid, follow_symlinks=False)


class HardLinks:
    """Creates the hard links of a reader, one folder per plan."""

    def __init__(self, root: str, files: LogFiles) -> None:
        self._folder = Path(root, HELD)
        self._files = files

    def can_link(self) -> bool:
        """False if links certainly cannot be created, because the data folder is read-only."""
        try:
            _make_folder(self._folder)
        except OSError:
            return False
        return os.access(self._folder, os.W_OK | os.X_OK)

    def link(self, tasks: Sequence[ReadTask], for_ms: int) -> tuple[list[ReadTask], LinkFolder | None]:
        """The tasks with links to their files, and the folder to release; None if links cannot be created.

        Raises SegmentGone if a segment was deleted or rewritten since it was planned: the caller must plan again.
        """
        now_ms = time.time_ns() // 1_000_000
        folder = self._folder / held_name(now_ms + for_ms, uuid.uuid4().hex)
        try:
            _make_folder(self._folder)
            self._remove_expired(now_ms)
            _make_folder(folder)
        except OSError:
            return list(tasks), None  # read-only, for this user or as a filesystem
        try:
            return list(self._linked(folder, tasks)), LinkFolder(folder)
        except (SegmentGone, OSError) as error:
            LinkFolder(folder).release()
            if isinstance(error, SegmentGone):
                raise
            return list(tasks), None

    def _linked(self, folder: Path, tasks: Sequence[ReadTask]) -> Iterator[ReadTask]:
        links: dict[Slice, str] = {}
        for task in tasks:
            assert task.slice is not None
            segment = msgspec.structs.replace(task.slice, position=0, length=0, base_offset=0, next_offset=0)
            if segment not in links:
                links[segment] = self._link(folder, segment)
            yield msgspec.structs.replace(task, link=links[segment] or None)

    def _link(self, folder: Path, segment: Slice) -> str:
        """The link; empty for a segment archived on another filesystem, which cannot be linked."""
        stem = SegmentStem(segment.segment, segment.generation)
        return self._files.link(segment.log_id, stem, str(folder / f"{segment.log_id}-{stem}")) or ""

    def _remove_expired(self, now_ms: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # another process is removing them, too
            for entry in self._folder.iterdir():
                until = held_until(entry.name)
                if until is not None and until < now_ms:
                    LinkFolder(entry).release()
