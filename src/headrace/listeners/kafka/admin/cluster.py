"""The APIs about the cluster, which has one broker: versions, features, log dirs, leaders, telemetry, ACLs."""

import uuid
from typing import Any

from headrace.broker.streams.streams import Stream
from headrace.errors import HeadraceError
from headrace.listeners.kafka.admin.config_types import BROKER, GROUP, TOPIC
from headrace.listeners.kafka.auth.access import operations_on_cluster
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka.apis import VERSIONS, Api
from headrace.wire.kafka.codec import encode
from headrace.wire.kafka.schema import response_struct

BROKERS = 1
PREFERRED, UNCLEAN = 0, 1  # types of leader election
TELEMETRY_INTERVAL_MS = 300_000
# Features (KIP-584) with their lowest supported and their finalized level, which is that of Kafka 4.3. Not offered are
# those that the broker does not have: streams.version (KIP-1071), eligible.leader.replicas.version, kraft.version.
FEATURES = {
    "group.version": (0, 1),  # KIP-848
    "metadata.version": (7, 30),  # 4.3-IV0
    "share.version": (0, 1),  # KIP-932
    "transaction.version": (0, 2),  # KIP-890
}
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3  # types of feature updates
NO_SECURITY = "Headrace has no ACLs: grant permissions with `headrace user grant`"


def api_versions(context: KafkaContext, request: Request) -> None:
    """An unknown version is answered in version 0, with an error and the supported versions."""
    known = request.version <= VERSIONS[Api.API_VERSIONS].highest
    version = request.version if known else 0
    values: dict[str, Any] = {
        "error_code": Code.NONE if known else Code.UNSUPPORTED_VERSION,
        "api_keys": [
            {"api_key": api, "min_version": one.lowest, "max_version": one.highest}
            for api, one in sorted(VERSIONS.items())
        ],
    }
    if version >= 3:
        values["finalized_features_epoch"] = 0
        values["finalized_features"] = [
            {"name": name, "min_version_level": level, "max_version_level": level}
            for name, (_, level) in FEATURES.items()
        ]
        values["supported_features"] = [
            {"name": name, "min_version": lowest, "max_version": level}
            for name, (lowest, level) in FEATURES.items()
            if lowest or version >= 4  # as in Kafka: older Java clients fail on a feature whose minimum is 0
        ]
    request.answer([encode(response_struct(Api.API_VERSIONS, version), values, request.correlation_id, False)])


