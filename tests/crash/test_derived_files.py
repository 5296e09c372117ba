"""Indexes are not synced while they grow, so a power cut may leave zeros in them (L9).

Recovery repairs them and says so."""

from random import Random

import pytest

from headrace.clock import ManualClock
from headrace.log.recovery.inspect import Inspector
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.shard import Shard
from tests.crash.shards import ROOT, SETTINGS, batch, checkpoint, new_disk, spec, values
from tests.crash.simdisk import SimulatedDisk

SPEC = spec(segment_size=3000, index_interval=100)


def written(count: int) -> SimulatedDisk:
    """A few sealed segments and an active one, some of it after the last checkpoint."""
    disk = new_disk()
    shard, _ = Shard.open(ROOT, SETTINGS, logs=[SPEC], clock=ManualClock(), disk=disk)
    for number in range(count):
        shard.logs[1].append(batch(f"{number}", 50 + number % 7 * 40))
        shard.pump()
        if number == count - 4:
            checkpoint(shard)
    return disk


def reopened(disk: SimulatedDisk) -> tuple[Shard, RecoveryReport]:
    return Shard.open(ROOT, SETTINGS, logs=[SPEC], clock=ManualClock(), disk=disk)


def index_files(disk: SimulatedDisk) -> list[str]:
    return sorted(path for path in disk.files() if path.endswith(("index",)))


def problems(disk: SimulatedDisk) -> list[str]:
    inspector = Inspector(ROOT, disk)
    try:
        return inspector.verify().problems
    finally:
        inspector.close()


@pytest.mark.parametrize("count", [12, 30, 61])
@pytest.mark.parametrize("seed", range(8))
def test_l9_after_a_power_cut_and_a_start_verify_finds_nothing_wrong_with_the_indexes(seed: int, count: int) -> None:
    image = written(count).power_cut(Random(seed), "mixed")
    shard, _ = reopened(image)
    assert problems(image) == []
    assert len(values(shard)) == count
    shard.logs[1].append(batch("later"))
    shard.pump()
    shard.close()
    assert problems(image) == []


def test_l9_zeroed_indexes_are_repaired_and_reported() -> None:
    image = written(61).power_cut(Random(0), "kept")
    zeroed = index_files(image)[-6:]
    assert len(zeroed) == 6
    for path in zeroed:
        size = image.file_size(path)
        file = image.open(path)
        image.pwrite(file, [bytes(size)], 0)
        image.close(file)
    assert problems(image), "verify sees it"
    _, report = reopened(image)
    assert problems(image) == []
    assert report.indexes_rebuilt >= 2
    assert f"indexes of {report.indexes_rebuilt} segments rebuilt" in report.summary()


@pytest.mark.parametrize("room", [0, 100, 700])
def test_l9_a_wrong_index_does_not_keep_a_full_disk_from_starting(room: int) -> None:
    disk = written(30)
    shard, _ = reopened(disk.kill())
    shard.close()
    assert isinstance(shard.disk, SimulatedDisk)
    image = shard.disk.kill()
    for path in index_files(image):
        size = image.file_size(path)
        file = image.open(path)
        image.pwrite(file, [bytes(size)], 0)
        image.close(file)
    marker = reopened(image.kill())[0].disk  # its state takes this much, without any index
    assert isinstance(marker, SimulatedDisk)
    image.capacity = image.used + (marker.used - image.used) + 20_000 + room
    assert len(values(reopened(image)[0])) == 30


def test_l9_being_killed_while_indexes_are_repaired_changes_nothing() -> None:
    image = written(61).power_cut(Random(3), "mixed")
    images: list[SimulatedDisk] = []

    def before(_kind: str, path: str) -> None:
        if "index" in path:
            images.append(image.kill())
            images.append(image.power_cut(Random(len(images)), "mixed"))

    image.before = before
    reopened(image)
    image.before = None
    for crashed in images:
        shard, _ = reopened(crashed)
        assert len(values(shard)) == 61 and problems(crashed) == []
