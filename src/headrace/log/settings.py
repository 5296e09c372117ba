"""Settings of streams and of the storage, with their defaults and the reasons for them."""

from typing import Literal

import msgspec

KB = 1024
MB = 1024 * KB
GB = 1024 * MB

WriteModeName = Literal["sync", "sync-immediate", "async"]  # what each does: write_mode.py
CleanupPolicy = Literal[
    "delete", "compact", "compact,delete", "delete,compact"
]  # both orders are valid, and are shown as they were set
TimestampType = Literal["create", "append"]
Compression = Literal["none", "gzip", "snappy", "lz4", "zstd"]


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one stream. Each can also be set for the whole broker."""

    segment_size: int = 256 * MB
    segment_age_ms: int = 7 * 24 * 3600 * 1000  # a quiet stream still rolls, so that retention can delete its records
    index_interval: int = 4 * KB
    write_mode: WriteModeName = "sync"
    flush_interval_ms: int = 1000  # async only: longest time until confirmed records are synced; 0 = never
    flush_bytes: int = 16 * MB  # async only: most confirmed bytes that are not synced; 0 = no limit
    retention_ms: int = 7 * 24 * 3600 * 1000  # -1 = forever
    retention_bytes: int = -1  # per partition; -1 = no limit
    cleanup_policy: CleanupPolicy = "delete"
    compaction_lag_ms: int = 0  # younger records are never compacted away
    compaction_lag_max_ms: int = -1  # an older record triggers compaction regardless of the dirty ratio; -1 = never
    compaction_dirty_percent: int = 33  # percentage of sealed bytes that must be new before all are rewritten
    tombstone_retention_ms: int = 24 * 3600 * 1000
    compression: Compression = "none"  # of batches that the broker builds, from HTTP and AMQP messages
    timestamp_type: TimestampType = "create"  # append: Kafka records get the broker's time instead of their own
    timestamp_before_max_ms: int = -1  # Kafka records may be this much older than the broker's time; -1 = any age
    timestamp_after_max_ms: int = 3600 * 1000  # and this much ahead of it, as since Kafka 4.0; -1 = any time
    batch_bytes_max: int = 16 * MB  # largest batch, and so largest message, that is accepted
    key_index: bool = False  # keep an index beside the log, to look up the last message of a key

    @property
    def is_compacted(self) -> bool:
        """If so, every message needs a key: one without could never be compacted away."""
        return "compact" in self.cleanup_policy


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the broker's storage."""

    journal_file_bytes: int = 64 * MB  # size of one journal file, pre-written and recycled
    journal_files: int = 3  # most journal files in use; rounds wait when all are full
    inline_bytes_max: int = 256 * KB  # larger appends bypass the journal; a quarter of it for a round of one log
    round_bytes_max: int = 16 * MB  # most bytes in one round; the rest waits for the next
    checkpoint_interval_ms: int = 30_000
    checkpoint_bytes: int = 256 * MB  # bytes written since the last checkpoint that cause the next one
    settle_sync_interval_ms: int = 5_000  # rounds that contain only settles are synced this often; 0 = on stop
    disk_reserve: int = 64 * MB  # appends are refused below this free space, so that checkpoints still have room
    open_files_max: int = 0  # 0 = a quarter of the process's limit
    index_cache_bytes: int = 16 * MB
    batch_bytes_max: int = 64 * MB  # recovery treats a larger batch as damage
    tier_dir: str | None = None  # folder of archived segments; None = `tier` in the data folder
