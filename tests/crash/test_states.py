"""100,000 crashes of the log on a simulated disk: none breaks an invariant (L1 to L5, L7, L9, L10).

A failure prints the command that runs its seed again. HEADRACE_SEED moves the seeds, HEADRACE_CRASH_STATES the
number: a nightly run takes other seeds and a million.
"""

import os
from random import Random
from types import SimpleNamespace

import pytest

from headrace.log.log import LogSpec
from headrace.log.settings import StreamSettings
from tests.crash.explore import Broken, Effort, Stats, explore
from tests.crash.faults import new_world
from tests.crash.model import LogModel

STATES = int(os.environ.get("HEADRACE_CRASH_STATES", "100000"))
SEED = int(os.environ.get("HEADRACE_SEED", "0"))
PARTS = 4  # four tests, so that a failure does not hide the rest, and several processes can share them


def explore_until(states: int, seed: int, stride: int) -> tuple[Stats, list[str]]:
    total, broken = Stats(), []
    while total.states < states:
        try:
            total.add(explore(seed, states_max=states - total.states))
        except Broken as error:
            broken.append(f"python -m tests.crash.replay {seed}\n  {error}")
            total.states += states // 4  # it goes on with other seeds, but not for ever
        seed += stride
    return total, broken


@pytest.mark.slow
@pytest.mark.timeout(900)  # of a machine that has other things to do, too
@pytest.mark.parametrize("part", range(PARTS))
def test_l1_to_l10_hold_in_every_crash_state(part: int) -> None:
    total, broken = explore_until(STATES // PARTS, SEED + part, PARTS)
    print(
        f"seeds from {SEED + part} in steps of {PARTS}: {total.states:,} crash states, {total.nested:,} inside a "
        f"recovery, {total.opened:,} different disks, {total.lives} lives"
    )
    assert not broken, "\n" + "\n".join(broken)
    assert total.states >= STATES // PARTS


def test_the_explorer_finds_a_journal_that_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The positive control: without its sync the journal loses what was confirmed."""
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


def test_the_explorer_finds_an_epoch_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.log.state.store import DiskStateStore

    write = DiskStateStore.write

    def forgetful(self, records, marker, **options):
        write(self, records, type(marker)(marker.sequence, 0, marker.clean), **options)

    monkeypatch.setattr(DiskStateStore, "write", forgetful)
    assert "L5" in _first_broken()


def test_the_explorer_finds_a_journal_slot_written_before_the_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound folder would be refused as damaged: the slot reached the disk and the entry did not."""
    from headrace.log.commit.committer import Committer

    sync = Committer.sync_journal

    def hasty(self):
        self.slots.write_sequence(self.journal.sequence)
        sync(self)

    monkeypatch.setattr(Committer, "sync_journal", hasty)
    assert "L5 cannot be opened: CorruptJournal" in _first_broken()


@pytest.mark.parametrize("mistake", ["no sync", "slot first"])
def test_the_explorer_finds_a_large_round_that_is_told_before_it_is_synced(
    monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    from headrace.log.commit import committer as commit
    from headrace.log.commit.plan import DirectPlan
    from headrace.log.disk.io_chain import Step

    def hasty(committer, runs):
        plan = DirectPlan.of(committer, runs)
        if plan is not None and mistake == "no sync":
            plan.steps = [Step(step.file, ()) if step.buffers is None else step for step in plan.steps]
        elif plan is not None:
            count = len(runs)
            plan.steps = [*plan.steps[:count], *plan.steps[2 * count :], *plan.steps[count : 2 * count]]
        return plan

    monkeypatch.setattr(commit, "DirectPlan", SimpleNamespace(of=hasty))
    assert _first_broken()


def test_the_explorer_finds_a_journal_slot_that_vouches_for_settles_nobody_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headrace.log.commit.committer import Committer

    tell = Committer.publish_ends

    def careless(self, log, **options):
        self.slots.write_sequence(self.journal.sequence)
        tell(self, log, **options)

    monkeypatch.setattr(Committer, "publish_ends", careless)
    assert "L5 cannot be opened: CorruptJournal" in _first_broken()


def _first_broken() -> str:
    effort = Effort(variants=3, nested_share=0.0)
    for seed in range(12):
        try:
            explore(seed, lives=2, steps=25, effort=effort)
        except Broken as broken:
            return str(broken)
    return ""


def test_the_model_goes_on_where_an_async_log_does_of_which_retention_left_nothing_and_a_cut_less() -> None:
    """Its start was durable and the records before it were not: what comes next comes behind the start, and the model
    looked for it behind the last record that was promised."""
    world = new_world(1)
    world.open()
    spec = LogSpec(world.shard.next_log_id(), "async", StreamSettings(write_mode="async", flush_interval_ms=0))
    there = world.shard.create_log(spec)
    log = world.model.logs[spec.id] = LogModel(spec, epoch=there.epoch)

    def append() -> None:
        raw, count = world.batches(1, (10,))
        unit = world.model.new_unit()
        ticket = world.shard.logs[spec.id].append(bytearray(raw))
        world.model.stage_append(spec.id, raw, count, unit)
        world._follow(ticket, unit, lazy=True)
        world.settle()

    append()
    append()
    log.start_max = there.visible_end
    world.shard.maintenance.starts.delete_before(there, log.start_max)
    world.settle()
    world.go_on_from(world.disk.power_cut(Random(1), "lost"), power_cut=True)
    append()
    world.read()
    found = world.shard.logs[spec.id]
    assert found.start_offset == log.start_max and found.visible_end > found.start_offset
