"""The standbys of this broker: which are connected, how far behind they are, and which confirms wait for them.

The HTTP listener attaches followers and streams changes to them; log/standby/ has the change feed and the acks.
"""

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.clock import Clock
from headrace.errors import Conflict, InvalidInput, NotFound
from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.shard import Shard
from headrace.log.standby.acks import StandbyAcks
from headrace.log.standby.change_feed import QUEUE_BYTES_MAX, Changes, RetainedChange, StandbyFeed
from headrace.log.standby.follower import folder_id
from headrace.log.standby.frames import FORMAT, Kind, pack

__all__ = ["FORMAT", "Follower", "RetainedChange", "Standbys"]

logger = logging.getLogger("headrace.standby")

SILENCE_S_MAX = 60.0  # a standby reports every few seconds, unless its disk is slow
QUEUE_SHARE = 8  # at most this part of the memory limit is queued for one standby


class Follower:
    """One connected standby."""

    def __init__(
        self, changes: Changes, name: str, address: str, copy: str, kept: dict[str, RetainedChange], bytes_max: int
    ) -> None:
        self.id = secrets.token_hex(8)
        self.name = name
        self.address = address
        self.copy = copy  # identifies the folder it writes to, across reconnects
        loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.feed = StandbyFeed(changes, kept, lambda: loop.call_soon_threadsafe(self.news.set), bytes_max)
        self.heard_s = changes.monotonic()

    def hello(self, version: str, *, folder: str, waits: bool) -> bytes:
        """The first frame. `waits`: publishers wait for each of its confirms."""
        greeting = {"id": self.id, "folder": folder, "version": version, "waits": waits}
        return pack(Kind.HELLO, self.feed.sent, data=msgspec.json.encode(greeting))

    def heartbeat(self) -> bytes:
        return pack(Kind.HEARTBEAT, self.feed.sent)

    @property
    def state(self) -> str:
        return "in step" if self.feed.is_in_step else "copying"

    def __str__(self) -> str:
        return f"standby {self.name} ({self.address})"


class Standbys:
    """`wanted` is the number of standbys that must have a change before it is confirmed (standby_confirms)."""

    def __init__(
        self,
        shard: Shard,
        catalog: FileCatalog,
        disk: Disk,
        data_dir: str,
        clock: Clock,
        *,
        wanted: int,
        memory_bytes_max: int,
    ) -> None:
        self._shard = shard
        self._catalog = catalog
        self._any_disk = disk
        self._data_dir = data_dir
        self._clock = clock
        self._followers: dict[str, Follower] = {}
        self.wanted = wanted
        self._queue_bytes_max = min(QUEUE_BYTES_MAX, memory_bytes_max // QUEUE_SHARE)
        self._naming = threading.Lock()
        self.lost = 0  # standbys that disconnected while in step or copying
        self.confirms: StandbyAcks | None = None
        self.changes: Changes | None = None
        if isinstance(disk, RealDisk):
            # Numbers start at the time in microseconds, above anything an earlier start has counted to. So of two
            # standbys the one with the higher number is further ahead, even if the other missed the restart.
            first = clock.now_ms() * 1000
            self.changes = Changes(disk, disk.names, data_dir, clock.monotonic, first)

    def start(self) -> None:
        """From here on nothing is confirmed before `wanted` standbys have it."""
        if self.wanted and (reason := self._why_not()) is not None:
            raise InvalidInput(f"standby_confirms: {reason}")
        if self.wanted and self.changes is not None:
            self._disk.watcher = self.changes
            confirms = self.confirms = StandbyAcks(self.changes, self.wanted)
            self._shard.worker.confirms = confirms
            self._catalog.confirms = confirms

    @property
    def _disk(self) -> RealDisk:
        assert isinstance(self._any_disk, RealDisk)
        return self._any_disk

    def __iter__(self) -> Iterator[Follower]:
        return iter(list(self._followers.values()))

    @property
    def in_step(self) -> int:
        return sum(follower.feed.is_in_step for follower in self._followers.values())

    def why_not_ready(self) -> str | None:
        if self.confirms is None or self.in_step >= self.wanted:
            return None
        return f"messages wait for standbys: {self.in_step} of {self.wanted} are in step (standby_confirms)"

    def folder_id(self) -> str:
        """Blocks for the disk: call it in a thread."""
        with self._naming:
            return folder_id(self._any_disk, self._data_dir)

    def _why_not(self) -> str | None:
        tier_root, data_dir = self._shard.tier_root, self._data_dir
        if self.changes is None:
            return "standbys cannot follow a broker with this kind of disk"
        if not tier_root.startswith(f"{data_dir}/"):
            return (
                f"archived segments are in {tier_root}, outside the data folder, so a standby would not have them: "
                "set tier_dir to `auto`"
            )
        return None

    def attach(self, name: str, address: str, copy: str, kept: dict[str, RetainedChange]) -> Follower:
        reason = self._why_not()
        if reason is not None or self.changes is None:
            raise Conflict(reason or "")
        for other in self:
            if other.copy == copy:  # it lost the connection and we have not noticed; one copy must not count as two
                self.leave(other, "it has reconnected")
        follower = Follower(self.changes, name, address, copy, kept, self._queue_bytes_max)
        self._followers[follower.id] = follower
        self.changes.attach(follower.feed)
        self._disk.watcher = self.changes
        logger.info("%s starts copying", follower)
        return follower

    def confirm(self, standby: str, position: int) -> None:
        """The standby has all changes up to `position` on disk; 0 while it copies."""
        follower = self._followers.get(standby)
        if follower is None:
            raise NotFound(f"no standby {standby} is connected")
        follower.heard_s = self._clock.monotonic()
        was_in_step = follower.feed.is_in_step
        if position:
            follower.feed.confirm(position)
        if follower.feed.is_in_step and not was_in_step:
            logger.info("%s is in step", follower)
        self._count()

    def is_silent(self, follower: Follower) -> bool:
        return self._clock.monotonic() - follower.heard_s > SILENCE_S_MAX

    def leave(self, follower: Follower, reason: str) -> None:
        if self._followers.pop(follower.id, None) is None:
            return
        state = follower.state
        follower.feed.leave()
        asyncio.get_running_loop().run_in_executor(None, follower.feed.close)
        if not self._followers and self.confirms is None:
            self._disk.watcher = None
        self.lost += 1
        logger.warning("%s disconnected while %s: %s", follower, state, reason)
        self._count()
        if (waiting := self.why_not_ready()) is not None:
            logger.warning("%s", waiting)

    def _count(self) -> None:
        if self.confirms is not None:
            self.confirms.count()

    def close(self) -> None:
        """Called when no client is left that could get a confirm too early."""
        if self.confirms is not None:
            if self.confirms.is_waiting:
                logger.warning(
                    "stopping without waiting for standbys: the last changes were not confirmed to publishers"
                )
            self.confirms.end()

    def describe(self) -> dict[str, Any]:
        now_s = self._clock.monotonic()
        return {
            "standby_confirms": self.wanted,
            "in_step": self.in_step,
            "waiting": self.confirms is not None and self.confirms.is_waiting,
            "standbys": [
                {
                    "id": follower.id,
                    "name": follower.name,
                    "address": follower.address,
                    "state": follower.state,
                    "copied_bytes": follower.feed.copied_bytes,
                    "copy_bytes": follower.feed.copy_bytes,
                    "bytes_behind": follower.feed.bytes_behind,
                    "seconds_behind": round(follower.feed.seconds_behind, 3),
                    "silent_seconds": round(now_s - follower.heard_s, 3),
                }
                for follower in self._followers.values()
            ],
        }
