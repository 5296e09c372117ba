"""The opened data folder: the shard with all logs and the state store, the catalog, and the recovery report.

`Broker` gets it as an argument. Listeners use the facts and the small state interface, never the shard itself.
"""

from headrace.broker.catalog.catalog import Catalog
from headrace.errors import StorageError
from headrace.log.counters import Counters
from headrace.log.disk.disk import Disk
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.shard import Shard


class Storage:
    """Used on the event loop."""

    def __init__(self, disk: Disk, catalog: Catalog, shard: Shard, report: RecoveryReport) -> None:
        self.disk = disk
        self.catalog = catalog
        self.shard = shard
        self.report = report

    # Facts for operators.

    @property
    def counters(self) -> Counters:
        return self.shard.counters

    @property
    def journal_bytes_written(self) -> int:
        return self.shard.journal.bytes_written

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the disk."""
        return self.shard.pending_bytes

    @property
    def failure(self) -> StorageError | None:
        """The failed write or sync after which nothing is accepted until a restart."""
        return self.shard.failure

    @property
    def is_full(self) -> bool:
        return self.shard.is_full

    @property
    def tier_dir(self) -> str:
        """Where archived segments are."""
        return self.shard.tier_root

    @property
    def log_count(self) -> int:
        return len(self.shard.logs)

    @property
    def damaged_logs(self) -> int:
        return sum(log.has_damage for log in self.shard.logs.values())

    # Single values in the state store.

    def get_state(self, table: str, key: bytes) -> bytes | None:
        return self.shard.state.get(table, key)

    async def put_state(self, table: str, key: bytes, value: bytes) -> None:
        """Durable on return."""
        entry = self.shard.group()
        entry.put(table, key, value)
        await entry.commit()
