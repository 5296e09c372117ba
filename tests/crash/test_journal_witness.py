"""The journal's slot holds the number of the last synced entry: lost entries are detected, and a sound folder opens."""

import errno
from collections.abc import Callable
from random import Random

import pytest

from headrace.errors import CorruptJournal
from headrace.log.commit import journal, slots
from headrace.log.commit.journal import Journal
from headrace.log.recovery import journal_repair
from headrace.log.settings import LogSettings
from headrace.log.shard import Shard
from tests.crash.shards import ROOT, batch, checkpoint, lost, new_disk, reopen, spec, values, write
from tests.crash.simdisk import Fault, SimulatedDisk

SLOTS = f"{ROOT}/slots"
TWO_LOGS = [spec(1), spec(2)]


def journal_files(disk: SimulatedDisk) -> dict[str, bytes]:
    return {path: content for path, content in disk.files().items() if "/journal/" in path}


def entry_at(disk: SimulatedDisk, sequence: int) -> tuple[str, int]:
    """Return file and position of a journal entry."""
    for path, content in journal_files(disk).items():
        for at in range(journal.SECTOR, len(content), journal.SECTOR):
            _, magic, _, number, _, _ = journal.ENTRY_HEADER.unpack_from(content, at)
            if magic == journal.ENTRY_MAGIC and number == sequence:
                return path, at
    raise AssertionError(f"no entry {sequence}")


def damaged(disk: SimulatedDisk, sequence: int) -> SimulatedDisk:
    """The disk after a kill, with a flipped bit in the body of one entry."""
    image = disk.kill()
    path, at = entry_at(image, sequence)
    content = bytearray(image.files()[path])
    content[at + journal.ENTRY_HEADER.size] ^= 1
    image.replace(path, bytes(content))
    return image


def without_segments(image: SimulatedDisk) -> SimulatedDisk:
    """Empty all segments, as if nothing of the journal had been written to them."""
    for path in list(image.files()):
        if path.endswith(".log"):
            image.replace(path, b"")
    return image


def put(shard: Shard, key: bytes, *, lazy: bool = False) -> None:
    group = shard.group()
    group.put("t", key, b"v")
    group.commit(lazy=lazy)
    shard.pump()


def filled() -> SimulatedDisk:
    """A disk with three synced entries: a record in log 1, one in log 2, a value in the state."""
    disk = new_disk()
    shard = reopen(disk, *TWO_LOGS)
    write(shard, "a", 1)
    write(shard, "b", 2)
    put(shard, b"k")
    assert shard.journal.synced == 3
    return disk


def test_a_sync_covers_only_entries_written_before_it_started() -> None:
    class Busy(SimulatedDisk):
        during: Callable[[], object] | None = None

        def sync(self, file: int) -> None:
            super().sync(file)
            if self.during is not None:
                call, self.during = self.during, None
                call()

    disk = Busy()
    log = Journal(disk, "/journal", 8192, 2)
    log.start(0)
    log.reserve(10)
    log.append([b"first"])
    disk.during = lambda: log.append([b"second"])
    log.sync()
    assert (log.sequence, log.synced, log.is_unsynced) == (2, 1, True)


def test_a_damaged_last_entry_is_reported_and_nothing_is_changed() -> None:
    image = damaged(filled(), 3)
    before = image.files()
    for _ in range(2):  # twice, because a refused start must not change anything
        with pytest.raises(CorruptJournal, match=r"entries 3 to 3 were synced and are gone.*headrace log repair"):
            reopen(image, *TWO_LOGS)
        assert {p: c for p, c in image.files().items() if not p.endswith("/lock")} == {
            p: c for p, c in before.items() if not p.endswith("/lock")
        }
        image = image.kill()


def test_entries_that_were_not_synced_may_be_lost() -> None:
    disk = filled().kill()
    shard = reopen(disk, *TWO_LOGS)
    put(shard, b"lazy", lazy=True)
    assert shard.journal.sequence == 4 and slots.read_sequence(disk, SLOTS) == 3
    shard.slots.sync()  # as a truncation does: the slots are durable before the entry
    assert dict(reopen(lost(disk), *TWO_LOGS).state.items("t")) == {b"k": b"v"}


def test_a_folder_of_an_older_version_without_a_journal_slot_opens() -> None:
    disk = filled()
    image = disk.kill()
    image.replace(SLOTS, image.files()[SLOTS][slots.SLOT.size :])
    assert slots.read_sequence(image, SLOTS) == 0
    shard = reopen(image, *TWO_LOGS)
    assert (values(shard, 1), values(shard, 2)) == (["a"], ["b"])


