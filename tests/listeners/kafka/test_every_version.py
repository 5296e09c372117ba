"""Every API at every supported version, with empty and with filled requests: always a response, never a bug."""

import dataclasses
import logging
import typing
from typing import Any

import pytest

from headrace.wire.kafka.apis import VERSIONS, Api
from headrace.wire.kafka.schema import request_entity, shape_of
from tests.listeners.kafka.world import World, batch, make
from tests.wire.kafka.test_schema_codec import written

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOPIC = "t"

# Fields of a typical client; every version uses those that it has. Lists in lists: [{...}].
FILLED: dict[Api, dict[str, Any]] = {
    Api.LIST_OFFSETS: {"topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "timestamp": -2}]}]},
    Api.OFFSET_COMMIT: {
        "group_id": "g",
        "generation_id_or_member_epoch": -1,
        "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 3}]}],
    },
    Api.OFFSET_FETCH: {
        "group_id": "g",
        "topics": [{"name": TOPIC, "partition_indexes": [0]}],
        "groups": [{"group_id": "g", "topics": [{"name": TOPIC, "partition_indexes": [0]}]}],
    },
    Api.FIND_COORDINATOR: {"key": "g", "coordinator_keys": ["g"]},
    Api.JOIN_GROUP: {
        "group_id": "j",
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"m"}],
    },
    Api.SYNC_GROUP: {"group_id": "g", "assignments": [{"member_id": "m", "assignment": b"a"}]},
    Api.HEARTBEAT: {"group_id": "g"},
    Api.SASL_HANDSHAKE: {"mechanism": "PLAIN"},
    Api.LEAVE_GROUP: {"group_id": "g", "members": [{"member_id": "m"}]},
    Api.DESCRIBE_GROUPS: {"groups": ["g", "nobody"]},
    Api.DELETE_GROUPS: {"groups_names": ["nobody"]},
    Api.CREATE_TOPICS: {
        "topics": [
            {"name": "made", "num_partitions": 1, "replication_factor": 1},
            {"name": "bad name!", "num_partitions": 1, "replication_factor": 1},
        ]
    },
    Api.DELETE_TOPICS: {
        "topic_names": ["made", "nowhere"],
        "topics": [{"name": "made"}, {"name": "nowhere"}],
    },
    Api.DELETE_RECORDS: {"topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "offset": 1}]}]},
    Api.INIT_PRODUCER_ID: {"transactional_id": "x", "transaction_timeout": 1000},
    Api.OFFSET_FOR_LEADER_EPOCH: {"topics": [{"topic": TOPIC, "partitions": [{"partition": 0}]}]},
    Api.ADD_PARTITIONS_TO_TXN: {
        "v3_and_below_transactional_id": "x",
        "v3_and_below_topics": [{"name": TOPIC, "partitions": [0, 9]}],
    },
    Api.ADD_OFFSETS_TO_TXN: {"transactional_id": "x", "group_id": "g"},
    Api.END_TXN: {"transactional_id": "nobody"},
    Api.TXN_OFFSET_COMMIT: {
        "transactional_id": "x",
        "group_id": "g",
        "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "committed_offset": 3}]}],
    },
    Api.DESCRIBE_CONFIGS: {
        "resources": [
            {"resource_type": 2, "resource_name": TOPIC, "configuration_keys": None},
            {"resource_type": 4, "resource_name": "1", "configuration_keys": None},
            {"resource_type": 2, "resource_name": "nowhere"},
        ]
    },
    Api.ALTER_CONFIGS: {
        "resources": [
            {
                "resource_type": 2,
                "resource_name": TOPIC,
                "configs": [{"name": "retention.ms", "value": "1000000"}],
            }
        ]
    },
    Api.INCREMENTAL_ALTER_CONFIGS: {
        "resources": [{"resource_type": 2, "resource_name": TOPIC, "configs": [{"name": "nonsense", "value": "1"}]}]
    },
    Api.CREATE_PARTITIONS: {"topics": [{"name": TOPIC, "count": 1}]},
    Api.DESCRIBE_LOG_DIRS: {"topics": None},
    Api.ALTER_REPLICA_LOG_DIRS: {"dirs": [{"path": "/x", "topics": [{"name": TOPIC, "partitions": [0]}]}]},
    Api.ELECT_LEADERS: {"topic_partitions": [{"topic": TOPIC, "partitions": [0, 7]}]},
    Api.ALTER_PARTITION_REASSIGNMENTS: {
        "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0, "replicas": [2]}]}]
    },
    Api.OFFSET_DELETE: {"group_id": "g", "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]},
    Api.DESCRIBE_QUORUM: {"topics": [{"topic_name": TOPIC, "partitions": [{"partition_index": 0}]}]},
    Api.UPDATE_FEATURES: {"feature_updates": [{"feature": "transaction.version", "max_version_level": 2}]},
    Api.DESCRIBE_PRODUCERS: {"topics": [{"name": TOPIC, "partition_indexes": [0, 7]}]},
    Api.DESCRIBE_TRANSACTIONS: {"transactional_ids": ["x", "nobody"]},
    Api.CONSUMER_GROUP_HEARTBEAT: {
        "group_id": "c",
        "member_id": "m",
        "member_epoch": 0,
        "rebalance_timeout": 1000,
        "subscribed_topic_names": [TOPIC],
        "topic_partitions": [],
    },
    Api.CONSUMER_GROUP_DESCRIBE: {"group_ids": ["c", "g", "nobody"]},
    Api.SHARE_GROUP_HEARTBEAT: {
        "group_id": "s",
        "member_id": "m",
        "member_epoch": 0,
        "subscribed_topic_names": [TOPIC],
    },
    Api.SHARE_GROUP_DESCRIBE: {"group_ids": ["s", "nobody"]},
    Api.SHARE_FETCH: {"group_id": "s", "member_id": "m", "max_records": 10, "max_bytes": 1000},
    Api.SHARE_ACKNOWLEDGE: {"group_id": "s", "member_id": "m"},
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: {"groups": [{"group_id": "s", "topics": None}, {"group_id": "nobody"}]},
    Api.ALTER_SHARE_GROUP_OFFSETS: {
        "group_id": "s",
        "topics": [{"topic_name": TOPIC, "partitions": [{"partition_index": 0, "start_offset": 1}]}],
    },
    Api.DELETE_SHARE_GROUP_OFFSETS: {"group_id": "s", "topics": [{"topic_name": TOPIC}]},
    Api.DESCRIBE_TOPIC_PARTITIONS: {"topics": [{"name": TOPIC}, {"name": "nowhere"}]},
    Api.METADATA: {"topics": [{"name": TOPIC}, {"name": "made by asking"}, {"name": "auto"}]},
    Api.FETCH: {
        "topics": [{"topic": TOPIC, "partitions": [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 99}]}]
    },
    Api.PRODUCE: {
        "acks": -1,
        "topic_data": [{"name": TOPIC, "partition_data": [{"index": 0, "records": None}]}],
    },
}


