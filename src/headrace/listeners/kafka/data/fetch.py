"""Fetch: answers when enough bytes are readable, or when the client's max_wait_ms has passed.

Waiting costs nothing: a watch on a log stays in place from one fetch to the next, until the log has more to read.
"""

import asyncio
from enum import Enum
from typing import Any

from headrace.broker.streams.partition import PART_BYTES_MIN, Partition, ReadWaits
from headrace.errors import HeadraceError
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.connection import Connection
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.data.fetch_sessions import FetchPosition, Key, Opened
from headrace.listeners.kafka.errors import Code, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka import hot
from headrace.wire.kafka.hot import FetchRequest, FetchResult

READ_COMMITTED = 1
BY_ID_FROM = 13  # the version from which requests name topics by id
LARGE_BYTES = 64 << 10  # a larger request may name more partitions than exist
RECHECK_S = 0.005  # a fetch that waits for many bytes does not read again for every small batch
Results = list[tuple[Key, FetchPosition, FetchResult]]


class Watch:
    """Notifies a connection's waiting fetches once when a log becomes readable at an offset."""

    __slots__ = ("committed", "connection", "fired", "offset", "waiter")

    def __init__(self, connection: Connection, partition: Partition, offset: int, committed: bool) -> None:
        self.connection = connection
        self.offset = offset
        self.committed = committed
        self.fired = False
        self.waiter = partition.wait(offset, self._fire, committed=committed)

    def is_armed(self, offset: int, committed: bool) -> bool:
        return not self.fired and self.offset == offset and self.committed == committed

    def _fire(self) -> None:
        self.fired = True
        for callback in list(self.connection.fetch_waiters):
            callback()

    def cancel(self) -> None:
        self.waiter.cancel()


class FetchState(Enum):
    """State of one Fetch.

    WAITING and RECHECKING have their watches armed and the max_wait_ms timer running. A watch that fires moves WAITING
    to RECHECKING, or reads at once if any byte is enough. LOADING ignores watches, because it reads every partition
    again when it ends; it also outlasts max_wait_ms, because an empty answer would be wrong.
    """

    READING = "reading the partitions"
    LOADING = "waiting for a worker thread to read cold data into memory"
    WAITING = "waiting for more bytes or for max_wait_ms"
    RECHECKING = "new bytes arrived, reads again after RECHECK_S"
    DONE = "answered, failed, or the connection is gone"


