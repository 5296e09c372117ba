"""Maintenance jobs for topics: verify, reindex, recompress, compact, tier, replay.

A job is split into items, mostly one per segment. The same function processes an item in this process or on Spark, and
the broker then swaps the segments, because only the broker may change a log. For less than a few gigabytes, a loop in
this process finishes before Spark has started.
"""

import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from headrace.client.exchange import without_password
from headrace.config import parse_duration
from headrace.errors import Conflict, HeadraceError, InvalidInput, NotFound
from headrace.log.disk.disk import RealDisk
from headrace.log.disk.paths import STAGING, TIER, UNFINISHED
from headrace.log.maintenance.compaction import Deletes, Survivors, kept_of
from headrace.log.maintenance.offline_rewrite import Written, rewrite_file
from headrace.log.read.external import LogFiles
from headrace.log.recovery.inspect import Checked, Inspector, VerifyReport
from headrace.log.segments.segment import Segment
from headrace.log.tier.archive import NotArchivable, parquet_path, write_parquet, write_segment
from headrace.log.tier.location import location_of
from headrace.log.tier.sources import Archives
from headrace.pipelines.java import check_pyspark, has_pyspark
from headrace.pipelines.local_folder import local_data_folder
from headrace.record.batch.recompress import recompress
from headrace.record.layout import CODECS
from headrace.record.types import BatchInfo, Buffer
from headrace.spark.broker import BrokerLink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Engine = Literal["auto", "local", "spark"]
SPARK_BYTES_MIN = 4 << 30  # for less, a loop on one core finishes before Spark has started

# Errors that skip a segment: it was rewritten or deleted meanwhile, or cannot be archived. The job continues.
SKIPPED = (NotFound, Conflict, NotArchivable)

Item = TypeVar("Item")
Result = TypeVar("Result")


def is_for_here(on: Engine, size: int) -> bool:
    return on == "local" or (on == "auto" and (size < SPARK_BYTES_MIN or not has_pyspark()))


def run_over(
    items: Sequence[Item],
    work: Callable[[Item], Result],
    *,
    on: Engine,
    size: int,
    session: "SparkSession | None" = None,
) -> list[Result]:
    """Processes all items in this process or on Spark, and returns the results in order."""
    if not items or is_for_here(on, size):
        return [work(item) for item in items]
    if session is None:
        from headrace.pipelines.session import build

        session = build("headrace maintenance")
    return list(session.sparkContext.parallelize(items, len(items)).map(work).collect())


@dataclass(frozen=True)
class SegmentItem:
    """A sealed segment, as sent to the process that works on it."""

    topic: str
    partition: int
    log_id: int
    folder: str
    base: int
    generation: int
    size: int
    records: int
    next_offset: int

    @classmethod
    def of(cls, topic: str, partition: int, log_id: int, segment: Segment) -> "SegmentItem":
        s = segment
        return cls(topic, partition, log_id, s.folder, s.base, s.generation, s.size, s.records, s.next_offset)

    @property
    def segment(self) -> Segment:
        found = Segment(self.folder, self.base, self.generation)
        found.size, found.next_offset, found.is_sealed = self.size, self.next_offset, True
        return found

    @property
    def archived(self) -> Segment:
        manifest = self.segment.path(TIER)
        try:
            source = Archives(RealDisk()).open(manifest)
        except FileNotFoundError:
            raise NotFound(f"{manifest} no longer exists: the segment was deleted or rewritten meanwhile") from None
        return Segment.archived(self.folder, self.generation, source)


class Done(NamedTuple):
    written: list[Written]
    left: list[str]  # for each skipped segment, the reason


Staged = tuple[str, Written] | HeadraceError  # (name of the staged file, its facts), or why there is none


