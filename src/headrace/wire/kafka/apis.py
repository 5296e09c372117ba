"""The supported APIs, their versions, and the version from which each is flexible (compact and tagged)."""

from enum import IntEnum
from typing import NamedTuple


class Api(IntEnum):
    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DESCRIBE_DELEGATION_TOKEN = 41
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_QUORUM = 55
    UPDATE_FEATURES = 57
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    UNREGISTER_BROKER = 64
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    GET_TELEMETRY_SUBSCRIPTIONS = 71
    PUSH_TELEMETRY = 72
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92


class Versions(NamedTuple):
    lowest: int
    highest: int
    flexible_from: int  # of request and response; 99 = never


NEVER = 99

# Produce is offered from version 0, as in Kafka 4: librdkafka before 2.9 switches compression off otherwise.
# Produce 13 and ListOffsets 11 are implemented but not offered: kafka-python infers the broker's version from them, and
# would then expect other APIs of that version.
VERSIONS: dict[Api, Versions] = {
    Api.PRODUCE: Versions(0, 12, 9),
    Api.FETCH: Versions(4, 18, 12),
    Api.LIST_OFFSETS: Versions(0, 10, 6),
    Api.METADATA: Versions(0, 13, 9),
    Api.OFFSET_COMMIT: Versions(1, 10, 8),
    Api.OFFSET_FETCH: Versions(1, 10, 6),
    Api.FIND_COORDINATOR: Versions(0, 6, 3),
    Api.JOIN_GROUP: Versions(0, 9, 6),
    Api.HEARTBEAT: Versions(0, 4, 4),
    Api.LEAVE_GROUP: Versions(0, 5, 4),
    Api.SYNC_GROUP: Versions(0, 5, 4),
    Api.DESCRIBE_GROUPS: Versions(0, 6, 5),
    Api.LIST_GROUPS: Versions(0, 5, 3),
    Api.SASL_HANDSHAKE: Versions(0, 1, NEVER),
    Api.API_VERSIONS: Versions(0, 4, 3),
    Api.CREATE_TOPICS: Versions(0, 7, 5),
    Api.DELETE_TOPICS: Versions(0, 6, 4),
    Api.DELETE_RECORDS: Versions(0, 2, 2),
    Api.INIT_PRODUCER_ID: Versions(0, 5, 2),
    Api.OFFSET_FOR_LEADER_EPOCH: Versions(2, 4, 4),
    Api.ADD_PARTITIONS_TO_TXN: Versions(0, 3, 3),
    Api.ADD_OFFSETS_TO_TXN: Versions(0, 4, 3),
    Api.END_TXN: Versions(0, 5, 3),
    Api.TXN_OFFSET_COMMIT: Versions(0, 5, 3),
    Api.DESCRIBE_ACLS: Versions(1, 3, 2),
    Api.CREATE_ACLS: Versions(1, 3, 2),
    Api.DELETE_ACLS: Versions(1, 3, 2),
    Api.DESCRIBE_CONFIGS: Versions(0, 4, 4),
    Api.ALTER_CONFIGS: Versions(0, 2, 2),
    Api.ALTER_REPLICA_LOG_DIRS: Versions(1, 2, 2),
    Api.DESCRIBE_LOG_DIRS: Versions(1, 4, 2),
    Api.SASL_AUTHENTICATE: Versions(0, 2, 2),
    Api.CREATE_PARTITIONS: Versions(0, 3, 2),
    Api.DESCRIBE_DELEGATION_TOKEN: Versions(1, 3, 2),
    Api.DELETE_GROUPS: Versions(0, 2, 2),
    Api.ELECT_LEADERS: Versions(0, 2, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: Versions(0, 1, 1),
    Api.ALTER_PARTITION_REASSIGNMENTS: Versions(0, 1, 0),
    Api.LIST_PARTITION_REASSIGNMENTS: Versions(0, 0, 0),
    Api.OFFSET_DELETE: Versions(0, 0, NEVER),
    Api.DESCRIBE_CLIENT_QUOTAS: Versions(0, 1, 1),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: Versions(0, 0, 0),
    Api.ALTER_USER_SCRAM_CREDENTIALS: Versions(0, 0, 0),
    Api.DESCRIBE_QUORUM: Versions(0, 2, 0),
    Api.UPDATE_FEATURES: Versions(0, 2, 0),
    Api.DESCRIBE_CLUSTER: Versions(0, 2, 0),
    Api.DESCRIBE_PRODUCERS: Versions(0, 0, 0),
    Api.UNREGISTER_BROKER: Versions(0, 0, 0),
    Api.DESCRIBE_TRANSACTIONS: Versions(0, 0, 0),
    Api.LIST_TRANSACTIONS: Versions(0, 2, 0),
    Api.CONSUMER_GROUP_HEARTBEAT: Versions(0, 1, 0),
    Api.CONSUMER_GROUP_DESCRIBE: Versions(0, 1, 0),
    Api.GET_TELEMETRY_SUBSCRIPTIONS: Versions(0, 0, 0),
    Api.PUSH_TELEMETRY: Versions(0, 0, 0),
    Api.LIST_CONFIG_RESOURCES: Versions(0, 1, 0),
    Api.DESCRIBE_TOPIC_PARTITIONS: Versions(0, 0, 0),
    Api.SHARE_GROUP_HEARTBEAT: Versions(1, 1, 0),
    Api.SHARE_GROUP_DESCRIBE: Versions(1, 1, 0),
    Api.SHARE_FETCH: Versions(1, 2, 0),
    Api.SHARE_ACKNOWLEDGE: Versions(1, 2, 0),
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: Versions(0, 1, 0),
    Api.ALTER_SHARE_GROUP_OFFSETS: Versions(0, 0, 0),
    Api.DELETE_SHARE_GROUP_OFFSETS: Versions(0, 0, 0),
}


def is_flexible(api: Api, version: int) -> bool:
    return version >= VERSIONS[api].flexible_from


def has_header_tags(api: Api, version: int) -> bool:
    """Whether the response header has tags. ApiVersions never has: the client may not know the version yet."""
    return api is not Api.API_VERSIONS and is_flexible(api, version)
