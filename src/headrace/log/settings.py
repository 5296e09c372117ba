"""What can be tuned, with the defaults and the reason for each."""

from typing import Literal

import msgspec

KB = 1024
MB = 1024 * KB
GB = 1024 * MB

WriteModeName = Literal["sync", "sync-immediate", "async"]  # what each does: write_mode.py
CleanupPolicy = Literal["delete", "compact", "compact,delete", "delete,compact"]  # each shown as it was set
TimestampType = Literal["create", "append"]
Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one stream; every one can be set for the whole broker, too."""

    segment_size: int = 256 * MB
    segment_age_ms: int = 7 * 24 * 3600 * 1000  # a quiet stream still rolls, so that retention can bite
    index_interval: int = 4 * KB
    write_mode: WriteModeName = "sync"
    flush_interval_ms: int = 1000  # async only: at most this long until what was confirmed is synced; 0 = never
    flush_bytes: int = 16 * MB  # async only: or this much
    retention_ms: int = 7 * 24 * 3600 * 1000  # -1 = for ever
    retention_bytes: int = -1  # per partition; -1 = no limit
    cleanup_policy: CleanupPolicy = "delete"
    compaction_lag_ms: int = 0  # records younger than this are never compacted away
    compaction_lag_max_ms: int = -1  # a record that is older has the log compacted, however little is new; -1 = never
    compaction_dirty_percent: int = 33  # of the sealed bytes must be new before all are rewritten
    tombstone_retention_ms: int = 24 * 3600 * 1000
    compression: Compression = "none"  # of the batches we build ourselves, from HTTP and AMQP
    timestamp_type: TimestampType = "create"  # append: Kafka records get the broker's time in place of their own
    batch_bytes_max: int = 16 * MB  # the largest batch (and so message) taken
    key_index: bool = False  # beside the log, so that the last message of a key can be asked for

    @property
    def is_compacted(self) -> bool:
        """Then every message needs a key: what has none could never be compacted away."""
        return "compact" in self.cleanup_policy


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the storage of the whole broker."""

    journal_file_bytes: int = 64 * MB  # one of the journal's files, pre-written and recycled
    journal_files: int = 3  # more than this many unsynced files is back-pressure
    inline_bytes_max: int = 256 * KB  # a larger part, or a quarter of it if it is alone, goes straight to its segment
    round_bytes_max: int = 16 * MB  # what does not fit waits for the next round
    checkpoint_interval_ms: int = 30_000
    checkpoint_bytes: int = 256 * MB  # written past the journal since the last one
    settle_sync_interval_ms: int = 5_000  # a round of settles alone is synced at most this often; 0 = on stop
    disk_reserve: int = 64 * MB  # free space below which appends are refused, so that checkpoints still work
    open_files_max: int = 0  # 0 = a quarter of the process's limit
    index_cache_bytes: int = 16 * MB
    batch_bytes_max: int = 64 * MB  # recovery refuses to believe in a larger batch
    tier_dir: str | None = None  # where archived segments go; None = `tier` in the data folder
