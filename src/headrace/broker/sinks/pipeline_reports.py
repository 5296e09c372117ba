"""Status reports of pipelines: state, lag, rates, last error. Shown by the dashboard and the CLI.

A pipeline reports every few seconds; each report is complete, so only the last one is kept. Reports are journaled
without waiting: if a power failure loses one, the next replaces it. The answer tells the pipeline whether an operator
asked it to stop.
"""

from typing import Any

import msgspec

from headrace.clock import Clock
from headrace.errors import InvalidInput, LimitReached, NotFound
from headrace.log.shard import Shard

TABLE = "pipelines"
PIPELINES_MAX = 1_000
NAME_BYTES_MAX = 255
REPORT_BYTES_MAX = 64 << 10
SILENT_MS_MAX = 30_000  # a running pipeline that is silent for so long is shown as lost

STATES = ("starting", "running", "stopped", "failed")


class PipelineNotFound(NotFound):
    def __init__(self, name: str) -> None:
        super().__init__(f"there is no pipeline {name!r}")
        self.name = name


class StoredReport(msgspec.Struct, frozen=True, kw_only=True):
    state: str
    updated_ms: int = 0
    started_ms: int = 0
    stop_requested: bool = False
    details: dict[str, Any] = {}  # lag, rates, batch, last error, as the pipeline reported them

    def as_seen(self, now_ms: int) -> str:
        if self.state in {"starting", "running"} and now_ms - self.updated_ms > SILENT_MS_MAX:
            return "lost"
        return self.state


class Pipelines:
    def __init__(self, shard: Shard, clock: Clock) -> None:
        self._shard = shard
        self._clock = clock
        self._reports: dict[str, StoredReport] = {
            key.decode(): msgspec.msgpack.decode(value, type=StoredReport) for key, value in shard.state.items(TABLE)
        }

    def names(self) -> list[str]:
        return sorted(self._reports)

    def get(self, name: str) -> StoredReport:
        try:
            return self._reports[name]
        except KeyError:
            raise PipelineNotFound(name) from None

    def __len__(self) -> int:
        return len(self._reports)

    def report(self, name: str, state: str, details: dict[str, Any]) -> StoredReport:
        """Store a report; `stop_requested` of the result tells the pipeline whether to stop."""
        if state not in STATES:
            raise InvalidInput(f"the state of a pipeline must be one of {', '.join(STATES)}, not {state[:80]!r}")
        old = self._reports.get(name)
        if old is None:
            self._check_new(name)
        now_ms = self._clock.now_ms()
        begins = old is None or state == "starting"
        kept = StoredReport(
            state=state,
            updated_ms=now_ms,
            started_ms=now_ms if begins or old is None else old.started_ms,
            stop_requested=False if begins or old is None else old.stop_requested,
            details=details,
        )
        self._store(name, kept)
        return kept

    def ask_to_stop(self, name: str) -> StoredReport:
        asked = msgspec.structs.replace(self.get(name), stop_requested=True)
        self._store(name, asked)
        return asked

    def forget(self, name: str) -> None:
        self.get(name)
        group = self._shard.group()
        group.delete(TABLE, name.encode())
        group.commit(lazy=True)
        del self._reports[name]

    def _store(self, name: str, report: StoredReport) -> None:
        try:
            value = msgspec.msgpack.encode(report)
        except OverflowError:
            raise InvalidInput("details must not contain numbers of more than 64 bits") from None
        if len(value) > REPORT_BYTES_MAX:
            raise InvalidInput(f"a report must have at most {REPORT_BYTES_MAX:,} bytes, not {len(value):,}")
        group = self._shard.group()
        group.put(TABLE, name.encode(), value)
        group.commit(lazy=True)
        self._reports[name] = report

    def _check_new(self, name: str) -> None:
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidInput("a name must not contain unpaired surrogates") from None
        if not 0 < size <= NAME_BYTES_MAX:
            raise InvalidInput(f"the name of a pipeline must have 1 to {NAME_BYTES_MAX} bytes, not {size}")
        if len(self._reports) >= PIPELINES_MAX:
            raise LimitReached(f"there are already {PIPELINES_MAX:,} pipelines: forget some first")
