"""A broker with queues on a simulated disk, and the promises about their messages.

Everything runs on one thread: the log's worker threads are replaced by callbacks of the event loop, so that a crash can
be checked at every disk call, with exactly the promises made before it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.retries import STORED
from headrace.broker.queues.view import View
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.types.message import Message
from headrace.broker.upkeep.schedule import Housekeeping
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.errors import HeadraceError
from headrace.log.settings import LogSettings
from headrace.record import codec
from tests.crash.model import Broken
from tests.crash.simdisk import SimulatedDisk

TTL_MS = 60_000
WORK, DEAD, BOUNDED, LEFT, RIGHT = "work", "dead", "bounded", "left", "right"
RETRIED, WAITING = "retried", "waiting for a retry"
BOUND = 2


class PostedWorker:
    """Replaces a worker thread: each job runs in a separate event-loop callback."""

    def __init__(self, name: str, post: Callable[[Callable[[], object]], object], threads: int = 1) -> None:
        self._post = post

    def submit(self, job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._post(partial(self._run, job, done))

    @staticmethod
    def _run(job: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        result, error = None, None
        try:
            result = job()
        except Exception as caught:  # noqa: BLE001 - as in the worker thread
            error = caught
        done(result, error)

    def close(self) -> None:
        pass


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the worker threads, and switch off work that depends on the wall clock, to make runs reproducible."""
    for module in ("shard", "read.cold_reads", "maintenance.jobs"):
        monkeypatch.setattr(f"headrace.log.{module}.ThreadWorker", PostedWorker)
    monkeypatch.setattr(Broker, "_tick", lambda self: None)
    monkeypatch.setattr(Housekeeping, "run", _never)


async def _never(_: Housekeeping, interval_s: float) -> None: ...


def config(folder: Path) -> Config:
    """Settings with one unit per round, so that no round makes separate changes atomic by accident."""
    log = LogSettings(
        round_bytes_max=1,
        journal_file_bytes=128 * 1024,
        journal_files=3,
        checkpoint_interval_ms=2000,
        settle_sync_interval_ms=1000,
        disk_reserve=0,
    )
    return Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=log, disk_free_limit=0)


@dataclass(slots=True)
class Promises:
    """Sets of message bodies. The promises only grow."""

    sent: set[bytes] = field(default_factory=set)
    confirmed: set[bytes] = field(default_factory=set)
    delivered: set[bytes] = field(default_factory=set)  # delivered to a consumer
    acked: set[bytes] = field(default_factory=set)
    acked_durably: set[bytes] = field(default_factory=set)  # a sync has covered the ack
    dead: set[bytes] = field(default_factory=set)  # rejected or expired: to be dead-lettered
    refused: set[bytes] = field(default_factory=set)
    pairs: set[bytes] = field(default_factory=set)  # confirmed transactions
    retried: set[bytes] = field(default_factory=set)  # rejected: to be retried

    def copy(self) -> "Promises":
        return Promises(*(set(getattr(self, one.name)) for one in fields(self)))


