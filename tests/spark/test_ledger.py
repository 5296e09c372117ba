"""The sink ledger without Spark: uploads, commits, repeated commits, and crashes at each step."""

import asyncio
import threading
import uuid
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.broker.broker import Broker
from headrace.broker.sinks import ledger as ledgers
from headrace.broker.sinks.uploads import Section, Uploads
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.errors import Conflict, StorageError
from headrace.log.disk.disk import RealDisk
from headrace.log.settings import LogSettings
from headrace.record import codec
from headrace.spark.broker import BrokerLink
from headrace.spark.options import write_options
from headrace.spark.writer import BatchWriter
from tests.listeners.http.live import Live
from tests.listing import listed
from tests.spark.world import RunningBroker, wait_until

RAW = "application/octet-stream"


def batch(first: int, count: int, size: int = 0) -> bytes:
    return bytes(codec.build((None, f"{n}".encode() + b"x" * size, (), 1) for n in range(first, first + count)))


def stage(broker: RunningBroker, data: bytes) -> str:
    name = uuid.uuid4().hex
    status, answer = broker.call("PUT", f"/staging/{name}", data, media=RAW)
    assert status == 201, answer
    return name


def part(name: str, data: bytes, partition: int = 0, topic: str = "t") -> dict[str, Any]:
    return {"staged": name, "topic": topic, "partition": partition, "position": 0, "length": len(data)}


def staged_files(broker: RunningBroker) -> list[Path]:
    return listed(broker.data, "staging/*")


def test_a_repeated_commit_stores_nothing_and_returns_the_same_response(shared_broker: RunningBroker) -> None:
    broker = shared_broker
    broker.create("t", 2)
    first, second = batch(0, 10), batch(10, 5)
    names = stage(broker, first), stage(broker, second)
    assert broker.count("t") == 0, "an upload is not visible yet"
    body = {"parts": [part(names[0], first, 0), part(names[1], second, 1)]}
    answer = broker.ok("PUT", "/sinks/w/batches/7", body)
    stored = [{"topic": "t", "partition": 0, "base_offset": 0, "next_offset": 10},
              {"topic": "t", "partition": 1, "base_offset": 0, "next_offset": 5}]  # fmt: skip
    assert (answer["duplicate"], answer["records"], answer["stored"]) == (False, 15, stored)
    again = broker.ok("PUT", "/sinks/w/batches/7", body)
    assert (again["duplicate"], again["stored"]) == (True, stored)
    assert broker.ok("PUT", "/sinks/w/batches/3", {"parts": []})["duplicate"]
    assert broker.ends("t") == {0: (0, 10), 1: (0, 5)}
    assert broker.ok("GET", "/sinks/w")["batch"] == 7
    assert not staged_files(broker)


def test_an_upload_without_whole_batches_is_refused_and_changes_nothing(shared_broker: RunningBroker) -> None:
    broker = shared_broker
    broker.create("strict")
    good = batch(0, 10)
    for bad in (good[:-1], good[:30], b"nonsense", good[:-3] + b"abc"):
        assert broker.call("PUT", f"/staging/{uuid.uuid4().hex}", bad, media=RAW)[0] == 400
    transactional = bytes(codec.build([(b"k", b"v", (), 1)], producer_id=5, producer_epoch=0, transactional=True))
    assert broker.call("PUT", f"/staging/{uuid.uuid4().hex}", transactional, media=RAW)[0] == 400
    assert broker.call("PUT", "/staging/..%2F..%2Fcatalog", good, media=RAW)[0] == 400
    name = stage(broker, good)
    wrong = [
        part(name, good, topic="nowhere"), part(name, good, partition=9, topic="strict"),
        part(uuid.uuid4().hex, good, topic="strict"), part(name, good, topic="strict") | {"position": 3},
        part(name, good, topic="strict") | {"length": len(good) - 1},
    ]  # fmt: skip
    for one in wrong:
        status, _ = broker.call("PUT", "/sinks/s/batches/0", {"parts": [part(name, good, topic="strict"), one]})
        assert status in (400, 404), one
    assert broker.count("strict") == 0
    assert broker.call("GET", "/sinks/s")[0] == 404
    broker.ok("DELETE", f"/staging/{name}")
    assert broker.call("PUT", "/sinks/s/batches/0", {"parts": [part(name, good, topic="strict")]})[0] == 404


