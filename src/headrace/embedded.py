"""`headrace.Log`: a durable log in a folder, for programs that need a log but no server.

A Log owns a thread, and all work on the shard runs on that thread; the public methods may be called from any thread.
"""

import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from headrace.clock import Clock, SystemClock
from headrace.config import load
from headrace.errors import Conflict, HeadraceError, InvalidInput, LogClosed, StorageError
from headrace.log.commit.round import Ticket
from headrace.log.disk.paths import CATALOG, LOGS, RESTORED, UNFINISHED, log_folder
from headrace.log.log import Log as StoredLog
from headrace.log.maintenance.compaction import is_due_now
from headrace.log.read.cold_reads import ReadWaits
from headrace.log.recovery.inspect import Inspector, VerifyReport
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.settings import StreamSettings
from headrace.log.shard import LogSpec, Shard
from headrace.log.tier.archive import is_archivable, parquet_path, write_parquet, write_segment
from headrace.record import codec
from headrace.record.layout import CODECS
from headrace.record.types import Record

logger = logging.getLogger("headrace.embedded")

T = TypeVar("T")
Data = bytes | str
Headers = Iterable[tuple[str, bytes | None]]
Entry = tuple[Data | None, Data | None]  # key, value
Draft = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]

LOG_ID, SLUG = 1, "log"
TICK_S = 0.05
READ_BYTES = 1 << 20


