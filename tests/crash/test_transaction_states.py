"""Crashes of a broker with Kafka transactions of version 2, before every disk call.

The client retries requests without a reply, as real clients do, and completes its work: committed records are stored
once, aborted ones are not visible, and no reader is blocked.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from headrace.broker.broker import Broker
from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.batches import TransactionBatches
from headrace.broker.transactions.coordinator import Transactions
from headrace.broker.transactions.producers import batches_from
from headrace.broker.transactions.table import JOINED
from headrace.broker.transactions.transaction import EPOCH_MAX, NO_INSTANCE, Instance, Transaction
from headrace.clock import ManualClock
from headrace.errors import HeadraceError
from headrace.log.log import Log
from headrace.record import codec
from headrace.record.codec import is_commit
from tests.crash.model import Broken
from tests.crash.queue_world import abandon_broker, config, without_threads
from tests.crash.simdisk import SimulatedDisk

TOPICS = ("a", "b")
# The topics of each transaction's records, and whether it commits. The producer's last epoch is reached on the way.
WORK = (("ab", True), ("ba", False), ("", False), ("aab", True), ("a", False), ("b", True))


@dataclass(frozen=True)
class Client:
    """The identity of a client and its state after the last reply."""

    producer: Instance
    transaction: int = 0
    written: int = 0  # records of the transaction
    sequences: dict[str, int] = field(default_factory=dict)  # of the epoch

    @property
    def is_done(self) -> bool:
        return self.transaction == len(WORK)

    async def send_next(self, broker: Broker) -> "Client":
        """Send the next request and return the state after its reply."""
        topics, commit = WORK[self.transaction]
        transactions = broker.coordination.transactions
        if self.written < len(topics):
            topic = topics[self.written]
            sequence = self.sequences.get(topic, 0)
            data = codec.build(
                [(None, f"{self.transaction}.{self.written}".encode(), (), 1)],
                timestamp_ms=1,
                producer_id=self.producer.producer_id,
                producer_epoch=self.producer.epoch,
                base_sequence=sequence,
                transactional=True,
            )
            await transactions.batches.append(
                Partition(0, log_of(broker, topic)), data, codec.validate(data), (topic, 0)
            )
            return replace(self, written=self.written + 1, sequences={**self.sequences, topic: sequence + 1})
        if topics and self.written == len(topics):
            offset = CommittedOffset("g", "a", 0, log_of(broker, "a").id, self.transaction, -1, "", 1)
            await transactions.commit_offsets("x", *self.producer, [offset], joins=True)
            return replace(self, written=self.written + 1)
        following = await transactions.end_with_epoch("x", *self.producer, commit=commit)
        return Client(following, self.transaction + 1)


def log_of(broker: Broker, topic: str) -> Log:
    return broker.streams.get(topic).partitions[0].log


def read_committed(log: Log) -> list[bytes | None]:
    waiting: dict[int, list[bytes | None]] = {}
    found: list[bytes | None] = []
    for data, info in batches_from(log, 0):
        if not info.is_control:
            values = [one.value for one in codec.records(data, info.position, info.end)]
            waiting.setdefault(info.producer_id, []).extend(values)
        elif is_commit(data, info):
            found += waiting.pop(info.producer_id, [])
        else:
            waiting.pop(info.producer_id, None)
    return found


def expected(topic: str) -> list[bytes | None]:
    return [
        f"{number}.{place}".encode()
        for number, (topics, commit) in enumerate(WORK)
        for place, one in enumerate(topics)
        if commit and one == topic
    ]


async def judge(folder: Path, image: SimulatedDisk, client: Client) -> None:
    try:
        broker = await Broker.open(config(folder), clock=ManualClock(), disk=image)
    except HeadraceError as error:
        raise Broken(f"L5 cannot be opened: {error!r}") from error
    try:
        while not client.is_done:
            client = await client.send_next(broker)
        for topic in TOPICS:
            log = log_of(broker, topic)
            if (found := read_committed(log)) != expected(topic):
                raise Broken(f"D9 {topic} holds {found}, not {expected(topic)}")
            if log.stable_end != log.visible_end:
                raise Broken(f"D9 readers of {topic} are blocked at {log.stable_end} of {log.visible_end}")
        offset = broker.coordination.groups.offsets.get("g", "a", 0)
        if left := [*broker.shard.state.items(JOINED)]:
            raise Broken(f"D9 ended transactions left {left}")
        if offset is None or offset.offset != len(WORK) - 1:
            raise Broken(f"D9 the group is at {offset}")
    except HeadraceError as error:
        raise Broken(f"D9 the client cannot continue: {error!r} to {client}") from error
    finally:
        await abandon_broker(broker)


async def explore(folder: Path, seed: int) -> tuple[str, int]:
    """Return the first violation and the number of crashes."""
    disk, rng = SimulatedDisk(), Random(seed)
    broker = await Broker.open(config(folder), clock=ManualClock(), disk=disk)
    for topic in TOPICS:
        await broker.streams.create(topic)
    transactions = broker.coordination.transactions
    await transactions.begin_producer("x", 60_000)
    one = transactions.get("x")
    one.epoch = EPOCH_MAX - 2
    await transactions._table.put(one)
    client, crashes, seen = Client(one.instance), 0, set()
    found: list[tuple[SimulatedDisk, str]] = []

    def before(kind: str, path: str) -> None:
        images = [(disk.kill(), "kill"), *((disk.power_cut(rng, mode), mode) for mode in ("lost", "kept", "mixed"))]
        for image, mode in images:
            if (image.key(), client.transaction, client.written) not in seen:
                seen.add((image.key(), client.transaction, client.written))
                found.append((image, f"{mode} before {kind} {path}, {client}"))

    disk.before = before
    broken = ""
    while not client.is_done and not broken:
        following = await client.send_next(broker)
        while found and not broken:
            image, where = found.pop()
            crashes += 1
            try:
                await judge(folder, image, client)
            except Broken as error:
                broken = f"{error} [{where}]"
        client = following
        if rng.random() < 0.3:
            broker.shard.checkpoint()
    disk.before = None
    await abandon_broker(broker)
    return broken, crashes


@pytest.mark.timeout(600)
async def test_transactions_of_version_2_are_exactly_once_in_every_crash_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    broken, crashes = await explore(tmp_path, 0)
    assert not broken
    print(f"{crashes} crash states")
    assert crashes > 50


# Positive controls: the test finds a bug that is introduced on purpose.


async def test_the_test_finds_a_batch_that_is_stored_before_its_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)

    def join(self: Transactions, one: Transaction, where: tuple[str, int], log_id: int, entry: object) -> None:
        self._open(one)
        one.partitions[where] = log_id

    monkeypatch.setattr(TransactionBatches, "_join", join)
    assert "D9" in (await explore(tmp_path, 0))[0]


async def test_the_test_finds_a_transaction_end_whose_result_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    saved = Transaction.saved

    def without_last_epoch(one: Transaction) -> bytes:
        last, one.last = one.last, NO_INSTANCE
        try:
            return saved(one)
        finally:
            one.last = last

    monkeypatch.setattr(Transaction, "saved", without_last_epoch)
    assert "D9 the client cannot continue" in (await explore(tmp_path, 0))[0]
