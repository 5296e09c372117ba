"""A disk that the broker filled itself (L1, L5): after a kill there is room for the next start, at every moment.

Recovery writes what it keeps before it deletes anything, so the broker refuses appends while the next start would find
less room than it needs. Nothing else writes to these disks.
"""

from collections.abc import Iterator
from random import Random

import pytest

from headrace.clock import ManualClock
from headrace.errors import DiskFull
from headrace.log.settings import LogSettings
from headrace.log.shard import Shard
from tests.crash.shards import ROOT, batch, new_disk, spec, values
from tests.crash.simdisk import SimulatedDisk

KB = 1024
SETTINGS = LogSettings(
    journal_file_bytes=32 * KB, journal_files=3, inline_bytes_max=8 * KB, disk_reserve=0, checkpoint_bytes=1 << 30
)
SPECS = (spec(1, segment_size=40 * KB), spec(2, segment_size=16 * KB), spec(3, write_mode="async"))


def opened(disk: SimulatedDisk) -> Shard:
    shard, _ = Shard.open(ROOT, SETTINGS, logs=SPECS, clock=ManualClock(), disk=disk)
    return shard


def fill(shard: Shard, seed: int) -> dict[int, list[str]]:
    """Append until everything is refused; returns what was confirmed."""
    rng = Random(seed)
    confirmed: dict[int, list[str]] = {spec.id: [] for spec in SPECS}
    refused = number = 0
    while refused < 50:
        number += 1
        tickets = []
        for log_id in rng.sample(list(confirmed), rng.choice((1, 2, 3))):
            try:
                tickets.append((log_id, shard.logs[log_id].append(batch(f"{number}", rng.choice((20, 600, 4 * KB))))))
            except DiskFull:
                refused += 1
        shard.pump()
        for log_id, ticket in tickets:
            if ticket.error is None:
                confirmed[log_id].append(f"{number}")
            else:
                assert isinstance(ticket.error, DiskFull)
                refused += 1
        if number % 10 == 0:
            shard.clock.advance(1)  # type: ignore[attr-defined]
            shard.tick()
            shard.pump()
    assert shard.failure is None
    return confirmed


def crashes(disk: SimulatedDisk, seed: int) -> Iterator[SimulatedDisk]:
    """After a kill there is exactly the room that there was before."""
    yield disk.kill()
    cut = disk.power_cut(Random(seed), "kept")
    yield cut


@pytest.mark.parametrize("room", [400 * KB, 1024 * KB, 2500 * KB])
@pytest.mark.parametrize("seed", range(4))
def test_l5_a_disk_that_the_broker_filled_has_room_for_the_start_after_a_kill(seed: int, room: int) -> None:
    disk = new_disk()
    shard = opened(disk)
    disk.capacity = disk.used + room
    shard.tick()
    confirmed = fill(shard, seed)
    assert sum(map(len, confirmed.values())) > 20, "it was filled"
    for image in crashes(disk, seed):
        again = opened(image)
        for log_id, expected in confirmed.items():
            assert values(again, log_id) == expected


@pytest.mark.parametrize("seed", range(3))
def test_l5_there_is_room_for_the_start_after_a_kill_at_any_moment_of_filling_the_disk(seed: int) -> None:
    disk = new_disk()
    shard = opened(disk)
    disk.capacity = disk.used + 600 * KB
    shard.tick()
    images: list[SimulatedDisk] = []
    calls = 0

    def before(_kind: str, _path: str) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == seed:
            images.append(disk.kill())

    disk.before = before
    fill(shard, seed)
    disk.before = None
    assert len(images) > 40
    for image in images:
        again = opened(image)
        assert all(log.damage is None for log in again.logs.values())


def test_a_full_disk_that_was_recovered_takes_appends_once_there_is_room() -> None:
    disk = new_disk()
    shard = opened(disk)
    disk.capacity = disk.used + 400 * KB
    shard.tick()
    confirmed = fill(shard, 1)
    image = disk.kill()
    again = opened(image)
    image.capacity += 500 * KB
    again.clock.advance(60)  # type: ignore[attr-defined]
    again.tick()
    again.pump()
    ticket = again.logs[1].append(batch("later"))
    again.pump()
    assert ticket.error is None
    assert values(again) == [*confirmed[1], "later"]
