"""What settings mean, for clients that ask for it beside their values (KIP-569)."""

from headrace.config import SETTINGS

HELP = {setting.name: setting.help for setting in SETTINGS}
NO_EFFECT = "Taken and without effect: one node that syncs before it confirms has no use for it."
NO_TIERS = "Can only be false: there is no remote storage here."
AS_IT_CHANGES = "Taken and without effect: an assignment is made when something changes."

# Where our own text has our own words; the others are those of the settings that they are here, see configs.py.
TOPIC = {
    "max.compaction.lag.ms": "A message that is older than this, and was not looked at by compaction yet, has the log "
    "compacted, whatever `min.cleanable.dirty.ratio` says.",
    "message.timestamp.type": "Whose time a record carries: `CreateTime` is its producer's, `LogAppendTime` is the "
    "broker's when it is stored.",
    "retention.ms": "Messages older than this are removed, a sealed segment at a time; -1 keeps them.",
}
BROKER = {
    "advertised.listeners": HELP["kafka_advertised"],
    "auto.create.topics.enable": HELP["auto_create_topics"],
    "broker.id": HELP["kafka_node_id"],
    "compression.type": HELP["compression"],
    "default.replication.factor": "There is one node.",
    "group.consumer.migration.policy": HELP["kafka_migration_policy"],
    "listeners": HELP["kafka"],
    "log.cleanup.policy": HELP["cleanup_policy"],
    "log.dirs": HELP["data_dir"],
    "log.retention.bytes": HELP["retention_bytes"],
    "log.retention.ms": HELP["retention_ms"],
    "log.segment.bytes": HELP["segment_size"],
    "message.max.bytes": HELP["batch_bytes_max"],
    "min.insync.replicas": "There is one node.",
    "node.id": HELP["kafka_node_id"],
    "num.partitions": HELP["auto_create_partitions"],
    "offsets.retention.minutes": "The offsets of a group that has no members are forgotten after this time.",
    "transactional.id.expiration.ms": "A transactional id that nobody uses is forgotten after this time.",
}
GROUP = {
    "consumer.assignment.interval.ms": AS_IT_CHANGES,
    "consumer.assignor.offload.enable": AS_IT_CHANGES,
    "consumer.heartbeat.interval.ms": "How often members of the new consumer protocol say that they are there.",
    "consumer.session.timeout.ms": "A member of the new consumer protocol that is not heard of for so long is gone.",
    "share.assignment.interval.ms": AS_IT_CHANGES,
    "share.assignor.offload.enable": AS_IT_CHANGES,
    "share.auto.offset.reset": "Where a share group begins on a partition that it has not read yet: `earliest`, "
    "`latest`, or `by_duration:` and how long ago, as ISO 8601 writes it.",
    "share.delivery.count.limit": "How often a record is handed out before the share group gives it up.",
    "share.heartbeat.interval.ms": "How often members of a share group say that they are there.",
    "share.isolation.level": "Whether a share group waits for the end of transactions and leaves out those that were "
    "aborted (`read_committed`).",
    "share.partition.max.record.locks": "How many records of a partition are out at once.",
    "share.record.lock.duration.ms": "A record that is not acknowledged for so long is handed out again.",
    "share.renew.acknowledge.enable": "Whether a member may renew the locks it has.",
    "share.session.timeout.ms": "A member of a share group that is not heard of for so long is gone.",
}
