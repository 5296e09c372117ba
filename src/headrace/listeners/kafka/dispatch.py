"""Which function handles which API.

HANDLERS are called at once and read their bytes themselves. ASYNC_HANDLERS run in a task, get the request's fields and
return those of the response.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from headrace.listeners.kafka.admin import cluster, configs, metadata, topics
from headrace.listeners.kafka.auth import access, login, scram_credentials
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.data import fetch, offsets, produce, transactions
from headrace.listeners.kafka.groups import classic, consumer, share, share_offsets
from headrace.listeners.kafka.groups import offsets as group_offsets
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import request_struct

Handler = Callable[[KafkaContext, Request], None]
AsyncHandler = Callable[[KafkaContext, Request, Any], Awaitable[dict[str, Any] | None]]

HANDLERS: dict[Api, Handler] = {
    Api.PRODUCE: produce.produce,
    Api.FETCH: fetch.fetch,
    Api.METADATA: metadata.handle_metadata,
    Api.API_VERSIONS: cluster.api_versions,
    Api.SASL_HANDSHAKE: login.sasl_handshake,
    Api.SASL_AUTHENTICATE: login.sasl_authenticate,
}

ASYNC_HANDLERS: dict[Api, AsyncHandler] = {
    Api.LIST_OFFSETS: offsets.list_offsets,
    Api.OFFSET_FOR_LEADER_EPOCH: offsets.offset_for_leader_epoch,
    Api.DELETE_RECORDS: offsets.delete_records,
    Api.FIND_COORDINATOR: classic.find_coordinator,
    Api.JOIN_GROUP: classic.join_group,
    Api.SYNC_GROUP: classic.sync_group,
    Api.HEARTBEAT: classic.heartbeat,
    Api.LEAVE_GROUP: classic.leave_group,
    Api.LIST_GROUPS: classic.list_groups,
    Api.DESCRIBE_GROUPS: classic.describe_groups,
    Api.DELETE_GROUPS: classic.delete_groups,
    Api.OFFSET_COMMIT: group_offsets.offset_commit,
    Api.OFFSET_FETCH: group_offsets.offset_fetch,
    Api.OFFSET_DELETE: group_offsets.offset_delete,
    Api.CONSUMER_GROUP_HEARTBEAT: consumer.consumer_group_heartbeat,
    Api.CONSUMER_GROUP_DESCRIBE: consumer.consumer_group_describe,
    Api.SHARE_GROUP_HEARTBEAT: share.share_group_heartbeat,
    Api.SHARE_GROUP_DESCRIBE: share.share_group_describe,
    Api.SHARE_FETCH: share.share_fetch,
    Api.SHARE_ACKNOWLEDGE: share.share_acknowledge,
    Api.DESCRIBE_SHARE_GROUP_OFFSETS: share_offsets.describe_share_group_offsets,
    Api.ALTER_SHARE_GROUP_OFFSETS: share_offsets.alter_share_group_offsets,
    Api.DELETE_SHARE_GROUP_OFFSETS: share_offsets.delete_share_group_offsets,
    Api.INIT_PRODUCER_ID: transactions.init_producer_id,
    Api.ADD_PARTITIONS_TO_TXN: transactions.add_partitions_to_txn,
    Api.ADD_OFFSETS_TO_TXN: transactions.add_offsets_to_txn,
    Api.TXN_OFFSET_COMMIT: transactions.txn_offset_commit,
    Api.END_TXN: transactions.end_txn,
    Api.DESCRIBE_TRANSACTIONS: transactions.describe_transactions,
    Api.LIST_TRANSACTIONS: transactions.list_transactions,
    Api.DESCRIBE_PRODUCERS: transactions.describe_producers,
    Api.CREATE_TOPICS: topics.create_topics,
    Api.DELETE_TOPICS: topics.delete_topics,
    Api.CREATE_PARTITIONS: topics.create_partitions,
    Api.DESCRIBE_TOPIC_PARTITIONS: topics.describe_topic_partitions,
    Api.DESCRIBE_CONFIGS: configs.describe_configs,
    Api.ALTER_CONFIGS: configs.alter_configs,
    Api.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    Api.DESCRIBE_CLUSTER: cluster.describe_cluster,
    Api.UNREGISTER_BROKER: cluster.unregister_broker,
    Api.DESCRIBE_DELEGATION_TOKEN: cluster.describe_delegation_token,
    Api.DESCRIBE_QUORUM: cluster.describe_quorum,
    Api.UPDATE_FEATURES: cluster.update_features,
    Api.ALTER_REPLICA_LOG_DIRS: cluster.alter_replica_log_dirs,
    Api.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,
    Api.ELECT_LEADERS: cluster.elect_leaders,
    Api.ALTER_PARTITION_REASSIGNMENTS: cluster.alter_partition_reassignments,
    Api.LIST_PARTITION_REASSIGNMENTS: cluster.list_partition_reassignments,
    Api.GET_TELEMETRY_SUBSCRIPTIONS: cluster.get_telemetry_subscriptions,
    Api.PUSH_TELEMETRY: cluster.push_telemetry,
    Api.LIST_CONFIG_RESOURCES: cluster.list_config_resources,
    Api.DESCRIBE_CLIENT_QUOTAS: cluster.describe_client_quotas,
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: scram_credentials.describe_user_scram_credentials,
    Api.ALTER_USER_SCRAM_CREDENTIALS: scram_credentials.alter_user_scram_credentials,
    Api.DESCRIBE_ACLS: cluster.describe_acls,
    Api.CREATE_ACLS: cluster.create_acls,
    Api.DELETE_ACLS: cluster.delete_acls,
}


def answer_in_task(context: KafkaContext, request: Request) -> None:
    """For the ASYNC_HANDLERS, which may have to wait."""
    context.spawn(_answer(context, request), request)


async def _answer(context: KafkaContext, request: Request) -> None:
    api, version = request.api, request.version
    fields = decode(request_struct(api, version), request.body, request.position, context.elements_max)
    request.buffer = bytearray()
    known = request.connection.access
    refused = access.refusal(known, api, fields) if known is not None else None
    if refused is not None:
        request.reply({"error_code": refused})
        return
    values = await ASYNC_HANDLERS[api](context, request, fields)
    if values is not None:  # else the handler has answered
        request.reply(values)