class TopicMaintenance:
    """Maintenance of a running broker's topics. Needs its data folder on this machine: segments are used as files."""

    def __init__(self, url: str, *, on: Engine = "auto", session: "SparkSession | None" = None) -> None:
        self.link = BrokerLink(url, retry_s=20.0)
        self._url = url
        self._on = on
        self._session = session
        status = self.link.get("status")
        folder = local_data_folder(status)
        if folder is None:
            self.link.close()
            where = without_password(url)
            raise NotFound(
                f"the data folder {status['data_dir']} of {where} is not on this machine; run the command there"
            )
        self.folder, self.tier_root = folder, str(status["tier_dir"])
        self._files = LogFiles(self.folder)

    def sealed(self, topic: str) -> list[SegmentItem]:
        """The segments that may be rewritten: sealed, below the durable end, and not archived."""
        return [SegmentItem.of(topic, *found) for found in self._segments(topic) if not found[2].is_archived]

    def _logs(self, topic: str) -> list[dict[str, Any]]:
        logs = self.link.logs(topic)
        if logs is None:
            raise NotFound(f"topic {topic!r} does not exist")
        return logs

    def _segments(self, topic: str) -> list[tuple[int, int, Segment]]:
        return [
            (log["partition"], log["log"], segment)
            for log in self._logs(topic)
            for segment in self._files.segments(log["log"], log["durable_end"])
            if segment.is_sealed and segment.next_offset <= log["durable_end"] and segment.size
        ]

    def recompress(self, topic: str, codec_name: str) -> Done:
        """Recompresses each sealed segment with another codec. A segment that does not become smaller is kept."""
        if codec_name not in CODECS:
            raise InvalidInput(f"the codec must be one of {', '.join(CODECS)}, not {codec_name!r}")
        number, folder = CODECS[codec_name], self.folder

        def work(item: SegmentItem) -> Staged:
            def change(data: memoryview, info: BatchInfo) -> Buffer:
                return recompress(data, info, number)

            return to_staging(folder, lambda path: rewrite_file(item.segment, path, change))

        return self._rewrite(self.sealed(topic), work)

    def tier(self, topic: str, *, before_ms: int | None = None) -> Done:
        """Archives sealed segments as Parquet; with `before_ms` only those whose newest record is older.

        The broker takes over each segment as soon as it is written, so that only a few exist twice at any time.
        """
        items = [
            SegmentItem.of(topic, partition, log_id, segment)
            for partition, log_id, segment in self._segments(topic)
            if not segment.is_archived and (before_ms is None or segment.max_timestamp < before_ms)
        ]
        root = self.tier_root

        def work(item: SegmentItem) -> Written | HeadraceError:
            try:
                return write_parquet(item.segment, parquet_path(root, item.segment) + UNFINISHED)
            except SKIPPED as error:
                return error

        done = Done([], [])
        for item, written in self._worked(items, work):
            if isinstance(written, HeadraceError):
                done.left.append(str(written))
                continue
            try:
                self.link.send("POST", *self._path(item), "archive", body={"generation": item.generation})
            except InvalidInput as error:  # the broker's NotArchivable
                done.left.append(str(error))
            except HeadraceError as error:
                unfinished = parquet_path(root, item.segment) + UNFINISHED
                location_of(RealDisk(), unfinished).remove(unfinished)
                self._skip(error, done)
            else:
                done.written.append(written)
        return done

    def restore(self, topic: str) -> Done:
        """Turns archived segments back into segment files, with their original codec."""
        found = [(p, log_id, s) for p, log_id, s in self._segments(topic) if s.is_archived]
        items = [SegmentItem.of(topic, *one) for one in found]
        folder = self.folder

        def work(item: SegmentItem) -> Staged:
            return to_staging(folder, lambda path: write_segment(item.archived, path))

        return self._rewrite(items, work, even_if_larger=True)

    def _worked(
        self, items: Sequence[SegmentItem], work: Callable[[SegmentItem], Result]
    ) -> Iterator[tuple[SegmentItem, Result]]:
        """Processes items and yields their results: one at a time here, on Spark in steps of twice its parallelism."""
        size = sum(item.size for item in items)
        here = is_for_here(self._on, size)
        step = 1 if here or not items else 2 * self.session().sparkContext.defaultParallelism
        for at in range(0, len(items), step):
            some = items[at : at + step]
            on: Engine = "local" if here else "spark"
            yield from zip(some, run_over(some, work, on=on, size=size, session=self._session), strict=True)

    def compact(self, topic: str) -> Done:
        """Keeps the latest record of each key.

        Locally the broker compacts. On Spark, a first job finds the surviving offsets from keys and offsets alone, and
        then each segment is rewritten on its own, so that values are never shuffled.
        """
        segments = self._segments(topic)
        items = [SegmentItem.of(topic, *found) for found in segments if not found[2].is_archived]
        if is_for_here(self._on, sum(item.size for item in items)):
            gains = self.link.send("POST", "topics", topic, "compact", body={})["partitions"]
            return Done([Written(g["bytes_before"], g["bytes_after"], g["records_after"]) for g in gains], [])
        described = self.link.get("topics", topic)
        if described["kind"] != "topic" or "compact" not in described["config"]["cleanup_policy"]:
            raise InvalidInput(f"topic {topic!r} is not compacted: set cleanup_policy=compact first")
        config, folder = described["config"], self.folder
        now_ms = time.time_ns() // 1_000_000
        untils = self._compact_until(topic, items, now_ms, parse_duration(config["compaction_lag"]))
        survivors = self._survivors(topic, items, untils)
        holds = {log["partition"]: log["held_from"] for log in self.link.logs(topic) or ()}
        deletes = Deletes(now_ms, parse_duration(config["tombstone_retention"]))
        # Archived segments are not rewritten: keep tombstones, which may be all that hides records in the archive.
        archived = {partition for partition, _, segment in segments if segment.is_archived}

        def work(item: SegmentItem) -> Staged:
            kept = survivors.get((item.partition, item.base), array("q"))
            until, hold = untils.get(item.partition, 0), holds.get(item.partition)
            until = until if hold is None else min(until, hold)
            keep = Survivors(kept, until=until, deletes=None if item.partition in archived else deletes)

            def change(data: memoryview, info: BatchInfo) -> Buffer | None:
                return kept_of(data, info, keep)

            return to_staging(folder, lambda path: rewrite_file(item.segment, path, change))

        # Use the list of segments from before the search for survivors: the broker may have merged some since then.
        return self._rewrite(items, work, in_order=True)

    def _compact_until(self, topic: str, items: Sequence[SegmentItem], now_ms: int, lag_ms: int) -> dict[int, int]:
        """Per partition the offset before which records may be removed: in sealed segments, before any open
        transaction, and older than the compaction lag. Records appended and sealed meanwhile are after it and are
        kept."""
        found = {}
        for log in self.link.logs(topic) or ():
            sealed_end = max((i.next_offset for i in items if i.partition == log["partition"]), default=0)
            until = min(sealed_end, log["stable_end"])
            if lag_ms > 0:
                young = self._files.offset_for_timestamp(log["log"], now_ms - lag_ms + 1, log["start"], until)
                until = until if young is None else min(until, young)
            found[log["partition"]] = until
        return found

    def _survivors(
        self, topic: str, items: Sequence[SegmentItem], untils: Mapping[int, int]
    ) -> "dict[tuple[int, int], array[int]]":
        """Per segment the ascending offsets that are the last of their key among those before `untils`."""
        from bisect import bisect_right

        from pyspark.sql import functions as f

        options = {"path": self.folder, "topic": topic, "columns": "partition,key,offset"}
        rows = self.session().read.format("headrace").options(**options).load()
        rows = rows.where(_any((f.col("partition") == p) & (f.col("offset") < end) for p, end in untils.items()))
        latest = rows.where("key is not null").groupBy("partition", "key").agg(f.max("offset").alias("offset"))
        found: dict[tuple[int, int], array[int]] = {}
        starts = sorted((item.partition, item.base) for item in items)
        for row in latest.select("partition", "offset").toLocalIterator():
            at = bisect_right(starts, (row.partition, row.offset)) - 1
            found.setdefault(starts[at], array("q")).append(row.offset)
        return {segment: array("q", sorted(offsets)) for segment, offsets in found.items()}

    def session(self) -> "SparkSession":
        if self._session is None:
            from headrace.pipelines.session import build

            self._session = build("headrace maintenance")
        return self._session

    def _rewrite(
        self,
        items: Sequence[SegmentItem],
        work: Callable[[SegmentItem], Staged],
        *,
        even_if_larger: bool = False,
        in_order: bool = False,
    ) -> Done:
        """Rewrites segments and passes them to the broker if they gained something: fewer bytes or records, or a delete
        horizon for tombstones. A segment that the broker rewrote or deleted meanwhile is skipped; that is no failure,
        because retention and compaction continue during the job.

        With `in_order`, all segments of a partition after a skipped one are skipped, too: records removed from them may
        have been superseded by records in the skipped segment.
        """
        done = Done([], [])
        stopped: set[int] = set()  # partitions
        for item, staged in self._worked(items, work):
            name, written = ("", staged) if isinstance(staged, HeadraceError) else staged
            if in_order and item.partition in stopped:
                written = Conflict(f"segment {item.base} was skipped: one before it was changed meanwhile")
            if isinstance(written, Written):
                is_smaller = written.bytes_after < written.bytes_before or written.records < item.records
                if not (is_smaller or written.horizons or even_if_larger):
                    self.link.discard(name)
                    done.written.append(Written(written.bytes_before, written.bytes_before, written.records))
                    continue
                try:
                    self.link.send("POST", *self._path(item), body={"generation": item.generation, "staged": name})
                except HeadraceError as error:
                    written = error
            if isinstance(written, Written):
                done.written.append(written)
                continue
            if name:
                self.link.discard(name)
            stopped.add(item.partition)
            self._skip(written, done)
        return done

    @staticmethod
    def _skip(error: HeadraceError, done: Done) -> None:
        if not isinstance(error, SKIPPED):
            raise error
        done.left.append(str(error))

    @staticmethod
    def _path(item: SegmentItem) -> tuple[str, ...]:
        return ("topics", item.topic, "partitions", str(item.partition), "segments", str(item.base))

    def replay(self, topic: str, target: str, *, start: str = "earliest", write_id: str | None = None) -> int:
        """Copies the records of a topic to another with keys, values, headers and timestamps; returns their number.

        With a `write_id`, a repeated run stores nothing twice. Decoding, encoding and the commit are the same here and
        on Spark.
        """
        if topic == target:
            raise InvalidInput("a topic cannot be replayed to itself")
        check_pyspark()  # the writer is a PySpark data source, also when it runs here
        from headrace.spark.options import BadOption, read_options
        from headrace.spark.replay import replay, replay_on_spark

        write_id = write_id or uuid.uuid4().hex
        size = sum(log["size_bytes"] for log in self._logs(topic))
        try:
            read_options({"path": self.folder, "topic": topic, "startingOffsets": start})  # fail before Spark starts
            if is_for_here(self._on, size):
                return replay(self._url, self.folder, topic, target, start=start, write_id=write_id)
        except BadOption as error:
            if error.name != "startingOffsets":
                raise
            raise InvalidInput(f"start: {error.reason}") from None  # the command calls this option --start
        return replay_on_spark(self.session(), self._url, self.folder, topic, target, start=start, write_id=write_id)