class Log:
    """A log in its own folder. All methods may be called from any thread.

    >>> with headrace.Log("data", retention_ms="7d") as log:
    ...     offset = log.append("hello", key="k")   # on disk when it returns
    ...     log.read(offset)[0].value
    b'hello'

    Settings are those of docs/configuration.md, with the same names and notations. Concurrent appends share a sync. The
    folder is locked: a second Log or a broker cannot open it. A forked child process cannot use the Log.
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None, **settings: object) -> None:
        config = load(arguments=settings)
        root = Path(path).absolute()
        _refuse_data_folder(root)
        self._settings: StreamSettings = config.stream
        self._clock = clock or SystemClock()
        self._owner = _Owner(self._clock)
        spec = LogSpec(LOG_ID, SLUG, config.stream)
        try:
            shard, report = self._owner.call(
                lambda: Shard.open(
                    str(root),
                    config.log,
                    logs=[spec],
                    clock=self._clock,
                    post=self._owner.post,
                )
            )
        except BaseException:
            self._owner.close()
            raise
        self._shard: Shard = shard
        self.recovery: RecoveryReport = report  # whether the last stop was clean, and what recovery kept and cut
        self._log: StoredLog = shard.log(LOG_ID)
        self._maintenance_s = config.retention_interval_ms / 1000
        self._maintained_at = self._clock.monotonic()
        self._closed = False
        self._is_forked = False
        self._owner.tick = self._tick
        _open.add(self)

    def forked(self) -> None:
        """Called in the child of a fork, where the log cannot be used: its thread and folder belong to the parent."""
        if not self._closed:
            self._closed = self._is_forked = True
            self._shard.leave_to_parent()

    # Writing.

    def append(
        self,
        value: Data | None,
        *,
        key: Data | None = None,
        headers: Headers = (),
        timestamp: int | None = None,
    ) -> int:
        """Appends a record and returns its offset once it is on disk."""
        stamp = self._clock.now_ms() if timestamp is None else timestamp
        return self._append([(_bytes(key), _bytes(value), list(headers), stamp)]).start

    def append_many(self, entries: Iterable[Entry]) -> range:
        """Appends records given as (key, value) atomically, as one batch, and returns their offsets."""
        now_ms = self._clock.now_ms()
        records: list[Draft] = [(_bytes(key), _bytes(value), [], now_ms) for key, value in entries]
        if not records:
            return range(0)
        return self._append(records)

    def _append(self, records: list[Draft]) -> range:
        batch = codec.build(records, codec=CODECS[self._settings.compression])
        stored: Future[range] = Future()

        def finish(ticket: Ticket) -> None:
            if ticket.error is not None:
                stored.set_exception(ticket.error)
            else:
                stored.set_result(range(ticket.base_offset, ticket.next_offset))

        self._on_owner(lambda: self._log.append(batch).add_callback(finish))
        return stored.result()

    # Reading.

    @property
    def start_offset(self) -> int:
        """The first readable offset."""
        return self._log.start_offset

    @property
    def end_offset(self) -> int:
        """The offset of the next record to be appended. Reading stops before it."""
        return self._log.visible_end

    @property
    def latest_offset(self) -> int | None:
        """The offset of the last record; None if the log is empty."""
        end = self._log.visible_end
        return end - 1 if end > self._log.start_offset else None

    def read(self, offset: int, *, limit: int = 1000, max_bytes: int = READ_BYTES) -> list[Record]:
        """Records starting at an offset; an empty list at the end. Raises OffsetOutOfRange past the end or before the
        start."""
        if limit < 1:
            raise InvalidInput(f"limit must be at least 1, not {limit}")
        while True:
            chunk = self._when_loaded(partial(self._log.read_now, offset, max_bytes))
            records = codec.records(chunk.data, from_offset=offset, limit=limit)
            if records or chunk.next_offset <= offset:
                return records
            offset = chunk.next_offset  # compaction removed all records of this range

    def offset_at(self, timestamp_ms: int) -> int:
        """The offset of the first record at or after a time; the end offset if there is none."""
        found = self._when_loaded(lambda: self._log.offset_for_timestamp_now(timestamp_ms))
        return self.end_offset if found is None else found[0]

    def __iter__(self) -> Iterator[Record]:
        """Iterates over the records up to the current end."""
        offset, end = self.start_offset, self.end_offset
        while offset < end:
            records = self.read(offset)
            if not records:
                return
            for record in records:
                if record.offset >= end:
                    return
                yield record
            offset = records[-1].offset + 1

    def subscribe(self, offset: int | None = None) -> "Subscription":
        """Records starting at an offset (default: the end), then new ones as they are appended."""
        return Subscription(self, self.end_offset if offset is None else offset)

    def wait(self, offset: int, timeout_s: float | None = None) -> bool:
        """Waits until the record at an offset is readable; False on timeout."""
        return self.wait_or(offset, threading.Event(), timeout_s)

    def wait_or(self, offset: int, stop: threading.Event, timeout_s: float | None) -> bool:
        """Like `wait`, but also returns when another thread sets `stop`."""
        waiter = self._on_owner(lambda: self._log.wait(offset, stop.set))
        stop.wait(timeout_s)
        waiter.cancel()
        return self._log.visible_end > offset and not self._closed

    # Maintenance.

    def verify(self) -> VerifyReport:
        """Reads and checks all batches, offsets, seals and indexes; the report lists the `problems`."""
        self._on_owner(lambda: None)  # raises LogClosed for a closed log
        inspector = Inspector(self._shard.root)
        try:
            return inspector.verify()
        finally:
            inspector.close()

    def tier(self) -> int:
        """Archives the sealed segments as Parquet and returns their number. Reads are unaffected. Needs pyarrow."""
        found = self._on_owner(lambda: [s for s in self._log.segments if is_archivable(s, self._log.durable_end)])
        for segment in found:
            write_parquet(segment, parquet_path(self._shard.tier_root, segment) + UNFINISHED)
            self._swap(partial(self._shard.maintenance.archive, self._log, segment))
        return len(found)

    def restore(self) -> int:
        """Turns archived segments back into segment files and returns their number."""
        found = self._on_owner(lambda: [s for s in self._log.segments if s.is_archived])
        for segment in found:
            path = segment.path(RESTORED)
            write_segment(segment, path)
            self._swap(partial(self._shard.maintenance.restore, self._log, segment, path))
        return len(found)

    def _swap(self, swap: Callable[[Callable[[object, BaseException | None], object]], None]) -> None:
        done: Future[bool] = Future()

        def finish(made: object, error: BaseException | None) -> None:
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(made is not None)

        self._on_owner(lambda: swap(finish))
        if not done.result():
            raise Conflict("the log is being compacted; try again")

    def maintain(self) -> None:
        """Applies retention and compaction now. This also runs automatically every `retention_interval`."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def begin() -> int:
            """Number of jobs started; each puts its error, or None, into `done`."""
            started = self._apply_retention(done.put)
            if self._settings.cleanup_policy != "delete":
                started += 1
                self._compact(done.put)
            return started

        failed = [done.get() for _ in range(self._on_owner(begin))]
        for error in failed:
            if error is not None:
                raise error if isinstance(error, HeadraceError) else StorageError(f"maintenance failed: {error}")

    def _tick(self) -> None:
        self._shard.tick()
        if self._clock.monotonic() - self._maintained_at >= self._maintenance_s and self._shard.failure is None:
            self._maintain_periodically()

    def _maintain_periodically(self) -> None:
        self._apply_retention(self._log_failure)
        if self._settings.cleanup_policy != "delete":
            self._compact_if_due()

    def _compact_if_due(self) -> None:
        """Compaction rewrites the whole log, so it only runs if enough of it is new."""
        try:
            if is_due_now(self._log, self._clock.now_ms()):
                self._compact(self._log_failure)
        except ReadWaits as cold:
            cold.then(self._compact_if_due)

    @staticmethod
    def _log_failure(error: BaseException | None) -> None:
        # Conflict: `maintain` was called at the same time. LogClosed: the log was closed meanwhile.
        if error is not None and not isinstance(error, Conflict | LogClosed):
            logger.error("periodic maintenance failed: %s", error)

    def _apply_retention(self, done: Callable[[BaseException | None], object]) -> int:
        """Starts a job if there is something to delete. Returns the number of jobs; `done` receives the error."""
        self._maintained_at = self._clock.monotonic()
        self._shard.maintenance.sweep()
        ticket = self._shard.maintenance.starts.apply_retention(self._log, self._clock.now_ms())
        if ticket is None:
            return 0
        ticket.add_callback(lambda ticket: done(ticket.error))
        return 1

    def _compact(self, done: Callable[[BaseException | None], object]) -> None:
        self._shard.maintenance.compact(self._log, lambda _, error: done(error))

    def close(self) -> None:
        """Syncs everything and marks the folder as cleanly closed. A second call has no effect."""
        if self._closed:
            return
        self._closed = True
        closed: Future[BaseException | None] = Future()
        try:
            self._owner.call(lambda: self._shard.close(closed.set_result))
            error = closed.result()
            if error is not None:
                raise error
        finally:
            self._owner.tick = None
            self._shard.join()
            self._owner.close()

    @property
    def closed(self) -> bool:
        return self._closed

    def _when_loaded(self, read: Callable[[], T]) -> T:
        """Runs a read on the owner thread. Waits for cold data on the calling thread, so that appends continue."""
        while True:
            try:
                return self._on_owner(read)
            except ReadWaits as cold:
                loaded = threading.Event()
                self._on_owner(partial(cold.then, loaded.set))
                while not loaded.wait(TICK_S) and not self._closed:  # closing may drop the callback
                    pass

    def _on_owner(self, work: Callable[[], T]) -> T:
        if self._is_forked:
            raise LogClosed("the log cannot be used in a forked child of the process that opened it")
        if self._closed:
            raise LogClosed("the log is closed")
        return self._owner.call(work)

    def __enter__(self) -> "Log":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open: "weakref.WeakSet[Log]" = weakref.WeakSet()


