"""Documentation of configs, for clients that ask for it in DescribeConfigs (KIP-569)."""

from headrace.config import SETTINGS

HELP = {setting.name: setting.help for setting in SETTINGS}
NO_EFFECT = (
    "Stored and returned as set, but has no effect: this broker has no replicas, syncs before it confirms and keeps "
    "records in its data folder."
)
AS_IT_CHANGES = (
    "Stored and returned as set, but has no effect: assignments are computed whenever members or topics change."
)

# Texts where Kafka's terms differ from those of the broker's setting; all others use the setting's help text.
TOPIC = {
    "max.compaction.lag.ms": "The log is compacted, regardless of `min.cleanable.dirty.ratio`, when a message that was "
    "not compacted yet is older than this.",
    "message.timestamp.type": "The timestamp of records: `CreateTime` is set by the producer, `LogAppendTime` by the "
    "broker when it appends the record.",
    "retention.ms": "Messages older than this are deleted, one sealed segment at a time; -1 keeps them forever.",
}
BROKER = {
    "advertised.listeners": HELP["kafka_advertised"],
    "auto.create.topics.enable": HELP["auto_create_topics"],
    "broker.id": HELP["kafka_node_id"],
    "compression.type": HELP["compression"],
    "default.replication.factor": "Always 1: there is one broker.",
    "group.consumer.migration.policy": HELP["kafka_migration_policy"],
    "listeners": HELP["kafka"],
    "log.dirs": HELP["data_dir"],
    "min.insync.replicas": "Always 1: there is one broker.",
    "node.id": HELP["kafka_node_id"],
    "num.partitions": HELP["auto_create_partitions"],
    "offsets.retention.minutes": "Committed offsets of a group without members are deleted after this time.",
    "transactional.id.expiration.ms": "A transactional id that is not used for this time is deleted.",
}
GROUP = {
    "consumer.assignment.interval.ms": AS_IT_CHANGES,
    "consumer.assignor.offload.enable": AS_IT_CHANGES,
    "consumer.heartbeat.interval.ms": "The heartbeat interval of members of a consumer group.",
    "consumer.session.timeout.ms": "A member of a consumer group that sends no heartbeat for this time is removed.",
    "share.assignment.interval.ms": AS_IT_CHANGES,
    "share.assignor.offload.enable": AS_IT_CHANGES,
    "share.auto.offset.reset": "Where a share group starts in a partition that it has not read yet: `earliest`, "
    "`latest`, or `by_duration:` with an ISO 8601 duration.",
    "share.delivery.count.limit": "The number of delivery attempts before a record is archived.",
    "share.heartbeat.interval.ms": "The heartbeat interval of members of a share group.",
    "share.isolation.level": "With `read_committed`, a share group waits for the end of transactions and skips records "
    "of aborted ones.",
    "share.partition.max.record.locks": "The number of records of a partition that can be acquired at the same time.",
    "share.record.lock.duration.ms": "A record that is not acknowledged within this time is delivered again.",
    "share.renew.acknowledge.enable": "Whether a member may renew its acquisition locks.",
    "share.session.timeout.ms": "A member of a share group that sends no heartbeat for this time is removed.",
}