async def prepare(world: World) -> None:
    await world.topic(TOPIC)


def only_known(schema: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that this version has, recursively."""
    hints = typing.get_type_hints(schema)
    known = {}
    for field in dataclasses.fields(schema):
        if field.name not in fields:
            continue
        shape = shape_of(field, hints[field.name])
        value = fields[field.name]
        if shape.nested is not None and shape.array and value is not None:
            value = [only_known(shape.nested, one) for one in value]
        if value is None and not shape.nullable:
            continue
        known[field.name] = value
    return known


@pytest.mark.parametrize("api", list(VERSIONS), ids=lambda api: api.name)
async def test_every_version_is_answered(world: World, api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    client = await world.client()
    await client.produce(TOPIC, batch(b"a", b"b", b"c"))
    versions = VERSIONS[api]
    for version in range(3 if api is Api.PRODUCE else versions.lowest, versions.highest + 1):
        schema = request_entity(api, version)
        filled = only_known(schema, FILLED.get(api, {}))
        if api is Api.JOIN_GROUP:
            filled["group_id"] = f"j{version}"  # a group of its own: no other member to wait for
        for fields in ({}, filled):
            if api in (Api.SASL_HANDSHAKE, Api.SASL_AUTHENTICATE):
                client = await world.client()  # requests after a failed login are ignored
            body = written(make(schema, fields))
            client.send(api, version, body)
            if api is Api.PRODUCE and not fields:
                continue  # acks=0 has no response
            assert await client.receive(), (api, version, fields)
    assert caplog.records == []
