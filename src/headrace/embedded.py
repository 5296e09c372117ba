"""`headrace.Log`: one durable log in a folder, for programs that want the log and no server."""

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
    """A log in a folder of its own. Every method may be called from any thread.

    >>> with headrace.Log("data", retention_ms="7d") as log:
    ...     offset = log.append("hello", key="k")   # on disk when it returns
    ...     log.read(offset)[0].value
    b'hello'

    Settings are those of docs/configuration.md, by name, as people write them. Appends of several threads
    share a sync. The folder is locked: a second Log, or a broker, on it is refused. A process that is forked
    cannot use it.
    """

    def __init__(self, path: str | Path, *, clock: Clock | None = None, **settings: object) -> None:
        config = load(arguments=settings)
        root = Path(path).absolute()
        _refuse_a_brokers(root)
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
        self.recovery: RecoveryReport = report  # what opening found: clean, or what was kept and cut
        self._log: StoredLog = shard.log(LOG_ID)
        self._housekeeping_s = config.retention_interval_ms / 1000
        self._kept_at = self._clock.monotonic()
        self._closed = False
        self._is_parents = False
        self._owner.tick = self._tick
        _open.add(self)

    def forked(self) -> None:
        """In the child of a fork: the thread and the folder are the parent's."""
        if not self._closed:
            self._closed = self._is_parents = True
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
        """The offset of the record: it is on disk when this returns."""
        stamp = self._clock.now_ms() if timestamp is None else timestamp
        return self._append([(_bytes(key), _bytes(value), list(headers), stamp)]).start

    def append_many(self, entries: Iterable[Entry]) -> range:
        """The offsets of records given as (key, value), all of them or none: one batch, one sync."""
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
        """The first offset that can be read."""
        return self._log.start_offset

    @property
    def end_offset(self) -> int:
        """The offset the next record will get: reading stops before it."""
        return self._log.visible_end

    @property
    def latest_offset(self) -> int | None:
        """The offset of the last record, None when there is none."""
        end = self._log.visible_end
        return end - 1 if end > self._log.start_offset else None

    def read(self, offset: int, *, limit: int = 1000, max_bytes: int = READ_BYTES) -> list[Record]:
        """Records from an offset on: none at the end, OffsetOutOfRange past it or before the start."""
        if limit < 1:
            raise InvalidInput(f"limit is at least 1, not {limit}")
        while True:
            chunk = self._when_loaded(partial(self._log.read_now, offset, max_bytes))
            records = codec.records(chunk.data, from_offset=offset, limit=limit)
            if records or chunk.next_offset <= offset:
                return records
            offset = chunk.next_offset  # a stretch that compaction emptied

    def offset_at(self, timestamp_ms: int) -> int:
        """The offset of the first record at or after a time; the end when there is none."""
        found = self._when_loaded(lambda: self._log.offset_for_timestamp_now(timestamp_ms))
        return self.end_offset if found is None else found[0]

    def __iter__(self) -> Iterator[Record]:
        """What is there now."""
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
        """Records from an offset on (the end when None), and then as they come."""
        return Subscription(self, self.end_offset if offset is None else offset)

    def wait(self, offset: int, timeout_s: float | None = None) -> bool:
        """Waits until the record at an offset can be read; False when the time is over."""
        return self.wait_or(offset, threading.Event(), timeout_s)

    def wait_or(self, offset: int, stop: threading.Event, timeout_s: float | None) -> bool:
        """As wait, but setting `stop` ends it, too."""
        waiter = self._on_owner(lambda: self._log.wait(offset, stop.set))
        stop.wait(timeout_s)
        waiter.cancel()
        return self._log.visible_end > offset and not self._closed

    # The rest.

    def verify(self) -> VerifyReport:
        """Reads everything and checks it: batches, offsets, seals and indexes; `problems` names what is wrong."""
        self._on_owner(lambda: None)  # refuses a closed log
        inspector = Inspector(self._shard.root)
        try:
            return inspector.verify()
        finally:
            inspector.close()

    def tier(self) -> int:
        """Archives the sealed segments as Parquet; how many there were. Reads stay the same; pyarrow is needed."""
        found = self._on_owner(lambda: [s for s in self._log.segments if is_archivable(s, self._log.durable_end)])
        for segment in found:
            write_parquet(segment, parquet_path(self._shard.tier_root, segment) + UNFINISHED)
            self._swapped(partial(self._shard.maintenance.archive, self._log, segment))
        return len(found)

    def restore(self) -> int:
        """Brings archived segments back as files of batches; how many there were."""
        found = self._on_owner(lambda: [s for s in self._log.segments if s.is_archived])
        for segment in found:
            path = segment.path(RESTORED)
            write_segment(segment, path)
            self._swapped(partial(self._shard.maintenance.restore, self._log, segment, path))
        return len(found)

    def _swapped(self, swap: Callable[[Callable[[object, BaseException | None], object]], None]) -> None:
        done: Future[bool] = Future()

        def finish(made: object, error: BaseException | None) -> None:
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(made is not None)

        self._on_owner(lambda: swap(finish))
        if not done.result():
            raise Conflict("the log is being compacted: try again")

    def maintain(self) -> None:
        """Applies retention and compaction now; it happens by itself every `retention_interval`."""
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def begin() -> int:
            """How many jobs; each puts what failed."""
            begun = self._apply_retention(done.put)
            if self._settings.cleanup_policy != "delete":
                begun += 1
                self._compact(done.put)
            return begun

        failed = [done.get() for _ in range(self._on_owner(begin))]
        for error in failed:
            if error is not None:
                raise error if isinstance(error, HeadraceError) else StorageError(f"not all was cleaned up: {error}")

    def _tick(self) -> None:
        self._shard.tick()
        if self._clock.monotonic() - self._kept_at >= self._housekeeping_s and self._shard.failure is None:
            self._keep_house()

    def _keep_house(self) -> None:
        self._apply_retention(self._kept_house)
        if self._settings.cleanup_policy != "delete":
            self._compact_if_due()

    def _compact_if_due(self) -> None:
        """Not each time: all of the log is rewritten for what is new in it."""
        try:
            if is_due_now(self._log, self._clock.now_ms()):
                self._compact(self._kept_house)
        except ReadWaits as cold:
            cold.then(self._compact_if_due)

    @staticmethod
    def _kept_house(error: BaseException | None) -> None:
        # Somebody asked for it at the same time, or the log was closed meanwhile.
        if error is not None and not isinstance(error, Conflict | LogClosed):
            logger.error("housekeeping failed: %s", error)

    def _apply_retention(self, done: Callable[[BaseException | None], object]) -> int:
        """How many jobs were begun, one or none; it tells `done` when it is over, with what failed."""
        self._kept_at = self._clock.monotonic()
        self._shard.maintenance.sweep()
        ticket = self._shard.maintenance.starts.apply_retention(self._log, self._clock.now_ms())
        if ticket is None:
            return 0
        ticket.add_callback(lambda ticket: done(ticket.error))
        return 1

    def _compact(self, done: Callable[[BaseException | None], object]) -> None:
        self._shard.maintenance.compact(self._log, lambda _, error: done(error))

    def close(self) -> None:
        """Syncs everything and marks the folder as cleanly closed."""
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
        """What is not in memory is waited for here, not on the owner's thread, where others append meanwhile."""
        while True:
            try:
                return self._on_owner(read)
            except ReadWaits as cold:
                loaded = threading.Event()
                self._on_owner(partial(cold.then, loaded.set))
                while not loaded.wait(TICK_S) and not self._closed:  # then it may be left out
                    pass

    def _on_owner(self, work: Callable[[], T]) -> T:
        if self._is_parents:
            raise LogClosed("the log belongs to the process that opened it, not to one that was forked from it")
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


