"""Crashes of a broker with queues at work, before every call to the disk: D1 to D5, D9 and D10 hold in each.

A killed process and power cuts that lose, keep and tear; the calls of settle checkpoints are among them.
"""

import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from headrace.broker.broker import Broker
from headrace.clock import ManualClock
from headrace.errors import DiskFull
from tests.crash.model import Broken
from tests.crash.queue_world import Promises, QueueWorld, config, judge, let_go, without_threads
from tests.crash.simdisk import SimulatedDisk

STEPS = 150
SEED = int(os.environ.get("HEADRACE_SEED", "0"))
Crash = tuple[SimulatedDisk, str, str, Promises]  # the disk found, how, before which call, what was promised


class Crashes:
    """Collects every different disk that a crash could leave, before each call that changes the disk."""

    def __init__(self, world: QueueWorld, seed: int) -> None:
        self._world = world
        self._chance = Random(seed)
        self._seen: set[tuple[int, int]] = set()
        self._found: list[Crash] = []
        self.places: Counter[str] = Counter()
        world.disk.before = self._before

    def _before(self, kind: str, path: str) -> None:
        disk, promises = self._world.disk, self._world.promises.copy()
        images = [(disk.kill(), "kill"), *((disk.power_cut(self._chance, mode), mode) for mode in ("lost", "mixed"))]
        for image, mode in images:
            key = image.key(), len(promises.confirmed) + len(promises.out) + len(promises.acked_for_good)
            if key not in self._seen:
                self._seen.add(key)
                self._found.append((image, mode, f"{kind} {path}", promises))
                self.places[path.rpartition("/")[2].rpartition(".")[2]] += 1

    def take(self) -> list[Crash]:
        found, self._found = self._found, []
        return found


async def explore(folder: Path, seed: int) -> tuple[str, Counter[str], Promises]:
    """(the first broken promise, crash states by the file that was about to change, what was promised in the end)."""
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
    return broken, crashes.places, world.promises


@pytest.mark.timeout(900)  # of a machine that has other things to do, too
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
async def test_d1_to_d10_hold_for_queues_in_every_crash_state(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    broken, places, end = await explore(tmp_path, seed)
    assert not broken
    print(f"seed {seed}: {places.total()} crash states, by file {dict(places)}")
    assert places["wal"] > 50 and places["tmp"] + places["state"] > 5, "rounds and checkpoints were among them"
    made = (end.confirmed, end.out, end.acked_for_good, end.doomed, end.refused, end.pairs)
    assert all(made), "every kind of promise was made"


# Positive controls: with a promise broken on purpose, a crash state shows it.


async def test_a_journal_that_is_not_synced_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)
    monkeypatch.setattr("headrace.log.commit.journal.Journal._sync_file", lambda self, file: None)
    monkeypatch.setattr("headrace.log.commit.slots.Slots.write_sequence", lambda self, sequence: None)
    assert "D1" in (await explore(tmp_path, 0))[0]


async def test_a_dead_letter_that_is_not_moved_as_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)
    monkeypatch.setattr("headrace.broker.queues.flush.FlushCoordinator.begin_atomic", lambda self: None)
    monkeypatch.setattr("headrace.broker.queues.flush.FlushCoordinator.end_atomic", lambda self: None)
    monkeypatch.setattr("headrace.broker.queues.flush.FlushCoordinator.join_atomic_group", lambda self, view: None)
    assert (await explore(tmp_path, 0))[0][:3] in ("D9 ", "D10")


async def test_deliveries_whose_reach_is_not_synced_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)
    from headrace.log.commit.atomic_group import AtomicGroup

    commit = AtomicGroup.commit
    monkeypatch.setattr(AtomicGroup, "commit", lambda self, *, lazy=False: commit(self, lazy=True))
    assert "D2" in (await explore(tmp_path, 0))[0]


@pytest.mark.parametrize("room", [0, 100, 2000, 20_000, 200_000])
async def test_l8_a_broker_started_without_room_serves_or_says_so_and_heals(
    tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_threads(monkeypatch)
    world = QueueWorld(tmp_path, 5)
    await world.open()
    for _ in range(STEPS):
        await world.step()
    promises, image = world.promises.copy(), world.disk.kill()
    await world.abandon()
    image.capacity = image.used + room
    try:
        broker = await Broker.open(config(tmp_path), clock=ManualClock(), disk=image)
    except DiskFull as error:
        assert "the disk is full" in str(error) and room < 200_000
    else:
        assert room > 0
        await let_go(broker)
    healed = image.kill()
    healed.capacity = 1 << 50
    await judge(tmp_path, healed, promises, world.promises)
