"""Every disk call of a workload fails once, in every possible way (L8, L2, L1).

For every fault: errors are HeadraceErrors, a failed write or sync stops all confirms until the next start, a full disk
only refuses appends until there is space, no confirmed record is lost and no refused one appears.
"""

import errno
import os
from collections import Counter
from dataclasses import replace

import pytest

from headrace.errors import DiskFull, HeadraceError, StorageError, StorageFailed
from headrace.log.state import store
from tests.crash.faults import READS, WRITES, Trial, calls_of, new_world, variants
from tests.crash.model import Broken
from tests.crash.simdisk import Fault
from tests.crash.world import World, open_shard, read_everything

STEPS = 60
SEED = int(os.environ.get("HEADRACE_SEED", "0"))
# The workloads of these seeds cover restarts, truncation, compaction and deletion; 4, 36 and 74 have large rounds.
SEEDS = [SEED + seed for seed in (4, 7, 21, 33, 36, 44, 46, 48, 74)]


@pytest.mark.timeout(900)  # generous, for busy machines
@pytest.mark.parametrize("seed", SEEDS)
def test_any_disk_call_may_fail_at_any_time(seed: int) -> None:
    calls = calls_of(seed, STEPS)
    outcomes: Counter[str] = Counter()
    broken = []
    for kind in (*WRITES, *READS):
        for variant in variants(kind):
            for nth in range(1, calls[kind] + 1):
                fault = replace(variant, kind=kind, nth=nth)
                try:
                    outcomes[Trial(seed, STEPS, fault).run()] += 1
                except Broken as error:
                    broken.append(f"seed {seed}, {fault}: {error}")
    print(f"seed {seed}: {sum(calls.values())} calls, {sum(outcomes.values())} runs, {dict(outcomes)}")
    assert not broken, "\n" + "\n".join(broken[:10])
    assert outcomes["failed"] and outcomes["healed"], "the faults must affect the workload"


def test_a_read_only_disk_stops_appends_but_not_reads() -> None:
    world = new_world(6)
    world.open()
    for _ in range(STEPS):
        world.step()
    world.settle()
    world.disk.read_only = True
    log = next(iter(world.shard.logs.values()))
    before = read_everything(world.shard)
    raw, _ = world.batches(1, (10,))
    ticket = log.append(bytearray(raw))
    world.shard.pump()
    assert isinstance(ticket.error, StorageFailed) and "Read-only" in str(ticket.error)
    with pytest.raises(StorageFailed):
        log.append(bytearray(raw))
    assert read_everything(world.shard).logs == before.logs


def test_without_file_descriptors_appends_are_refused_until_some_are_free() -> None:
    world = new_world(44)
    world.open()
    for _ in range(STEPS):
        world.step()
    world.settle()
    log = next(iter(world.shard.logs.values()))
    world.disk.files_limit = len(world.disk.open_paths())
    raw, count = world.batches(1, (3000,))
    errors = []
    for _ in range(20):
        try:
            ticket = log.append(bytearray(raw))
        except HeadraceError as error:
            errors.append(error)
            continue
        world.shard.pump()
        if ticket.error is not None:
            errors.append(ticket.error)
    assert all(isinstance(error, StorageError) for error in errors)
    assert world.shard.failure is None, world.shard.failure
    world.disk.files_limit = 1 << 30
    for _ in range(3):
        world.clock.advance(60)
        world.shard.tick()
        world.shard.pump()
    ticket = log.append(bytearray(raw))
    world.shard.pump()
    assert ticket.done and ticket.error is None and ticket.next_offset - ticket.base_offset == count


def check_healed(world: World) -> None:
    """All promised records are there, now and after a kill and restart."""
    for _ in range(3):
        world.clock.advance(60)
        world.shard.tick()
        world.settle()
    world.observe()
    world.model.check(read_everything(world.shard, clean=True), power_cut=False)
    shard, clean = open_shard(world.disk.kill(), world.settings, world.model.specs(), world.clock)
    world.model.check(read_everything(shard, clean), power_cut=False)


@pytest.mark.parametrize("seed", SEEDS[1:4])
def test_a_shard_recovers_from_a_full_disk_and_loses_nothing(seed: int) -> None:
    """The disk is full for a while, several times, instead of a single failing call."""
    world = new_world(seed)
    world.open()
    world.faulty = True
    refused = 0
    for step in range(160):
        if step % 40 == 15:
            world.disk.capacity = world.disk.used + 300
        if step % 40 == 35:
            world.disk.capacity = 1 << 50
        try:
            world.step()
        except DiskFull:
            pass
        except (StorageError, OSError):
            if not world.shard.is_closed:
                raise
        if world.shard.is_closed:  # a restart on a full disk may refuse to open
            world.disk.capacity = 1 << 50
            world.continue_from(world.disk.kill(), power_cut=False)  # pending appends may be stored or not
        assert world.shard.failure is None, world.shard.failure
        refused = max(refused, world.refused)
    world.disk.capacity = 1 << 50
    check_healed(world)
    assert refused, "the disk was full but no append was refused"


def test_an_error_names_the_file_that_failed() -> None:
    world = new_world(6)
    world.open()
    for _ in range(STEPS):
        world.step()
    world.settle()
    world.disk.arm(Fault("sync", 1, errno.EIO, within=".wal"))
    log = next(log for log in world.shard.logs.values() if log.write_mode.syncs_before_confirm)
    raw, _ = world.batches(1, (10,))
    ticket = log.append(bytearray(raw))
    world.shard.pump()
    assert isinstance(ticket.error, StorageFailed) and ".wal" in str(ticket.error)


@pytest.mark.parametrize("seed", [*SEEDS, SEED + 9, SEED + 14])
def test_a_shard_recovers_from_a_lack_of_descriptors_and_loses_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sometimes no descriptor is left, even after idle files are closed."""
    monkeypatch.setattr(store, "_REWRITE_BYTES_MIN", 500)
    world = new_world(seed)
    world.open()
    world.faulty = True
    for step in range(160):
        if step % 20 == 10:
            world.disk.files_limit = len(world.disk.open_paths()) + step // 20 % 4
        if step % 20 == 17:
            world.disk.files_limit = 1 << 30
        try:
            world.step()
        except (StorageError, OSError):
            if not world.shard.is_closed and world.done[-1] != "read":
                raise
        if world.shard.is_closed:  # a restart without a descriptor may refuse to open
            world.disk.files_limit = 1 << 30
            world.continue_from(world.disk.kill(), power_cut=False)
        assert world.shard.failure is None, world.shard.failure
    world.disk.files_limit = 1 << 30
    check_healed(world)
