"""Appending the batches of transactions.

A batch of a client of transaction version 2 adds its partition to the transaction in the journal entry that stores the
batch; older clients have added the partition before.
"""

from collections.abc import Callable
from functools import partial

import msgspec

from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.producers import Producers
from headrace.broker.transactions.table import JOINED, TransactionTable
from headrace.broker.transactions.transaction import ONGOING, AddedPartition, Transaction, Where, joined_key
from headrace.errors import ConcurrentTransactions, NotInTransaction
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.round import Ticket
from headrace.log.shard import Shard
from headrace.record.types import BatchInfo


class TransactionBatches:
    """`open_` opens a transaction unless it is open."""

    def __init__(
        self, shard: Shard, table: TransactionTable, producers: Producers, open_: Callable[[Transaction], None]
    ) -> None:
        self._shard = shard
        self._table = table
        self._producers = producers
        self._open = open_

    def name_of(self, producer_id: int) -> str | None:
        """The transactional id of a producer."""
        return self._table.name_of(producer_id)

    def check_append(self, producer_id: int, epoch: int, where: Where) -> None:
        """Raises unless a transactional batch of this producer belongs to its open transaction."""
        one = self._table.of_producer(producer_id, epoch)
        # A topic that was recreated under the name is not in it: its log would get no marker.
        if one.state != ONGOING or one.partitions.get(where) not in self._shard.logs or where in one.joining:
            raise NotInTransaction(f"{where[0]}-{where[1]} is not in the transaction")

    def append(
        self, partition: Partition, data: bytearray | memoryview, infos: list[BatchInfo], where: Where
    ) -> Ticket:
        """Append a transactional batch, which adds its partition to the transaction and opens it if it is the first.

        Each transaction has an epoch of its own, so its first batch in a log has sequence number 0; another number
        means that the batch has overtaken the first one."""
        one = self._table.of_producer(infos[0].producer_id, infos[0].producer_epoch)
        log_id = partition.log_id
        saved = where not in one.joining if log_id in one.joined else one.is_saved
        if one.state == ONGOING and one.partitions.get(where) == log_id and saved:
            return self._producers.append(partition, data, infos, from_zero=True)
        if (one.busy and one.state != ONGOING) or any(marker.log_id == log_id for marker in one.owed):
            if infos[0].base_sequence == 0:  # a later batch is out of order when it is retried
                self._producers.put_off(partition, infos[0])
            raise ConcurrentTransactions(one.transactional_id)
        join = partial(self._join, one, where, log_id)
        ticket = self._producers.append(partition, data, infos, join, from_zero=True)
        ticket.add_callback(partial(self._joined, one, where))
        return ticket

    def _join(self, one: Transaction, where: Where, log_id: int, entry: AtomicGroup) -> None:
        self._open(one)
        one.partitions[where] = log_id
        one.joined[log_id] = where
        one.joining.add(where)
        joined = AddedPartition(*one.instance, one.started_ms, *where)
        entry.put(JOINED, joined_key(one, log_id), msgspec.msgpack.encode(joined))

    @staticmethod
    def _joined(one: Transaction, where: Where, ticket: Ticket) -> None:
        if ticket.error is None:
            one.joining.discard(where)
