"""The sink ledger: for each writer, the last batch that was committed and where it was stored.

A commit names a writer (a Spark query), the number of its batch, and uploads. A commit that fits one journal entry is
stored together with the ledger's line in that entry: both are stored or neither is. A larger commit is first stored as
a plan (the ledger's line with the remaining steps; the uploads are durable already), then each step is stored in one
entry with the number of the next. After a crash the next start finishes the plan, so a commit whose plan is durable
will succeed. Committing the same batch again changes nothing and returns what was stored the first time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from headrace.broker.sinks.uploads import Section, Uploads
from headrace.broker.streams.append import Appender
from headrace.broker.streams.streams import Streams
from headrace.clock import Clock, ExpiryClock
from headrace.errors import BatchTooLarge, HeadraceError, InvalidInput, NotFound
from headrace.log.commit.journal_entry import PART_BYTES
from headrace.log.shard import Shard
from headrace.record.types import BatchInfo

logger = logging.getLogger("headrace.broker")

TABLE = "sinks"
PLANS = "sink-plans"
STEP_BYTES_MAX = 8 << 20  # several fit a journal file, and other rounds can run in between
LINE_BYTES = 4096  # more than the ledger's line needs in the same entry
PARTS_MAX = 100_000
WRITER_BYTES_MAX = 255
MAX_AGE_MS = 90 * 24 * 3600 * 1000
ONCE = "once:"  # prefix of writers that commit only once: a Spark write without a query id
ONCE_AGE_MS = 3600 * 1000  # far longer than its one commit may be retried


class LedgerEntry(NamedTuple):
    """Batches of an upload, and the partition they are for."""

    section: Section
    topic: str
    partition: int


class Stored(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int
    base_offset: int
    next_offset: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's line of one writer. While steps are left, the batch is decided and still being stored."""

    batch: int
    updated_ms: int
    records: int = 0
    stored: list[Stored] = []
    next_step: int = 0
    steps: int = 0
    user: str = ""  # the writer's owner; empty without authentication

    @property
    def is_open(self) -> bool:
        return self.next_step < self.steps


class _Step(msgspec.Struct, frozen=True, array_like=True):
    """One or more runs of batches, small enough for one journal entry."""

    runs: list[tuple[str, int, int, int]]  # upload, position, length, log id


class Outcome(NamedTuple):
    line: Line
    duplicate: bool


Claim = Callable[[str], str]  # from the writer's present owner to the new one; raises if that is not allowed


def unclaimed(owner: str) -> str:
    return owner


