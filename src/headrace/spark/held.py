"""Keeping the files that were planned: a second name for each, so that nobody has to be asked.

A batch, its retries included, must read what it was planned on, whatever retention and rewriting do meanwhile. A
hard link is there or it is not: there is no moment between looking and holding, and no broker need run. Links are in a
folder whose name says until when they are needed; whoever comes by removes what is past its time.
"""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.log.disk.paths import DATA, HELD, PARQUET, TIER, SegmentStem, held_name, held_until, parse_segment
from headrace.log.read.external import LogFiles, SegmentGone
from headrace.record.types import Slice
from headrace.spark.access import Piece


class HeldFolder:
    """The links of one plan."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def release(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)  # what stays goes when its time is over


def links_from(held: str, cut: Slice) -> list[tuple[int, str]]:
    """(base offset, link) of the segments of a log that the same plan holds, from the one of a slice on."""
    folder, prefix = os.path.dirname(held), f"{cut.log_id}-"
    found = []
    with contextlib.suppress(FileNotFoundError):  # its time is over
        for name in os.listdir(folder):
            stem = parse_segment(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if stem is not None and stem.base >= cut.segment:
                found.append((stem.base, f"{folder}/{name}"))
    return sorted(found)


def _make(folder: Path) -> None:
    """Whose the data is, if root makes it: the broker removes what is past its time, and others hold files beside."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    if os.geteuid() == 0:
        above = folder.parent.stat()
        with contextlib.suppress(PermissionError):  # a root that may not: it is root's then
            os.chown(folder, above.st_uid, above.st_gid, follow_symlinks=False)


class HeldFiles:
    """Makes the links of one reader, plan by plan."""

    def __init__(self, root: str, files: LogFiles) -> None:
        self._folder = Path(root, HELD)
        self._files = files

    def can_hold(self) -> bool:
        """False where it is plain that links cannot be made: the folder may only be read."""
        try:
            _make(self._folder)
        except OSError:
            return False
        return os.access(self._folder, os.W_OK | os.X_OK)

    def hold(self, pieces: Sequence[Piece], for_ms: int) -> tuple[list[Piece], HeldFolder | None]:
        """The pieces with where else their bytes are, and what to release; None where links cannot be made.

        SegmentGone when one was removed or rewritten since it was planned: plan again.
        """
        now_ms = time.time_ns() // 1_000_000
        folder = self._folder / held_name(now_ms + for_ms, uuid.uuid4().hex)
        try:
            _make(self._folder)
            self._sweep(now_ms)
            _make(folder)
        except OSError:
            return list(pieces), None  # the folder may only be read, by this user or at all
        try:
            return list(self._linked(folder, pieces)), HeldFolder(folder)
        except (SegmentGone, OSError) as error:
            HeldFolder(folder).release()
            if isinstance(error, SegmentGone):
                raise
            return list(pieces), None

    def _linked(self, folder: Path, pieces: Sequence[Piece]) -> Iterator[Piece]:
        links: dict[Slice, str] = {}
        for piece in pieces:
            assert piece.slice is not None
            segment = msgspec.structs.replace(piece.slice, position=0, length=0, base_offset=0, next_offset=0)
            if segment not in links:
                links[segment] = self._link(folder, segment)
            yield msgspec.structs.replace(piece, held=links[segment] or None)

    def _link(self, folder: Path, segment: Slice) -> str:
        """The other name; none for what is archived on another disk, where there can be none."""
        stem = SegmentStem(segment.segment, segment.generation)
        log = self._files.folder(segment.log_id)
        target = str(folder / f"{segment.log_id}-{stem}{DATA}")
        try:
            if log is None:
                raise FileNotFoundError
            os.link(f"{log}/{stem}{DATA}", target)
        except FileNotFoundError:
            archived = None if log is None else self._files.archived_at(log, stem)
            if archived is not None:
                return self._link_archived(*archived, target.removesuffix(DATA))
            raise SegmentGone(f"segment {stem} of log {segment.log_id} went while it was planned") from None
        return target

    @staticmethod
    def _link_archived(manifest: str, parquet: str, target: str) -> str:
        try:
            os.link(parquet, target + PARQUET)
            os.link(manifest, target + TIER)
        except FileNotFoundError:
            raise SegmentGone(f"{parquet} went while it was planned") from None
        except OSError:
            return ""
        return target + TIER

    def _sweep(self, now_ms: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # somebody else is sweeping, too
            for entry in self._folder.iterdir():
                until = held_until(entry.name)
                if until is not None and until < now_ms:
                    HeldFolder(entry).release()
