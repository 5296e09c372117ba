"""The reading half: a batch of everything, or micro-batches for ever.

Planning methods run in a Python process beside the driver, `read` in the executors' workers; the objects are
pickled in between and hold no file, socket or lock.
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
from headrace.spark.access import Access, Hold, Piece, State
from headrace.spark.broker import BrokerLink
from headrace.spark.offsets import Partition, Position, Positions, from_json, to_json
from headrace.spark.options import BadOption, ReadOptions
from headrace.spark.plan import HOLD_MS, Planner, by_topic, planned
from headrace.spark.rows import Rows
from headrace.spark.workers import prepare_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

logger = logging.getLogger("headrace.spark")

KEEP_RETRY_S = 1.0  # a stream with nothing to do has no reason to wait for a broker that is not there
KEEP_AGAIN_S = 60.0


class SlicePartition(InputPartition):
    """A piece of the plan on its way to an executor."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


class _Reading:
    """What both readers share: a plan on the driver, rows on executors."""

    def __init__(self, options: ReadOptions, access: Access, columns: Sequence[str], schema: "StructType") -> None:
        self._options = options
        self._access = access
        self._planner = Planner(options, access)
        self._schema = schema
        self._broker: BrokerLink | None = None
        self._rows = Rows(
            access, columns, verify_crc=options.verify_crc, committed=options.isolation == "read_committed"
        )

    def _link(self) -> BrokerLink | None:
        """To the broker, if it was said where it is: cursors are with it."""
        if self._options.bootstrap is not None and self._broker is None:
            self._broker = BrokerLink(self._options.bootstrap)
        return self._broker

    def _close_link(self) -> None:
        if self._broker is not None:
            self._broker.close()

    def _planned(self, plan: Callable[[], list[Piece]]) -> tuple[list[InputPartition], Hold | None]:
        """Plan, and see to it that what was planned stays until the batch is done, or its time is over."""
        for_ms = min(HOLD_MS, self._options.pin_max_age_ms)
        pieces, hold = planned(self._access, plan, for_ms)
        return [SlicePartition(piece) for piece in pieces], hold

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        if not isinstance(partition, SlicePartition):
            return iter(())  # Spark's stand-in for a plan without a single piece
        from pyspark.sql.pandas.types import to_arrow_schema

        prepare_worker()
        return self._rows.read(partition.piece, to_arrow_schema(self._schema, timezone="UTC"))


class BatchReader(_Reading, DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        options = self._options
        if options.cursor is not None:
            raise BadOption("cursor", "is for streams: a batch has no progress to keep")

        def plan() -> list[Piece]:
            """With ends of its own every time: where retention was faster than the last, the earliest is another."""
            states = self._planner.states()
            start, end = self._planner.first(states, "earliest"), self._planner.last(states)
            return self._planner.pieces(start, end, states)

        # Nobody says when a batch is done: what holds its files goes when its time is over.
        planned, _ = self._planned(plan)
        self._access.close()
        return planned


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, access: Access, columns: Sequence[str], schema: "StructType") -> None:
        super().__init__(options, access, columns, schema)
        if options.ending is not None or options.ending_ms is not None:
            name = "endingOffsets" if options.ending is not None else "endingTimestamp"
            raise BadOption(name, "is for batches: a stream has no end (trigger availableNow stops at what is there)")
        self._target: dict[Partition, State] | None = None
        self._holding: list[tuple[dict[str, Any], Hold]] = []  # the end of a batch, what holds its files
        self._told: Positions = {}  # where the cursor was moved to,
        self._tell_at = 0.0  # and when it is told so again
        self._try_at = 0.0  # after it could not be told

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Called once in the life of a checkpoint."""
        states = self._planner.states()
        first = self._planner.first(states, "latest")
        self._move_cursor(first)  # a pin holds from before the first batch on
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
        """Called about every ten milliseconds: reads the slots, 64 bytes a log, and nothing else."""
        if self._options.stop_file is not None and Path(self._options.stop_file).exists():
            return start  # nothing new, so no further batch is begun
        began = from_json(start)
        states = self._planner.states_left() if self._target is None else self._target
        latest = self._planner.latest(began, states)
        if self._target is not None:
            latest = {place: _further(began.get(place), position) for place, position in latest.items()}
        moved = {place: p for place, p in latest.items() if began.get(place) != p}
        if not moved:
            self._keep_cursor(began)
            return start
        if isinstance(limit, ReadMaxRows):
            latest = self._planner.limited(began, latest, states, rows=limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            latest = self._planner.limited(began, latest, states, size=limit.max_bytes)
        return to_json(latest)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        states = self._planner.states_left()
        return to_json({place: Position(s.end, s.log_id, s.epoch) for place, s in states.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        began, until, states = from_json(start), from_json(end), self._planner.states_left()
        planned, hold = self._planned(lambda: self._planner.pieces(began, until, states))
        if hold is not None:
            self._holding.append((end, hold))
        return planned

    def commit(self, end: dict[str, Any]) -> None:
        """Batches up to here are done for good; Spark says so when it plans the next one."""
        done = next((at for at, (until, _) in enumerate(self._holding) if until == end), -1) + 1
        for _, hold in self._holding[:done]:
            hold.release()
        self._holding = self._holding[done:]
        self._move_cursor(from_json(end))

    def _keep_cursor(self, done: Positions) -> None:
        """When there is nothing new: what Spark would say only with the next batch, and now and then the same again,
        for the broker drops a cursor that stands still for too long."""
        now_s = time.monotonic()
        is_told = done == self._told and now_s < self._tell_at
        if self._options.cursor is None or is_told or now_s < self._try_at:
            return
        link = BrokerLink(self._options.bootstrap or "", retry_s=KEEP_RETRY_S)
        try:
            self._move_cursor(done, link)
        except HeadraceError as error:
            logger.warning("cursor %s could not be kept: %s", self._options.cursor, error)
            self._try_at = now_s + KEEP_AGAIN_S
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
            except (NotFound, OffsetOutOfRange):  # deleted since then, and perhaps made anew
                if options.fail_on_data_loss:
                    raise
        self._told, self._tell_at = positions, time.monotonic() + options.pin_max_age_ms / 4000

    def stop(self) -> None:
        for _, hold in self._holding:
            hold.release()
        self._holding = []
        self._access.close()
        self._close_link()


def _further(began: Position | None, position: Position) -> Position:
    """A restarted query may be past the target that was taken: it stays where it is."""
    if began is not None and began.log_id == position.log_id and began.offset > position.offset:
        return began
    return position


__all__ = ["BatchReader", "Positions", "SlicePartition", "StreamReader"]
