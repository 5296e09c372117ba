"""Every setting, declared once: flags, environment, headrace.toml, docs and `status` are derived from here.

The structs (model.py, log/settings.py) give a setting its type and default; SETTINGS says how people write it
and what it means. To add one: a field there, a line here; tests fail until both exist and the docs are made.
"""

from headrace.config.setting import Setting
from headrace.log.settings import GB, KB, MB

UNLIMITED = {"unlimited": -1}
FOREVER = {"forever": -1}
SEGMENT_MOST = 2 * GB - 1  # positions in a segment's index are 32 bits wide

SETTINGS: tuple[Setting, ...] = (
    # Where things are.
    Setting(
        "data_dir",
        "path",
        "Folder that holds everything the broker keeps. Made when missing; locked against a second broker.",
        aliases=("storage_path",),
    ),
    Setting(
        "tier_dir",
        "path",
        "Folder for segments archived as Parquet (`headrace log tier`); `auto` is `tier` in the data folder. "
        "What is archived already stays where it is.",
        path="log.tier_dir",
    ),
    Setting(
        "http",
        "address",
        "Where the HTTP listener listens, `HOST:PORT`; `off` closes it, port 0 takes a free one.",
        unset="off",
    ),
    Setting("amqp", "address", "Where the AMQP 0-9-1 listener listens, `HOST:PORT`; `off` closes it.", unset="off"),
    Setting("kafka", "address", "Where the Kafka listener listens, `HOST:PORT`; `off` closes it.", unset="off"),
    # Who may listen in.
    Setting(
        "tls_cert",
        "file",
        "Certificate of this broker, PEM, with the chain up to its CA: the listeners then speak TLS on their "
        "ports, and "
        "nothing else. Read again when it changes.",
        unset="off",
    ),
    Setting("tls_key", "file", "The certificate's key, PEM, without a password; `auto`: it is in `tls_cert`, too."),
    Setting(
        "tls_client_ca",
        "file",
        "CA, PEM: clients must show a certificate of it, besides whatever user and password are asked for.",
        unset="off",
    ),
    Setting(
        "tls_listeners",
        "names",
        "Which listeners use TLS, separated by commas.",
        choices=("amqp", "kafka", "http"),
        aliases=("tls_doors",),
    ),
    # What is promised.
    Setting(
        "durability",
        "choice",
        "`sync`: a confirm means the message is on stable storage. `os`: a confirm means the operating "
        "system has it; a power cut can then lose confirmed messages (a killed broker cannot).",
        choices=("sync", "os"),
    ),
    Setting(
        "standby_confirms",
        "count",
        "So many standbys must have a change on their disks, too, before anybody is told of it. Without that many, "
        "publishers wait. 0: standbys follow, and nobody waits for them.",
        most=10,
    ),
    Setting(
        "profile",
        "choice",
        "A documented bundle of settings. Whatever is set explicitly wins over the bundle.",
        choices=("none", "throughput", "latency", "availability"),
    ),
    # What it says.
    Setting(
        "log_level",
        "choice",
        "How much the broker says on stderr.",
        choices=("debug", "info", "warning", "error"),
    ),
    Setting("log_format", "choice", "Lines for people or one JSON object per line.", choices=("text", "json")),
    # Topics that make themselves.
    Setting("auto_create_topics", "bool", "Publishing to a topic that does not exist creates it."),
    Setting(
        "auto_create_partitions",
        "count",
        "Partitions of a topic created by publishing to it.",
        least=1,
        most=10_000,
    ),
    Setting("partitions_max", "count", "Most partitions one topic may have.", least=1, most=100_000),
    # Limits of one request, one connection, one process.
    Setting("request_bytes_max", "size", "Largest body of one HTTP request.", least=KB),
    Setting(
        "decompressed_bytes_max",
        "size",
        "Most that one compressed request or batch may unfold to.",
        least=64 * KB,
    ),
    Setting(
        "read_bytes_max",
        "size",
        "Most that one read answers with; a larger single message still comes.",
        least=KB,
    ),
    Setting("read_wait_max", "duration", "Longest that a read may wait for new messages.", path="read_wait_ms_max"),
    Setting("connections_max", "count", "Most client connections per listener.", least=1),
    Setting(
        "stop_timeout",
        "duration",
        "How long a stopping broker lets work in flight end before it closes connections. Nothing "
        "confirmed is lost either way.",
        path="stop_timeout_ms",
    ),
    Setting(
        "memory_limit",
        "size",
        "Memory of the process. Publishers are slowed from 60 % of it on, paused over 90 %, and go on below 80 %; "
        "`auto` is 2 GB or 40 % of the machine or container, whichever is less.",
        words={"auto": 0},
    ),
    Setting(
        "disk_free_limit",
        "size",
        "Free space on the data folder's disk below which publishers are paused; they go on with a quarter more.",
    ),
    Setting(
        "disk_reserve",
        "size",
        "Free space below which appends are refused outright, so that checkpoints still have room.",
        path="log.disk_reserve",
    ),
    Setting(
        "open_files_max",
        "count",
        "Most segment files held open; `auto` is a quarter of the process's limit.",
        path="log.open_files_max",
        words={"auto": 0},
    ),
    # Housekeeping.
    Setting(
        "retention_interval",
        "duration",
        "How often retention and compaction look for work.",
        path="retention_interval_ms",
        least=100,
    ),
    Setting(
        "offset_checkpoint_interval",
        "duration",
        "Acknowledgements and read positions alone are synced at most this often: a power cut may repeat "
        "that much, a killed broker repeats nothing. 0 syncs them only on stop.",
        path="log.settle_sync_interval_ms",
    ),
    Setting(
        "checkpoint_interval",
        "duration",
        "How often the journal's work is synced to the segments in the background.",
        path="log.checkpoint_interval_ms",
        least=10,
    ),
    Setting(
        "checkpoint_bytes",
        "size",
        "Or after this much was written.",
        path="log.checkpoint_bytes",
        least=64 * KB,
    ),
    # The journal.
    Setting(
        "journal_file_size",
        "size",
        "Size of one journal file.",
        path="log.journal_file_bytes",
        least=64 * KB,
        most=SEGMENT_MOST,
    ),
    Setting(
        "journal_files",
        "count",
        "Journal files in the ring; when all wait for a checkpoint, publishers wait too.",
        path="log.journal_files",
        least=2,
        most=1024,
    ),
    Setting(
        "round_bytes_max",
        "size",
        "Most that one sync covers; what does not fit waits for the next.",
        path="log.round_bytes_max",
        least=4 * KB,
    ),
    Setting(
        "inline_bytes_max",
        "size",
        "A larger piece of a round goes straight to its segment instead of through the journal; a quarter of it, if "
        "nothing else is in the round.",
        path="log.inline_bytes_max",
    ),
    Setting(
        "index_cache_size",
        "size",
        "Memory for pieces of the offset indexes in use.",
        path="log.index_cache_bytes",
    ),
    Setting(
        "recovery_batch_bytes_max",
        "size",
        "Recovery takes a batch that claims to be larger than this for damage.",
        path="log.batch_bytes_max",
        least=KB,
    ),
    # Listeners to come read these.
    Setting(
        "kafka_advertised",
        "address",
        "Address told to Kafka clients, when it differs from where the listener listens (containers, NAT); "
        "`auto` is the address they connected to.",
    ),
    Setting(
        "kafka_node_id",
        "count",
        "The number Kafka clients know this broker by: for scripts that place partitions on the broker of a Kafka that "
        "had another, often 0.",
        most=2**31 - 1,
    ),
    Setting(
        "kafka_session_timeout_max",
        "duration",
        "Longest session timeout a Kafka group member may ask for.",
        path="kafka_session_timeout_ms_max",
        least=1000,
    ),
    Setting(
        "kafka_migration_policy",
        "choice",
        "Which live Kafka groups change their protocol, as Kafka's `group.consumer.migration.policy`: `upgrade` is "
        "from the classic one to the new one, `downgrade` is back.",
        choices=("bidirectional", "upgrade", "downgrade", "disabled"),
    ),
    Setting(
        "amqp_product",
        "choice",
        "Product announced to AMQP clients; `rabbitmq` for clients that behave differently when they know the name.",
        choices=("headrace", "rabbitmq"),
    ),
    Setting(
        "amqp_heartbeat",
        "duration",
        "Heartbeat offered to AMQP clients; 0 is none.",
        path="amqp_heartbeat_ms",
    ),
    Setting("amqp_channels_max", "count", "Most channels per AMQP connection.", least=1, most=65_535),
    Setting("amqp_frame_max", "size", "Largest AMQP frame.", least=4 * KB, most=16 * MB),
    Setting("amqp_bindings_max", "count", "Most bindings of one virtual host.", least=1),
    Setting("amqp_consumers_max", "count", "Most AMQP consumers, of all connections together.", least=1),
    # Per stream; the broker's value is the default of every stream.
    Setting(
        "segment_size",
        "size",
        "A segment file is sealed at this size. Retention and compaction work on sealed segments.",
        path="stream.segment_size",
        least=KB,
        most=SEGMENT_MOST,
        aliases=("segment_bytes",),
    ),
    Setting(
        "segment_age",
        "duration",
        "A segment file is sealed at this age, too, so that retention also works on a quiet topic.",
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
        "`sync`: confirmed after a sync shared with everything else that arrived. `sync-immediate`: a "
        "sync of its own. `async`: confirmed and visible at once, synced later.",
        path="stream.write_mode",
        choices=("sync", "sync-immediate", "async"),
    ),
    Setting(
        "flush_interval",
        "duration",
        "With `write_mode` async: the longest until what was confirmed is synced; 0 is never.",
        path="stream.flush_interval_ms",
        aliases=("flush_ms", "flush_interval_ms"),
    ),
    Setting(
        "flush_bytes",
        "size",
        "With `write_mode` async: or after this much; 0 is never.",
        path="stream.flush_bytes",
    ),
    Setting(
        "retention_ms",
        "duration",
        "Messages older than this are removed, a sealed segment at a time; `forever` keeps them.",
        path="stream.retention_ms",
        words=FOREVER,
    ),
    Setting(
        "retention_bytes",
        "size",
        "The oldest segments of a partition are removed when it is larger than this.",
        path="stream.retention_bytes",
        words=UNLIMITED,
    ),
    Setting(
        "cleanup_policy",
        "choice",
        "`delete` removes old segments; `compact` keeps the last message of every key; `compact,delete` does both, "
        "in either order.",
        path="stream.cleanup_policy",
        choices=("delete", "compact", "compact,delete", "delete,compact"),
    ),
    Setting(
        "compaction_lag",
        "duration",
        "Messages younger than this are never compacted away.",
        path="stream.compaction_lag_ms",
        aliases=("min_compaction_lag_ms", "compaction_lag_ms"),
    ),
    Setting(
        "compaction_lag_max",
        "duration",
        "A message that is older than this, and was not looked at by compaction yet, has the log compacted, whatever "
        "`compaction_dirty_percent` says; a segment is closed by the first message that comes when it is so old.",
        path="stream.compaction_lag_max_ms",
        aliases=("max_compaction_lag_ms", "compaction_lag_max_ms"),
        words=FOREVER,
    ),
    Setting(
        "compaction_dirty_percent",
        "count",
        "Compaction begins when at least this much of the sealed bytes is new since the last one. Less is sooner, and "
        "more rewriting.",
        path="stream.compaction_dirty_percent",
        most=100,
    ),
    Setting(
        "tombstone_retention",
        "duration",
        "How long compaction keeps a null value, so that every reader can see that the key is gone: from the first "
        "compaction that passes it on, whatever the time of the message.",
        path="stream.tombstone_retention_ms",
        aliases=("delete_retention_ms", "tombstone_retention_ms"),
    ),
    Setting(
        "compression",
        "choice",
        "Compression of the batches the broker builds itself, from HTTP and AMQP. Kafka batches stay as sent, "
        "unless the topic itself sets this.",
        path="stream.compression",
        choices=("none", "gzip", "snappy", "lz4", "zstd"),
        aliases=("compression_type",),
    ),
    Setting(
        "timestamp_type",
        "choice",
        "Whose time a Kafka record carries: `create` is its producer's, `append` is the broker's when it is stored.",
        path="stream.timestamp_type",
        choices=("create", "append"),
    ),
    Setting(
        "batch_bytes_max",
        "size",
        "Largest batch taken, and so the largest message.",
        path="stream.batch_bytes_max",
        least=KB,
        most=64 * MB,
        aliases=("max_message_bytes",),
    ),
    Setting(
        "key_index",
        "bool",
        "Keep an index of keys beside the log, so that the last message of a key can be asked for "
        "(`GET /topics/TOPIC/keys/KEY`, `headrace topic get`). Needs `pip install 'headrace[keys]'`.",
        path="stream.key_index",
    ),
)

BY_NAME: dict[str, Setting] = {
    spelling: setting for setting in SETTINGS for spelling in (setting.name, *setting.aliases)
}
STREAM_SETTINGS: tuple[Setting, ...] = tuple(setting for setting in SETTINGS if setting.scope == "stream")

# Each bundle trades something; docs/configuration.md says what. Explicit settings win.
PROFILES: dict[str, dict[str, str]] = {
    "none": {},
    "throughput": {  # fewer, larger pieces of work; recovery after a kill takes longer
        "segment_size": "1GB",
        "index_interval": "16KB",
        "compression": "lz4",
        "round_bytes_max": "64MB",
        "journal_file_size": "256MB",
        "checkpoint_bytes": "1GB",
        "checkpoint_interval": "2m",
    },
    "latency": {  # small rounds, nothing that makes one message wait for another's work
        "compression": "none",
        "round_bytes_max": "4MB",
        "checkpoint_bytes": "64MB",
        "checkpoint_interval": "10s",
    },
    "availability": {  # back soon after a crash, and early warning before the disk is full
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