def test_a_commit_of_many_entries_is_finished_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails twice during the steps; the third start finds the plan and finishes it."""
    monkeypatch.setattr(ledgers, "STEP_BYTES_MAX", 20_000)
    uploads = [b"".join(batch(at * 100 + n * 10, 10, 500) for n in range(10)) for at in range(3)]
    names = [uuid.uuid4().hex for _ in uploads]
    reads = 0
    real = Uploads.read

    async def failing(self: Uploads, section: Section, **options: bool) -> Any:
        nonlocal reads
        reads += 1
        if reads in (5, 8):  # three reads for the plan, the others are steps
            raise StorageError("a test pulled the plug")
        return await real(self, section, **options)

    monkeypatch.setattr(Uploads, "read", failing)
    server = Live(tmp_path / "data")
    server.client.post("/topics", json={"name": "t"})
    for name, data in zip(names, uploads, strict=True):
        assert server.client.put(f"/staging/{name}", content=data).status_code == 201
    body = {"parts": [part(name, data) for name, data in zip(names, uploads, strict=True)]}
    assert server.client.put("/sinks/w/batches/0", json=body).status_code == 503
    assert server.client.put("/sinks/w/batches/0", json=body).status_code == 503  # continues, and fails again
    server.stop()
    server = Live(tmp_path / "data")
    try:
        answer = server.client.put("/sinks/w/batches/0", json=body).json()
        assert answer["duplicate"] and answer["records"] == 300
        found = server.client.get("/topics/t/messages", params={"limit": 1000}).json()["messages"]
        assert [m["value"].rstrip("x") for m in found] == [str(n) for n in range(300)]
        assert not list((tmp_path / "data" / "staging").iterdir())
    finally:
        server.stop()


def test_a_large_commit_is_stored_exactly_once_after_a_kill(tmp_path: Path) -> None:
    broker = RunningBroker(tmp_path).start()
    try:
        broker.create("t", 2)
        uploads = [b"".join(batch(at * 10_000 + n * 100, 100, 1000) for n in range(100)) for at in range(6)]
        parts = [part(stage(broker, data), data, at % 2) for at, data in enumerate(uploads)]
        for _ in range(3):
            commit = threading.Thread(target=_try_commit, args=(broker, parts))
            commit.start()
            before = broker.count("t")
            wait_until(lambda: broker.count("t") > before or not commit.is_alive(), "nothing was stored")  # noqa: B023
            broker.kill()
            commit.join()
            broker.start()
        answer = broker.ok("PUT", "/sinks/w/batches/0", {"parts": parts})
        assert answer["records"] == 60_000
        assert broker.ends("t") == {0: (0, 30_000), 1: (0, 30_000)}
        assert not staged_files(broker)
    finally:
        broker.close()


def _try_commit(broker: RunningBroker, parts: list[dict[str, Any]]) -> None:
    try:
        broker.call("PUT", "/sinks/w/batches/0", {"parts": parts})
    except (OSError, HTTPException):  # killed before, during or after the response
        return


@pytest.mark.parametrize("size", [0, 3 << 20])  # one journal entry; a plan
def test_a_sink_refuses_messages_without_a_key_for_a_compacted_topic(shared_broker: RunningBroker, size: int) -> None:
    broker, topic = shared_broker, f"kept-{size}"
    broker.create(topic, cleanup_policy="compact")
    with_keys = b"".join(codec.build([(b"k%d" % n, b"x" * size, (), 1)]) for n in range(4))
    data = with_keys + batch(0, 1, size)
    body = {"parts": [part(stage(broker, data), data, topic=topic)]}
    status, answer = broker.call("PUT", f"/sinks/{topic}/batches/1", body)
    assert status == 400 and "a compacted topic takes no record without a key" in answer["detail"], answer
    assert broker.count(topic) == 0
    body = {"parts": [part(stage(broker, with_keys), with_keys, topic=topic)]}
    assert broker.ok("PUT", f"/sinks/{topic}/batches/1", body)["records"] == 4


async def test_stale_uploads_are_removed_only_after_their_time(tmp_path: Path) -> None:
    class Clock:
        now = 1_000_000

        def now_ms(self) -> int:
            return self.now

        def monotonic(self) -> float:
            return self.now / 1000

    clock = Clock()
    staging = Uploads(RealDisk(), str(tmp_path), clock)
    name, held = uuid.uuid4().hex, uuid.uuid4().hex
    for one in (name, held):
        await staging.store(one, batch(0, 1), batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
    staging.hold([held])
    assert await staging.sweep(1000) == []
    clock.now += 1000
    assert await staging.sweep(1000) == [name]
    assert [p.name for p in (tmp_path / "staging").iterdir()] == [f"{held}.staged"]
    staging.close()


async def test_an_upload_drops_the_delete_horizon_of_another_log(tmp_path: Path) -> None:
    """Regression: the first compaction removed a tombstone, and readers had no time to see it."""
    whole = codec.build([(b"k", None, (), 1)])
    [info] = codec.scan(whole)
    compacted = codec.filter_batch(whole, info, [0], delete_horizon_ms=7)
    assert compacted is not None and codec.scan(compacted)[0].delete_horizon_ms == 7
    staging = Uploads(RealDisk(), str(tmp_path), ManualClock())
    name = uuid.uuid4().hex
    await staging.store(name, bytes(compacted), batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
    data, [info] = await staging.read(Section(name, 0, len(compacted)))
    assert info.delete_horizon_ms is None and codec.records(data) == codec.records(compacted)
    staging.close()


async def test_uploads_of_a_decided_batch_cannot_be_discarded(tmp_path: Path) -> None:
    """A driver that gets no response in time aborts, and discards the uploads of which the broker is just making a
    plan. A plan without its files could never be finished, and no later batch of this writer could be stored."""
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config)
    try:
        await broker.streams.create("t")
        data = b"".join(batch(n * 10, 10, 100_000) for n in range(10))
        assert len(data) > ledgers.STEP_BYTES_MAX
        name = uuid.uuid4().hex
        await broker.uploads.store(name, data, batch_bytes_max=1 << 21, decompressed_bytes_max=1 << 30)
        parts = [ledgers.LedgerEntry(Section(name, 0, len(data)), "t", 0)]
        commit = asyncio.create_task(broker.ledger.commit("w", 0, parts))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the plan has requested the file; later work runs after that
        await broker.uploads.remove([name])
        outcome = await commit
        assert (outcome.duplicate, outcome.line.records) == (False, 100)
        more = batch(100, 1)
        await broker.uploads.store(name, more, batch_bytes_max=1 << 21, decompressed_bytes_max=1 << 30)
        after = await broker.ledger.commit("w", 1, [ledgers.LedgerEntry(Section(name, 0, len(more)), "t", 0)])
        assert after.line.batch == 1
    finally:
        await broker.close()


async def test_a_writer_that_commits_while_it_expires_is_remembered(tmp_path: Path) -> None:
    """Regression: the writer's old line expired during its commit. Its deletion came after the new line, and the next
    start did not know the batch and would have stored it again."""
    clock = ManualClock()
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config, clock=clock)
    await broker.streams.create("t")
    data = batch(0, 3)
    names = [uuid.uuid4().hex for _ in range(2)]
    for name in names:
        await broker.uploads.store(name, data, batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
    parts = [[ledgers.LedgerEntry(Section(name, 0, len(data)), "t", 0)] for name in names]
    await broker.ledger.commit("w", 0, parts[0])
    clock.advance(ledgers.MAX_AGE_MS / 1000 + 1)
    commit = asyncio.create_task(broker.ledger.commit("w", 1, parts[1]))
    log = broker.streams.get("t").partitions[0].log
    while log.next_offset < 6:
        await asyncio.sleep(0)  # its entry is being written
    await broker.ledger.expire()
    assert (await commit).line.batch == 1
    await broker.close()
    again = await Broker.open(config, clock=clock)
    try:
        assert again.ledger.get("w").batch == 1
    finally:
        await again.close()


async def test_a_writer_without_an_id_is_forgotten_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every df.write without a writeId is such a writer, and cannot be repeated: remembering all would fill the
    memory."""
    writers: list[str] = []
    monkeypatch.setattr(BrokerLink, "commit", lambda _, writer, *__: writers.append(writer))
    for more in ({"writeId": "daily"}, {}):
        BatchWriter(write_options({"bootstrap": "h:1", "topic": "t"} | more), ["value"]).commit([])
    clock = ManualClock()
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config, clock=clock)
    try:
        for writer in writers:
            await broker.ledger.commit(writer, 0, [])
        assert await broker.ledger.expire() == []
        clock.advance(24 * 3600)
        assert await broker.ledger.expire() == writers[1:]
        assert list(broker.ledger.lines()) == ["write:daily"]
    finally:
        await broker.close()