class QueueWorld:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = Random(seed)
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.promises = Promises()
        self.errors: list[BaseException] = []
        self._acked_in: dict[bytes, int] = {}  # number of flushes before the ack
        self.number = 0
        self._delivered: list[tuple[Queue, Any, int, bytes]] = []

    async def open(self) -> None:
        self.broker = await Broker.open(config(self.folder), clock=self.clock, disk=self.disk)
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD, "x-message-ttl": TTL_MS}
        self.dead = await self._declare(DEAD)
        self.work = await self._declare(WORK, **arguments)
        self.bounded = await self._declare(BOUNDED, **{"x-max-length": BOUND, "x-overflow": "reject-publish"})
        self.retried = await self._declare(RETRIED, **{"x-retry-limit": 1_000_000})
        self.left, self.right = await self._declare(LEFT), await self._declare(RIGHT)

    async def _declare(self, name: str, **arguments: object) -> Queue:
        return await self.broker.vhosts.get("/").declare_queue(
            name, durable=True, exclusive=False, auto_delete=False, arguments=arguments, owner=object()
        )

    async def step(self) -> None:
        names = list(ACTIONS)
        await getattr(self, self.rng.choices(names, list(ACTIONS.values()))[0])()
        if self.rng.random() < 0.3:
            await asyncio.sleep(0)

    # Publishers.

    def _next(self) -> bytes:
        self.number += 1
        body = b"%04d" % self.number
        self.promises.sent.add(body)
        return body

    def _send(self, queue: Queue, body: bytes) -> bool:
        return queue.publish(Message("", queue.name, b"\0\0", body), self.clock.now_ms())

    async def publish(self) -> None:
        for _ in range(self.rng.choice((1, 1, 3))):
            body = self._next()
            assert self._send(self.work, body)
            self._when_durable(partial(self.promises.confirmed.add, body))

    async def publish_retried(self) -> None:
        body = self._next()
        assert self._send(self.retried, body)
        self._when_durable(partial(self.promises.confirmed.add, body))

    async def publish_bounded(self) -> None:
        body = self._next()
        if self._send(self.bounded, body):
            self._when_durable(lambda: self.promises.confirmed.add(body))
        else:
            self.promises.refused.add(body)

    async def publish_pair(self) -> None:
        """Publish one message to two queues atomically, as tx.commit does."""
        body = self._next()
        rounds = self.broker.vhosts.flushes
        rounds.begin_atomic()
        self._send(self.left, body)
        self._send(self.right, body)
        rounds.end_atomic()
        self._when_durable(lambda: self.promises.pairs.add(body))

    def _when_durable(self, record: Callable[[], object]) -> None:
        # Acks of earlier flushes are in the journal before the entry of this flush.
        flushes = self.broker.vhosts.flushes.flush_count
        acked = {body for body, flush in self._acked_in.items() if flush < flushes}

        def done(error: BaseException | None) -> None:
            if error is not None:
                self.errors.append(error)
                return
            record()
            self.promises.acked_durably |= acked

        self.broker.vhosts.flushes.after(done)

    # Consumers.

    async def get(self) -> None:
        queue = self.rng.choice((self.work, self.work, self.dead, self.retried))
        await queue.prepare_get()
        taken = queue.get()
        if taken is None:
            return
        view, offset, message, redelivered = taken
        if message.body in self.promises.delivered and queue is self.work and not redelivered:
            raise Broken(f"D2 {message.body!r} was delivered again without the redelivered flag")
        self.promises.delivered.add(message.body)
        self._delivered.append((queue, view, offset, message.body))

    def _pop_delivered(self) -> tuple[Queue, Any, int, bytes] | None:
        return self._delivered.pop(self.rng.randrange(len(self._delivered))) if self._delivered else None

    async def ack(self) -> None:
        if (one := self._pop_delivered()) is not None:
            queue, view, offset, body = one
            self.promises.acked.add(body)
            self._acked_in[body] = self.broker.vhosts.flushes.flush_count
            queue.settle(view, offset, offset + 1)

    async def requeue(self) -> None:
        if (one := self._pop_delivered()) is not None:
            queue, view, offset, _ = one
            queue.give_back(view, offset)

    async def reject(self) -> None:
        if (one := self._pop_delivered()) is not None:
            queue, view, offset, body = one
            ended = {WORK: self.promises.dead, RETRIED: self.promises.retried, DEAD: self.promises.acked}
            ended[queue.name].add(body)
            queue.reject(view, offset)

    async def retry(self) -> None:
        await self.retried.prepare_get()
        taken = self.retried.get()
        if taken is not None:
            self.promises.retried.add(taken[2].body)
            self.retried.reject(taken[0], taken[1])

    # Time and background work.

    async def wait_all_durable(self) -> None:
        await self.broker.vhosts.flushes.wait_all_durable()

    async def wait(self) -> None:
        self.clock.advance(self.rng.choice((0.2, 1.2, 3.0)))
        self.broker.shard.tick()
        await asyncio.sleep(0)

    async def expire(self) -> None:
        """Expire all messages in the queue."""
        self.promises.dead |= self.promises.sent - self.promises.acked
        self.clock.advance(TTL_MS / 1000 + 1)
        self.work.drop_expired()

    async def checkpoint(self) -> None:
        self.broker.shard.checkpoint()
        for _ in range(self.rng.choice((1, 3, 8))):
            await asyncio.sleep(0)

    async def abandon(self) -> None:
        """End the test: release the broker without writing anything more."""
        self.disk.before = None
        assert not self.errors and self.broker.shard.failure is None, (self.errors, self.broker.shard.failure)
        await abandon_broker(self.broker)


async def abandon_broker(broker: Broker) -> None:
    broker.shard.fail(OSError("no power"))
    broker.vhosts.flushes.close()
    await asyncio.gather(broker.close(), return_exceptions=True)


