"""Queues on a disk that forgets what was not synced: after a power cut every promise still holds."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view_state import SETTLE_TABLE, decode_settles
from headrace.broker.types.message import Message
from headrace.config import Config
from headrace.errors import StorageError
from headrace.log.settings import MB, LogSettings
from tests.crash.simdisk import SimulatedDisk

MODES = ["lost", "kept", "prefix", "mixed"]


def config(folder: Path) -> Config:
    log = LogSettings(journal_file_bytes=1 * MB, disk_reserve=0)
    return Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=log, disk_free_limit=0)


async def declare(broker: Broker, name: str, **arguments: object) -> Queue:
    return await broker.vhosts.get("/").declare_queue(
        name, durable=True, exclusive=False, auto_delete=False,
        arguments={key.replace("_", "-"): value for key, value in arguments.items()}, owner=object(),
    )  # fmt: skip


async def abandon(broker: Broker) -> None:
    """Simulate a power cut: this process only has to stop its threads."""
    broker.shard.fail(OSError("no power"))
    await asyncio.gather(broker.close(), return_exceptions=True)


def drain(queue: Queue) -> dict[bytes, bool]:
    """What is in it, with its redelivered flag."""
    found = {}
    while (taken := queue.get()) is not None:
        assert taken[2].body not in found, "once, not twice"
        found[taken[2].body] = taken[3]
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
async def test_after_a_power_cut_confirmed_messages_exist_once_and_delivered_ones_are_flagged(
    tmp_path: Path, mode: str, seed: int
) -> None:
    chance = Random(seed)
    disk = SimulatedDisk()
    broker = await Broker.open(config(tmp_path), disk=disk)
    dead = await declare(broker, "dead")
    queue = await declare(broker, "q", x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    rounds = broker.vhosts.flushes
    confirmed: set[bytes] = set()
    out: set[bytes] = set()
    rejected: set[bytes] = set()
    acked: set[bytes] = set()
    for number in range(40):
        body = b"%03d" % number
        queue.publish(Message("", "q", b"\0\0", body), broker.clock.now_ms())
        if chance.random() < 0.5:
            await rounds.wait_all_durable()
            confirmed = {b"%03d" % n for n in range(number + 1)}
        if chance.random() < 0.4 and (taken := queue.get()) is not None:
            view, offset, message, _ = taken
            async with asyncio.timeout(60):
                while view.reserved <= offset:
                    await asyncio.sleep(0.001)
            out.add(message.body)
            choice = chance.random()
            if choice < 0.4:
                queue.reject(view, offset)
                rejected.add(message.body)
            elif choice < 0.7:
                queue.settle(view, offset, offset + 1)
                acked.add(message.body)
    assert dead.ready <= len(rejected)
    after = disk.power_cut(chance, mode)
    await abandon(broker)
    broker = await Broker.open(config(tmp_path), disk=after)
    queues = broker.vhosts.get("/").queues
    left, moved = drain(queues["q"]), drain(queues["dead"])
    missing = confirmed - acked - left.keys() - moved.keys()
    assert not missing, f"L1: confirmed and gone: {sorted(missing)}"
    assert not left.keys() & moved.keys(), "D10: a dead letter is in one place"
    assert moved.keys() <= rejected
    unflagged = {body for body in left.keys() & out if not left[body]}
    assert not unflagged, f"D2: delivered before, and not flagged: {sorted(unflagged)}"
    await broker.close()


async def test_the_last_deliveries_are_flagged_even_without_a_later_sync(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    broker = await Broker.open(config(tmp_path), disk=disk)
    queue = await declare(broker, "q")
    for number in range(10):
        queue.publish(Message("", "q", b"\0\0", b"%d" % number), broker.clock.now_ms())
    await broker.vhosts.flushes.wait_all_durable()
    for _ in range(3):
        await queue.prepare_get()
        queue.get()
    after = disk.power_cut(Random(1), "lost")
    await abandon(broker)
    broker = await Broker.open(config(tmp_path), disk=after)
    flags = drain(broker.vhosts.get("/").queues["q"])
    assert [flags[b"%d" % number] for number in range(3)] == [True, True, True]
    await broker.close()


@pytest.mark.parametrize("mode", MODES)
async def test_purged_messages_do_not_return(tmp_path: Path, mode: str) -> None:
    disk = SimulatedDisk()
    broker = await Broker.open(config(tmp_path), disk=disk)
    queue = await declare(broker, "q")
    for number in range(10):
        queue.publish(Message("", "q", b"\0\0", b"%d" % number), broker.clock.now_ms())
    await broker.vhosts.flushes.wait_all_durable()
    assert await queue.purge() == 10
    after = disk.power_cut(Random(1), mode)
    await abandon(broker)
    broker = await Broker.open(config(tmp_path), disk=after)
    assert drain(broker.vhosts.get("/").queues["q"]) == {}
    await broker.close()


async def test_a_purge_that_the_disk_refuses_is_not_called_done_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise StorageError("no room")

    broker = await Broker.open(config(tmp_path), disk=SimulatedDisk())
    queue = await declare(broker, "q")
    queue.publish(Message("", "q", b"\0\0", b"1"), broker.clock.now_ms())
    await broker.vhosts.flushes.wait_all_durable()
    with monkeypatch.context() as patched, pytest.raises(StorageError):
        patched.setattr(broker.shard, "group", refuse)
        await queue.purge()
    assert await queue.purge() == 0
    _, settled, _ = decode_settles(broker.shard.state.get(SETTLE_TABLE, queue.view.key))
    assert list(settled) == [(0, 1)]
    await broker.close()
