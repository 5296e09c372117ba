"""The transactional ids of a broker and how they are stored, in two tables of the state.

Used by the other modules of this package only, on the event-loop thread.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec

from headrace.broker.transactions.transaction import ONGOING, AddedPartition, Transaction
from headrace.clock import Clock
from headrace.errors import ConcurrentTransactions, InvalidProducerEpoch, TransactionNotFound, UnknownProducer
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.shard import Shard

TRANSACTIONS = "transactions"
JOINED = "transactions.joined"


class TransactionTable:
    def __init__(self, shard: Shard, clock: Clock) -> None:
        self._shard = shard
        self._clock = clock
        self._by_id: dict[str, Transaction] = {}
        self._by_producer: dict[int, Transaction] = {}

    def load(self) -> None:
        for key, value in self._shard.state.items(TRANSACTIONS):
            self.add(Transaction.restored(key.decode(), value))
        for key, value in self._shard.state.items(JOINED):
            self._restore_added(int.from_bytes(key[:8], "big"), key[8:].decode(), value)

    def _restore_added(self, log_id: int, transactional_id: str, value: bytes) -> None:
        added = msgspec.msgpack.decode(value, type=AddedPartition)
        one, where = self._by_id.get(transactional_id), (added.topic, added.partition)
        if one is None or one.instance != (added.producer_id, added.epoch):
            return
        one.state, one.started_ms = ONGOING, added.started_ms
        one.joined[log_id] = where
        if log_id in self._shard.logs:  # else deleted; a new topic of that name may be in the transaction, too
            one.partitions[where] = log_id

    def every(self) -> Iterator[Transaction]:
        return iter(self._by_id.values())

    def find(self, transactional_id: str) -> Transaction | None:
        return self._by_id.get(transactional_id)

    def get(self, transactional_id: str) -> Transaction:
        try:
            return self._by_id[transactional_id]
        except KeyError:
            raise TransactionNotFound(transactional_id) from None

    def name_of(self, producer_id: int) -> str | None:
        """The transactional id of a producer."""
        one = self._by_producer.get(producer_id)
        return one.transactional_id if one is not None else None

    def of_producer(self, producer_id: int, epoch: int) -> Transaction:
        """The transactional id of a producer; raises unless this is its current epoch."""
        one = self._by_producer.get(producer_id)
        if one is None:
            raise UnknownProducer(f"producer {producer_id} has no transactional id")
        if epoch != one.epoch:  # perhaps it timed out: Java restarts after this error, but not after a fence
            raise InvalidProducerEpoch(f"producer {producer_id} is at epoch {one.epoch}, not {epoch}")
        return one

    # Changes.

    def add(self, one: Transaction) -> None:
        self._by_id[one.transactional_id] = self._by_producer[one.producer_id] = one

    def set_producer(self, one: Transaction, producer_id: int, epoch: int) -> None:
        self._by_producer.pop(one.producer_id, None)
        one.producer_id, one.epoch = producer_id, epoch
        self._by_producer[producer_id] = one

    async def put(self, one: Transaction) -> None:
        """Store a transactional id; durable on return."""
        one.changed_ms = self._clock.now_ms()
        one.is_saved = False
        entry = self._shard.group()
        self.stage(one, entry)
        await entry.commit()
        one.is_saved = True

    @staticmethod
    def stage(one: Transaction, entry: AtomicGroup) -> None:
        """Store a transactional id as part of a journal entry."""
        entry.put(TRANSACTIONS, one.transactional_id.encode(), one.saved())

    async def forget(self, gone: Sequence[Transaction]) -> None:
        with ExitStack() as busy:  # a producer that returns meanwhile retries, and gets a new id
            entry = self._shard.group()
            for one in gone:
                busy.enter_context(self.busy(one))
                entry.delete(TRANSACTIONS, one.transactional_id.encode())
            await entry.commit()
            for one in gone:
                del self._by_id[one.transactional_id]
                self._by_producer.pop(one.producer_id, None)

    @contextmanager
    def busy(self, one: Transaction) -> Iterator[None]:
        """While a change of a transactional id is being stored; ConcurrentTransactions if another one is."""
        if one.busy:
            raise ConcurrentTransactions(one.transactional_id)
        one.busy = True
        try:
            yield
        finally:
            one.busy = False
