"""Segment upkeep on request: replace a segment by a rewritten one, archive, compact, delete before an offset.

Used by the HTTP listener (`headrace log compact|recompress|tier`) and by Kafka's DeleteRecords. Scheduled upkeep is
in schedule.py.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from headrace.broker.sinks.uploads import Uploads
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.producers import Producers
from headrace.errors import Conflict, HeadraceError, NotFound, StorageError
from headrace.log.segments.replacement import Rewritten
from headrace.log.segments.segment import Segment
from headrace.log.shard import Shard
from headrace.log.tier.archive import adopt_rewritten

Outcome = tuple[Rewritten | None, BaseException | None]


class Gain(NamedTuple):
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


class SegmentUpkeep:
    """Used on the event loop; the work itself runs on the shard's keeper thread."""

    def __init__(self, shard: Shard, uploads: Uploads, producers: Producers) -> None:
        self._shard = shard
        self._uploads = uploads
        self._producers = producers

    async def replace(self, partition: Partition, base: int, generation: int, upload: str) -> Gain:
        """Make an upload the next generation of a sealed segment. The whole upload is verified first."""
        log = partition.log
        found = _sealed(partition, base, generation)
        path = self._uploads.path_of(upload)
        interval = log.settings.index_interval
        done, report = _outcome()
        self._uploads.hold([upload])
        try:
            self._shard.maintenance.rewrite_segments(
                log,
                [found],
                lambda _data, _info: None,
                report,
                make=lambda: adopt_rewritten(self._shard.files, found, path, interval),
            )
            return _gain(*await done, what=f"segment {base}")
        finally:
            self._uploads.release([upload])

    async def archive(self, partition: Partition, base: int, generation: int) -> Gain:
        """Make a Parquet file the next generation of a sealed segment.

        The caller has written the unfinished file to `parquet_path`. It is read back and compared with the segment
        before it replaces it.
        """
        found = _sealed(partition, base, generation)
        if found.is_archived:
            raise Conflict(f"segment {base} is already archived")
        done, report = _outcome()
        self._shard.maintenance.archive(partition.log, found, report)
        return _gain(*await done, what=f"segment {base}")

    async def compact(self, partition: Partition) -> Gain:
        """Keep only the latest record of each key in the sealed segments."""
        done, report = _outcome()
        self._shard.maintenance.compact(partition.log, report)
        made, error = await done
        if made is None and error is None:
            return Gain(0, 0, 0, 0)  # no segment is sealed yet
        return _gain(made, error, what="the log")

    async def delete_before(self, partition: Partition, offset: int) -> None:
        """Move the start of the log, durably on return.

        A snapshot first keeps what the deleted records say about producers (sequence numbers, aborted transactions).
        """
        self._producers.snapshot_of(partition.log)
        await self._shard.maintenance.starts.delete_before(partition.log, offset)


def _outcome() -> tuple["asyncio.Future[Outcome]", Callable[[Rewritten | None, BaseException | None], object]]:
    """A future, and the callback that completes it."""
    done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    return done, lambda made, error: None if done.done() else done.set_result((made, error))


def _sealed(partition: Partition, base: int, generation: int) -> Segment:
    log = partition.log
    found = next((s for s in log.segments if s.base == base and s.generation == generation), None)
    if found is None:
        raise NotFound(f"partition {partition.number} has no segment {base} of generation {generation}")
    if not found.is_sealed or found.next_offset > log.durable_end:
        raise Conflict(f"segment {base} is still being written: only sealed segments can be rewritten")
    return found


def _gain(made: Rewritten | None, error: BaseException | None, *, what: str) -> Gain:
    if isinstance(error, HeadraceError):
        raise error
    if error is not None:
        raise StorageError(f"{what} could not be rewritten: {error}") from error
    if made is None:
        raise Conflict(f"{what} is already being rewritten: try again later")
    return Gain(made.bytes_before, made.bytes_after, made.records_before, made.records_after)