ACTIONS = {
    "publish": 30,
    "publish_bounded": 8,
    "publish_retried": 8,
    "publish_pair": 6,
    "get": 26,
    "ack": 12,
    "requeue": 5,
    "reject": 6,
    "retry": 8,
    "wait_all_durable": 10,
    "wait": 8,
    "expire": 1,
    "checkpoint": 4,
}


def drain(queue: Queue) -> list[tuple[bytes, bool]]:
    """Body and redelivered flag of all messages in the queue, in order."""
    found = []
    while (taken := queue.get()) is not None:
        found.append((taken[2].body, taken[3]))
    return found


async def unsettled(view: View) -> list[bytes]:
    """The bodies of all unsettled messages of a log."""
    found: list[bytes] = []
    at = view.log.start_offset
    while (gap := view.settled.gap(at, view.log.stable_end)) is not None:
        try:
            chunk = view.log.read_now(gap[0], 1 << 20)
        except ReadWaits as cold:
            loaded = asyncio.get_running_loop().create_future()
            cold.then(partial(loaded.set_result, None))
            await loaded
            continue
        found += [record.value or b"" for record in codec.records(chunk.data, from_offset=gap[0], to_offset=gap[1])]
        at = min(chunk.next_offset, gap[1])
    return found


async def judge(folder: Path, image: SimulatedDisk, before: Promises, after: Promises) -> None:
    """Check a disk against the promises at the crash (`before`) and all operations started by then (`after`).

    The clock starts again, so that only messages that had expired before the crash are expired. Raises Broken.
    """
    try:
        broker = await Broker.open(config(folder), clock=ManualClock(), disk=image)
    except HeadraceError as error:
        raise Broken(f"L5 cannot be opened: {error!r}") from error
    host = broker.vhosts.get("/")
    retries = host.delays.log(STORED)
    assert retries is not None
    retries.is_closed = True  # nothing returns from now on
    await host.flushes.wait_all_durable()
    waiting = [(body, False) for body in await unsettled(retries.view)]
    found = {name: drain(host.queues[name]) for name in (WORK, DEAD, BOUNDED, RETRIED, LEFT, RIGHT)}
    found[WAITING] = waiting
    await abandon_broker(broker)
    _check_queues(found, before, after)
    _check_moves(found, before, after)


Found = dict[str, list[tuple[bytes, bool]]]


def _check_queues(found: Found, before: Promises, after: Promises) -> None:
    everywhere: set[bytes] = set()
    for name, messages in found.items():
        there = [body for body, _ in messages]
        everywhere |= set(there)
        if len(set(there)) != len(there):
            raise Broken(f"D5 {name} holds a message twice: {there}")
        if strange := set(there) - after.sent:
            raise Broken(f"D5 {name} holds messages that were never sent: {sorted(strange)}")
        if name not in (DEAD, RETRIED, WAITING) and there != sorted(there):
            raise Broken(f"D4 {name} is out of order: {there}")
    if lost := before.confirmed - after.acked - everywhere:
        raise Broken(f"D1 confirmed but missing: {sorted(lost)}")
    if again := before.acked_durably & everywhere:
        raise Broken(f"D3 durably acked but still there: {sorted(again)}")
    if again := before.refused & everywhere:
        raise Broken(f"D5 refused but stored: {sorted(again)}")
    if unflagged := [body for body, flag in found[WORK] if body in before.delivered and not flag]:
        raise Broken(f"D2 delivered before the crash but not flagged: {unflagged}")


def _check_moves(found: Found, before: Promises, after: Promises) -> None:
    bodies = {name: [body for body, _ in messages] for name, messages in found.items()}
    if both := set(bodies[WORK]) & set(bodies[DEAD]):
        raise Broken(f"D10 in the queue and in the dead-letter queue: {sorted(both)}")
    if both := set(bodies[RETRIED]) & set(bodies[WAITING]):
        raise Broken(f"D10 in the queue and waiting for a retry: {sorted(both)}")
    if early := set(bodies[WAITING]) - after.retried:
        raise Broken(f"D10 waiting for a retry but not rejected: {sorted(early)}")
    if early := set(bodies[DEAD]) - after.dead:
        raise Broken(f"D10 dead-lettered but neither rejected nor expired: {sorted(early)}")
    if bodies[LEFT] != bodies[RIGHT]:
        raise Broken(f"D9 half a transaction: {bodies[LEFT]} and {bodies[RIGHT]}")
    if lost := before.pairs - set(bodies[LEFT]):
        raise Broken(f"D9 a confirmed transaction is missing: {sorted(lost)}")
