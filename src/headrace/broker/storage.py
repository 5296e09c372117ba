"""The opened data folder: the shard with all logs and the state store, the catalog, and the recovery report.

`Broker` gets it as an argument. Listeners use the facts and the small state interface, never the shard itself.
"""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.queues.view_state import SETTLE_TABLE, fold_settles
from headrace.clock import Clock
from headrace.config import Config
from headrace.errors import StorageError
from headrace.log.counters import Counters
from headrace.log.disk.disk import Disk
from headrace.log.log import LogSpec
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.shard import Shard

FOLDS = {SETTLE_TABLE: fold_settles}

logger = logging.getLogger("headrace.broker")


class Storage:
    """Used on the event loop."""

    def __init__(self, disk: Disk, catalog: FileCatalog, shard: Shard, report: RecoveryReport) -> None:
        self.disk = disk
        self.catalog = catalog
        self.shard = shard
        self.report = report

    @classmethod
    def open(
        cls, config: Config, clock: Clock, disk: Disk, catalog: FileCatalog, logs: Callable[[], Iterable[LogSpec]]
    ) -> "Storage":
        """Lock the data folder and recover the logs. Blocks the event loop: nothing is served before.

        `logs` is called once the folder is locked, because it reads the catalog.
        """
        loop, data_dir = asyncio.get_running_loop(), config.data_dir
        with readable_errors(data_dir):
            _make_folder(disk, data_dir)
            shard, report = Shard.open(
                data_dir,
                config.log,
                logs=_lazily(logs),
                clock=clock,
                disk=disk,
                post=loop.call_soon_threadsafe,
                defer=loop.call_soon,
                watch=partial(_watch, loop),
                make_future=loop.create_future,
                folds=FOLDS,
            )
        report.restored += catalog.restored
        if shard.was_standby:
            logger.warning("%s was a standby's copy and no longer follows its leader", data_dir)
        return cls(disk, catalog, shard, report)

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


def _lazily(logs: Callable[[], Iterable[LogSpec]]) -> Iterator[LogSpec]:
    yield from logs()


def _watch(loop: asyncio.AbstractEventLoop, file: int, call: Callable[[], object] | None) -> None:
    if call is None:
        loop.remove_reader(file)
    else:
        loop.add_reader(file, call)


def _make_folder(disk: Disk, path: str) -> None:
    """Create the folder and sync every new name on the path to it, so that a power failure cannot lose the folder."""
    missing = []
    while not disk.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        disk.mkdir(made)
        disk.sync_dir(os.path.dirname(made))


@contextlib.contextmanager
def readable_errors(data_dir: str) -> Iterator[None]:
    """Turn the errors of an unusable data folder into one sentence each."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.EACCES: "this user may not use it",
            errno.EPERM: "this user may not use it",
            errno.EROFS: "its filesystem is read-only",
            errno.ENOTDIR: "it is not a folder",
            errno.EEXIST: "it is not a folder",
            errno.ENOSPC: "its disk is full",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"the data folder {data_dir} cannot be opened: {reason}") from error
