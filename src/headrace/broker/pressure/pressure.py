"""Back-pressure: slows publishers, then pauses them, and reclaims memory from the largest holders.

`judge` decides, from numbers alone; `Pressure` measures, acts and counts. Publishers are slowed step by step as memory
fills or as more bytes wait for the disk, paused over 90 % of the memory limit, and resumed below 80 %. A nearly full
disk pauses them likewise. Readers are never held back: they free memory and disk.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from headrace.allocator import trim_allocator
from headrace.broker.pressure.process_memory import ProcessMemory, memory_limit
from headrace.clock import Clock
from headrace.config import Config, format_size
from headrace.errors import DiskFull, Overloaded
from headrace.log.disk.disk import Disk
from headrace.log.read.file_range import parts_max
from headrace.log.shard import Shard

logger = logging.getLogger("headrace.pressure")

MB = 1 << 20
PAUSE_SHARE, RESUME_SHARE = 0.90, 0.80
SHED_TO_SHARE = 0.75  # below RESUME_SHARE, so that publishers really resume
DISK_RESUME_SHARE = 1.25  # times the limit must be free again: with less, each deleted segment would toggle the alarm
# The level is the number of steps passed; each one halves the rate of the publishers.
MEMORY_STEPS = (0.60, 0.66, 0.72, 0.78, 0.84)
DEPTH_STEPS = (0.30, 0.45, 0.60, 0.75, 0.90)  # of the bytes that may wait for the disk
STEP_BACK = 0.03  # hysteresis: a step is left only this far below where it was entered
RATES = (512 * MB, 256 * MB, 128 * MB, 64 * MB, 32 * MB)  # bytes a second, of all publishers together
# A publisher waits at most as long as its own bytes take at this part of the rate, so large messages do not delay
# small ones.
FAIR_PART = 64
DELAY_S_MAX = 1.0
STREAMING_PART = 4
PENDING_BYTES_MAX = 256 * MB  # with less, one slow sync would refuse publishers
CALM_LOOK_S = 1.0  # while nothing is published: measuring at every tick was most of the cost of an idle broker
DISK_LOOK_S = 1.0
SHED_INTERVAL_S = 1.0
IDLE_LOOK_S = 10.0
IDLE_BYTES = 16 * MB  # written and read in that time; with less the broker counts as idle
TRIM_INTERVAL_S = 5.0
SAME_ALARM_S = 10.0  # an alarm that returns sooner continues the last one: its patience periods have passed
NOTHING_LEFT_S = 30.0
OTHER_FILES = 128  # journal, slots, listeners, threads
CONNECTIONS_MIN = 64
MEMORY, DISK, DEPTH = "memory", "disk", "depth"
EVENTS = ("memory_paused", "disk_paused", "memory_slowed", "depth_slowed")


class PressureLimits(NamedTuple):
    memory_bytes: int
    disk_free_bytes: int
    pending_bytes: int


class Usage(NamedTuple):
    rss_bytes: int
    pending_bytes: int  # waiting for the disk
    disk_free_bytes: int


class Verdict(NamedTuple):
    """The decision for publishers. `level` 0 is full speed; it has no meaning while they are paused."""

    level: int = 0
    slowed_by: str = ""
    memory_alarm: bool = False
    disk_alarm: bool = False

    @property
    def paused_by(self) -> str | None:
        return MEMORY if self.memory_alarm else DISK if self.disk_alarm else None

    @property
    def rate_bytes_s(self) -> int | None:
        """The rate of all publishers together; None is unlimited."""
        if self.paused_by is not None:
            return 0
        return RATES[self.level - 1] if self.level else None


CALM = Verdict()


def judge(before: Verdict, usage: Usage, limits: PressureLimits) -> Verdict:
    """Pure function. Alarms and steps have hysteresis, so that nothing toggles at a threshold."""
    memory = usage.rss_bytes / limits.memory_bytes
    depth = usage.pending_bytes / limits.pending_bytes
    memory_level = _level(MEMORY_STEPS, memory, before.level if before.slowed_by == MEMORY else 0)
    depth_level = _level(DEPTH_STEPS, depth, before.level if before.slowed_by == DEPTH else 0)
    level = max(memory_level, depth_level)
    disk_enough = limits.disk_free_bytes * (DISK_RESUME_SHARE if before.disk_alarm else 1.0)
    return Verdict(
        level,
        "" if not level else MEMORY if memory_level >= depth_level else DEPTH,
        memory >= (RESUME_SHARE if before.memory_alarm else PAUSE_SHARE),
        usage.disk_free_bytes < disk_enough,
    )


def _level(steps: tuple[float, ...], share: float, before: int) -> int:
    entered = sum(share >= step for step in steps)
    kept = sum(share >= step - STEP_BACK for step in steps)
    return max(entered, min(before, kept))


class Reclaimable(Protocol):
    """Memory that can be freed without losing data: caches, read-ahead, buffers that can go to disk."""

    name: str
    patience_s: float  # how long an alarm must last before this holder is asked

    def held_bytes(self) -> int: ...

    def shed(self, wanted_bytes: int) -> int:
        """Free about that much, largest parts first; returns the bytes really freed."""


class Pressure:
    """Owned by the broker and used on its event loop, which calls `tick` about twenty times a second."""

    def __init__(
        self, shard: Shard, config: Config, clock: Clock, disk: Disk, memory: ProcessMemory | None = None
    ) -> None:
        self._shard, self._clock, self._disk = shard, clock, disk
        self._data_dir = config.data_dir
        self._segment_files = config.log.open_files_max
        self._memory = memory or ProcessMemory()
        limit = memory_limit(config.memory_limit)
        self.limits = PressureLimits(limit, config.disk_free_limit, max(4 * MB, min(PENDING_BYTES_MAX, limit // 4)))
        self.verdict = Verdict()
        self.usage = Usage(self._memory.rss_bytes(), 0, config.disk_free_limit)
        self.holders: list[Reclaimable] = []
        self.events = dict.fromkeys(EVENTS, 0)
        self.shed_bytes: dict[str, int] = {}
        self.delays = 0  # times that a publisher was delayed
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._callbacks: list[Callable[[Verdict], object]] = []
        self._unseen_bytes = 0
        self._growth_bytes = limit // 64
        self._free_at = 0.0
        self._look_due = self._disk_due = self._shed_due = self._trim_due = self._idle_due = 0.0
        self._moved_bytes = 0
        self._has_worked = False
        self._alarm_since = self._complain_due = 0.0
        self._alarm_ended = -SAME_ALARM_S
        self._trim: asyncio.Future[None] | None = None
        if self.usage.rss_bytes >= limit * RESUME_SHARE:
            logger.warning(
                "memory_limit %s is too small: the broker alone takes %d MB", format_size(limit),
                self.usage.rss_bytes // MB,
            )  # fmt: skip

    # Admission of publishers.

    @property
    def must_throttle(self) -> bool:
        """Whether clients that wait for each answer (Kafka) should pause: the disk has its limit of pending bytes."""
        return self._shard.pending_bytes > self.limits.pending_bytes

    @property
    def must_pause_reading(self) -> bool:
        """Whether clients that publish without waiting (AMQP) should no longer be read.

        They stop at a quarter of the limit: whatever their sockets hold already still comes."""
        return self._shard.staging.pending_bytes > self.limits.pending_bytes // STREAMING_PART

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Call back once, when the pending bytes are on disk."""
        self._shard.on_drain(callback)

    @property
    def connections_max(self) -> int:
        """Of all listeners together: the file descriptors that the log does not need."""
        files = self._disk.open_files_max()
        log_files = (self._segment_files or files // 4) + 2 * parts_max(files)
        return max(CONNECTIONS_MIN, files - log_files - OTHER_FILES)

    @property
    def memory_share(self) -> float:
        return self.usage.rss_bytes / self.limits.memory_bytes

    @property
    def paused_s(self) -> float:
        """Total time that publishers have been paused since the start."""
        return self._paused_s + (self._clock.monotonic() - self._paused_at if self._paused_at is not None else 0.0)

    @property
    def paused_because(self) -> str | None:
        """The reason as a sentence, while publishers are paused."""
        if self.verdict.memory_alarm:
            return f"memory is short: {self.usage.rss_bytes // MB} MB of {format_size(self.limits.memory_bytes)} in use"
        if self.verdict.disk_alarm:
            enough = int(self.limits.disk_free_bytes * DISK_RESUME_SHARE)
            return f"disk space is short: {self.usage.disk_free_bytes // MB} MB free, {enough // MB} MB needed"
        return None

    def check(self) -> None:
        """For publishers that can be refused. Raises Overloaded or DiskFull while publishers are paused."""
        if self.verdict.memory_alarm:
            raise Overloaded(f"{self.paused_because}; messages can be read, but not published", 2.0)
        if self.verdict.disk_alarm:
            raise DiskFull(f"{self.paused_because}; messages can be read, but not published")
        pending = self._shard.pending_bytes
        if pending > self.limits.pending_bytes:
            raise Overloaded(f"{pending:,} bytes are waiting for the disk")

    def admit(self, size: int) -> float:
        """For publishers that can be refused and delayed (HTTP): count the bytes, and return the seconds to wait.

        Raises as `check` does."""
        self.check()
        self.count_received(size)
        return self.delay_s(size)

    def delay_s(self, size: int) -> float:
        """Seconds that a publisher of `size` bytes must wait before it sends more; 0 at full speed."""
        rate = self.verdict.rate_bytes_s
        if not rate:
            return 0.0
        now = self._clock.monotonic()
        self._free_at = max(now, self._free_at) + size / rate
        delay = min(self._free_at - now, size * FAIR_PART / rate, DELAY_S_MAX)
        self.delays += delay > 0.001
        return delay

    def on_change(self, callback: Callable[[Verdict], object]) -> None:
        self._callbacks.append(callback)

    def add_holder(self, holder: Reclaimable) -> None:
        self.holders.append(holder)
        self.shed_bytes.setdefault(holder.name, 0)

    # Measuring.

    def count_received(self, size: int) -> None:
        """Count received bytes. A burst is measured at once: the next tick might be too late."""
        self._unseen_bytes += size
        if self._unseen_bytes >= self._growth_bytes:
            self.look()

    def tick(self) -> None:
        now = self._clock.monotonic()
        if self._unseen_bytes or now >= self._look_due or self.verdict != CALM:
            self.look()
        if self.verdict.memory_alarm and now >= self._shed_due:
            self._shed_due = now + SHED_INTERVAL_S
            self._shed(now)
        elif self.verdict.slowed_by == MEMORY and now >= self._trim_due:
            self._trim_memory(now)
        elif now >= self._idle_due:
            self._idle_due = now + IDLE_LOOK_S
            self._trim_after_work(now)

    def look(self) -> None:
        self._unseen_bytes = 0
        now = self._clock.monotonic()
        self._look_due = now + CALM_LOOK_S
        free = self.usage.disk_free_bytes
        if now >= self._disk_due:
            self._disk_due = now + DISK_LOOK_S
            free = self._free_bytes()
        self.usage = Usage(self._memory.rss_bytes(), self._shard.pending_bytes, free)
        self._take(judge(self.verdict, self.usage, self.limits), now)

    def _free_bytes(self) -> int:
        try:
            return self._disk.free_bytes(self._data_dir)
        except OSError:
            return self.usage.disk_free_bytes  # the log reports what is wrong with the disk

    def _take(self, verdict: Verdict, now: float) -> None:
        before, self.verdict = self.verdict, verdict
        if verdict == before:
            return
        if verdict.memory_alarm and not before.memory_alarm:
            self.events["memory_paused"] += 1
            self._shed_due = 0.0
            if now - self._alarm_ended > SAME_ALARM_S:
                self._alarm_since = now
        if before.memory_alarm and not verdict.memory_alarm:
            self._alarm_ended = now
        if verdict.disk_alarm and not before.disk_alarm:
            self.events["disk_paused"] += 1
        if verdict.level and (not before.level or verdict.slowed_by != before.slowed_by):
            self.events[f"{verdict.slowed_by}_slowed"] += 1
        if (verdict.paused_by is None) != (before.paused_by is None):
            self._log_paused(now)
        for callback in list(self._callbacks):
            callback(verdict)

    def _log_paused(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now
            logger.warning("publishers are paused: %s", self.paused_because)
        else:
            self._paused_s += now - self._paused_at
            logger.warning("publishers resume after %.1f s", now - self._paused_at)
            self._paused_at = None

    # Reclaiming memory.

    def _shed(self, now: float) -> None:
        """Ask the largest holders first, until enough is freed."""
        excess = int(self.usage.rss_bytes - self.limits.memory_bytes * SHED_TO_SHARE)
        patient = [holder for holder in self.holders if now - self._alarm_since >= holder.patience_s]
        freed = 0
        for _, _, holder in sorted(((h.held_bytes(), i, h) for i, h in enumerate(patient)), reverse=True):
            if freed >= excess:
                break
            got = holder.shed(excess - freed)
            self.shed_bytes[holder.name] += got
            freed += got
        self._trim_memory(now)
        if not freed and now - self._alarm_since > NOTHING_LEFT_S and now >= self._complain_due:
            self._complain_due = now + 60.0
            logger.warning("%s, and nothing is left to reclaim", self.paused_because)

    def _trim_after_work(self, now: float) -> None:
        """Return the allocator's free memory to the system once after each busy period."""
        counters = self._shard.counters
        moved, self._moved_bytes = self._moved_bytes, counters.bytes_written + counters.bytes_read
        if self._moved_bytes - moved > IDLE_BYTES:
            self._has_worked = True
        elif self._has_worked:
            self._has_worked = False
            self._trim_memory(now)

    def _trim_memory(self, now: float) -> None:
        if self._trim is None or self._trim.done():
            self._trim_due = now + TRIM_INTERVAL_S
            self._trim = asyncio.get_running_loop().run_in_executor(None, trim_allocator)

    async def close(self) -> None:
        if self._trim is not None:
            await self._trim
        self._callbacks.clear()
        self._memory.close()