def verify(
    folder: str, log_ids: Sequence[int], *, on: Engine = "auto", session: "SparkSession | None" = None
) -> VerifyReport:
    """Checks every batch, offset, seal and index of the logs, segment by segment. Needs no broker."""

    def work(item: tuple[Segment, int | None]) -> Checked:
        return _closed(folder, lambda inspector: inspector.check(*item))

    def look(inspector: Inspector) -> VerifyReport:
        logs = [log for log in inspector.logs() if log.id in log_ids]
        items = [(segment, log.visible_end) for log in logs for segment in log.segments]
        size = sum(log.size_bytes for log in logs)
        checked = iter(run_over(items, work, on=on, size=size, session=session))
        total = VerifyReport()
        for log in logs:
            total.add(inspector.joined(log, list(islice(checked, len(log.segments)))))
        return total

    return _closed(folder, look)


def reindex(
    folder: str, log_ids: set[int] | None, *, on: Engine = "auto", session: "SparkSession | None" = None
) -> int:
    """Rebuilds the indexes of sealed segments and returns their number. No broker may run on the folder."""

    def work(segment: SegmentItem) -> int:
        return _closed(folder, lambda inspector: inspector.rebuild(segment.segment))

    inspector = Inspector(folder)
    try:
        with inspector.locked():
            items = [SegmentItem.of("", 0, log_id, segment) for log_id, segment in inspector.indexed(log_ids)]
            size = sum(item.size for item in items)
            return len(run_over(items, work, on=on, size=size, session=session))
    finally:
        inspector.close()


def _closed(folder: str, look: Callable[[Inspector], Result]) -> Result:
    inspector = Inspector(folder)
    try:
        return look(inspector)
    finally:
        inspector.close()


def to_staging(folder: str, write: Callable[[str], Written]) -> Staged:
    """Writes a rewritten segment into the staging folder, from where the broker takes it."""
    RealDisk().mkdir(f"{folder}/{STAGING}")
    name = uuid.uuid4().hex
    path = Path(folder, STAGING, f"{name}.staged")
    try:
        return name, write(str(path))
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SKIPPED):
            return error
        raise


def _any(conditions: Iterable[object]) -> "Column":
    import functools
    import operator

    from pyspark.sql import functions as f

    return functools.reduce(operator.or_, conditions, f.lit(False))


if TYPE_CHECKING:
    from pyspark.sql import Column