class Ledger:
    def __init__(self, shard: Shard, streams: Streams, appender: Appender, uploads: Uploads, clock: Clock) -> None:
        self._shard = shard
        self._streams = streams
        self._appender = appender
        self._uploads = uploads
        self._clock = clock
        self._ages = ExpiryClock(clock)
        self._lines: dict[str, Line] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Outcome]] = set()
        for key, value in shard.state.items(TABLE):
            self._lines[key.decode()] = msgspec.msgpack.decode(value, type=Line)

    def get(self, writer: str) -> Line:
        try:
            return self._lines[writer]
        except KeyError:
            raise NotFound(f"the sink ledger has no writer {writer!r}") from None

    def lines(self) -> dict[str, Line]:
        return dict(self._lines)

    async def finish_open(self) -> int:
        """At the start: finish the plans that a crash interrupted; returns how many there were."""
        unfinished = [writer for writer, line in self._lines.items() if line.is_open]
        for writer in unfinished:
            try:
                await self._run(writer)
            except HeadraceError as error:
                logger.error("the interrupted batch of sink writer %r cannot be finished: %s", writer, error)
        return len(unfinished)

    async def commit(self, writer: str, batch: int, parts: Sequence[LedgerEntry], claim: Claim = unclaimed) -> Outcome:
        """Durable on return. A batch at or before the writer's last one is not stored again."""
        _check(writer, parts)
        # In a task of its own: if it were cancelled with the client's connection, the entry could be on disk while
        # memory still has the old line, and the batch would be stored twice.
        task = asyncio.get_running_loop().create_task(
            self._in_turn(writer, batch, parts, claim), name=f"commit of {writer}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for the commits in progress; their callers get the errors."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _in_turn(self, writer: str, batch: int, parts: Sequence[LedgerEntry], claim: Claim) -> Outcome:
        async with self._turns.setdefault(writer, asyncio.Lock()):
            return await self._commit(writer, batch, parts, claim)

    async def _commit(self, writer: str, batch: int, parts: Sequence[LedgerEntry], claim: Claim) -> Outcome:
        line = self._lines.get(writer)
        user = claim(line.user if line is not None else "")
        if line is not None and line.is_open:
            await self._run(writer)
            line = self._lines[writer]
        names = {part.section.name for part in parts}
        if line is not None and batch <= line.batch:
            await self._uploads.remove(names)
            return Outcome(line, True)
        if sum(part.section.length + PART_BYTES for part in parts) > self._step_bytes():
            # Before they are checked: a plan whose uploads are discarded meanwhile could never be finished.
            self._uploads.hold(names)
            try:
                await self._plan(writer, batch, parts, user)
            except BaseException:
                self._uploads.release(names)
                raise
            await self._run(writer)
            return Outcome(self._lines[writer], False)
        self._uploads.hold(names)
        try:
            loaded = []
            for part in parts:
                stream = self._streams.get(part.topic)
                log_id = stream.partition(part.partition).log_id
                loaded.append((log_id, *await self._uploads.read(part.section, keyed=stream.rules.needs_key)))
            line = Line(batch=batch, updated_ms=self._clock.now_ms(), user=user)
            line = await self._append(writer, line, loaded)
        finally:
            self._uploads.release(names)
        await self._uploads.remove(names)
        return Outcome(line, False)

    def _step_bytes(self) -> int:
        """The most one entry can hold, even of a small journal: a larger step could never be stored."""
        return min(STEP_BYTES_MAX, self._shard.journal.capacity // 2 - LINE_BYTES)

    async def _plan(self, writer: str, batch: int, parts: Sequence[LedgerEntry], user: str) -> None:
        """Check every batch, cut it into steps, and store the plan: from then on the batch is decided."""
        steps: list[_Step] = []
        runs: list[tuple[str, int, int, int]] = []
        room = most = self._step_bytes()
        for part in parts:
            stream = self._streams.get(part.topic)
            log = stream.partition(part.partition).log
            _, infos = await self._uploads.read(part.section, keyed=stream.rules.needs_key)
            for position, length in _runs(infos, most):
                self._appender.check(log, [info for info in infos if position <= info.position < position + length])
                if length > room and runs:
                    steps.append(_Step(runs))
                    runs, room = [], most
                runs.append((part.section.name, part.section.position + position, length, log.id))
                room -= length + PART_BYTES
        steps.append(_Step(runs))
        line = Line(batch=batch, updated_ms=self._clock.now_ms(), steps=len(steps), user=user)
        group = self._shard.group()
        group.put(PLANS, writer.encode(), msgspec.msgpack.encode(steps))
        group.put(TABLE, writer.encode(), msgspec.msgpack.encode(line))
        await group.commit()
        self._lines[writer] = line

    async def _run(self, writer: str) -> None:
        """Store the remaining steps. Each entry has its batches and the number of the next step."""
        raw = self._shard.state.get(PLANS, writer.encode())
        steps = msgspec.msgpack.decode(raw or b"", type=list[_Step])
        names = {run[0] for step in steps for run in step.runs}
        self._uploads.hold(names)  # until all is stored: after an error the next attempt needs them
        for step in steps[self._lines[writer].next_step :]:
            loaded = []
            for name, position, length, log_id in step.runs:
                if log_id in self._shard.logs:  # else its topic was deleted meanwhile
                    loaded.append((log_id, *await self._uploads.read(Section(name, position, length))))
            await self._append(writer, self._lines[writer], loaded)
        self._uploads.release(names)
        await self._uploads.remove(names)

    async def _append(self, writer: str, line: Line, loaded: Sequence[tuple[int, bytearray, list[BatchInfo]]]) -> Line:
        """Store the batches and the ledger's new line in one journal entry.

        Offsets are known only afterwards, so only the line in memory has them: they are for a prompt retry."""
        group = self._shard.group()
        tickets = [
            (log_id, self._appender.stage_in(group, self._shard.log(log_id), data, infos))
            for log_id, data, infos in loaded
        ]
        records = line.records + sum(info.count for _, _, infos in loaded for info in infos)
        last = line.next_step + 1 >= line.steps
        changed = msgspec.structs.replace(
            line, records=records, updated_ms=self._clock.now_ms(), next_step=line.next_step + (line.steps > 0)
        )
        group.put(TABLE, writer.encode(), msgspec.msgpack.encode(changed))
        if last and line.steps:
            group.delete(PLANS, writer.encode())
        await group.commit()
        stored = [*line.stored, *(self._stored(log_id, t.base_offset, t.next_offset) for log_id, t in tickets)]
        changed = msgspec.structs.replace(changed, stored=_merged(stored))
        self._lines[writer] = changed
        return changed

    def _stored(self, log_id: int, base_offset: int, next_offset: int) -> Stored:
        place = self._streams.of_log(log_id)
        topic, number = (place[0].name, place[1].number) if place is not None else ("", 0)
        return Stored(topic, number, base_offset, next_offset)

    async def expire(self, max_age_ms: int = MAX_AGE_MS) -> list[str]:
        """Forget writers that were silent for so long that their last batch will not be retried."""
        old = [
            writer
            for writer, line in self._lines.items()
            if not line.is_open
            and self._ages.is_past(line.updated_ms, ONCE_AGE_MS if writer.startswith(ONCE) else max_age_ms)
            and not self._is_busy(writer)
        ]
        if old:
            group = self._shard.group()
            for writer in old:
                group.delete(TABLE, writer.encode())
                del self._lines[writer]
                self._turns.pop(writer, None)
            await group.commit()
        return old

    def _is_busy(self, writer: str) -> bool:
        """Whether a commit is in progress, which will replace the line."""
        turn = self._turns.get(writer)
        return turn is not None and turn.locked()


def _check(writer: str, parts: Sequence[LedgerEntry]) -> None:
    if not 0 < len(writer.encode("utf-8", "replace")) <= WRITER_BYTES_MAX:
        raise InvalidInput(f"the name of a writer must have 1 to {WRITER_BYTES_MAX} bytes")
    if len(parts) > PARTS_MAX:
        raise InvalidInput(f"a commit can have at most {PARTS_MAX:,} parts, not {len(parts):,}")


def _runs(infos: Sequence[BatchInfo], bytes_max: int) -> list[tuple[int, int]]:
    """(position, length) of runs of batches, none longer than bytes_max."""
    runs: list[tuple[int, int]] = []
    begin = 0
    for info in infos:
        if info.size > bytes_max:
            raise BatchTooLarge(info.size, bytes_max)
        if info.end - begin > bytes_max:
            runs.append((begin, info.position - begin))
            begin = info.position
    runs.append((begin, infos[-1].end - begin))
    return runs


def _merged(stored: Sequence[Stored]) -> list[Stored]:
    """Merge adjacent ranges; other writers' batches may lie between two of ours."""
    merged: list[Stored] = []
    last: dict[tuple[str, int], int] = {}
    for one in stored:
        at = last.get((one.topic, one.partition))
        if at is not None and merged[at].next_offset == one.base_offset:
            merged[at] = msgspec.structs.replace(merged[at], next_offset=one.next_offset)
        else:
            last[one.topic, one.partition] = len(merged)
            merged.append(one)
    return merged