@pytest.mark.parametrize("step_bytes", [1 << 20, 500])
async def test_a_writer_belongs_to_its_user_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_bytes: int
) -> None:
    """In one entry with its batches, and as a plan."""
    monkeypatch.setattr(ledgers, "STEP_BYTES_MAX", step_bytes)
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config)
    await broker.streams.create("t")
    data = b"".join(batch(n * 10, 10) for n in range(10))
    name = uuid.uuid4().hex
    await broker.uploads.store(name, data, batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
    parts = [ledgers.LedgerEntry(Section(name, 0, len(data)), "t", 0)]
    outcome = await broker.ledger.commit("w", 0, parts, lambda owner: owner or "bill")
    assert bool(outcome.line.steps) == (step_bytes == 500)
    await broker.close()
    again = await Broker.open(config)
    try:
        assert again.ledger.get("w").user == "bill"
    finally:
        await again.close()


async def test_a_writer_stored_by_an_older_version_has_no_owner(tmp_path: Path) -> None:
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config)
    group = broker.shard.group()
    line = {"batch": 7, "updated_ms": broker.clock.now_ms(), "records": 3, "stored": [], "next_step": 0, "steps": 0}
    group.put(ledgers.TABLE, b"w", msgspec.msgpack.encode(line))
    await group.commit()
    await broker.close()
    again = await Broker.open(config)
    try:
        assert (again.ledger.get("w").batch, again.ledger.get("w").user) == (7, "")
        assert (await again.ledger.commit("w", 7, [])).duplicate
    finally:
        await again.close()


