"""The readers of the Spark source: BatchReader for `read`, StreamReader for `readStream`.

Planning methods run in a Python process next to the driver, `read` in worker processes of the executors. The objects
are pickled in between and hold no file, socket or lock.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from headrace.errors import HeadraceError, NotFound, OffsetOutOfRange
from headrace.spark.access import Access, Lease, ReadTask, State
from headrace.spark.broker import BrokerLink
from headrace.spark.offsets import Partition, Position, Positions, from_json, to_json
from headrace.spark.options import BadOption, ReadOptions
from headrace.spark.plan import LEASE_MS, Planner, by_topic, plan_with_lease
from headrace.spark.rows import RowDecoder
from headrace.spark.worker_process import prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger("headrace.spark")

CURSOR_RETRY_S = 1.0  # an idle stream need not wait for an absent broker
CURSOR_PAUSE_S = 60.0  # after a failed refresh


class ReadPartition(InputPartition):
    """A ReadTask on its way to an executor."""

    def __init__(self, task: ReadTask) -> None:
        super().__init__(task)
        self.task = task


class _Reading:
    """Shared by both readers: planning on the driver, decoding on executors."""

    def __init__(self, options: ReadOptions, access: Access, columns: Sequence[str], schema: "StructType") -> None:
        self._options = options
        self._access = access
        self._planner = Planner(options, access)
        self._schema = schema
        self._broker: BrokerLink | None = None
        self._rows = RowDecoder(
            access, columns, verify_crc=options.verify_crc, committed=options.isolation == "read_committed"
        )

    def _link(self) -> BrokerLink | None:
        """The connection to the broker, which stores cursors; None without the option bootstrap."""
        if self._options.bootstrap is not None and self._broker is None:
            self._broker = BrokerLink(self._options.bootstrap)
        return self._broker

    def _close_link(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def _plan(self, plan: Callable[[], list[ReadTask]]) -> tuple[list[InputPartition], Lease | None]:
        for_ms = min(LEASE_MS, self._options.pin_max_age_ms)
        tasks, lease = plan_with_lease(self._access, plan, for_ms)
        return [ReadPartition(task) for task in tasks], lease

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        if not isinstance(partition, ReadPartition):
            return iter(())  # Spark's placeholder for a plan without tasks
        from pyspark.sql.pandas.types import to_arrow_schema

        prepare_worker()
        return self._rows.read(partition.task, to_arrow_schema(self._schema, timezone="UTC"))


class BatchReader(_Reading, DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        options = self._options
        if options.cursor is not None:
            raise BadOption("cursor", "is only for streams: a batch has no progress to store")

        def plan() -> list[ReadTask]:
            """Reads the bounds of the logs at every attempt, because retention may have moved their start."""
            states = self._planner.states()
            start, end = self._planner.start_positions(states, "earliest"), self._planner.end_positions(states)
            return self._planner.tasks(start, end, states)

        # Spark does not report the end of a batch: the lease expires by itself.
        partitions, _ = self._plan(plan)
        self._access.close()
        return partitions


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, access: Access, columns: Sequence[str], schema: "StructType") -> None:
        super().__init__(options, access, columns, schema)
        if options.ending is not None or options.ending_ms is not None:
            name = "endingOffsets" if options.ending is not None else "endingTimestamp"
            raise BadOption(name, "is only for batches: use trigger availableNow to stop a stream at the current end")
        self._target: dict[Partition, State] | None = None
        self._leases: list[tuple[dict[str, Any], Lease]] = []  # (end of a batch, lease on its files), oldest first
        self._cursor_at: Positions = {}  # the positions last stored in the cursor
        self._refresh_at = 0.0  # when to store the same positions again
        self._retry_at = 0.0  # no attempt before this time, after a failed one

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Called by Spark once in the life of a checkpoint."""
        states = self._planner.states()
        first = self._planner.start_positions(states, "latest")
        self._move_cursor(first)  # so that the pin protects the first batch, too
        return to_json(first)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.offsets_per_trigger is not None:
            return ReadMaxRows(self._options.offsets_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._planner.states_left()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Called by Spark about every ten milliseconds. Reads only the slots, 64 bytes per log."""
        if self._options.stop_file is not None and Path(self._options.stop_file).exists():
            return start  # reports no new records, so that no further batch starts
        began = from_json(start)
        states = self._planner.states_left() if self._target is None else self._target
        latest = self._planner.latest(began, states)
        if self._target is not None:
            latest = {partition: _not_before(began.get(partition), position) for partition, position in latest.items()}
        moved = {partition: p for partition, p in latest.items() if began.get(partition) != p}
        if not moved:
            self._refresh_cursor(began)
            return start
        if isinstance(limit, ReadMaxRows):
            latest = self._planner.limited(began, latest, states, rows=limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            latest = self._planner.limited(began, latest, states, size=limit.max_bytes)
        return to_json(latest)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        states = self._planner.states_left()
        return to_json({partition: Position(s.end, s.log_id, s.epoch) for partition, s in states.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        began, until, states = from_json(start), from_json(end), self._planner.states_left()
        partitions, lease = self._plan(lambda: self._planner.tasks(began, until, states))
        if lease is not None:
            self._leases.append((end, lease))
        return partitions

    def commit(self, end: dict[str, Any]) -> None:
        """Called by Spark when it plans the next batch: all batches up to `end` are finished."""
        done = next((at for at, (until, _) in enumerate(self._leases) if until == end), -1) + 1
        for _, lease in self._leases[:done]:
            lease.release()
        self._leases = self._leases[done:]
        self._move_cursor(from_json(end))

    def _refresh_cursor(self, done: Positions) -> None:
        """Stores the cursor of an idle stream.

        Spark would commit the last batch only when the next one starts. The same positions are stored again from time
        to time, because the broker drops a cursor that is not updated for too long.
        """
        now_s = time.monotonic()
        is_fresh = done == self._cursor_at and now_s < self._refresh_at
        if self._options.cursor is None or is_fresh or now_s < self._retry_at:
            return
        link = BrokerLink(self._options.bootstrap or "", retry_s=CURSOR_RETRY_S)
        try:
            self._move_cursor(done, link)
        except HeadraceError as error:
            logger.warning("cursor %s could not be stored: %s", self._options.cursor, error)
            self._retry_at = now_s + CURSOR_PAUSE_S
        finally:
            link.close()

    def _move_cursor(self, positions: Positions, link: BrokerLink | None = None) -> None:
        options = self._options
        if options.cursor is None:
            return
        link = link or self._link()
        assert link is not None
        for topic, offsets in by_topic(positions):
            try:
                link.put_cursor(options.cursor, topic, offsets, pin=options.pin, max_age_ms=options.pin_max_age_ms)
            except (NotFound, OffsetOutOfRange):  # the topic was deleted, and may have been created again
                if options.fail_on_data_loss:
                    raise
        self._cursor_at, self._refresh_at = positions, time.monotonic() + options.pin_max_age_ms / 4000

    def stop(self) -> None:
        for _, lease in self._leases:
            lease.release()
        self._leases = []
        self._access.close()
        self._close_link()


def _not_before(began: Position | None, position: Position) -> Position:
    """The later of both: a restarted query may already be past the target of trigger availableNow."""
    if began is not None and began.log_id == position.log_id and began.offset > position.offset:
        return began
    return position


__all__ = ["BatchReader", "Positions", "ReadPartition", "StreamReader"]
