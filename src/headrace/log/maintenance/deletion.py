"""Deleting a log: its slot, its folder and its entries in the state."""

from collections.abc import Callable

from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.slots import Slots
from headrace.log.disk import paths
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.disk.workers import Worker
from headrace.log.log import Log
from headrace.log.maintenance import abort_markers
from headrace.log.maintenance.jobs import REMOVER, BackgroundWorkers, ShardHealth, report_failure
from headrace.log.segments import epochs
from headrace.log.state.tables import ENDS, STARTS, TRUNCATIONS
from headrace.log.tier.archive import remove_archived


class LogDeletion:
    def __init__(
        self,
        files: FileCache,
        worker: Worker,
        slots: Slots,
        group: Callable[[], AtomicGroup],
        background: BackgroundWorkers,
        health: ShardHealth,
        *,
        tier_root: str,
    ) -> None:
        self._files = files
        self._worker = worker
        self._slots = slots
        self._group = group
        self._background = background
        self._health = health
        self._tier_root = tier_root

    def delete(self, log: Log) -> None:
        """Rename the log's folder to mark it as deleted, then remove it. The next start finishes after a crash."""
        files, folder = self._files, log.tail.folder
        doomed = folder + paths.DELETED
        check = report_failure(self._health)

        def rename() -> list[str] | None:
            self._clear_slot(log)
            if not files.disk.exists(folder):
                return None
            files.disk.rename(folder, doomed)
            files.folder_changed(folder.rpartition("/")[0])
            # List it by its new name, under which a compaction that is still running cannot add files.
            try:
                names = files.listdir(doomed)
            except OSError as error:
                if error.errno not in NO_FILES:
                    raise
                return None  # the next start removes the folder
            files.forget([f"{folder}/{name}" for name in names])
            return names

        def remove(names: list[str]) -> None:
            if not remove_archived(files.disk, self._tier_root, doomed):
                return  # the next start tries again
            for name in names:
                files.disk.unlink(f"{doomed}/{name}")
            files.disk.rmdir(doomed)
            files.folder_changed(folder.rpartition("/")[0])

        def renamed(names: list[str] | None, error: BaseException | None) -> None:
            check(None, error)
            if names is not None and not self._health.is_closed:
                self._background.get(REMOVER).submit(lambda: remove(names), check)

        self._worker.submit(rename, renamed)
        key = log.id.to_bytes(8, "big")
        group = self._group()
        for table in (ENDS, STARTS, TRUNCATIONS, epochs.TABLE, abort_markers.TABLE):
            group.delete(table, key)
        group.commit(lazy=True)

    def _clear_slot(self, log: Log) -> None:
        """Runs on the worker: a round in progress may still write the slot, which may be another log's afterwards."""
        try:
            self._slots.remove(log.id)
        except OSError as error:
            # On a full disk the slot stays. Log ids are never reused, and the next start ignores it.
            if error.errno not in NO_ROOM:
                raise
