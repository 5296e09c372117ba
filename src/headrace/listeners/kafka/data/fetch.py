"""Fetch: answers at once if there is enough to read, else when there is, or when the client's patience ends.

Waiting costs nothing: a watch on a log is left in place from one fetch to the next, until the log has
more to read.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.broker.streams.partition import PART_BYTES_MIN, Partition, ReadWaits
from headrace.errors import HeadraceError
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.auth import access
from headrace.listeners.kafka.connection import Connection
from headrace.listeners.kafka.data.fetch_sessions import FetchPosition, Key, Opened, open_session
from headrace.listeners.kafka.errors import Code, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka import hot

if TYPE_CHECKING:
    from headrace.listeners.kafka.listener import KafkaListener

READ_COMMITTED = 1
BY_ID_FROM = 13  # the version from which topics are called by their ids
LARGE_BYTES = 64 << 10  # may name more partitions than there are
RECHECK_S = 0.005  # a fetch that waits for many bytes does not look again at every small batch
Result = tuple[int, int, int, int, int, Sequence[tuple[int, int]] | None, Any]


class Watch:
    """Tells the connection once that a log can be read at an offset."""

    __slots__ = ("committed", "connection", "fired", "offset", "waiter")

    def __init__(self, connection: Connection, partition: Partition, offset: int, committed: bool) -> None:
        self.connection = connection
        self.offset = offset
        self.committed = committed
        self.fired = False
        self.waiter = partition.wait(offset, self._fire, committed=committed)

    def still_waits(self, offset: int, committed: bool) -> bool:
        return not self.fired and self.offset == offset and self.committed == committed

    def _fire(self) -> None:
        self.fired = True
        for callback in list(self.connection.fetch_waiters):
            callback()

    def cancel(self) -> None:
        self.waiter.cancel()


class Fetch:
    """One request on its way to an answer."""

    def __init__(self, listener: "KafkaListener", request: Request, parsed: tuple[Any, ...]) -> None:
        (
            _,
            self.max_wait_ms,
            self.min_bytes,
            self.max_bytes,
            self.isolation,
            session_id,
            epoch,
            topics,
            gone,
        ) = parsed
        self.listener = listener
        self.request = request
        self.max_bytes = min(self.max_bytes, listener.config.read_bytes_max, listener.flow.answer_bytes_max())
        known = request.connection.access
        self.topics: Topics = listener.topics if known is None else known.reads
        self.opened: Opened = open_session(
            listener, request.connection, session_id, epoch, request.version >= BY_ID_FROM, topics, gone
        )
        self._timer: asyncio.TimerHandle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self._cold: ReadWaits | None = None  # the first thing to read that is not in memory
        self._is_loading = self._is_final = False
        self._messages = 0  # found by the last look
        self._is_full = False  # there was more than it has room for

    def start(self) -> None:
        if self.opened.error:
            self._answer([])
            return
        if not self._try(final=self.max_wait_ms <= 0 or not self.opened.wanted):
            self._wait()

    def _try(self, *, final: bool) -> bool:
        """Whether that was all: see _look. Called by timers and by logs that have more to read, too: our bug ends this
        connection, and is not theirs."""
        try:
            return self._look(final=final)
        except Exception as error:  # noqa: BLE001 - one bad request must not stop the others
            self._stop()
            self.request.fail(error)
            return True

    def _look(self, *, final: bool) -> bool:
        """Answer if there is enough, or if this was the last chance."""
        self._is_final = self._is_final or final
        if self._is_loading:
            return True  # and looks again when it is done
        results, size, has_error = self._read()
        cold, self._cold = self._cold, None
        if cold is not None and not (has_error or size >= max(self.min_bytes, 1)):
            # Not even at the end of the client's patience: that there is nothing would be untrue.
            self._is_loading = True
            cold.then(self._loaded)
            return True
        if not (final or has_error or self._is_full or size >= self.min_bytes):
            return False
        if cold is not None:  # for the next fetch: something else may be in memory each time
            cold.then(lambda: None)
        self._answer(self._changed(results) if self.opened.is_incremental else results)
        return True

    def _is_over(self) -> bool:
        """Nobody wants it any more. What has waited is for whoever the connection belongs to now."""
        if self.request.connection.is_closed or not self.listener.admits(self.request):
            self._stop()
            return True
        self.topics = access.of(self.listener, self.request).reads
        return False

    def _loaded(self) -> None:
        self._is_loading = False
        if self._is_over():
            return
        if not self._try(final=self._is_final):
            if self._timer is None:
                self._wait()
            else:
                self._stop_waiting()
                self._rewatch()

    # Reading.

    def _read(self) -> tuple[list[tuple[Key, FetchPosition, Result]], int, bool]:
        results: list[tuple[Key, FetchPosition, Result]] = []
        size, has_error = 0, False
        self._messages = 0
        self._is_full = False
        incremental, committed = self.opened.is_incremental, self.isolation == READ_COMMITTED
        for key, wanted in self.opened.wanted.items():
            if incremental and wanted.watch is not None and wanted.watch.still_waits(wanted.offset, committed):
                continue  # an idle partition of a session costs this line
            result = self._read_one(key, wanted, self.max_bytes - size, first=size == 0)
            records = result[6]
            size += len(records) if records is not None else 0
            has_error = has_error or result[1] != Code.NONE
            results.append((key, wanted, result))
        return results, size, has_error

    def _read_one(self, key: Key, wanted: FetchPosition, room: int, *, first: bool) -> Result:
        topic, number = key
        try:
            partition = self.topics.partition(topic, number)
            if wanted.leader_epoch >= 0 and wanted.leader_epoch != partition.epoch:
                stale = wanted.leader_epoch < partition.epoch
                code = Code.FENCED_LEADER_EPOCH if stale else Code.UNKNOWN_LEADER_EPOCH
                return number, code, -1, -1, -1, None, None
            committed = self.isolation == READ_COMMITTED
            high, stable, start = partition.end_offset, partition.stable_end, partition.start_offset
            end = stable if committed else high
            records: Any = None
            next_offset = wanted.offset
            if wanted.offset != end:
                most = min(wanted.max_bytes, room)
                if room > 0 or first:
                    records, next_offset = self._records(partition, wanted.offset, most, end)
                # The first batch is sent whatever its size: a client that asks for less than it could never go on.
                # Another is not: librdkafka closes the connection at an answer larger than it can be, again and again.
                if not first and (records is None or len(records) > most):
                    records, next_offset = None, wanted.offset
                    self._is_full = True
                self._messages += max(0, next_offset - wanted.offset)
            aborted = self._aborted(partition.log_id, wanted.offset, next_offset) if committed else None
            return number, Code.NONE, partition.end_offset, stable, start, aborted, records
        except ReadWaits as cold:
            self._cold = self._cold or cold
            return number, Code.NONE, partition.end_offset, stable, start, [] if committed else None, None
        except HeadraceError as error:
            return number, code_of(error), -1, -1, -1, None, None

    def _records(self, partition: Partition, offset: int, most: int, end: int) -> tuple[Any, int]:
        """With the offset behind them. In their file, where they can be sent from there."""
        if self.request.connection.takes_files and most >= PART_BYTES_MIN:
            part = partition.part_now(offset, most, end=end)
            if part is not None:
                return part, part.next_offset
        chunk = partition.read_now(offset, max(1, most), end=end)
        return chunk.data, chunk.next_offset

    def _aborted(self, log_id: int, start: int, end: int) -> list[tuple[int, int]]:
        producers = self.listener.coordination.producers.of(log_id)
        return producers.aborted_between(start, end) if producers is not None else []

    def _changed(self, results: list[tuple[Key, FetchPosition, Result]]) -> list[tuple[Key, FetchPosition, Result]]:
        return [
            (key, wanted, result)
            for key, wanted, result in results
            if result[6] or result[1] or result[2] != wanted.high_watermark or result[4] != wanted.log_start
        ]

    # Answering.

    def _answer(self, results: list[tuple[Key, FetchPosition, Result]]) -> None:
        self._stop()
        stats = self.listener.stats
        stats.messages_out += self._messages
        topics: dict[str | bytes, list[Result]] = {}
        read: list[Key] = []
        for key, wanted, result in results:
            topics.setdefault(key[0], []).append(result)
            wanted.high_watermark, wanted.log_start = result[2], result[4]
            if result[6]:
                stats.bytes_out += len(result[6])
                read.append(key)
        for key in read:  # who was served goes to the end, so that others have their turn
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

    # Waiting.

    def _wait(self) -> None:
        connection = self.request.connection
        committed = self.isolation == READ_COMMITTED
        for (topic, number), wanted in self.opened.wanted.items():
            if wanted.watch is not None and wanted.watch.still_waits(wanted.offset, committed):
                continue
            try:
                partition = self.topics.partition(topic, number)
            except HeadraceError:
                continue
            end = partition.stable_end if committed else partition.end_offset
            offset = max(wanted.offset, end)
            watch: Watch | None = connection.watches.get(partition.log_id)
            if watch is None or not watch.still_waits(offset, committed):
                if watch is not None:
                    watch.cancel()
                    watch.fired = True  # sessions that share it must not take it for a promise
                watch = connection.watches[partition.log_id] = Watch(connection, partition, offset, committed)
            wanted.watch = watch
        connection.fetch_waiters.append(self._woken)
        self._timer = self.listener.loop.call_later(
            min(self.max_wait_ms, self.listener.config.read_wait_ms_max) / 1000, self._time_is_up
        )

    def _woken(self) -> None:
        if self._recheck is not None:
            return
        if self.min_bytes > 1:
            self._recheck = self.listener.loop.call_later(RECHECK_S, self._look_again)
        else:
            self._look_again()

    def _look_again(self) -> None:
        self._recheck = None
        if not self._is_over() and not self._try(final=False):
            self._stop_waiting()
            self._rewatch()

    def _rewatch(self) -> None:
        timer, self._timer = self._timer, None
        self._wait()
        if self._timer is not None and timer is not None:
            self._timer.cancel()  # the first one still runs
        self._timer = timer

    def _time_is_up(self) -> None:
        self._timer = None
        if not self._is_over():
            self._try(final=True)

    def _stop_waiting(self) -> None:
        if self._woken in self.request.connection.fetch_waiters:
            self.request.connection.fetch_waiters.remove(self._woken)

    def _stop(self) -> None:
        self._stop_waiting()
        for timer in (self._timer, self._recheck):
            if timer is not None:
                timer.cancel()
        self._timer = self._recheck = None


def fetch(listener: "KafkaListener", request: Request) -> None:
    parsed = hot.parse_fetch(request.buffer, request.position, request.size, request.version)
    request.buffer = bytearray()
    if request.size > LARGE_BYTES:
        listener.check_named(parsed[7])
    if parsed[0] >= 0:  # somebody who says that it is a broker: there is only us
        pieces = hot.fetch_response(
            request.version, request.correlation_id, 0, Code.CLUSTER_AUTHORIZATION_FAILED, 0, []
        )
        request.answer(pieces)
        return
    Fetch(listener, request, parsed).start()
