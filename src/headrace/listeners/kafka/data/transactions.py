"""Handlers of idempotent producers and transactions."""

from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.broker.groups.coordinator import check_group_id
from headrace.broker.groups.subscription_patterns import compile_pattern
from headrace.broker.transactions.producer_state import Producer
from headrace.broker.transactions.transaction import ONGOING
from headrace.errors import (
    ConcurrentTransactions,
    GroupNotFound,
    HeadraceError,
    InvalidInput,
    InvalidPattern,
    NotInTransaction,
    ProducerFenced,
    StaleMemberEpoch,
)
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of, group_code
from headrace.listeners.kafka.groups.common import is_share_group
from headrace.listeners.kafka.groups.offsets import collect, fail_all
from headrace.listeners.kafka.per_partition import per_partition
from headrace.listeners.kafka.request_pipeline import Request

ABORTABLE_SINCE = 4  # TxnOffsetCommit: clients abort on TRANSACTION_ABORTABLE; INVALID_TXN_STATE is fatal to them
SINCE_VERSION_2 = 5  # TxnOffsetCommit and EndTxn: clients know transaction.version 2
NEVER = 1000  # TxnOffsetCommit names topics by name in all supported versions
STATES = {"Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead"}


def fencing_code(error: HeadraceError, version: int, since: int) -> Code:
    """PRODUCER_FENCED exists since version `since` of an API; older versions use INVALID_PRODUCER_EPOCH. Storage errors
    become a retriable code, as for groups."""
    if isinstance(error, ProducerFenced) and version < since:
        return Code.INVALID_PRODUCER_EPOCH
    return group_code(code_of(error))


async def init_producer_id(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    try:
        if (fields.producer_id < 0) != (fields.producer_epoch < 0):
            raise InvalidInput("give both the previous producer id and its epoch, or neither")
        if fields.transactional_id is None:
            producer_id, epoch = await context.coordination.producers.new_id(), 0
        else:
            producer_id, epoch = await context.coordination.transactions.begin_producer(
                fields.transactional_id,
                fields.transaction_timeout,
                fields.producer_id,
                fields.producer_epoch,
            )
    except HeadraceError as error:
        code = fencing_code(error, request.version, 4)
        if code is Code.COORDINATOR_NOT_AVAILABLE and fields.transactional_id is None:
            # Retriable, too: without a transactional id, Java has no coordinator to look up.
            code = Code.COORDINATOR_LOAD_IN_PROGRESS
        return {"error_code": code, "producer_id": -1, "producer_epoch": -1}
    return {"producer_id": producer_id, "producer_epoch": epoch}


async def add_partitions_to_txn(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    topics = fields.v3_and_below_topics
    allowed = context.access_of(request)
    partitions: dict[tuple[str, int], int] = {}
    codes: dict[tuple[str, int], Code] = {}
    for topic in topics:
        for number in topic.partitions:
            try:
                allowed.transaction(fields.v3_and_below_transactional_id)
                partitions[topic.name, number] = allowed.writes.partition(topic.name, number).log_id
                codes[topic.name, number] = Code.NONE
            except HeadraceError as error:
                codes[topic.name, number] = code_of(error)
    if len(partitions) < len(codes):  # all or none
        codes = {where: code or Code.OPERATION_NOT_ATTEMPTED for where, code in codes.items()}
    else:
        try:
            await context.coordination.transactions.add_partitions(
                fields.v3_and_below_transactional_id,
                fields.v3_and_below_producer_id,
                fields.v3_and_below_producer_epoch,
                partitions,
            )
        except HeadraceError as error:
            codes = dict.fromkeys(codes, fencing_code(error, request.version, 2))
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic.name,
                "results_by_partition": [
                    {"partition_index": number, "partition_error_code": codes[topic.name, number]}
                    for number in topic.partitions
                ],
            }
            for topic in topics
        ]
    }


