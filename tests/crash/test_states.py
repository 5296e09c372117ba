"""100,000 crashes of the log on a simulated disk. The invariants L1 to L5, L7, L9 and L10 hold in each state.

A failure prints the command that runs its seed again. HEADRACE_SEED sets the first seed and HEADRACE_CRASH_STATES the
number of states, for longer runs with other seeds.
"""

import os
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.log.log import LogSpec
from headrace.log.settings import StreamSettings
from tests.crash.explore import Broken, Effort, Stats, explore
from tests.crash.faults import new_world
from tests.crash.model import LogModel

STATES = int(os.environ.get("HEADRACE_CRASH_STATES", "100000"))
SEED = int(os.environ.get("HEADRACE_SEED", "0"))
PARTS = 4  # several tests, so that one failure does not hide others, and processes can share them


def explore_until(states: int, seed: int, stride: int) -> tuple[Stats, list[str]]:
    total, broken = Stats(), []
    while total.states < states:
        try:
            total.add(explore(seed, states_max=states - total.states))
        except Broken as error:
            broken.append(f"python -m tests.crash.replay {seed}\n  {error}")
            total.states += states // 4  # continue with other seeds, but not without a limit
        seed += stride
    return total, broken


@pytest.mark.slow
@pytest.mark.timeout(900)  # generous, for busy machines
@pytest.mark.parametrize("part", range(PARTS))
def test_the_log_invariants_hold_in_every_crash_state(part: int) -> None:
    total, broken = explore_until(STATES // PARTS, SEED + part, PARTS)
    print(
        f"seeds from {SEED + part} in steps of {PARTS}: {total.states:,} crash states, {total.nested:,} during a "
        f"recovery, {total.opened:,} distinct disks, {total.lives} lives"
    )
    assert not broken, "\n" + "\n".join(broken)
    assert total.states >= STATES // PARTS


def test_the_explorer_finds_a_journal_that_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: without its sync, the journal loses confirmed records."""
    from headrace.log.commit.journal import Journal

    monkeypatch.setattr(Journal, "sync", lambda self: setattr(self, "_synced", self.sequence))
    found = _first_broken()
    assert "L1" in found


def test_the_explorer_finds_a_segment_whose_name_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.log.disk.file_cache import FileCache

    monkeypatch.setattr(FileCache, "sync_folder", lambda self, folder: self._dirty_folders.pop(folder, None))
    assert _first_broken()


def test_the_explorer_finds_a_recovery_that_trusts_the_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.log.recovery.new_files import NewFiles

    monkeypatch.setattr(NewFiles, "sync", lambda self: None)
    assert _first_broken()


def test_the_explorer_finds_an_epoch_that_does_not_increase(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.log.state.store import DiskStateStore

    write = DiskStateStore.write

    def write_without_epoch(self: DiskStateStore, records: Any, marker: Any, **options: Any) -> None:
        write(self, records, type(marker)(marker.sequence, 0, marker.clean), **options)

    monkeypatch.setattr(DiskStateStore, "write", write_without_epoch)
    assert "L5" in _first_broken()


def test_the_explorer_finds_a_journal_slot_written_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """An undamaged folder would be refused: the slot is durable but the entry is not."""
    from headrace.log.commit.committer import Committer

    sync = Committer.sync_journal

    def write_slot_first(self: Committer) -> None:
        self.slots.write_sequence(self.journal.sequence)
        sync(self)

    monkeypatch.setattr(Committer, "sync_journal", write_slot_first)
    assert "L5 cannot be opened: CorruptJournal" in _first_broken()


@pytest.mark.parametrize("mistake", ["no sync", "slot first"])
def test_the_explorer_finds_a_large_round_that_is_confirmed_before_its_sync(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    from headrace.log.commit import committer as commit
    from headrace.log.commit.plan import DirectPlan
    from headrace.log.disk.io_chain import Step

    def plan_with_mistake(committer: Any, runs: Any) -> DirectPlan | None:
        plan = DirectPlan.of(committer, runs)
        if plan is not None and mistake == "no sync":
            plan.steps = [Step(step.file, ()) if step.buffers is None else step for step in plan.steps]
        elif plan is not None:
            count = len(runs)
            plan.steps = [*plan.steps[:count], *plan.steps[2 * count :], *plan.steps[count : 2 * count]]
        return plan

    monkeypatch.setattr(commit, "DirectPlan", SimpleNamespace(of=plan_with_mistake))
    assert _first_broken()


def test_the_explorer_finds_a_journal_slot_that_covers_unsynced_settles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.log.commit.committer import Committer

    publish_ends = Committer.publish_ends

    def publish_unsynced(self: Committer, log: Any, **options: Any) -> None:
        self.slots.write_sequence(self.journal.sequence)
        publish_ends(self, log, **options)

    monkeypatch.setattr(Committer, "publish_ends", publish_unsynced)
    assert "L5 cannot be opened: CorruptJournal" in _first_broken()


def _first_broken() -> str:
    effort = Effort(variants=3, nested_share=0.0)
    for seed in range(12):
        try:
            explore(seed, lives=2, steps=25, effort=effort)
        except Broken as broken:
            return str(broken)
    return ""


def test_the_model_follows_an_async_log_that_continues_at_its_start_after_a_crash() -> None:
    """The start was durable but the records before it were not. The log continues at its start, and the model expected
    it to continue after the last promised record."""
    world = new_world(1)
    world.open()
    spec = LogSpec(world.shard.next_log_id(), "async", StreamSettings(write_mode="async", flush_interval_ms=0))
    real_log = world.shard.create_log(spec)
    log = world.model.logs[spec.id] = LogModel(spec, epoch=real_log.epoch)

    def append() -> None:
        raw, count = world.batches(1, (10,))
        unit = world.model.new_unit()
        ticket = world.shard.logs[spec.id].append(bytearray(raw))
        world.model.stage_append(spec.id, raw, count, unit)
        world._follow(ticket, unit, lazy=True)
        world.settle()

    append()
    append()
    log.start_max = real_log.visible_end
    world.shard.maintenance.starts.delete_before(real_log, log.start_max)
    world.settle()
    world.continue_from(world.disk.power_cut(Random(1), "lost"), power_cut=True)
    append()
    world.read()
    found = world.shard.logs[spec.id]
    assert found.start_offset == log.start_max and found.visible_end > found.start_offset
