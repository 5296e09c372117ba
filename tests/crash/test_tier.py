"""A crash before any disk call of archiving and restoring: every record is still there, once."""

from random import Random

import pytest

from headrace.log.disk.paths import UNFINISHED
from headrace.log.shard import Shard
from headrace.log.tier import archive as tiering
from headrace.log.tier import parquet
from tests.crash.shards import new_disk, reopen, spec, values, write
from tests.crash.simdisk import SimulatedDisk

EXPECTED = [f"record {n}" for n in range(24)]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1500)


def archive(shard: Shard) -> None:
    log = shard.logs[1]
    for segment in [s for s in log.segments if tiering.is_archivable(s, log.durable_end)]:
        tiering.write_parquet(segment, tiering.parquet_path(shard.tier_root, segment) + UNFINISHED, shard.disk)
        shard.maintenance.archive(log, segment, fail)
        shard.pump()


def restore(shard: Shard) -> None:
    log = shard.logs[1]
    for segment in [s for s in log.segments if s.is_archived]:
        path = segment.path(".restored.tmp")
        tiering.write_segment(segment, path, shard.disk)
        shard.maintenance.restore(log, segment, path, fail)
        shard.pump()


def fail(_made: object, error: BaseException | None) -> None:
    if error is not None:
        raise error


def judge(disk: SimulatedDisk) -> None:
    """Check that the disk holds every record and no unknown file, and that the next run completes the work."""
    shard = reopen(disk, spec())
    log = shard.logs[1]
    assert values(shard) == EXPECTED
    folder = f"{shard.tier_root}/{log.tail.folder.rpartition('/')[2]}"
    found = set(disk.listdir(folder)) if disk.exists(folder) else set()
    assert found == {s.data_path.rpartition("/")[2] for s in log.segments if s.is_archived}
    archive(shard)
    assert values(shard) == EXPECTED and all(s.is_archived for s in log.segments if s.is_sealed)
    shard.close()
    again = reopen(disk, spec())
    assert values(again) == EXPECTED
    again.close()


@pytest.mark.parametrize("work", [archive, restore])
def test_a_crash_before_any_disk_call_loses_no_record(work: object) -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    for text in EXPECTED:
        write(shard, text, size=400)
    if work is restore:
        archive(shard)
    rng = Random(3)
    images: dict[str, list[SimulatedDisk]] = {}

    def before(kind: str, path: str) -> None:
        step = f"{kind} {path.rpartition('/')[2]}"
        cuts = [disk.kill(), disk.power_cut(rng, "lost"), disk.power_cut(rng), disk.power_cut(rng)]
        images.setdefault(step, cuts)

    disk.before = before
    (archive if work is archive else restore)(shard)
    disk.before = None
    assert {s.state for s in shard.logs[1].segments} == {"archived" if work is archive else "sealed", "active"}
    assert len(images) > 15, sorted(images)
    for cuts in images.values():
        for image in cuts:
            judge(image)
    judge(disk.kill())
