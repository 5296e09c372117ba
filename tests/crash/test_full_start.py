"""Opening a data folder after a crash on a full disk, where recovery must write before it can delete.

The folder opens, or the error says in one sentence that the disk is full. Repeated attempts lose nothing, and the
folder opens once there is space.
"""

import errno
from random import Random

import pytest

from headrace.errors import DiskFull
from tests.crash.faults import new_world
from tests.crash.model import Found
from tests.crash.shards import ROOT, new_disk, reopen, spec, values, write
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.crash.world import World, open_shard, read_everything

STEPS = 60
UNLIMITED = 1 << 50
FREE_BYTES = (0, 40, 200, 600, 1500, 4000, 12_000)
ATTEMPTS = 3


def crashed(seed: int) -> tuple[World, SimulatedDisk]:
    world = new_world(seed)
    world.open()
    for _ in range(STEPS):
        world.step()
    world.observe()
    return world, world.disk.kill()


def found_on(world: World, image: SimulatedDisk) -> Found:
    return read_everything(*open_shard(image, world.settings, world.model.specs(), world.clock))


@pytest.mark.parametrize("seed", [1, 7, 21, 33, 44, 46])
def test_a_start_on_a_full_disk_succeeds_or_raises_disk_full_and_loses_nothing(seed: int) -> None:
    world, killed = crashed(seed)
    rng = Random(seed)
    outcomes = set()
    for free_bytes in FREE_BYTES:
        image = killed.kill()
        image.capacity = image.used + free_bytes
        used = []
        for _ in range(ATTEMPTS):
            try:
                found = found_on(world, image)
            except DiskFull as error:
                assert str(error).startswith("/data cannot be opened: ") and "\n" not in str(error)
                outcomes.add("refused")
            else:
                world.model.check(found, power_cut=False)
                outcomes.add("opened")
                break
            used.append(image.used)
            image = image.kill()
        assert not used or max(used[1:], default=0) <= used[0], "repeated attempts use more and more space"
        after = [image.kill(), *(image.power_cut(rng, mode) for mode in ("lost", "mixed", "mixed"))]
        for number, crash in enumerate(after):
            crash.capacity = UNLIMITED
            world.model.check(found_on(world, crash), power_cut=number > 0)
    assert outcomes == {"opened", "refused"}


def killed_with(count: int) -> SimulatedDisk:
    disk = new_disk()
    shard = reopen(disk, spec())
    for _ in range(count):
        write(shard, "a", size=300)
    return disk.kill()


def test_failed_starts_do_not_accumulate_copies_of_the_journal() -> None:
    image = killed_with(5)
    used = []
    for _ in range(4):
        image.arm(Fault("create", 1, errno.ENOSPC, within=".state", forever=True))
        with pytest.raises(DiskFull):
            reopen(image, spec())
        image = image.kill()
        used.append(image.used)
    assert used == used[:1] * 4
    assert values(reopen(image, spec())) == ["a"] * 5


def test_a_start_that_fails_with_disk_full_removes_its_temporary_files() -> None:
    image = killed_with(5)
    image.arm(Fault("sync", 1, errno.ENOSPC, within=".log.tmp"))
    with pytest.raises(DiskFull):
        reopen(image, spec())
    assert not [path for path in image.files() if path.endswith(".tmp")]


def test_a_start_removes_the_temporary_files_of_a_killed_start() -> None:
    image = killed_with(5)
    before = image.used
    reopen(image.kill(), spec())
    folder = next(path for path in image.files() if path.endswith(".log")).rpartition("/")[0]
    assert folder.startswith(ROOT)
    file = image.open(f"{folder}/00000000000000000099.log.tmp", create=True)
    image.pwrite(file, [bytes(20_000)], 0)
    image.close(file)
    image = image.kill()
    image.capacity = before + 10_000
    assert values(reopen(image, spec())) == ["a"] * 5
