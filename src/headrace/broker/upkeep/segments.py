"""Upkeep of a log on request: replace a segment by a rewritten one, compact, drop what lies before an offset."""

import asyncio
from typing import NamedTuple

from headrace.broker.sinks.uploads import Uploads
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.producers import Producers
from headrace.errors import Conflict, HeadraceError, NotFound, StorageError
from headrace.log.segments.replacement import Rewritten, adopt
from headrace.log.segments.segment import Segment
from headrace.log.shard import Shard
from headrace.log.tier.archive import adopt_restored


class Gain(NamedTuple):
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


async def replace_segment(
    shard: Shard, staging: Uploads, partition: Partition, base: int, generation: int, name: str
) -> Gain:
    """Make an upload the next generation of a sealed segment. All of it is checked first."""
    log = partition.log
    found = _sealed(partition, base, generation)
    path = staging.path_of(name)
    interval = log.settings.index_interval
    done: asyncio.Future[tuple[Rewritten | None, BaseException | None]] = asyncio.get_running_loop().create_future()
    staging.hold([name])
    try:
        shard.maintenance.rewrite_segments(
            log,
            [found],
            lambda _data, _info: None,
            lambda made, error: None if done.done() else done.set_result((made, error)),
            make=lambda: (adopt_restored if found.is_archived else adopt)(shard.files, found, path, interval),
        )
        return _gain(*await done, what=f"segment {base}")
    finally:
        staging.let_go([name])


def _sealed(partition: Partition, base: int, generation: int) -> Segment:
    log = partition.log
    found = next((s for s in log.segments if s.base == base and s.generation == generation), None)
    if found is None:
        raise NotFound(f"partition {partition.number} has no segment {base} of generation {generation}")
    if not found.is_sealed or found.next_offset > log.durable_end:
        raise Conflict(f"segment {base} is still being written: only sealed ones are rewritten")
    return found


async def archive_segment(shard: Shard, partition: Partition, base: int, generation: int) -> Gain:
    """Make the Parquet file that was written for a sealed segment the next generation of it. The file lies where
    `parquet_path` says, unfinished; all of it is read back and compared with the segment first."""
    found = _sealed(partition, base, generation)
    if found.is_archived:
        raise Conflict(f"segment {base} is archived already")
    done: asyncio.Future[tuple[Rewritten | None, BaseException | None]] = asyncio.get_running_loop().create_future()
    shard.maintenance.archive(
        partition.log, found, lambda made, error: None if done.done() else done.set_result((made, error))
    )
    return _gain(*await done, what=f"segment {base}")


async def compact(shard: Shard, partition: Partition) -> Gain:
    """Keep the latest record of each key in the sealed segments."""
    done: asyncio.Future[tuple[Rewritten | None, BaseException | None]] = asyncio.get_running_loop().create_future()
    shard.maintenance.compact(
        partition.log, lambda made, error: None if done.done() else done.set_result((made, error))
    )
    made, error = await done
    if made is None and error is None:
        return Gain(0, 0, 0, 0)  # nothing is sealed yet
    return _gain(made, error, what="the log")


def _gain(made: Rewritten | None, error: BaseException | None, *, what: str) -> Gain:
    if isinstance(error, HeadraceError):
        raise error
    if error is not None:
        raise StorageError(f"{what} could not be rewritten: {error}") from error
    if made is None:
        raise Conflict(f"{what} is being rewritten already: try again")
    return Gain(made.bytes_before, made.bytes_after, made.records_before, made.records_after)


async def delete_before(shard: Shard, producers: Producers, partition: Partition, offset: int) -> None:
    """Move the start of the log; durable on return. What its producers have sent stays known."""
    producers.snapshot_of(partition.log)
    await shard.maintenance.starts.delete_before(partition.log, offset)
