"""Planner: decides which topics and offsets a batch reads, and divides them into tasks. Runs on the driver."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.errors import SegmentGone
from headrace.spark.access import Access, DataLoss, Lease, ReadTask, State, loss_reason
from headrace.spark.limits import divide_limit
from headrace.spark.offsets import Partition, Position, Positions
from headrace.spark.options import EARLIEST, LATEST, BadOption, Offsets, ReadOptions

TASKS_PER_CORE = 2
SPLIT_BYTES_MIN = 64 << 20
SPLIT_BYTES_MAX = 320 << 20  # above the default segment size, so that such a segment is not split
ATTEMPTS_MAX = 10
RETRY_S = 0.02
LEASE_MS = 3600 * 1000  # far longer than a batch takes; bounds how long a dead reader delays retention

SKIP_HINT = "set option failOnDataLoss=false to continue without the missing records"


class Planner:
    def __init__(self, options: ReadOptions, access: Access) -> None:
        self.options = options
        self.access = access

    # Topics.

    def topics(self) -> list[str]:
        existing = set(self.access.topics())
        if self.options.pattern is not None:
            matches = re.compile(self.options.pattern).fullmatch
            return sorted(name for name in existing if matches(name))
        for name in self.options.topics:
            if name not in existing:
                option = "topic" if len(self.options.topics) == 1 else "topics"
                raise BadOption(option, f"topic {name!r} does not exist")
        return list(self.options.topics)

    def states(self) -> dict[Partition, State]:
        return self.access.states(self.topics())

    def states_left(self) -> dict[Partition, State]:
        """Like `states`, but for a running stream: a deleted topic is not an error here; `latest` and `tasks` report
        the loss."""
        return self.access.states([name for name in self.access.topics() if self.options.reads(name)])

    # Start and end.

    def start_positions(self, states: Mapping[Partition, State], default: Offsets) -> Positions:
        options = self.options
        if options.starting_ms is not None:
            return {
                partition: self._at_time(partition, state, options.starting_ms) for partition, state in states.items()
            }
        chosen = self._resolve("startingOffsets", options.starting or default, states)
        if options.starting is not None and options.fail_on_data_loss:
            for partition, position in chosen.items():
                self._refuse_loss(partition, position, states[partition])
        return chosen

    def end_positions(self, states: Mapping[Partition, State]) -> Positions:
        options = self.options
        if options.ending_ms is not None:
            found = {
                partition: self._at_time(partition, state, options.ending_ms) for partition, state in states.items()
            }
            # The record at that time may be newer than `states`: the batch must not read past the ends in `states`.
            return {
                partition: at._replace(offset=min(at.offset, states[partition].end)) for partition, at in found.items()
            }
        chosen = self._resolve("endingOffsets", options.ending or "latest", states, default=LATEST)
        for partition, position in chosen.items():
            if position.offset > states[partition].end:
                raise BadOption(
                    "endingOffsets",
                    f"partition {partition.number} of {partition.topic!r} ends at {states[partition].end}",
                )
        return chosen

    def _at_time(self, partition: Partition, state: State, timestamp_ms: int) -> Position:
        offset = self.access.offset_for_timestamp(partition, state, timestamp_ms)
        return Position(state.end if offset is None else offset, state.log_id, state.epoch)

    def _resolve(
        self, name: str, offsets: Offsets, states: Mapping[Partition, State], default: int = EARLIEST
    ) -> Positions:
        if isinstance(offsets, str):
            default = EARLIEST if offsets == "earliest" else LATEST
            offsets = {}
        for topic, partitions in offsets.items():
            for number in partitions:
                if Partition(topic, number) not in states:
                    raise BadOption(name, f"topic {topic!r} has no partition {number}, or is not read")
        found = {}
        for partition, state in states.items():
            offset = offsets.get(partition.topic, {}).get(partition.number, default)
            if offset == EARLIEST:
                offset = min(self.access.start(partition, state), state.end)
            elif offset == LATEST:
                offset = state.end
            found[partition] = Position(offset, state.log_id, state.epoch)
        return found

    def _refuse_loss(self, partition: Partition, position: Position, state: State) -> None:
        reason = loss_reason(self.access, partition, position, state)
        if reason is not None:
            raise DataLoss(f"{reason}; {SKIP_HINT}")

    # Micro-batches.

    def latest(
        self, start: Mapping[Partition, Position], states: Mapping[Partition, State]
    ) -> dict[Partition, Position]:
        """The current end of each partition; a deleted partition stays at its start position."""
        found = {}
        for partition, position in start.items():
            if partition not in states:
                self._report_loss(f"topic {partition.topic!r} was deleted")
                found[partition] = position
        for partition, state in states.items():
            at = start.get(partition)
            if at is not None and at.log_id == state.log_id and at.offset > state.end:
                self._report_loss(
                    f"partition {partition.number} of {partition.topic!r} ends at {state.end}, before {at.offset}"
                )
            if at is not None and at.log_id != state.log_id:
                self._report_loss(f"topic {partition.topic!r} was deleted and created again")
            if at is None:
                self._start_of_new(partition, state.start)
            found[partition] = Position(state.end, state.log_id, state.epoch)
        return found

    def limited(
        self,
        start: Mapping[Partition, Position],
        latest: Mapping[Partition, Position],
        states: Mapping[Partition, State],
        *,
        rows: int | None = None,
        size: int | None = None,
    ) -> Positions:
        """Like `latest`, but within a limit on rows or bytes."""
        begins = {
            partition: self._begin(partition, start.get(partition), end, states) for partition, end in latest.items()
        }
        backlog = {partition: max(0, end.offset - begins[partition]) for partition, end in latest.items()}
        if rows is not None:
            shares = divide_limit(backlog, rows)
        else:
            assert size is not None
            shares = self._by_size(begins, backlog, latest, states, size)
        return {
            partition: Position(begins[partition] + shares.get(partition, 0), end.log_id, end.epoch)
            for partition, end in latest.items()
        }

    def _begin(
        self, partition: Partition, at: Position | None, end: Position, states: Mapping[Partition, State]
    ) -> int:
        """The offset from which a limit counts: the first existing record at or after the position.

        Counting deleted records would produce empty batches. If the log lost records at its end, counting starts at the
        new end, because other records will take these offsets.
        """
        if at is None or at.log_id != end.log_id:
            return self.access.start(partition, states[partition])
        first = states[partition].start if partition in states else 0
        return min(max(at.offset, first), end.offset)

    def _by_size(
        self,
        begins: Mapping[Partition, int],
        backlog: Mapping[Partition, int],
        latest: Mapping[Partition, Position],
        states: Mapping[Partition, State],
        limit: int,
    ) -> dict[Partition, int]:
        sizes = {
            partition: max(
                count,
                self.access.size_between(partition, states[partition], begins[partition], latest[partition].offset),
            )
            for partition, count in backlog.items()
            if count
        }
        found = {}
        for partition, share in divide_limit(sizes, limit).items():
            end = latest[partition].offset
            if share < sizes[partition]:
                reached = self.access.offset_after_bytes(partition, states[partition], begins[partition], end, share)
                end = min(max(reached, begins[partition] + 1), end)
            found[partition] = end - begins[partition]
        return found

    def tasks(
        self,
        start: Mapping[Partition, Position],
        end: Mapping[Partition, Position],
        states: Mapping[Partition, State],
    ) -> list[ReadTask]:
        ranges: list[tuple[Partition, State, int, int]] = []
        for partition, until in sorted(end.items()):
            state = states.get(partition)
            at = start.get(partition)
            if state is None:
                self._report_loss(f"topic {partition.topic!r} was deleted")
                continue
            if at == until:
                continue
            if until.log_id != state.log_id:
                self._report_loss(f"topic {partition.topic!r} was deleted and created again")
                continue  # the next batch reads the new topic from its start
            if at is not None and at.log_id == until.log_id and at.offset > until.offset:
                continue  # it starts at a timestamp that the log had not reached when the batch was planned
            begin = self._checked_start(partition, at, state)
            if until.offset > state.end:
                self._report_loss(
                    f"partition {partition.number} of {partition.topic!r} ends at {state.end}, before {until.offset}"
                )
            stop = min(until.offset, state.end)
            if begin < stop:
                ranges.append((partition, state, begin, stop))
        split_bytes = self.options.split_bytes
        if split_bytes is None:
            split_bytes = split_for(sum(self.access.estimate_size(*span) for span in ranges), os.cpu_count() or 1)
        return [task for span in ranges for task in self.access.tasks(*span, split_bytes)]

    def _checked_start(self, partition: Partition, at: Position | None, state: State) -> int:
        if at is None:
            return self._start_of_new(partition, self.access.start(partition, state))
        reason = loss_reason(self.access, partition, at, state)
        if reason is None:
            return at.offset
        self._report_loss(reason)
        start = self.access.start(partition, state)
        return max(start, min(at.offset, state.end)) if at.log_id == state.log_id else start

    def _start_of_new(self, partition: Partition, start: int) -> int:
        """A partition or topic created while the stream was running is read from its first record."""
        if start > 0:
            self._report_loss(
                f"partition {partition.number} of {partition.topic!r} is new to this stream but starts at {start}"
            )
        return start

    def _report_loss(self, reason: str) -> None:
        if self.options.fail_on_data_loss:
            raise DataLoss(f"{reason}; {SKIP_HINT}")


def plan_with_lease(
    access: Access, plan: Callable[[], list[ReadTask]], for_ms: int
) -> tuple[list[ReadTask], Lease | None]:
    """Plans, and leases the planned files until the lease is released or `for_ms` has passed."""
    for attempt in range(ATTEMPTS_MAX):
        try:
            return access.lease(plan(), for_ms)
        except SegmentGone:
            time.sleep(attempt * RETRY_S)  # retention or compaction was faster: plan on the current segments
    raise DataLoss("segments are deleted or rewritten faster than a batch can be planned on them; try again")


def split_for(size: int, cores: int) -> int:
    """Bytes per task for a batch of `size` bytes, if the option splitBytes is not set.

    A task costs Spark 20 ms of CPU however little it reads, so there are only as many as keep the cores busy to the
    end, and none so large that a retry is expensive. A task gets a tenth more than an even share, so that partitions
    of similar size do not leave tiny rests. `cores` are the driver's: the planner does not know the cluster's.
    """
    share = size * 11 // (10 * TASKS_PER_CORE * cores)
    return min(max(share, SPLIT_BYTES_MIN), SPLIT_BYTES_MAX)


def by_topic(positions: Mapping[Partition, Position]) -> Iterable[tuple[str, dict[int, int]]]:
    found: dict[str, dict[int, int]] = {}
    for partition, position in positions.items():
        found.setdefault(partition.topic, {})[partition.number] = position.offset
    return found.items()


__all__: Sequence[str] = ["Planner", "by_topic", "plan_with_lease", "split_for"]
