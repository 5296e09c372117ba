"""A shard of a few small logs on a simulated disk, for tests that run each step themselves."""

from random import Random
from typing import Any

from headrace.clock import ManualClock
from headrace.log.log import LogSpec
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import Shard
from headrace.record import codec
from tests.crash.simdisk import SimulatedDisk

ROOT = "/srv/data"
SETTINGS = LogSettings(journal_file_bytes=8192, journal_files=3, inline_bytes_max=600, disk_reserve=0)
STREAM = StreamSettings(segment_size=4000, index_interval=256, retention_ms=-1)


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.mkdir("/srv")
    disk.sync_dir("/")
    return disk


def spec(log_id: int = 1, **settings: Any) -> LogSpec:
    return LogSpec(log_id, f"log{log_id}", StreamSettings(**{**_fields(STREAM), **settings}))


def _fields(settings: StreamSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def reopen(disk: SimulatedDisk, *specs: LogSpec, settings: LogSettings = SETTINGS) -> Shard:
    shard, _ = Shard.open(ROOT, settings, logs=specs, clock=ManualClock(), disk=disk)
    return shard


def batch(text: str, size: int = 0) -> bytearray:
    return codec.build([(b"key", text.encode().ljust(size, b"."), (), 1)])


def values(shard: Shard, log_id: int = 1) -> list[str]:
    log = shard.logs[log_id]
    assert log.damage is None
    found, offset = [], log.start_offset
    while offset < log.visible_end:
        chunk = log.read(offset)
        found += [bytes(r.value or b"").rstrip(b".").decode() for r in codec.records(chunk.data)]
        offset = chunk.next_offset
    return found


def lost(disk: SimulatedDisk) -> SimulatedDisk:
    """The disk after the worst power cut, which loses everything unsynced. It is no longer full."""
    image = disk.power_cut(Random(0), "lost")
    image.capacity = 1 << 50
    return image


def write(shard: Shard, text: str, log_id: int = 1, size: int = 0) -> None:
    ticket = shard.logs[log_id].append(batch(text, size))
    shard.pump()
    assert ticket.done and ticket.error is None


def checkpoint(shard: Shard) -> None:
    shard.checkpoint(lambda error: None)
    shard.pump()


def every_cut(disk: SimulatedDisk, variants: int = 3) -> list[SimulatedDisk]:
    """Return a list that receives the disks that a crash could leave, before each call that changes this disk."""
    images: list[SimulatedDisk] = []

    def before(kind: str, path: str) -> None:
        images.append(disk.kill())
        images.append(lost(disk))
        images.extend(disk.power_cut(Random(len(images) + n)) for n in range(variants))

    disk.before = before
    return images


def truncate(shard: Shard, offset: int) -> None:
    errors: list[BaseException | None] = []
    shard.maintenance.truncations.truncate(shard.logs[1], offset, errors.append)
    shard.pump()
    assert errors == [None]


def reopen_and_finish(disk: SimulatedDisk, *specs: LogSpec) -> Shard:
    shard = reopen(disk, *specs)
    shard.pump()  # finishes interrupted truncations
    return shard
