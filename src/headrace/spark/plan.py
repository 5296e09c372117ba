"""What to read: which topics, from where to where, in which pieces. Runs on the driver."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.errors import SegmentGone
from headrace.spark.access import Access, DataLoss, Hold, Piece, State, lost
from headrace.spark.offsets import Partition, Position, Positions
from headrace.spark.options import EARLIEST, LATEST, BadOption, Offsets, ReadOptions
from headrace.spark.ranges import spread

TASKS_PER_CORE = 2
SPLIT_BYTES_LEAST = 64 << 20
SPLIT_BYTES_MOST = 320 << 20  # more than a segment has if nobody said otherwise: such a one is not cut
PLANS_MAX = 10
PLAN_AGAIN_S = 0.02
HOLD_MS = 3600 * 1000  # far longer than a batch takes; retention waits no longer for one that died


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
        """As `states`, for a stream under way: of a topic that is gone `latest` and `pieces` say what is lost."""
        return self.access.states([name for name in self.access.topics() if self.options.reads(name)])

    # Where to begin and end.

    def first(self, states: Mapping[Partition, State], default: Offsets) -> Positions:
        options = self.options
        if options.starting_ms is not None:
            return {place: self._at_time(place, state, options.starting_ms) for place, state in states.items()}
        chosen = self._resolve("startingOffsets", options.starting or default, states)
        if options.starting is not None and options.fail_on_data_loss:
            for place, position in chosen.items():
                self._refuse_loss(place, position, states[place])
        return chosen

    def last(self, states: Mapping[Partition, State]) -> Positions:
        options = self.options
        if options.ending_ms is not None:
            found = {place: self._at_time(place, state, options.ending_ms) for place, state in states.items()}
            # What came since then may be where the time is: the batch ends where the log did when it was planned.
            return {place: at._replace(offset=min(at.offset, states[place].end)) for place, at in found.items()}
        chosen = self._resolve("endingOffsets", options.ending or "latest", states, unnamed=LATEST)
        for place, position in chosen.items():
            if position.offset > states[place].end:
                raise BadOption(
                    "endingOffsets", f"partition {place.number} of {place.topic!r} ends at {states[place].end}"
                )
        return chosen

    def _at_time(self, place: Partition, state: State, timestamp_ms: int) -> Position:
        offset = self.access.offset_for_timestamp(place, state, timestamp_ms)
        return Position(state.end if offset is None else offset, state.log_id, state.epoch)

    def _resolve(
        self, name: str, offsets: Offsets, states: Mapping[Partition, State], unnamed: int = EARLIEST
    ) -> Positions:
        if isinstance(offsets, str):
            unnamed = EARLIEST if offsets == "earliest" else LATEST
            offsets = {}
        for topic, partitions in offsets.items():
            for number in partitions:
                if Partition(topic, number) not in states:
                    raise BadOption(name, f"there is no partition {number} of topic {topic!r} to read")
        found = {}
        for place, state in states.items():
            offset = offsets.get(place.topic, {}).get(place.number, unnamed)
            if offset == EARLIEST:
                offset = min(self.access.start(place, state), state.end)
            elif offset == LATEST:
                offset = state.end
            found[place] = Position(offset, state.log_id, state.epoch)
        return found

    def _refuse_loss(self, place: Partition, position: Position, state: State) -> None:
        reason = lost(self.access, place, position, state)
        if reason is not None:
            raise DataLoss(f"{reason}; option failOnDataLoss=false goes on with what is there")

    # Micro-batches.

    def latest(
        self, start: Mapping[Partition, Position], states: Mapping[Partition, State]
    ) -> dict[Partition, Position]:
        """Where each partition ends now; never behind `start`, so that a stream only goes forward."""
        found = {}
        for place, position in start.items():
            if place not in states:
                self._loss(f"topic {place.topic!r} was deleted")
                found[place] = position
        for place, state in states.items():
            at = start.get(place)
            if at is not None and at.log_id == state.log_id and at.offset > state.end:
                self._loss(f"partition {place.number} of {place.topic!r} ends at {state.end}, not {at.offset}")
            if at is not None and at.log_id != state.log_id:
                self._loss(f"topic {place.topic!r} was deleted and made anew")
            if at is None:
                self._new(place, state.start)
            found[place] = Position(state.end, state.log_id, state.epoch)
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
        """As `latest`, but no further than a limit allows."""
        begins = {place: self._begin(place, start.get(place), end, states) for place, end in latest.items()}
        behind = {place: max(0, end.offset - begins[place]) for place, end in latest.items()}
        if rows is not None:
            shares = spread(behind, rows)
        else:
            assert size is not None
            shares = self._by_size(begins, behind, latest, states, size)
        return {
            place: Position(begins[place] + shares.get(place, 0), end.log_id, end.epoch)
            for place, end in latest.items()
        }

    def _begin(self, place: Partition, at: Position | None, end: Position, states: Mapping[Partition, State]) -> int:
        """Where a limit is counted from: what is there. Neither what retention took, which would be batches of nothing,
        nor what a log has lost at its end: others take its place."""
        if at is None or at.log_id != end.log_id:
            return self.access.start(place, states[place])
        first = states[place].start if place in states else 0
        return min(max(at.offset, first), end.offset)

    def _by_size(
        self,
        begins: Mapping[Partition, int],
        behind: Mapping[Partition, int],
        latest: Mapping[Partition, Position],
        states: Mapping[Partition, State],
        limit: int,
    ) -> dict[Partition, int]:
        sizes = {
            place: max(count, self.access.size_between(place, states[place], begins[place], latest[place].offset))
            for place, count in behind.items()
            if count
        }
        found = {}
        for place, share in spread(sizes, limit).items():
            end = latest[place].offset
            if share < sizes[place]:
                reached = self.access.reach(place, states[place], begins[place], end, share)
                end = min(max(reached, begins[place] + 1), end)
            found[place] = end - begins[place]
        return found

    def pieces(
        self,
        start: Mapping[Partition, Position],
        end: Mapping[Partition, Position],
        states: Mapping[Partition, State],
    ) -> list[Piece]:
        ranges: list[tuple[Partition, State, int, int]] = []
        for place, until in sorted(end.items()):
            state = states.get(place)
            at = start.get(place)
            if state is None:
                self._loss(f"topic {place.topic!r} was deleted")
                continue
            if at == until:
                continue
            if until.log_id != state.log_id:
                self._loss(f"topic {place.topic!r} was deleted and made anew")
                continue  # what is there by now is for the next batch, which begins at its start
            if at is not None and at.log_id == until.log_id and at.offset > until.offset:
                continue  # it is to begin at a time that the log had not come to when the batch was planned
            begin = self._checked_start(place, at, state)
            if until.offset > state.end:
                self._loss(f"partition {place.number} of {place.topic!r} no longer reaches {until.offset}")
            stop = min(until.offset, state.end)
            if begin < stop:
                ranges.append((place, state, begin, stop))
        split_bytes = self.options.split_bytes
        if split_bytes is None:
            split_bytes = split_for(sum(self.access.rough_size(*span) for span in ranges), os.cpu_count() or 1)
        return [piece for span in ranges for piece in self.access.pieces(*span, split_bytes)]

    def _checked_start(self, place: Partition, at: Position | None, state: State) -> int:
        if at is None:
            return self._new(place, self.access.start(place, state))
        reason = lost(self.access, place, at, state)
        if reason is None:
            return at.offset
        self._loss(reason)
        start = self.access.start(place, state)
        return max(start, min(at.offset, state.end)) if at.log_id == state.log_id else start

    def _new(self, place: Partition, start: int) -> int:
        """A partition or topic that came while the stream was under way is read from its first record on."""
        if start > 0:
            self._loss(f"partition {place.number} of {place.topic!r} is new to this stream, and begins at {start}")
        return start

    def _loss(self, reason: str) -> None:
        if self.options.fail_on_data_loss:
            raise DataLoss(f"{reason}; option failOnDataLoss=false goes on with what is there")


def planned(access: Access, plan: Callable[[], list[Piece]], for_ms: int) -> tuple[list[Piece], Hold | None]:
    """Plan, and see to it that what was planned stays until it is released, or its time is over."""
    for attempt in range(PLANS_MAX):
        try:
            return access.hold(plan(), for_ms)
        except SegmentGone:
            time.sleep(attempt * PLAN_AGAIN_S)  # retention or rewriting was faster: plan on what is there now
    raise DataLoss("segments are rewritten or removed faster than a batch can be planned on them: try again")


def split_for(size: int, cores: int) -> int:
    """How much one task reads of so many bytes, if nobody said.

    A task costs Spark 20 ms of CPU however little it reads: as few as keep the cores busy to the end, but none so large
    that to repeat it is a loss. A tenth more than an even share, so that of partitions that are about alike no crumbs
    are left. The cores are the driver's: those of a cluster are not known where this is planned."""
    share = size * 11 // (10 * TASKS_PER_CORE * cores)
    return min(max(share, SPLIT_BYTES_LEAST), SPLIT_BYTES_MOST)


def by_topic(positions: Mapping[Partition, Position]) -> Iterable[tuple[str, dict[int, int]]]:
    found: dict[str, dict[int, int]] = {}
    for place, position in positions.items():
        found.setdefault(place.topic, {})[place.number] = position.offset
    return found.items()


__all__: Sequence[str] = ["Planner", "by_topic", "planned", "split_for"]