def test_a_journal_slot_of_another_broker_is_ignored() -> None:
    image = filled().kill()
    foreign = slots.pack(slots.Ends(slots.JOURNAL, 0, 0, 99, 99, 99))
    image.replace(SLOTS, image.files()[SLOTS] + foreign)
    assert values(reopen(image, *TWO_LOGS)) == ["a"]


def test_an_entry_that_a_full_disk_has_written_whole_is_confirmed() -> None:
    """The append was refused although its entry could reappear, for example on a copy-on-write file system."""
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "a")
    disk.arm(Fault("pwrite", 1, error=errno.ENOSPC, share=1.0, within=".wal", forever=True))
    ticket = shard.logs[1].append(batch("b"))
    shard.pump()
    assert ticket.error is None
    assert values(reopen(lost(disk), spec())) == ["a", "b"]


# Repair.


def test_repair_does_not_change_an_undamaged_journal() -> None:
    image = filled().kill()
    before = journal_files(image)
    assert journal_repair.examine(ROOT, image) == journal_repair.JournalFacts(0, 3, 3, None)
    assert journal_repair.accept_loss(ROOT, image) == journal_repair.JournalFacts(0, 3, 3, None)
    assert journal_files(image) == before


def test_examining_a_damaged_journal_changes_nothing() -> None:
    image = damaged(filled(), 3)
    before = image.files()
    facts = journal_repair.examine(ROOT, image)
    assert (facts.checkpoint, facts.readable, facts.synced) == (0, 2, 3)
    assert facts.problem is not None and "entries 3 to 3" in facts.problem
    assert {p for p, c in image.files().items() if before.get(p) != c} <= {f"{ROOT}/lock"}


def test_accepting_the_loss_keeps_all_other_data_and_the_damaged_files() -> None:
    image = damaged(filled(), 3)
    bytes_before = set(journal_files(image).values())
    facts = journal_repair.accept_loss(ROOT, image)
    assert set(facts.set_aside) <= journal_files(image).keys()
    assert {image.files()[path] for path in facts.set_aside} <= bytes_before
    shard = reopen(image, *TWO_LOGS)
    assert (values(shard, 1), values(shard, 2), dict(shard.state.items("t"))) == (["a"], ["b"], {})
    write(shard, "c")
    assert values(reopen(lost(image), *TWO_LOGS)) == ["a", "c"]
    assert set(facts.set_aside) <= journal_files(image).keys(), "the quarantined files are kept"


@pytest.mark.parametrize("sequence", [1, 2, 3])
def test_a_log_that_lost_confirmed_records_with_the_journal_is_reported(sequence: int) -> None:
    image = without_segments(damaged(filled(), sequence))
    journal_repair.accept_loss(ROOT, image)
    shard = reopen(image, *TWO_LOGS)
    damaged_logs = {log_id for log_id, log in shard.logs.items() if log.damage is not None}
    assert damaged_logs == {log_id for log_id in (1, 2) if log_id >= sequence}


def outcome(image: SimulatedDisk) -> tuple[list[bytes], list[bool]]:
    shard = reopen(image, *TWO_LOGS)
    return [key for key, _ in shard.state.items("t")], [log.damage is not None for log in shard.logs.values()]


def test_an_interrupted_repair_can_be_repeated() -> None:
    disk = new_disk()
    shard = reopen(disk, *TWO_LOGS, settings=LogSettings(journal_file_bytes=8192, journal_files=4, disk_reserve=0))
    for text in "abcdefghijklmnopqrstuvwxyz":  # enough for two journal files
        put(shard, text.encode())
        if text == "c":
            checkpoint(shard)
    write(shard, "last", 2)
    assert shard.journal.files_live == 2
    rng = Random(3)
    image = without_segments(damaged(disk, shard.journal.sequence - 1)).power_cut(rng, "kept")
    repaired = image.kill()
    journal_repair.accept_loss(ROOT, repaired)
    expected = outcome(repaired)
    assert expected == ([bytes([n]) for n in b"abcdefghijklmnopqrstuvwxy"], [False, True])
    crashes: list[SimulatedDisk] = []

    def crash(kind: str, path: str) -> None:
        crashes.extend([image.kill(), *(image.power_cut(rng, mode) for mode in ("lost", "kept", "mixed", "mixed"))])

    image.before = crash
    journal_repair.accept_loss(ROOT, image)
    image.before = None
    assert len(crashes) > 30
    for crashed in crashes:
        journal_repair.accept_loss(ROOT, crashed)
        assert outcome(crashed) == expected
