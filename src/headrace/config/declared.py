"""Declares every setting once: flags, environment variables, headrace.toml, the docs and `status` derive from SETTINGS.

The structs in model.py and log/settings.py hold the type and the default of a setting; SETTINGS holds its spelling,
its bounds and its help text. To add a setting, add a field there and a line here, then regenerate the docs; tests
fail until all three agree.
"""

from headrace.config.setting import Setting
from headrace.log.settings import GB, KB, MB

UNLIMITED = {"unlimited": -1}
FOREVER = {"forever": -1}
SEGMENT_BYTES_MAX = 2 * GB - 1  # positions in an offset index have 32 bits

SETTINGS: tuple[Setting, ...] = (
    # Places.
    Setting(
        "data_dir",
        "path",
        "Data folder: holds the logs, the catalog and the users. Created if missing; only one broker can open it at "
        "a time.",
        aliases=("storage_path",),
    ),
    Setting(
        "tier_dir",
        "path",
        "Folder for segments archived as Parquet by `headrace log tier`. `auto` is `tier` inside the data folder. "
        "Changing it does not move segments that are already archived.",
        path="log.tier_dir",
    ),
    Setting(
        "http",
        "address",
        "Address of the HTTP listener, `HOST:PORT`. `off` disables it; port 0 picks a free port.",
        unset="off",
    ),
    Setting(
        "amqp",
        "address",
        "Address of the AMQP 0-9-1 listener, `HOST:PORT`. `off` disables it; port 0 picks a free port.",
        unset="off",
    ),
    Setting(
        "kafka",
        "address",
        "Address of the Kafka listener, `HOST:PORT`. `off` disables it; port 0 picks a free port.",
        unset="off",
    ),
    # TLS.
    Setting(
        "tls_cert",
        "file",
        "Certificate of this broker in PEM format, including the chain up to its CA. When set, the listeners in "
        "`tls_listeners` accept only TLS. Reloaded when the file changes.",
        unset="off",
    ),
    Setting(
        "tls_key",
        "file",
        "Private key of the certificate in PEM format, without a password. `auto` reads it from the `tls_cert` file.",
    ),
    Setting(
        "tls_client_ca",
        "file",
        "CA certificate in PEM format. Clients must present a certificate signed by this CA, in addition to any "
        "user and password.",
        unset="off",
    ),
    Setting(
        "tls_listeners",
        "names",
        "Listeners that use TLS, separated by commas.",
        choices=("amqp", "kafka", "http"),
        aliases=("tls_doors",),
    ),
    # Access.
    Setting(
        "protected_mode",
        "bool",
        "While `guest` with its default password is the only user, serve only clients on this machine. `off` serves "
        "every client that can reach a listener, without a login, until you create a user.",
    ),
    # Durability.
    Setting(
        "durability",
        "choice",
        "When a message is confirmed. `sync`: once it is on stable storage. `os`: once the operating system has it; "
        "a power failure can then lose confirmed messages, a crash of the broker cannot.",
        choices=("sync", "os"),
    ),
    Setting(
        "standby_confirms",
        "count",
        "Number of standbys that must sync a change before it is confirmed. Publishers wait while fewer are "
        "in step. 0 never waits for standbys.",
        most=10,
    ),
    Setting(
        "profile",
        "choice",
        "Named group of settings for one goal. Settings given explicitly override it.",
        choices=("none", "throughput", "latency", "availability"),
    ),
    # Logging.
    Setting(
        "log_level",
        "choice",
        "Lowest level of log messages written to stderr.",
        choices=("debug", "info", "warning", "error"),
    ),
    Setting(
        "log_format",
        "choice",
        "Format of log messages: plain text, or one JSON object per line.",
        choices=("text", "json"),
    ),
    # Automatically created topics.
    Setting("auto_create_topics", "bool", "Create a missing topic when a client publishes to it."),
    Setting(
        "auto_create_partitions",
        "count",
        "Number of partitions of a new topic, unless the request that creates it gives one.",
        least=1,
        most=10_000,
    ),
    Setting("partitions_max", "count", "Maximum number of partitions per topic.", least=1, most=100_000),
    # Limits per request, connection and process.
    Setting("request_bytes_max", "size", "Maximum size of an HTTP request body.", least=KB),
    Setting(
        "decompressed_bytes_max",
        "size",
        "Maximum size of a compressed request or batch from a client after decompression. Larger stored batches are "
        "still readable.",
        least=64 * KB,
    ),
    Setting(
        "read_bytes_max",
        "size",
        "Maximum size of a read response. A single larger message is still returned, as JSON up to "
        "`decompressed_bytes_max`.",
        least=KB,
    ),
    Setting("read_wait_max", "duration", "Maximum time a read may wait for new messages.", path="read_wait_ms_max"),
    Setting("connections_max", "count", "Maximum number of client connections per listener.", least=1),
    Setting(
        "stop_timeout",
        "duration",
        "How long a stopping broker waits for requests in progress before it closes their connections. Confirmed "
        "messages are safe either way.",
        path="stop_timeout_ms",
    ),
    Setting(
        "memory_limit",
        "size",
        "Memory limit of the process. Publishers are throttled above 60 % of it, paused above 90 % and resumed "
        "below 80 %. `auto` is 2 GB or 40 % of the memory of the machine or container, whichever is less.",
        words={"auto": 0},
    ),
    Setting(
        "disk_free_limit",
        "size",
        "Pause publishers while the disk of the data folder has less free space than this. They resume once free "
        "space exceeds the limit by a quarter.",
    ),
    Setting(
        "disk_reserve",
        "size",
        "Refuse appends while the disk has less free space than this, so that checkpoints still have room. "
        "Space that a start after a crash would need is kept free in any case.",
        path="log.disk_reserve",
    ),
    Setting(
        "open_files_max",
        "count",
        "Maximum number of segment files kept open. `auto` is a quarter of the process's limit on open files.",
        path="log.open_files_max",
        words={"auto": 0},
    ),
    # Background work.
    Setting(
        "retention_interval",
        "duration",
        "How often the broker looks for segments to delete or compact.",
        path="retention_interval_ms",
        least=100,
    ),
    Setting(
        "offset_checkpoint_interval",
        "duration",
        "How often acknowledgements and read positions are synced while nothing else is. A power failure can undo "
        "those of this interval, so that messages are delivered again; a crash of the broker cannot. 0 syncs them "
        "only on shutdown.",
        path="log.settle_sync_interval_ms",
    ),
    Setting(
        "checkpoint_interval",
        "duration",
        "How often a background checkpoint syncs the segments that the journal covers.",
        path="log.checkpoint_interval_ms",
        least=10,
    ),
    Setting(
        "checkpoint_bytes",
        "size",
        "Run a checkpoint earlier, once this much has been written since the last one.",
        path="log.checkpoint_bytes",
        least=64 * KB,
    ),
    # Journal and commit.
    Setting(
        "journal_file_size",
        "size",
        "Size of one journal file.",
        path="log.journal_file_bytes",
        least=64 * KB,
        most=SEGMENT_BYTES_MAX,
    ),
    Setting(
        "journal_files",
        "count",
        "Number of journal files. Publishers wait when all of them wait for a checkpoint.",
        path="log.journal_files",
        least=2,
        most=1024,
    ),
    Setting(
        "round_bytes_max",
        "size",
        "Maximum size of a round, the batch of appends that one sync makes durable. Further appends wait for the "
        "next round.",
        path="log.round_bytes_max",
        least=4 * KB,
    ),
    Setting(
        "inline_bytes_max",
        "size",
        "Appends larger than this go directly to their segment instead of through the journal. The limit is a "
        "quarter of this if the round contains nothing else.",
        path="log.inline_bytes_max",
    ),
    Setting(
        "index_cache_size",
        "size",
        "Memory for caching offset indexes.",
        path="log.index_cache_bytes",
    ),
    Setting(
        "recovery_batch_bytes_max",
        "size",
        "Recovery treats a batch that claims to be larger than this as damaged.",
        path="log.batch_bytes_max",
        least=KB,
    ),
    # Kafka and AMQP.
    Setting(
        "kafka_advertised",
        "address",
        "Address announced to Kafka clients, if it differs from the address of the listener (containers, NAT). "
        "`auto` announces the address that the client connected to.",
    ),
    Setting(
        "kafka_node_id",
        "count",
        "Broker id announced to Kafka clients. Change it for scripts that assign partitions to the id of a former "
        "Kafka broker, often 0.",
        most=2**31 - 1,
    ),
    Setting(
        "kafka_session_timeout_max",
        "duration",
        "Maximum session timeout that a Kafka group member may request.",
        path="kafka_session_timeout_ms_max",
        least=1000,
    ),
    Setting(
        "kafka_migration_policy",
        "choice",
        "Which Kafka groups may change their protocol while they have members, as in Kafka's "
        "`group.consumer.migration.policy`. `upgrade`: from classic to consumer; `downgrade`: from consumer to "
        "classic.",
        choices=("bidirectional", "upgrade", "downgrade", "disabled"),
    ),
    Setting(
        "amqp_product",
        "choice",
        "Product name announced to AMQP clients. `rabbitmq` is for clients that change their behaviour when they "
        "see that name.",
        choices=("headrace", "rabbitmq"),
    ),
    Setting(
        "amqp_heartbeat",
        "duration",
        "Heartbeat interval offered to AMQP clients. 0 disables heartbeats.",
        path="amqp_heartbeat_ms",
    ),
    Setting("amqp_channels_max", "count", "Maximum number of channels per AMQP connection.", least=1, most=65_535),
    Setting("amqp_frame_max", "size", "Maximum size of an AMQP frame.", least=4 * KB, most=16 * MB),
    Setting("amqp_bindings_max", "count", "Maximum number of bindings per virtual host.", least=1),
    Setting("amqp_consumers_max", "count", "Maximum number of AMQP consumers on all connections together.", least=1),
    # Per stream. The broker's value is the default for every stream.
    Setting(
        "segment_size",
        "size",
        "Size at which a segment is sealed. Retention and compaction work on sealed segments only.",
        path="stream.segment_size",
        least=KB,
        most=SEGMENT_BYTES_MAX,
        aliases=("segment_bytes",),
    ),
    Setting(
        "segment_age",
        "duration",
        "Age at which a segment is sealed, so that retention also works on topics with little traffic.",
        path="stream.segment_age_ms",
        least=1,
        aliases=("segment_ms", "segment_age_ms"),
    ),
    Setting(
        "index_interval",
        "size",
        "Bytes between two entries of a segment's offset index.",
        path="stream.index_interval",
        least=1,
        aliases=("index_interval_bytes",),
    ),
    Setting(
        "write_mode",
        "choice",
        "When a message is confirmed. `sync`: after a sync shared with everything else that arrived. "
        "`sync-immediate`: after a sync of its own. `async`: at once, and synced later.",
        path="stream.write_mode",
        choices=("sync", "sync-immediate", "async"),
    ),
    Setting(
        "flush_interval",
        "duration",
        "With `write_mode` async: maximum time until a confirmed message is synced. 0 disables this limit.",
        path="stream.flush_interval_ms",
        aliases=("flush_ms", "flush_interval_ms"),
    ),
    Setting(
        "flush_bytes",
        "size",
        "With `write_mode` async: sync after this much has been written. 0 disables this limit.",
        path="stream.flush_bytes",
    ),
    Setting(
        "retention_ms",
        "duration",
        "Delete messages older than this, one sealed segment at a time. `forever` keeps them.",
        path="stream.retention_ms",
        words=FOREVER,
    ),
    Setting(
        "retention_bytes",
        "size",
        "Delete the oldest segments of a partition while it is larger than this.",
        path="stream.retention_bytes",
        words=UNLIMITED,
    ),
    Setting(
        "cleanup_policy",
        "choice",
        "`delete` removes old segments. `compact` keeps the last message of every key. `compact,delete` does both, "
        "in either order.",
        path="stream.cleanup_policy",
        choices=("delete", "compact", "compact,delete", "delete,compact"),
    ),
    Setting(
        "compaction_lag",
        "duration",
        "Never compact away messages younger than this.",
        path="stream.compaction_lag_ms",
        aliases=("min_compaction_lag_ms", "compaction_lag_ms"),
    ),
    Setting(
        "compaction_lag_max",
        "duration",
        "Compact a log once it has an uncompacted message older than this, regardless of `compaction_dirty_percent`. "
        "A segment of this age is sealed by the next append.",
        path="stream.compaction_lag_max_ms",
        aliases=("max_compaction_lag_ms", "compaction_lag_max_ms"),
        words=FOREVER,
    ),
    Setting(
        "compaction_dirty_percent",
        "count",
        "Compact a log once this share of its sealed bytes is new since the last compaction. A lower value compacts "
        "sooner and rewrites more.",
        path="stream.compaction_dirty_percent",
        most=100,
    ),
    Setting(
        "tombstone_retention",
        "duration",
        "How long compaction keeps a tombstone (a null value), so that every reader can see that the key is gone. "
        "Counted from the first compaction that sees it, not from the message's timestamp.",
        path="stream.tombstone_retention_ms",
        aliases=("delete_retention_ms", "tombstone_retention_ms"),
    ),
    Setting(
        "compression",
        "choice",
        "Compression of the batches that the broker builds from HTTP and AMQP messages. Kafka batches are stored as "
        "sent, unless the topic itself has this setting.",
        path="stream.compression",
        choices=("none", "gzip", "snappy", "lz4", "zstd"),
        aliases=("compression_type",),
    ),
    Setting(
        "timestamp_type",
        "choice",
        "Timestamp of Kafka records. `create`: the producer's. `append`: the broker's, set when it stores the record.",
        path="stream.timestamp_type",
        choices=("create", "append"),
    ),
    Setting(
        "timestamp_before_max",
        "duration",
        "Refuse Kafka records whose timestamp is older than the broker's time by more than this. Not for "
        "`timestamp_type = append`.",
        path="stream.timestamp_before_max_ms",
        aliases=("message_timestamp_before_max_ms", "timestamp_before_max_ms"),
        words=FOREVER,
    ),
    Setting(
        "timestamp_after_max",
        "duration",
        "Refuse Kafka records whose timestamp is ahead of the broker's time by more than this: retention would keep "
        "them for too long. Not for `timestamp_type = append`.",
        path="stream.timestamp_after_max_ms",
        aliases=("message_timestamp_after_max_ms", "timestamp_after_max_ms"),
        words=FOREVER,
    ),
    Setting(
        "batch_bytes_max",
        "size",
        "Maximum size of a batch, and therefore of a message.",
        path="stream.batch_bytes_max",
        least=KB,
        most=64 * MB,
        aliases=("max_message_bytes",),
    ),
    Setting(
        "key_index",
        "bool",
        "Keep an index of keys, so that the last message of a key can be read (`GET /topics/TOPIC/keys/KEY`, "
        "`headrace topic get`). Needs `pip install 'headrace[keys]'`.",
        path="stream.key_index",
    ),
)