async def add_offsets_to_txn(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    try:
        await context.coordination.transactions.add_group(
            fields.transactional_id, fields.producer_id, fields.producer_epoch, fields.group_id
        )
    except HeadraceError as error:
        return {"error_code": fencing_code(error, request.version, 2)}
    return {}


async def txn_offset_commit(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    allowed = context.access_of(request)
    entries, answers = collect(
        context, allowed.reads, fields.group_id, fields.topics, request.version, by_id_from=NEVER
    )
    try:
        allowed.transaction(fields.transactional_id)
        allowed.group(fields.group_id)
        check_group_id(fields.group_id)
        if is_share_group(context, fields.group_id):
            raise GroupNotFound(fields.group_id)  # share groups commit no offsets
        if fields.generation_id >= 0 or fields.member_id:
            context.coordination.groups.check_commit(
                fields.group_id,
                fields.member_id,
                fields.group_instance_id,
                fields.generation_id,
                transactional=True,
            )
        await context.coordination.transactions.commit_offsets(
            fields.transactional_id,
            fields.producer_id,
            fields.producer_epoch,
            entries,
            joins=request.version >= SINCE_VERSION_2,
        )
    except StaleMemberEpoch:
        fail_all(answers, Code.ILLEGAL_GENERATION)  # the producer can abort; STALE_MEMBER_EPOCH is fatal to Java
    except NotInTransaction as error:
        abortable = request.version >= ABORTABLE_SINCE
        fail_all(answers, Code.TRANSACTION_ABORTABLE if abortable else code_of(error))
    except ConcurrentTransactions:
        fail_all(answers, Code.COORDINATOR_LOAD_IN_PROGRESS)  # retriable; CONCURRENT_TRANSACTIONS is fatal to Java here
    except HeadraceError as error:
        fail_all(answers, fencing_code(error, request.version, 99))
    return {"topics": answers}


async def end_txn(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    transactions = context.coordination.transactions
    producer = fields.transactional_id, fields.producer_id, fields.producer_epoch
    try:
        if request.version < SINCE_VERSION_2:
            await transactions.end(*producer, commit=fields.committed)
            return {}
        producer_id, epoch = await transactions.end_with_epoch(*producer, commit=fields.committed)
    except HeadraceError as error:
        return {"error_code": fencing_code(error, request.version, 2)}
    return {"producer_id": producer_id, "producer_epoch": epoch}


async def describe_transactions(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    allowed = context.access_of(request)
    states = []
    async for transactional_id in YieldEvery().each(dict.fromkeys(fields.transactional_ids)):
        try:
            allowed.transaction(transactional_id)
            one = context.coordination.transactions.get(transactional_id)
        except HeadraceError as error:
            states.append({"transactional_id": transactional_id, "error_code": code_of(error)})
            continue
        topics: dict[str, list[int]] = {}
        for topic, number in sorted(one.shown_partitions):
            if allowed.sees.shows(topic):
                topics.setdefault(topic, []).append(number)
        states.append(
            {
                "transactional_id": transactional_id,
                "transaction_state": one.shown_state,
                "transaction_timeout": one.timeout_ms,
                "transaction_start_time": one.started_ms,
                "producer_id": one.producer_id,
                "producer_epoch": one.epoch,
                "topics": [{"topic": topic, "partitions": numbers} for topic, numbers in topics.items()],
            }
        )
    return {"transaction_states": states}


async def list_transactions(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    now_ms = context.broker.clock.now_ms()
    allowed = context.access_of(request)
    try:
        pattern = compile_pattern(fields.transactional_id_pattern or ".*")
    except InvalidPattern as error:
        return {"error_code": code_of(error)}
    listed = []
    for one in context.coordination.transactions.every():
        age_ms = now_ms - one.started_ms if one.state == ONGOING else -1
        if (
            (not fields.state_filters or one.shown_state in fields.state_filters)
            and (not fields.producer_id_filters or one.producer_id in fields.producer_id_filters)
            and (fields.duration_filter < 0 or age_ms > fields.duration_filter)
            and (not fields.transactional_id_pattern or pattern.fullmatch(one.transactional_id))
            and allowed.shows_transaction(one.transactional_id)
        ):
            listed.append(
                {
                    "transactional_id": one.transactional_id,
                    "producer_id": one.producer_id,
                    "transaction_state": one.shown_state,
                }
            )
    unknown = [state for state in fields.state_filters if state not in STATES]
    return {"transaction_states": listed, "unknown_state_filters": unknown}


async def describe_producers(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    readable = context.access_of(request).reads
    seen: set[tuple[str, int]] = set()  # a partition may have thousands of producers: each is described once
    for topic in fields.topics:
        numbers = dict.fromkeys(topic.partition_indexes)
        topic.partition_indexes = [number for number in numbers if (topic.name, number) not in seen]
        seen.update((topic.name, number) for number in numbers)

    async def describe(topic: Any, number: int) -> dict[str, Any]:
        known = context.coordination.producers.of(readable.partition(topic.name, number).log_id)
        active = known.producers.values() if known is not None else ()
        return {"active_producers": [describe_producer(one) for one in active]}

    topics = await per_partition(fields.topics, describe, partitions_field="partition_indexes", has_message=True)
    return {"topics": topics}


def describe_producer(one: Producer) -> dict[str, Any]:
    return {
        "producer_id": one.producer_id,
        "producer_epoch": one.epoch,
        "last_sequence": one.last_sequence,
        "last_timestamp": one.seen_ms,
        "coordinator_epoch": 0,
        "current_txn_start_offset": -1 if one.open_since is None else one.open_since,
    }