def _leave_to_parent() -> None:
    for log in list(_open):
        log.forked()


os.register_at_fork(after_in_child=_leave_to_parent)


class Subscription:
    """Iterates over records for ever, waiting where there are none yet, until it or its log is closed."""

    def __init__(self, log: Log, offset: int) -> None:
        self.offset = offset  # of the record that comes next
        self._log = log
        self._closed = False
        self._wake = threading.Event()

    def get(self, timeout_s: float | None = None) -> list[Record]:
        """The next records; an empty list when the time is over or the subscription is closed."""
        records = self._next(timeout_s)
        if records:
            self.offset = records[-1].offset + 1
        return records

    def __iter__(self) -> Iterator[Record]:
        while records := self._next(None):
            for record in records:
                self.offset = record.offset + 1  # right whenever the reader stops
                yield record

    def _next(self, timeout_s: float | None) -> list[Record]:
        self._wake.clear()
        if self._closed or self._log.closed:
            return []
        try:
            if not self._log.wait_or(self.offset, self._wake, timeout_s) or self._closed:
                return []
            return self._log.read(self.offset)
        except LogClosed:  # since we looked
            return []

    def close(self) -> None:
        """Ends the iteration, also of a reader that waits in another thread."""
        self._closed = True
        self._wake.set()

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Owner:
    """The one thread that the log belongs to: it runs what it is given, in order, and ticks in between."""

    def __init__(self, clock: Clock) -> None:
        self.tick: Callable[[], None] | None = None
        self._clock = clock
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._ending = threading.Lock()  # nothing that somebody waits for comes behind the end
        self._ended = False
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="headrace-owner", daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def call(self, work: Callable[[], T]) -> T:
        """The result of work done on the thread, or its error."""
        if threading.current_thread() is self._thread:
            return work()
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:  # noqa: BLE001 - belongs to the caller, on the other thread
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
        while not self._work.empty():  # said by the last that was done: somebody may wait for it
            left = self._work.get()
            if left is not None:
                self._do(left)

    def _do(self, work: Callable[[], object]) -> None:
        """Whatever it raises: without this thread everybody would wait for ever."""
        try:
            work()
        except Exception as error:
            if str(error) != self._said:  # a folder that is gone is gone at every tick
                self._said = str(error)
                logger.exception("looking after the log failed")


def _refuse_a_brokers(root: Path) -> None:
    """Its first topic would be taken for the log, and what its journal holds of the others thrown away."""
    if (root / CATALOG).exists() and not (root / LOGS / log_folder(LOG_ID, SLUG)).exists():
        raise InvalidInput(f"{root} is the folder of a broker: a Log needs one of its own")


def _bytes(data: Data | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data