BY_NAME: dict[str, Setting] = {
    spelling: setting for setting in SETTINGS for spelling in (setting.name, *setting.aliases)
}
STREAM_SETTINGS: tuple[Setting, ...] = tuple(setting for setting in SETTINGS if setting.scope == "stream")

# Each profile trades one goal for another, see docs/configuration.md. Explicit settings override a profile.
PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "throughput": {  # fewer, larger writes; recovery after a kill takes longer
        "segment_size": "1GB",
        "index_interval": "16KB",
        "compression": "lz4",
        "round_bytes_max": "64MB",
        "journal_file_size": "256MB",
        "checkpoint_bytes": "1GB",
        "checkpoint_interval": "2m",
    },
    "latency": {  # small rounds, so that no message waits for the work of others
        "compression": "none",
        "round_bytes_max": "4MB",
        "checkpoint_bytes": "64MB",
        "checkpoint_interval": "10s",
    },
    "availability": {  # fast recovery after a crash, and early back-pressure before the disk is full
        "segment_size": "64MB",
        "checkpoint_bytes": "32MB",
        "checkpoint_interval": "5s",
        "offset_checkpoint_interval": "1s",
        "disk_free_limit": "1GB",
        "disk_reserve": "256MB",
    },
}
DURABILITIES: dict[str, dict[str, str]] = {
    "sync": {},
    "os": {"write_mode": "async", "flush_interval": "0", "flush_bytes": "0"},
}