async def update_features(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """All updates or none, as in Kafka. No level can change: an update may only repeat the present level."""
    for one in fields.feature_updates:
        reason = refusal_of(one.feature, one.max_version_level, change_of(one, request.version))
        if reason is not None:
            wrong = f"Invalid update version {one.max_version_level} for feature {one.feature}. {reason}"
            return {"error_code": Code.INVALID_UPDATE_VERSION, "error_message": wrong}
    if request.version >= 2:  # one result for all updates
        return {}
    names = dict.fromkeys(one.feature for one in fields.feature_updates)
    return {"results": [{"feature": name} for name in names]}


def change_of(one: Any, version: int) -> int:
    if version == 0:
        return SAFE_DOWNGRADE if one.allow_downgrade else UPGRADE
    kind: int = one.upgrade_type
    return kind


def refusal_of(feature: str, level: int, change: int) -> str | None:
    lowest, have = FEATURES.get(feature, (None, 0))
    if change not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        return f"The upgrade type {change} is unknown."
    if lowest is None:
        return "The feature is not supported."
    if level < 0:
        return "The level must not be negative."
    if level > have:
        return f"The highest supported level is {have}."
    if level < have and change == UPGRADE:
        return f"The present level is {have}: an upgrade cannot lower it."
    if level < have:
        return f"The level is fixed at {have}: clients that do not know the feature are served without it."
    return None


async def describe_cluster(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    host, port = context.address_of(request)
    return {
        "cluster_id": context.cluster_id,
        "controller_id": context.node_id,
        "endpoint_type": fields.endpoint_type or BROKERS,
        "brokers": [{"broker_id": context.node_id, "host": host, "port": port}],
        "cluster_authorized_operations": operations_on_cluster(
            context.access_of(request), asked=fields.include_cluster_authorized_operations
        ),
    }


async def unregister_broker(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """Kafka removes a broker from the cluster's metadata. Here this broker is the only one."""
    if fields.broker_id != context.node_id:
        message = f"Broker ID {fields.broker_id} is not currently registered"
        return {"error_code": Code.BROKER_ID_NOT_REGISTERED, "error_message": message}
    message = f"Broker ID {fields.broker_id} is the only broker and cannot be unregistered"
    return {"error_code": Code.INVALID_REQUEST, "error_message": message}


async def describe_delegation_token(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """There are no delegation tokens. As in Kafka, a client without a login gets another code than one with."""
    if request.connection.has_logged_in:
        return {"error_code": Code.DELEGATION_TOKEN_AUTH_DISABLED}
    return {"error_code": Code.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED}


async def describe_log_dirs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    chosen: list[tuple[Stream, set[int] | None]] = []
    if fields.topics is None:
        chosen = [(stream, None) for stream in context.topics.all()]
    else:
        for topic in fields.topics:
            try:
                chosen.append((context.topics.find(topic.topic), set(topic.partitions)))
            except HeadraceError:
                continue
    free = context.broker.disk.free_bytes(context.broker.config.data_dir)
    topics = [
        {
            "name": stream.name,
            "partitions": [
                {"partition_index": partition.number, "partition_size": partition.size_bytes}
                for partition in stream.partitions
                if numbers is None or partition.number in numbers
            ],
        }
        for stream, numbers in chosen
    ]
    used = sum(partition.size_bytes for stream in context.topics.all() for partition in stream.partitions)
    return {
        "results": [
            {
                "log_dir": context.broker.config.data_dir,
                "topics": topics,
                "total_bytes": free + used,
                "usable_bytes": free,
            }
        ]
    }


async def alter_replica_log_dirs(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """All logs are in one data folder and cannot be moved."""
    allowed = context.access_of(request)
    results = []
    for folder in fields.dirs:
        for topic in folder.topics:
            parts = []
            for number in topic.partitions:
                code = Code.NONE if folder.path == context.broker.config.data_dir else Code.LOG_DIR_NOT_FOUND
                try:
                    allowed.administer()
                    context.topics.partition(topic.name, number)
                except HeadraceError as error:
                    code = code_of(error)
                parts.append({"partition_index": number, "error_code": code})
            results.append({"topic_name": topic.name, "partitions": parts})
    return {"results": results}


async def describe_quorum(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """The quorum of controllers: this broker is its only voter."""
    host, port = context.address_of(request)
    state = {"replica_id": context.node_id, "log_end_offset": 0}
    return {
        "topics": [
            {
                "topic_name": topic.topic_name,
                "partitions": [
                    {
                        "partition_index": one.partition_index,
                        "leader_id": context.node_id,
                        "current_voters": [state],
                    }
                    for one in topic.partitions
                ],
            }
            for topic in fields.topics
        ],
        "nodes": [{"node_id": context.node_id, "listeners": [{"name": "KAFKA", "host": host, "port": port}]}],
    }


async def elect_leaders(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """No election is ever needed: this broker leads all partitions."""
    if fields.topic_partitions is None:
        return {}
    if fields.election_type not in (PREFERRED, UNCLEAN):
        return {"error_code": Code.INVALID_REQUEST}
    return {
        "replica_election_results": [
            {
                "topic": topic.topic,
                "partition_result": [election(context, topic.topic, number) for number in topic.partitions],
            }
            for topic in fields.topic_partitions
        ]
    }


def election(context: KafkaContext, topic: str, number: int) -> dict[str, Any]:
    try:
        context.topics.partition(topic, number)
        code, message = Code.ELECTION_NOT_NEEDED, "the only broker is the leader"
    except HeadraceError as error:
        code, message = code_of(error), str(error)
    return {"partition_id": number, "error_code": code, "error_message": message}


async def alter_partition_reassignments(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return {
        "allow_replication_factor_change": fields.allow_replication_factor_change,
        "responses": [
            {
                "name": topic.name,
                "partitions": [reassignment(context, topic.name, one) for one in topic.partitions],
            }
            for topic in fields.topics
        ],
    }


def reassignment(context: KafkaContext, topic: str, one: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"partition_index": one.partition_index}
    try:
        context.topics.partition(topic, one.partition_index)
    except HeadraceError as error:
        return {**answer, "error_code": code_of(error), "error_message": str(error)}
    if one.replicas is None:
        return {**answer, "error_code": Code.NO_REASSIGNMENT_IN_PROGRESS}
    if one.replicas != [context.node_id]:
        message = f"the only broker is {context.node_id}"
        return {**answer, "error_code": Code.INVALID_REPLICA_ASSIGNMENT, "error_message": message}
    return answer


async def list_partition_reassignments(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return {}


async def get_telemetry_subscriptions(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """The broker collects no client metrics: an empty subscription, to be asked for again in five minutes."""
    known = fields.client_instance_id
    return {
        "client_instance_id": known if any(known) else uuid.uuid4().bytes,
        "subscription_id": 0,
        "push_interval": TELEMETRY_INTERVAL_MS,
        "telemetry_max_bytes": 0,
        "requested_metrics": [],
    }


async def push_telemetry(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return {} if fields.terminating else {"error_code": Code.UNKNOWN_SUBSCRIPTION_ID}


async def list_config_resources(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    if request.version == 0:  # lists client metrics resources only
        return {"config_resources": []}
    names = {
        TOPIC: [stream.name for stream in context.topics.all()],
        BROKER: [str(context.node_id)],
        GROUP: context.coordination.group_configs.configured(),
    }
    wanted = set(fields.resource_types) or set(names)
    return {
        "config_resources": [
            {"resource_name": name, "resource_type": kind} for kind in names if kind in wanted for name in names[kind]
        ]
    }


async def describe_client_quotas(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return {"entries": []}


async def describe_acls(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    return {"error_code": Code.SECURITY_DISABLED, "error_message": NO_SECURITY}


async def create_acls(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    refused = {"error_code": Code.SECURITY_DISABLED, "error_message": NO_SECURITY}
    return {"results": [refused for _ in fields.creations]}


async def delete_acls(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    refused = {"error_code": Code.SECURITY_DISABLED, "error_message": NO_SECURITY}
    return {"filter_results": [refused for _ in fields.filters]}
