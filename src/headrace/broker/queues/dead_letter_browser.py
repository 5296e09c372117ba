"""Dead letters of all queues: summaries by reason and origin, and replays to where they came from.

A replay moves messages from a dead-letter queue back to the queue they died in. The publish and the settle of each
message are one atomic group: after a kill the message is in exactly one of the two queues. A replay is a range of
offsets and a filter, fixed when it starts and kept in the state table. After a kill it continues by itself; messages it
has moved are settled, so they are not found again. Messages that die again lie beyond the range, so a replay always
ends.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.dead_lettering import routing_keys
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.publish_batch import PublishBatch
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.routing.router import Routing
from headrace.broker.streams.browse import READY, BrowsedMessage, Gap, browse, has_text, state_of, unserved
from headrace.broker.streams.decode import Decoder
from headrace.broker.types.message import Message, from_record
from headrace.clock import Clock
from headrace.errors import HeadraceError, InvalidInput, LimitReached, NotFound
from headrace.log.shard import Shard
from headrace.record.types import Record

logger = logging.getLogger("headrace.broker")

TABLE = "replays"
BATCH_MESSAGES = 500
BATCH_BYTES = 4 << 20
TICK_S = 0.1
REPLAYS_MAX = 200
SUMMARY_RECORDS_MAX = 20_000
SAVE_EVERY_S = 1.0
RUNNING, DONE, STOPPED, FAILED = "running", "done", "stopped", "failed"


class Death(NamedTuple):
    """The last death of a message."""

    queue: str
    reason: str
    exchange: str
    routing_key: str
    deaths: int
    time_s: int
    first_queue: str
    first_reason: str
    replays: int


def death_of(message: Message) -> Death | None:
    headers = message.headers()
    deaths = headers.get("x-death")
    if not isinstance(deaths, list) or not deaths or not isinstance(deaths[0], dict):
        return None
    last = deaths[0]
    keys, time_s = routing_keys(last), last.get("time")
    replays = headers.get("x-replays", 0)
    return Death(
        str(last.get("queue", "")),
        str(last.get("reason", "")),
        str(last.get("exchange", "")),
        str(keys[0]) if keys else message.routing_key,
        sum(int(d.get("count", 1)) for d in deaths if isinstance(d, dict) and isinstance(d.get("count", 1), int)),
        time_s if isinstance(time_s, int) else 0,
        str(headers.get("x-first-death-queue", "")),
        str(headers.get("x-first-death-reason", "")),
        replays if isinstance(replays, int) else 0,
    )


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """A filter for dead letters: all given conditions must hold."""

    reason: str | None = None
    origin: str | None = None
    contains: str | None = None

    def fits(self, message: Message, death: Death | None) -> bool:
        if self.reason is not None and (death is None or death.reason != self.reason):
            return False
        if self.origin is not None and (death is None or death.queue != self.origin):
            return False
        return self.contains is None or has_text(message.body, self.contains.encode())


class Replay(msgspec.Struct, kw_only=True):
    """A replay, as stored in the state table. `until` is the end of its range, for each priority of the queue."""

    id: str
    vhost: str
    queue: str
    to: str | None  # None: the queue that each message died in
    wanted: Selection
    until: dict[int, int]
    rate: float
    matched: int
    moved: int = 0
    skipped: int = 0  # the origin was deleted, or refused the message
    state: str = RUNNING
    error: str | None = None
    started_ms: int = 0
    ended_ms: int = 0


class Unread(NamedTuple):
    """Dead letters that cannot be read; they stay in the queue."""

    level: int
    gap: Gap

    def __str__(self) -> str:
        start, end, reason = self.gap
        where = f"from offset {start} on" if end is None else f"at offsets {start} to {end - 1}"
        return f"messages {where} cannot be read and stay in the queue: {reason}"


class ReplayPlan(NamedTuple):
    matched: int
    until: dict[int, int]
    targets: dict[str, int]  # number of messages by queue
    missing: dict[str, int]  # number of messages by origin that does not exist; they stay
    is_cut: bool  # the requested number was reached before the end
    unread: list[Unread]


class BrowsedHost(Protocol):
    @property
    def queues(self) -> dict[str, Queue]: ...
    @property
    def routing(self) -> Routing[Queue]: ...

    def queue(self, name: str) -> Queue: ...


class BrowsedHosts(Protocol):
    """All vhosts of the broker."""

    @property
    def flushes(self) -> FlushCoordinator: ...

    def __iter__(self) -> Iterator[BrowsedHost]: ...

    def get(self, name: str) -> BrowsedHost: ...


class DeadLetterBrowser:
    """All dead-letter queues of the broker, and the replays out of them. Continues running replays when constructed."""

    def __init__(self, hosts: BrowsedHosts, shard: Shard, clock: Clock, decoder: Decoder) -> None:
        self._hosts = hosts
        self._shard = shard
        self._clock = clock
        self._decoder = decoder
        self._replays: dict[str, Replay] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        for _, value in shard.state.items(TABLE):
            replay = msgspec.msgpack.decode(value, type=Replay)
            self._replays[replay.id] = replay
        for replay in self._replays.values():
            if replay.state == RUNNING:
                self._start(replay)

    async def close(self) -> None:
        """Running replays stay marked as running: the next start continues them."""
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    # Browsing.

    def queues(self) -> list[tuple[Queue, list[str]]]:
        """Dead-letter queues, each with the names of the queues that use it."""
        found: dict[int, tuple[Queue, list[str]]] = {}
        for host in self._hosts:
            for source in host.queues.values():
                name = source.policy.dead_letter_exchange
                if name is None:
                    continue
                exchange = host.routing.exchanges.get(name)
                if exchange is None:
                    continue
                for target in self._targets_of(host, exchange, source):
                    found.setdefault(id(target), (target, []))[1].append(source.name)
        return sorted(found.values(), key=lambda pair: (pair[0].vhost.name, pair[0].name))

    @staticmethod
    def _targets_of(host: BrowsedHost, exchange: Exchange, source: Queue) -> Iterable[Queue]:
        if source.policy.dead_letter_key is not None:
            return host.routing.route(exchange, source.policy.dead_letter_key, host.queues).queues
        if not exchange.name:
            return ()
        # Dead letters keep their routing keys, so any queue bound to the exchange may be a target.
        return [b.destination for b in exchange.bindings.values() if isinstance(b.destination, Queue)]

    async def summary(self, queue: Queue) -> tuple[list[dict[str, Any]], int, list[Unread]]:
        """(groups by origin and reason, number of messages examined, unreadable ranges), of the first ready ones."""
        groups: dict[tuple[str, str], dict[str, Any]] = {}
        looked = 0
        unread: list[Unread] = []
        async for death in self._deaths(queue, SUMMARY_RECORDS_MAX, unread):
            looked += 1
            key = (death.queue, death.reason) if death is not None else ("", "")
            group = groups.setdefault(
                key, {"origin": key[0], "reason": key[1], "messages": 0, "deaths_max": 0, "last": 0, "exchange": ""}
            )
            group["messages"] += 1
            if death is not None:
                group["deaths_max"] = max(group["deaths_max"], death.deaths)
                group["last"] = max(group["last"], death.time_s * 1000)
                group["exchange"] = death.exchange
        return sorted(groups.values(), key=lambda group: -group["messages"]), looked, unread

    async def _deaths(self, queue: Queue, limit: int, unread: list[Unread]) -> AsyncIterator[Death | None]:
        turns = YieldEvery()
        for view in queue.views:
            async for record in self._ready(view, view.log.stable_end, limit, turns, unread):
                yield death_of(from_record(record))

    async def _ready(
        self, view: View, until: int, limit: int, turns: YieldEvery, unread: list[Unread]
    ) -> AsyncIterator[Record]:
        """Ready messages of a view in order, with one page in memory."""
        offset = view.low
        while offset < until and limit > 0:
            page = await self._look(view, offset, until, min(limit, BATCH_MESSAGES), unread)
            limit -= len(page.records)
            async for record in turns.each(page.records):
                yield record
            if page.next_offset <= offset:
                return
            offset = page.next_offset
        if limit > 0:
            unread += (Unread(view.level, gap) for gap in unserved(view.partition))

    async def _look(self, view: View, offset: int, until: int, limit: int, unread: list[Unread]) -> BrowsedMessage:
        gaps: list[Gap] = []
        found = await browse(
            self._decoder,
            view.partition,
            offset,
            limit=limit,
            bytes_max=BATCH_BYTES,
            wanted=lambda record: record.offset < until and state_of(view, record.offset) == READY,
            aborted=view.reader.aborted(),
            gaps=gaps,
        )
        unread += (Unread(view.level, gap) for gap in gaps)
        return found

    # Replaying.

    async def plan(
        self, queue: Queue, wanted: Selection, *, to: str | None = None, count: int | None = None
    ) -> ReplayPlan:
        """What a replay would do now, without changing anything."""
        if queue.is_stream:
            raise InvalidInput("a stream keeps its messages: read it from an offset instead of replaying it")
        matched, targets, missing = 0, {}, {}  # type: int, dict[str, int], dict[str, int]
        until: dict[int, int] = {view.level: view.log.stable_end for view in queue.views}
        is_cut = False
        turns, unread = YieldEvery(), []  # type: YieldEvery, list[Unread]
        queues = self._queues_of(queue)
        for view in queue.views:
            async for record in self._ready(view, until[view.level], 1 << 60, turns, unread):
                message = from_record(record)
                death = death_of(message)
                if not wanted.fits(message, death):
                    continue
                if count is not None and matched >= count:
                    until[view.level] = record.offset
                    is_cut = True
                    break
                name = to if to is not None else death.queue if death is not None else ""
                target = queues.get(name)
                if target is None or target is queue:
                    missing[name] = missing.get(name, 0) + 1
                    continue
                matched += 1
                targets[name] = targets.get(name, 0) + 1
            if is_cut:
                for later in queue.views[queue.views.index(view) + 1 :]:
                    until[later.level] = 0
                break
        return ReplayPlan(matched, until, targets, missing, is_cut, unread)

    def _queues_of(self, queue: Queue) -> Mapping[str, Queue]:
        """All queues of the queue's vhost."""
        return self._hosts.get(queue.vhost.name).queues

    async def replay(
        self,
        queue: Queue,
        wanted: Selection,
        *,
        replay_id: str,
        to: str | None = None,
        count: int | None = None,
        rate: float = 0.0,
    ) -> Replay:
        """Start a replay. It runs in the background and continues after a restart."""
        plan = await self.plan(queue, wanted, to=to, count=count)
        self._make_room()
        replay = Replay(
            id=replay_id,
            vhost=queue.vhost.name,
            queue=queue.name,
            to=to,
            wanted=wanted,
            until=plan.until,
            rate=rate,
            matched=plan.matched,
            started_ms=self._clock.now_ms(),
        )
        await self._save(replay)
        self._replays[replay.id] = replay
        self._start(replay)
        return replay

    def replays(self) -> list[Replay]:
        return sorted(self._replays.values(), key=lambda replay: -replay.started_ms)

    def get(self, replay_id: str) -> Replay:
        found = self._replays.get(replay_id)
        if found is None:
            raise NotFound(f"no replay {replay_id!r}")
        return found

    async def stop(self, replay_id: str) -> Replay:
        replay = self.get(replay_id)
        task = self._tasks.get(replay_id)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if replay.state == RUNNING:
            await self._hosts.flushes.wait_flushed()  # so that its last moves are counted
            await self._end(replay, STOPPED)
        return replay

    async def wait(self, replay_id: str) -> Replay:
        """Wait until the replay has ended."""
        task = self._tasks.get(replay_id)
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        return self.get(replay_id)

    def _make_room(self) -> None:
        ended = sorted((r for r in self._replays.values() if r.state != RUNNING), key=lambda r: r.ended_ms)
        if len(self._replays) >= REPLAYS_MAX:
            if not ended:
                raise LimitReached(f"{REPLAYS_MAX} replays are running")
            gone = ended[0].id
            del self._replays[gone]
            group = self._shard.group()
            group.delete(TABLE, gone.encode())
            group.commit()

    def _start(self, replay: Replay) -> None:
        task = asyncio.get_running_loop().create_task(self._run(replay), name=f"replay {replay.id}")
        self._tasks[replay.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(replay.id, None))

    async def _run(self, replay: Replay) -> None:
        try:
            host = self._hosts.get(replay.vhost)
            queue = host.queue(replay.queue)
            unread: list[Unread] = []
            for view in queue.views:
                await self._move_all(replay, queue, view, unread)
            if unread:
                logger.error("replay %s of %r: %s", replay.id, replay.queue, unread[0])
            await self._end(replay, FAILED if unread else DONE, str(unread[0]) if unread else None)
        except HeadraceError as error:
            logger.error("replay %s of %r failed: %s", replay.id, replay.queue, error)
            await self._end(replay, FAILED, str(error))

    async def _move_all(self, replay: Replay, queue: Queue, view: View, unread: list[Unread]) -> None:
        """Unreadable messages are skipped, so that those after them need not wait for a repair."""
        clock = self._clock
        saved_at = clock.monotonic()
        offset, until = view.low, replay.until.get(view.level, 0)
        while offset < until:
            share = min(BATCH_MESSAGES, max(1, round(replay.rate * TICK_S))) if replay.rate else BATCH_MESSAGES
            began = clock.monotonic()
            page = await self._look(view, offset, until, share, unread)
            offset = max(page.next_offset, offset + 1)
            flushes = queue.vhost.flushes
            with flushes.collecting() as batches:
                moved = self._move_some(replay, queue, view, page.records)
            # By callback: durable moves are counted even if the replay is stopped while it waits for them.
            flushes.after(partial(_count, replay, moved, batches))
            await flushes.wait_stored(batches)
            if clock.monotonic() - saved_at > SAVE_EVERY_S:
                saved_at = clock.monotonic()
                await self._save(replay)
            if replay.rate:
                await asyncio.sleep(max(0.0, moved / replay.rate - (clock.monotonic() - began)))
            else:
                await asyncio.sleep(0)

    def _move_some(self, replay: Replay, queue: Queue, view: View, records: Sequence[Record]) -> int:
        """The number of messages moved. Consumers may have taken some while the disk was read, but not from now on."""
        moved = 0
        queues = self._queues_of(queue)
        for record in records:
            message = from_record(record)
            death = death_of(message)
            if state_of(view, record.offset) != READY or not replay.wanted.fits(message, death):
                continue
            name = replay.to if replay.to is not None else death.queue if death is not None else ""
            target = queues.get(name)
            if target is None or target is queue or not self._move(queue, view, record.offset, message, target, death):
                replay.skipped += 1
                continue
            moved += 1
        return moved

    def _move(
        self, queue: Queue, view: View, offset: int, message: Message, target: Queue, death: Death | None
    ) -> bool:
        key = death.routing_key if death is not None else message.routing_key
        exchange = death.exchange if death is not None else message.exchange
        replays = death.replays + 1 if death is not None else 1
        again = message.with_headers(**{"x-replays": replays, "x-replayed-from": queue.name})
        again.exchange, again.routing_key = exchange, key
        flushes = queue.vhost.flushes
        flushes.begin_atomic()
        try:
            if not target.publish(again, self._clock.now_ms()):
                return False
            view.returned.remove(offset, offset + 1)
            view.settle(offset, offset + 1)
        finally:
            flushes.end_atomic()
        return True

    async def _end(self, replay: Replay, state: str, error: str | None = None) -> None:
        replay.state, replay.error, replay.ended_ms = state, error, self._clock.now_ms()
        try:
            await self._save(replay)
        except HeadraceError as failure:
            logger.error("the end of replay %s could not be stored: %s", replay.id, failure)

    async def _save(self, replay: Replay) -> None:
        group = self._shard.group()
        group.put(TABLE, replay.id.encode(), msgspec.msgpack.encode(replay))
        await group.commit()


def _count(replay: Replay, moved: int, batches: Collection[PublishBatch], _error: object) -> None:
    if all(batch.error is None for batch in batches):
        replay.moved += moved
