"""The standbys of this broker: who follows, how far behind, and what waits for them."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.clock import Clock
from headrace.errors import Conflict, InvalidInput, NotFound
from headrace.log.disk.disk import RealDisk
from headrace.log.standby.acks import StandbyAcks
from headrace.log.standby.change_feed import QUEUE_BYTES_MAX, Changes, RetainedChange, StandbyFeed
from headrace.log.standby.follower import folder_id
from headrace.log.standby.frames import FORMAT, Kind, pack

if TYPE_CHECKING:
    from headrace.broker.broker import Broker

__all__ = ["FORMAT", "Follower", "RetainedChange", "Standbys"]

logger = logging.getLogger("headrace.standby")

SILENCE_S_MAX = 60.0  # a standby says something every few seconds, unless its disk keeps it
QUEUE_SHARE = 8  # and never more than this part of the memory limit waits for one of them


class Follower:
    """One standby that is connected."""

    def __init__(
        self, changes: Changes, name: str, address: str, copy: str, kept: dict[str, RetainedChange], bytes_max: int
    ) -> None:
        self.id = secrets.token_hex(8)
        self.name = name
        self.address = address
        self.copy = copy  # the folder that it writes to, over as many connections as it takes
        loop = asyncio.get_running_loop()
        self.news = asyncio.Event()
        self.feed = StandbyFeed(changes, kept, lambda: loop.call_soon_threadsafe(self.news.set), bytes_max)
        self.heard_s = changes.monotonic()

    def hello(self, version: str, *, folder: str, waits: bool) -> bytes:
        """What it is sent first. `waits`: somebody waits for each of its confirms."""
        said = {"id": self.id, "folder": folder, "version": version, "waits": waits}
        return pack(Kind.HELLO, self.feed.sent, data=msgspec.json.encode(said))

    def heartbeat(self) -> bytes:
        return pack(Kind.HEARTBEAT, self.feed.sent)

    @property
    def state(self) -> str:
        return "in step" if self.feed.is_in_step else "copying"

    def __str__(self) -> str:
        return f"standby {self.name} ({self.address})"


class Standbys:
    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self._clock: Clock = broker.clock
        self._followers: dict[str, Follower] = {}
        self.wanted = broker.config.standby_confirms
        self._naming = threading.Lock()
        self.lost = 0  # that were in step, or on their way there
        self.confirms: StandbyAcks | None = None
        self.changes: Changes | None = None
        if isinstance(broker.disk, RealDisk):
            names, clock = broker.disk.names, broker.clock
            # From the time on, in microseconds: more than any start before it has counted to, so that of two standbys
            # the one with the higher number is further, also if the other has not been here since.
            first = clock.now_ms() * 1000
            self.changes = Changes(broker.disk, names, broker.config.data_dir, clock.monotonic, first)

    def start(self) -> None:
        """From here on nobody is told of anything before the standbys have it."""
        if self.wanted and (reason := self._why_not()) is not None:
            raise InvalidInput(f"standby_confirms: {reason}")
        if self.wanted and self.changes is not None:
            self._disk.watcher = self.changes
            confirms = self.confirms = StandbyAcks(self.changes, self.wanted)
            self._broker.shard.worker.confirms = confirms
            self._broker.catalog.confirms = confirms

    @property
    def _disk(self) -> RealDisk:
        assert isinstance(self._broker.disk, RealDisk)
        return self._broker.disk

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
        """On a thread that may wait for the disk."""
        with self._naming:
            return folder_id(self._broker.disk, self._broker.config.data_dir)

    def _why_not(self) -> str | None:
        tier_root, data_dir = self._broker.shard.tier_root, self._broker.config.data_dir
        if self.changes is None:
            return "this broker's disk is none that a standby could follow"
        if not tier_root.startswith(f"{data_dir}/"):
            return (
                f"archived segments lie in {tier_root}, outside of the data folder: a standby would not have them. "
                "It can follow a broker whose tier_dir is `auto`"
            )
        return None

    def attach(self, name: str, address: str, copy: str, kept: dict[str, RetainedChange]) -> Follower:
        reason = self._why_not()
        if reason is not None or self.changes is None:
            raise Conflict(reason or "")
        for other in self:
            if other.copy == copy:  # its connection broke, and only it has noticed; one copy must not count as two
                self.leave(other, "it has come again")
        limit = min(QUEUE_BYTES_MAX, self._broker.pressure.limits.memory_bytes // QUEUE_SHARE)
        follower = Follower(self.changes, name, address, copy, kept, limit)
        self._followers[follower.id] = follower
        self.changes.attach(follower.feed)
        self._disk.watcher = self.changes
        logger.info("%s begins to copy", follower)
        return follower

    def confirm(self, standby: str, position: int) -> None:
        """What the standby has; 0 while it copies."""
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
        logger.warning("%s is gone, it was %s: %s", follower, state, reason)
        self._count()
        if (waiting := self.why_not_ready()) is not None:
            logger.warning("%s", waiting)

    def _count(self) -> None:
        if self.confirms is not None:
            self.confirms.count()

    def close(self) -> None:
        """Nobody is connected any more who could be told too early."""
        if self.confirms is not None:
            if self.confirms.is_waiting:
                logger.warning("stopping without the standbys: what came last was confirmed to nobody")
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
