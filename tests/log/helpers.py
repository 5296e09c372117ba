"""A shard in a folder, small enough that a short test rolls, recycles and checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.clock import ManualClock
from headrace.log.disk.disk import Disk
from headrace.log.log import Log
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import LogSpec, Shard
from headrace.log.state.store import Fold
from headrace.record import codec
from headrace.record.types import Record
from tests.crash.simdisk import SimulatedDisk

SMALL = LogSettings(journal_file_bytes=64 * 1024, journal_files=3, inline_bytes_max=4096, disk_reserve=0)


def batch(values: Sequence[bytes], *, keys: Sequence[bytes | None] | None = None, timestamp: int = 1000) -> bytearray:
    keys = keys or [None] * len(values)
    return codec.build([(k, v, (), timestamp + i) for i, (k, v) in enumerate(zip(keys, values, strict=True))])


def values(log: Log, start: int | None = None) -> list[bytes | None]:
    return [record.value for record in records(log, start)]


def records(log: Log, start: int | None = None) -> list[Record]:
    found = []
    offset = log.start_offset if start is None else start
    while offset < log.visible_end:
        chunk = log.read(offset, 2000)
        found += codec.records(chunk.data, from_offset=offset)
        assert chunk.next_offset > offset
        offset = chunk.next_offset
    return found


class Bench:
    """Opens, kills and reopens shards on one folder."""

    def __init__(self, root: Path | str, disk: Disk | None = None) -> None:
        self.root = str(root)
        self.disk = disk
        self.clock = ManualClock()
        self.report: RecoveryReport
        self.shard: Shard

    def open(
        self,
        *logs: int,
        settings: LogSettings = SMALL,
        stream: StreamSettings | None = None,
        folds: Mapping[str, Fold] | None = None,
    ) -> Shard:
        specs = [LogSpec(log_id, "t", stream or StreamSettings()) for log_id in logs or (1,)]
        self.shard, self.report = Shard.open(
            self.root, settings, logs=specs, clock=self.clock, disk=self.disk, folds=folds
        )
        return self.shard

    @property
    def simulated(self) -> SimulatedDisk:
        """The disk of the open shard, of a bench that was made with a simulated one."""
        assert isinstance(self.shard.disk, SimulatedDisk)
        return self.shard.disk

    def kill(self) -> None:
        """The process dies: locks are released, nothing else happens."""
        self.shard.disk.close(self.shard._lock)

    def append(self, log_id: int, *parts: Sequence[bytes]) -> None:
        tickets = [self.shard.log(log_id).append(batch(part)) for part in parts]
        self.shard.pump()
        for ticket in tickets:
            assert ticket.done and ticket.error is None, ticket.error