class Fetch:
    """One fetch request, from parsing to its answer."""

    def __init__(self, context: KafkaContext, request: Request, parsed: FetchRequest) -> None:
        self.context = context
        self.request = request
        self.max_wait_ms = parsed.max_wait_ms
        self.min_bytes = parsed.min_bytes
        self.max_bytes = min(parsed.max_bytes, context.config.read_bytes_max, context.flow.answer_bytes_max())
        self.committed = parsed.isolation == READ_COMMITTED
        known = request.connection.access
        self.topics: Topics = context.topics if known is None else known.reads
        self.opened: Opened = context.fetch_sessions.open(
            request.connection.fetch_sessions,
            parsed.session_id,
            parsed.session_epoch,
            request.version >= BY_ID_FROM,
            parsed.topics,
            parsed.forgotten,
        )
        self._state = FetchState.READING
        self._is_past_max_wait = self.max_wait_ms <= 0 or not self.opened.wanted
        self._max_wait_timer: asyncio.TimerHandle | None = None
        self._recheck_timer: asyncio.TimerHandle | None = None
        # Found by the last read of the partitions:
        self._cold: ReadWaits | None = None  # the first read that needs data which is not in memory
        self._messages = 0
        self._is_full = False  # there was more than max_bytes

    def start(self) -> None:
        if self.opened.error:
            self._answer([])
        else:
            self._read_and_answer_or_wait()

    def _read_and_answer_or_wait(self) -> None:
        """Timers and logs call this, too, so a bug here ends this connection and must not reach the caller."""
        try:
            self._state = FetchState.READING
            results, size, has_error = self._read_all()
            cold, self._cold = self._cold, None
            if cold is not None and not has_error and size < max(self.min_bytes, 1):
                self._state = FetchState.LOADING
                cold.then(self._on_loaded)
            elif self._is_past_max_wait or has_error or self._is_full or size >= self.min_bytes:
                if cold is not None:  # load it for the next fetch, which may find other partitions in memory again
                    cold.then(lambda: None)
                self._answer(self._changed(results) if self.opened.is_incremental else results)
            else:
                self._wait()
        except Exception as error:  # noqa: BLE001 - one bad request must not stop the others
            self._finish()
            self.request.fail(error)

    # Reading.

    def _read_all(self) -> tuple[Results, int, bool]:
        """(results, bytes found, whether a partition failed)"""
        results: Results = []
        size, has_error = 0, False
        self._messages = 0
        self._is_full = False
        incremental, committed = self.opened.is_incremental, self.committed
        for key, wanted in self.opened.wanted.items():
            if incremental and wanted.watch is not None and wanted.watch.is_armed(wanted.offset, committed):
                continue  # all that an idle partition of a session costs
            result = self._read_one(key, wanted, self.max_bytes - size, first=size == 0)
            records = result.records
            size += len(records) if records is not None else 0
            has_error = has_error or result.error != Code.NONE
            results.append((key, wanted, result))
        return results, size, has_error

    def _read_one(self, key: Key, wanted: FetchPosition, room: int, *, first: bool) -> FetchResult:
        topic, number = key
        try:
            partition = self.topics.partition(topic, number)
            if wanted.leader_epoch >= 0 and wanted.leader_epoch != partition.epoch:
                stale = wanted.leader_epoch < partition.epoch
                return FetchResult(number, Code.FENCED_LEADER_EPOCH if stale else Code.UNKNOWN_LEADER_EPOCH)
            committed = self.committed
            high, stable, start = partition.end_offset, partition.stable_end, partition.start_offset
            end = stable if committed else high
            records: Any = None
            next_offset = wanted.offset
            if wanted.offset != end:
                most = min(wanted.max_bytes, room)
                if room > 0 or first:
                    records, next_offset = self._records(partition, wanted.offset, most, end)
                # The first batch is sent regardless of its size: a client with a smaller limit could never continue.
                # Later batches are not: librdkafka closes the connection when a response exceeds its limit, every time.
                if not first and (records is None or len(records) > most):
                    records, next_offset = None, wanted.offset
                    self._is_full = True
                self._messages += max(0, next_offset - wanted.offset)
            aborted = self._aborted(partition.log_id, wanted.offset, next_offset) if committed else None
            return FetchResult(number, Code.NONE, high, stable, start, aborted, records)
        except ReadWaits as cold:
            self._cold = self._cold or cold
            return FetchResult(number, Code.NONE, high, stable, start, [] if committed else None)
        except HeadraceError as error:
            return FetchResult(number, code_of(error))

    def _records(self, partition: Partition, offset: int, most: int, end: int) -> tuple[Any, int]:
        """(records, the offset after them). The records are a range of their file where it can be sent from there."""
        if self.request.connection.takes_files and most >= PART_BYTES_MIN:
            part = partition.file_range_now(offset, most, end=end)
            if part is not None:
                return part, part.next_offset
        chunk = partition.read_now(offset, max(1, most), end=end)
        return chunk.data, chunk.next_offset

    def _aborted(self, log_id: int, start: int, end: int) -> list[tuple[int, int]]:
        producers = self.context.coordination.producers.of(log_id)
        return producers.aborted_between(start, end) if producers is not None else []

    def _changed(self, results: Results) -> Results:
        """The results that an incremental fetch session has to include."""
        return [
            (key, wanted, result)
            for key, wanted, result in results
            if result.records
            or result.error
            or result.high_watermark != wanted.high_watermark
            or result.log_start != wanted.log_start
        ]

    # Answering.

    def _answer(self, results: Results) -> None:
        self._finish()
        stats = self.context.stats
        stats.messages_out += self._messages
        topics: dict[str | bytes, list[FetchResult]] = {}
        read: list[Key] = []
        for key, wanted, result in results:
            topics.setdefault(key[0], []).append(result)
            wanted.high_watermark, wanted.log_start = result.high_watermark, result.log_start
            records = result.records
            if records:
                stats.bytes_out += len(records)
                read.append(key)
        for key in read:  # partitions with records move to the end, so that the next fetch starts with the others
            kept = self.opened.wanted.pop(key, None)
            if kept is not None:
                self.opened.wanted[key] = kept
        request = self.request
        request.answer(
            hot.fetch_response(
                request.version,
                request.correlation_id,
                0,
                self.opened.error,
                self.opened.session_id,
                list(topics.items()),
            )
        )

    def _finish(self) -> None:
        self._state = FetchState.DONE
        if self._on_readable in self.request.connection.fetch_waiters:
            self.request.connection.fetch_waiters.remove(self._on_readable)
        for timer in (self._max_wait_timer, self._recheck_timer):
            if timer is not None:
                timer.cancel()
        self._max_wait_timer = self._recheck_timer = None

    # Waiting.

    def _wait(self) -> None:
        self._state = FetchState.WAITING
        self._arm_watches()
        waiters = self.request.connection.fetch_waiters
        if self._on_readable not in waiters:
            waiters.append(self._on_readable)
        if self._max_wait_timer is None:
            self._max_wait_timer = self.context.loop.call_later(
                min(self.max_wait_ms, self.context.config.read_wait_ms_max) / 1000, self._on_max_wait
            )

    def _arm_watches(self) -> None:
        connection, committed = self.request.connection, self.committed
        for (topic, number), wanted in self.opened.wanted.items():
            if wanted.watch is not None and wanted.watch.is_armed(wanted.offset, committed):
                continue
            try:
                partition = self.topics.partition(topic, number)
            except HeadraceError:
                continue
            end = partition.stable_end if committed else partition.end_offset
            offset, log_id = max(wanted.offset, end), partition.log_id
            watch: Watch | None = connection.watches.get(log_id)
            if watch is None or not watch.is_armed(offset, committed):
                if watch is not None:
                    watch.cancel()
                    watch.fired = True  # other sessions share this watch and must not skip their partition for it
                watch = connection.watches[log_id] = Watch(connection, partition, offset, committed)
            wanted.watch = watch

    def _on_readable(self) -> None:
        if self._state is not FetchState.WAITING:
            return
        if self.min_bytes > 1:
            self._state = FetchState.RECHECKING
            self._recheck_timer = self.context.loop.call_later(RECHECK_S, self._on_recheck)
        else:
            self._resume()

    def _on_recheck(self) -> None:
        self._recheck_timer = None
        if self._state is FetchState.RECHECKING:
            self._resume()

    def _on_max_wait(self) -> None:
        self._max_wait_timer = None
        self._is_past_max_wait = True
        if self._state is not FetchState.LOADING:
            self._resume()

    def _on_loaded(self) -> None:
        if self._state is FetchState.LOADING:
            self._resume()

    def _resume(self) -> None:
        """Read again, with the permissions that the connection has now, unless it is gone or not admitted any more."""
        if self.request.connection.is_closed or not self.context.admits(self.request):
            self._finish()
            return
        self.topics = self.context.access_of(self.request).reads
        self._read_and_answer_or_wait()


def fetch(context: KafkaContext, request: Request) -> None:
    parsed = hot.parse_fetch(request.buffer, request.position, request.size, request.version)
    request.buffer = bytearray()
    if request.size > LARGE_BYTES:
        context.check_named(parsed.topics)
    if parsed.replica_id >= 0:  # a broker that replicates: this cluster has no other broker
        pieces = hot.fetch_response(
            request.version, request.correlation_id, 0, Code.CLUSTER_AUTHORIZATION_FAILED, 0, []
        )
        request.answer(pieces)
        return
    Fetch(context, request, parsed).start()
