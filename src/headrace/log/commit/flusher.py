"""Flushes async logs: syncs the records that were confirmed without a sync, every `flush_interval` or `flush_bytes`."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from headrace.log.commit.context import CommitContext
from headrace.log.commit.round import LogEnd
from headrace.log.disk.file_cache import NO_FILES


class _Unsynced(NamedTuple):
    end: int
    written: dict[str, int]


class Flusher:
    def __init__(self, context: CommitContext, logs: Mapping[int, LogEnd]) -> None:
        self._worker = context.worker
        self._keeper = context.keeper
        self._status = context.status
        self._logs = logs
        self._flushing: set[int] = set()
        self._last: dict[int, float] = {}  # by log: when its last flush began
        self._retries: set[int] = set()  # logs whose flush found no free descriptor: the next tick tries again

    def flush_due(self, touched: Iterable[int], now: float) -> None:
        """Flush the logs among `touched` that are due. Called from the tick."""
        for log_id in list(touched):
            log = self._logs.get(log_id)
            if (
                log is None
                or log.is_frozen  # the flush could end after the truncation and report removed records as durable
                or log.durable_end == log.visible_end
                or log_id in self._flushing
            ):
                continue
            since = self._last.setdefault(log_id, now)
            settings = log.settings
            is_due = settings.flush_interval_ms and (now - since) * 1000 >= settings.flush_interval_ms
            has_many = settings.flush_bytes and log.unflushed_bytes >= settings.flush_bytes
            if is_due or has_many or log_id in self._retries:
                self._flush(log, now)

    def _flush(self, log: LogEnd, now: float) -> None:
        self._flushing.add(log.id)
        self._retries.discard(log.id)
        self._last[log.id] = now
        log.unflushed_bytes = 0

        # The worker only lists the files: if it synced them, every round would wait.
        def list_files() -> _Unsynced:
            return _Unsynced(log.tail.next_offset, log.tail.unsynced())

        def listed(unsynced: _Unsynced, error: BaseException | None) -> None:
            if error is not None:
                self._flushed(log, error)
                return
            self._keeper.submit(
                lambda: log.tail.sync_files(unsynced.written), lambda _, failed: self._flushed(log, failed, unsynced)
            )

        self._worker.submit(list_files, listed)

    def _flushed(self, log: LogEnd, error: BaseException | None, unsynced: _Unsynced | None = None) -> None:
        self._flushing.discard(log.id)
        if isinstance(error, OSError) and error.errno in NO_FILES:
            self._status.is_full = True  # as after a checkpoint: records that came meanwhile would be as unsafe
            self._retries.add(log.id)
            return
        if error is not None:
            self._status.fail(error)
            return
        end, written = unsynced or _Unsynced(0, {})
        if not log.is_closed:
            mark_durable(log, end)
        self._worker.submit(lambda: log.tail.synced(written), self._recorded)

    def _recorded(self, _result: object, error: BaseException | None) -> None:
        if error is not None:
            self._status.fail(error)


def mark_durable(log: LogEnd, end: int) -> None:
    """Only up to the visible end: a round that is under way may still be refused as a whole."""
    log.durable_end = max(log.durable_end, min(end, log.visible_end))
