"""The services that the components of the commit path share. Made once per shard, before recovery."""

from dataclasses import dataclass

from headrace.clock import Clock
from headrace.log.counters import Counters
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.workers import SerialExecutor, Worker
from headrace.log.settings import LogSettings
from headrace.log.status import ShardStatus


@dataclass(frozen=True, slots=True)
class CommitContext:
    root: str
    settings: LogSettings
    clock: Clock
    counters: Counters
    disk: Disk
    files: FileCache
    status: ShardStatus
    worker: SerialExecutor  # writes rounds, one at a time
    keeper: Worker  # syncs and writes in the background, beside the rounds
