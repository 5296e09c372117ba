"""Crashes of a broker with queues before every disk call. The invariants D1 to D5, D9 and D10 hold in each state.

The crashes are kills and power cuts that keep, lose and tear unsynced data, also during checkpoints.
"""

import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.retries import Retries
from headrace.clock import ManualClock
from headrace.errors import DiskFull
from tests.crash.model import Broken
from tests.crash.queue_world import Promises, QueueWorld, abandon_broker, config, judge, without_threads
from tests.crash.simdisk import SimulatedDisk

STEPS = 150
SEED = int(os.environ.get("HEADRACE_SEED", "0"))
Crash = tuple[SimulatedDisk, str, str, Promises]  # disk after the crash, kind of crash, next disk call, promises


class Crashes:
    """Collects the distinct disks that a crash could leave, before each call that changes the disk."""

    def __init__(self, world: QueueWorld, seed: int) -> None:
        self._world = world
        self._rng = Random(seed)
        self._seen: set[tuple[int, int]] = set()
        self._found: list[Crash] = []
        self.states_by_file: Counter[str] = Counter()
        world.disk.before = self._before

    def _before(self, kind: str, path: str) -> None:
        disk, promises = self._world.disk, self._world.promises.copy()
        images = [(disk.kill(), "kill"), *((disk.power_cut(self._rng, mode), mode) for mode in ("lost", "mixed"))]
        for image, mode in images:
            key = image.key(), len(promises.confirmed) + len(promises.delivered) + len(promises.acked_durably)
            if key not in self._seen:
                self._seen.add(key)
                self._found.append((image, mode, f"{kind} {path}", promises))
                self.states_by_file[path.rpartition("/")[2].rpartition(".")[2]] += 1

    def take(self) -> list[Crash]:
        found, self._found = self._found, []
        return found


async def explore(folder: Path, seed: int) -> tuple[str, Counter[str], Promises]:
    """Return the first violation, the crash states by type of the changed file, and the promises at the end."""
    world = QueueWorld(folder, seed)
    await world.open()
    crashes = Crashes(world, seed)
    broken = ""
    for _ in range(STEPS):
        await world.step()
        for image, mode, where, promises in crashes.take():
            try:
                await judge(folder, image, promises, world.promises)
            except Broken as error:
                broken = broken or f"{error} [seed {seed}, {mode} before {where}]"
        if broken:
            break
    await world.abandon()
    return broken, crashes.states_by_file, world.promises


@pytest.mark.timeout(900)  # generous, for busy machines
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_the_queue_invariants_hold_in_every_crash_state(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    broken, states_by_file, end = await explore(tmp_path, seed)
    assert not broken
    print(f"seed {seed}: {states_by_file.total()} crash states, by file {dict(states_by_file)}")
    assert states_by_file["wal"] > 50 and states_by_file["tmp"] + states_by_file["state"] > 5, (
        "rounds and checkpoints must be covered"
    )
    promises = (end.confirmed, end.delivered, end.acked_durably, end.dead, end.refused, end.pairs, end.retried)
    assert all(promises), "every kind of promise must be covered"


# Positive controls: the test finds a bug that is introduced on purpose.


async def test_the_test_finds_a_journal_that_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)
    monkeypatch.setattr("headrace.log.commit.journal.Journal._sync_file", lambda self, file: None)
    monkeypatch.setattr("headrace.log.commit.slots.Slots.write_sequence", lambda self, sequence: None)
    assert (await explore(tmp_path, 0))[0][:3] in ("D1 ", "D9 "), "messages or halves of transactions are lost"


async def test_the_test_finds_a_dead_letter_that_is_not_moved_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    monkeypatch.setattr("headrace.broker.queues.flush.FlushCoordinator.begin_atomic", lambda self: None)
    monkeypatch.setattr("headrace.broker.queues.flush.FlushCoordinator.end_atomic", lambda self: None)
    monkeypatch.setattr("headrace.broker.queues.flush.FlushCoordinator.join_atomic_group", lambda self, view: None)
    assert (await explore(tmp_path, 0))[0][:3] in ("D9 ", "D10")


async def test_the_test_finds_a_retry_that_is_not_moved_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    keep = Retries.keep

    def keep_in_two_steps(self: Retries, *arguments: Any) -> bool:
        with monkeypatch.context() as patch:
            for name in ("begin_atomic", "end_atomic"):
                patch.setattr(FlushCoordinator, name, lambda self: None)
            return keep(self, *arguments)

    monkeypatch.setattr(Retries, "keep", keep_in_two_steps)
    assert "waiting for a retry" in (await explore(tmp_path, 0))[0]


async def test_the_test_finds_deliveries_whose_marker_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    from headrace.log.commit.atomic_group import AtomicGroup

    commit = AtomicGroup.commit
    monkeypatch.setattr(AtomicGroup, "commit", lambda self, *, lazy=False: commit(self, lazy=True))
    assert "D2" in (await explore(tmp_path, 0))[0]


@pytest.mark.parametrize("free_bytes", [0, 100, 2000, 20_000, 200_000])
async def test_a_broker_started_on_a_full_disk_serves_or_raises_disk_full_and_recovers(
    tmp_path: Path, free_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    world = QueueWorld(tmp_path, 5)
    await world.open()
    for _ in range(STEPS):
        await world.step()
    promises, image = world.promises.copy(), world.disk.kill()
    await world.abandon()
    image.capacity = image.used + free_bytes
    try:
        broker = await Broker.open(config(tmp_path), clock=ManualClock(), disk=image)
    except DiskFull as error:
        assert "the disk is full" in str(error) and free_bytes < 200_000
    else:
        assert free_bytes > 0
        await abandon_broker(broker)
    healed = image.kill()
    healed.capacity = 1 << 50
    await judge(tmp_path, healed, promises, world.promises)
