"""A disk that has no room for an overwrite (L8, L2): a copy-on-write or sparse filesystem needs space even for that.

The journal's files are written ahead, so an entry is an overwrite. When it finds no room, the append is refused,
nothing of it appears later, and appends work again without a restart once there is room.
"""

import errno

import pytest

from headrace.errors import DiskFull
from headrace.log.commit.round import Ticket
from headrace.log.shard import Shard
from tests.crash.shards import batch, every_cut, new_disk, reopen, spec, values, write
from tests.crash.simdisk import Fault, SimulatedDisk

WITHOUT_PADDING = 0.999  # of a write that ends in the padding of the entry
SHARES = (0.0, 0.05, 0.2, WITHOUT_PADDING)


def no_room_for_overwrites(disk: SimulatedDisk, share: float, within: str = ".wal") -> None:
    disk.arm(Fault("pwrite", 1, errno.ENOSPC, share=share, within=within, forever=True))


def append(shard: Shard, text: str, *, as_chain: bool) -> Ticket:
    """A small append is an I/O chain; together with one that bypasses the journal it is a job for the worker."""
    ticket = shard.logs[1].append(batch(text, 20))
    if not as_chain:
        shard.logs[2].append(batch(f"large {text}", 1000))
    shard.pump()
    return ticket


def tick(shard: Shard) -> None:
    shard.clock.advance(60)  # type: ignore[attr-defined]
    shard.tick()
    shard.pump()


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("as_chain", [True, False])
def test_l8_an_entry_that_finds_no_room_for_an_overwrite_is_refused_and_heals(share: float, as_chain: bool) -> None:
    disk = new_disk()
    shard = reopen(disk, spec(), spec(2))
    write(shard, "first")
    write(shard, "first", 2)
    no_room_for_overwrites(disk, share)
    expected = ["first"]
    ticket = append(shard, "refused", as_chain=as_chain)
    if share == WITHOUT_PADDING:  # the entry is complete without its padding
        assert ticket.error is None
        expected.append("refused")
    else:
        assert isinstance(ticket.error, DiskFull), ticket.error
    assert shard.failure is None
    assert values(shard) == expected
    disk.disarm()
    tick(shard)
    assert append(shard, "second", as_chain=as_chain).error is None
    expected.append("second")
    assert values(shard) == expected
    assert values(reopen(disk.kill(), spec(), spec(2))) == expected
    tick(shard)
    shard.close()
    assert values(reopen(disk.kill(), spec(), spec(2))) == expected


@pytest.mark.parametrize("share", SHARES[:3])
def test_l8_a_disk_without_room_for_any_overwrite_refuses_everything_and_heals(share: float) -> None:
    disk = new_disk()
    shard = reopen(disk, spec())
    write(shard, "first")
    no_room_for_overwrites(disk, share, within="")
    for number in range(5):
        try:
            ticket = append(shard, f"refused {number}", as_chain=True)
        except DiskFull:
            continue
        assert isinstance(ticket.error, DiskFull)
        tick(shard)
    assert shard.failure is None
    disk.disarm()
    tick(shard)
    write(shard, "second")
    assert values(shard) == ["first", "second"]
    assert values(reopen(disk.kill(), spec())) == ["first", "second"]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("as_chain", [True, False])
def test_l2_no_crash_brings_back_an_entry_that_was_refused_for_an_overwrite(share: float, as_chain: bool) -> None:
    disk = new_disk()
    shard = reopen(disk, spec(), spec(2))
    write(shard, "first")
    no_room_for_overwrites(disk, share)
    refused = append(shard, "refused", as_chain=as_chain).error is not None
    disk.disarm()
    images = every_cut(disk)
    tick(shard)
    assert append(shard, "second", as_chain=as_chain).error is None
    tick(shard)
    disk.before = None
    for image in images:
        image.capacity = 1 << 50
        found = values(reopen(image, spec(), spec(2)))
        assert found[:1] == ["first"]
        assert ("refused" in found) is not refused
        assert found in (["first", "second"][: len(found)], ["first", "refused", "second"][: len(found)])