async def test_an_upload_of_a_commit_in_progress_cannot_be_replaced(tmp_path: Path) -> None:
    """The steps of a plan must store the bytes it was made of: other bytes under the same name could not be split
    alike."""
    broker = await Broker.open(Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None))
    try:
        name = uuid.uuid4().hex
        await broker.uploads.store(name, batch(0, 3), batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
        broker.uploads.hold([name])
        with pytest.raises(Conflict, match="being committed"):
            await broker.uploads.store(name, batch(0, 9), batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
        broker.uploads.release([name])
        await broker.uploads.store(name, batch(0, 9), batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 20)
    finally:
        await broker.close()


async def test_steps_fit_into_the_configured_journal(tmp_path: Path) -> None:
    """A decided plan whose steps fit no journal entry could never finish, and its writer could store nothing more."""
    log = LogSettings(journal_file_bytes=1 << 20)
    broker = await Broker.open(Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None, log=log))
    try:
        await broker.streams.create("t")
        data = b"".join(batch(n * 10, 10, 10_000) for n in range(100))
        half = codec.scan(data)[49].end
        assert half < ledgers.STEP_BYTES_MAX < len(data)
        for number, length in enumerate((len(data), half)):
            name = uuid.uuid4().hex
            await broker.uploads.store(name, data, batch_bytes_max=1 << 20, decompressed_bytes_max=1 << 30)
            parts = [ledgers.LedgerEntry(Section(name, 0, length), "t", 0)]
            outcome = await broker.ledger.commit("w", number, parts)
            assert outcome.line.batch == number and not outcome.line.is_open
        assert broker.streams.get("t").partitions[0].end_offset == 1500
    finally:
        await broker.close()
