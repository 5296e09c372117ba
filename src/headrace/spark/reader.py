"""The reading half: a batch of everything, or micro-batches for ever.

Planning methods run in a Python process beside the driver, `read` in the executors' workers; the objects are
pickled in between and hold no file, socket or lock.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from headrace.spark.access import Access, Piece, State
from headrace.spark.offsets import Partition, Position, Positions, from_json, to_json
from headrace.spark.options import BadOption, ReadOptions
from headrace.spark.plan import Planner
from headrace.spark.rows import Rows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class SlicePartition(InputPartition):
    """A piece of the plan on its way to an executor."""

    def __init__(self, piece: Piece) -> None:
        super().__init__(piece)
        self.piece = piece


class _Reading:
    """What both readers share: a plan on the driver, rows on executors."""

    def __init__(self, options: ReadOptions, access: Access, columns: Sequence[str], schema: "StructType") -> None:
        self._options = options
        self._planner = Planner(options, access)
        self._schema = schema
        self._rows = Rows(
            access, columns, verify_crc=options.verify_crc, committed=options.isolation == "read_committed"
        )

    def read(self, partition: InputPartition) -> "Iterator[pa.RecordBatch]":
        if not isinstance(partition, SlicePartition):
            return iter(())  # Spark's stand-in for a plan without a single piece
        from pyspark.sql.pandas.types import to_arrow_schema

        return self._rows.read(partition.piece, to_arrow_schema(self._schema, timezone="UTC"))


class BatchReader(_Reading, DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        options = self._options
        if options.cursor is not None:
            raise BadOption("cursor", "is for streams: a batch has no progress to keep")
        states = self._planner.states()
        start = self._planner.first(states, "earliest")
        pieces = self._planner.pieces(start, self._planner.last(states), states)
        return [SlicePartition(piece) for piece in pieces]


class StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: ReadOptions, access: Access, columns: Sequence[str], schema: "StructType") -> None:
        super().__init__(options, access, columns, schema)
        if options.ending is not None or options.ending_ms is not None:
            name = "endingOffsets" if options.ending is not None else "endingTimestamp"
            raise BadOption(name, "is for batches: a stream has no end (trigger availableNow stops at what is there)")
        self._target: dict[Partition, State] | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Called once in the life of a checkpoint."""
        states = self._planner.states()
        return to_json(self._planner.first(states, "latest"))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.offsets_per_trigger is not None:
            return ReadMaxRows(self._options.offsets_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._planner.states()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Called about every ten milliseconds: reads the slots, 64 bytes a log, and nothing else."""
        began = from_json(start)
        states = self._planner.states() if self._target is None else self._target
        latest = self._planner.latest(began, states)
        if self._target is not None:
            latest = {place: _further(began.get(place), position) for place, position in latest.items()}
        moved = {place: p for place, p in latest.items() if began.get(place) != p}
        if not moved:
            return start
        if isinstance(limit, ReadMaxRows):
            latest = self._planner.limited(began, latest, states, rows=limit.max_rows)
        elif isinstance(limit, ReadMaxBytes):
            latest = self._planner.limited(began, latest, states, size=limit.max_bytes)
        return to_json(latest)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        states = self._planner.states()
        return to_json({place: Position(s.end, s.log_id, s.epoch) for place, s in states.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        states = self._planner.states()
        pieces = self._planner.pieces(from_json(start), from_json(end), states)
        return [SlicePartition(piece) for piece in pieces]

    def commit(self, end: dict[str, Any]) -> None:
        """Batches up to here are done for good; Spark says so when it plans the next one."""

    def stop(self) -> None:
        pass


def _further(began: Position | None, position: Position) -> Position:
    """A restarted query may be past the target that was taken: it stays where it is."""
    if began is not None and began.log_id == position.log_id and began.offset > position.offset:
        return began
    return position


__all__ = ["BatchReader", "Positions", "SlicePartition", "StreamReader"]