def _disable_in_child() -> None:
    for log in list(_open):
        log.forked()


os.register_at_fork(after_in_child=_disable_in_child)


class Subscription:
    """Iterates over records and waits for new ones, until the subscription or its log is closed."""

    def __init__(self, log: Log, offset: int) -> None:
        self.offset = offset  # of the next record
        self._log = log
        self._closed = False
        self._wake = threading.Event()

    def get(self, timeout_s: float | None = None) -> list[Record]:
        """The next records; an empty list on timeout or if the subscription is closed."""
        records = self._next(timeout_s)
        if records:
            self.offset = records[-1].offset + 1
        return records

    def __iter__(self) -> Iterator[Record]:
        while records := self._next(None):
            for record in records:
                self.offset = record.offset + 1  # correct even if the caller stops iterating
                yield record

    def _next(self, timeout_s: float | None) -> list[Record]:
        self._wake.clear()
        if self._closed or self._log.closed:
            return []
        try:
            if not self._log.wait_or(self.offset, self._wake, timeout_s) or self._closed:
                return []
            return self._log.read(self.offset)
        except LogClosed:  # closed since the check above
            return []

    def close(self) -> None:
        """Ends the iteration, even of a thread that is waiting in it."""
        self._closed = True
        self._wake.set()

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Owner:
    """The thread that owns the shard: it runs submitted work in order, and calls `tick` every TICK_S."""

    def __init__(self, clock: Clock) -> None:
        self.tick: Callable[[], None] | None = None
        self._clock = clock
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ending = threading.Lock()  # no call is queued after the end marker, where it would never run
        self._ended = False
        self._logged = ""
        self._thread = threading.Thread(target=self._run, name="headrace-owner", daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def call(self, work: Callable[[], T]) -> T:
        """Runs work on the thread, and returns its result or raises its error."""
        if threading.current_thread() is self._thread:
            return work()
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
                result.set_exception(error)

        with self._ending:
            if self._ended:
                raise LogClosed("the log is closed")
            self._work.put(run)
        return result.result()

    def close(self) -> None:
        with self._ending:
            self._ended = True
            self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        ticked = self._clock.monotonic()
        while True:
            try:
                work = self._work.get(timeout=TICK_S)
                if work is None:
                    break
                self._do(work)
            except queue.Empty:
                pass
            now = self._clock.monotonic()
            if self.tick is not None and now - ticked >= TICK_S:
                ticked = now
                self._do(self.tick)
        while not self._work.empty():  # posted by the last piece of work; a caller may be waiting for it
            left = self._work.get()
            if left is not None:
                self._do(left)

    def _do(self, work: Callable[[], object]) -> None:
        """Errors must not end the thread: all callers would wait for ever."""
        try:
            work()
        except Exception as error:
            if str(error) != self._logged:  # log a persistent error once, not at every tick
                self._logged = str(error)
                logger.exception("work on the log failed")


def _refuse_data_folder(root: Path) -> None:
    """A broker's folder must not be opened: its first topic would become the log, and recovery would discard journal
    entries of the other topics."""
    if (root / CATALOG).exists() and not (root / LOGS / log_folder(LOG_ID, SLUG)).exists():
        raise InvalidInput(f"{root} is the data folder of a broker; a Log needs its own folder")


def _bytes(data: Data | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data
