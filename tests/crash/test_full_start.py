"""Opening a folder after a crash, on a disk that has no room left: recovery writes before it deletes.

It opens, or says in one sentence that it needs room. Either way nothing is lost, however often it is tried, and it
opens once there is room.
"""

import errno
from random import Random

import pytest

from headrace.errors import DiskFull
from tests.crash.faults import new_world
from tests.crash.model import Found
from tests.crash.shards import ROOT, new_disk, reopen, spec, values, write
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.crash.world import World, look, open_shard

STEPS = 60
ENDLESS = 1 << 50
ROOMS = (0, 40, 200, 600, 1500, 4000, 12_000)
ATTEMPTS = 3


def crashed(seed: int) -> tuple[World, SimulatedDisk]:
    world = new_world(seed)
    world.open()
    for _ in range(STEPS):
        world.step()
    world.observe()
    return world, world.disk.kill()


def found_on(world: World, image: SimulatedDisk) -> Found:
    return look(*open_shard(image, world.settings, world.model.specs(), world.clock))


@pytest.mark.parametrize("seed", [1, 7, 21, 33, 44, 46])
def test_l8_a_start_without_room_opens_or_says_so_and_loses_nothing(seed: int) -> None:
    world, killed = crashed(seed)
    rng = Random(seed)
    outcomes = set()
    for room in ROOMS:
        image = killed.kill()
        image.capacity = image.used + room
        held = []
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
            held.append(image.used)
            image = image.kill()
        assert not held or max(held[1:], default=0) <= held[0], "every attempt takes more room"
        after = [image.kill(), *(image.power_cut(rng, mode) for mode in ("lost", "mixed", "mixed"))]
        for number, crash in enumerate(after):
            crash.capacity = ENDLESS
            world.model.check(found_on(world, crash), power_cut=number > 0)
    assert outcomes == {"opened", "refused"}


def killed_with(count: int) -> SimulatedDisk:
    disk = new_disk()
    shard = reopen(disk, spec())
    for _ in range(count):
        write(shard, "a", size=300)
    return disk.kill()


def test_starts_that_fail_do_not_fill_the_disk_with_copies_of_the_journal() -> None:
    image = killed_with(5)
    held = []
    for _ in range(4):
        image.arm(Fault("create", 1, errno.ENOSPC, within=".state", forever=True))
        with pytest.raises(DiskFull):
            reopen(image, spec())
        image = image.kill()
        held.append(image.used)
    assert held == held[:1] * 4
    assert values(reopen(image, spec())) == ["a"] * 5


def test_a_start_that_finds_no_room_gives_back_what_it_took() -> None:
    image = killed_with(5)
    image.arm(Fault("sync", 1, errno.ENOSPC, within=".log.tmp"))
    with pytest.raises(DiskFull):
        reopen(image, spec())
    assert not [path for path in image.files() if path.endswith(".tmp")]


def test_what_a_killed_start_left_makes_room_for_the_next() -> None:
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
