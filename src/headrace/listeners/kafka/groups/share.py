"""Handlers of share groups (KIP-932): heartbeat, fetch, acknowledge, describe."""

import asyncio
import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from headrace.broker.groups.config import GroupConfig
from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.groups.share.partition import ACCEPT, RELEASE, SharePartition
from headrace.broker.streams.partition import Chunk, Partition, when_loaded
from headrace.broker.streams.read import aborted_batches
from headrace.broker.types.aborted_ranges import NO_ABORTS
from headrace.errors import (
    AccessRefused,
    GroupNotFound,
    HeadraceError,
    InvalidRecordState,
    PartitionNotFound,
    StreamNotFound,
)
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of, group_code
from headrace.listeners.kafka.groups.common import describe_each, not_found
from headrace.listeners.kafka.groups.consumer import by_topic
from headrace.listeners.kafka.groups.share_sessions import FINAL, NEW, ShareSession
from headrace.listeners.kafka.groups.share_wakeups import Arrivals, Key
from headrace.listeners.kafka.request_pipeline import Request
from headrace.record import codec
from headrace.record.types import Buffer

RENEWS_FROM = 2  # from this version on a ShareFetch may only renew locks
CHUNK_BYTES = 1 << 20
ASSIGNOR = "simple"


async def share_group_heartbeat(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    shares = context.coordination.shares
    names = fields.subscribed_topic_names
    try:
        check_kind(context, fields.group_id)
        member, is_changed = shares.members.heartbeat(
            fields.group_id,
            fields.member_id,
            fields.member_epoch,
            client_id=request.client_id,
            client_host=request.connection.client_host,
            rack_id=fields.rack_id,
            topics=frozenset(names) if names is not None else None,
        )
        if is_changed:
            await start_reading(context, context.topics, shares.group(fields.group_id), member.assigned)
    except HeadraceError as error:
        return {
            "error_code": group_code(code_of(error)),
            "error_message": str(error),
            "member_id": fields.member_id,
            "member_epoch": fields.member_epoch,
        }
    values: dict[str, Any] = {
        "member_id": member.member_id,
        "member_epoch": member.epoch,
        "heartbeat_interval": context.coordination.group_configs.get(fields.group_id).heartbeat_interval_ms,
    }
    if is_changed:
        values["assignment"] = {"topic_partitions": by_topic(context, member.assigned)}
    return values


async def start_reading(
    context: KafkaContext, topics: Topics, group: ShareGroup, partitions: Iterable[tuple[str | bytes, int]]
) -> None:
    """Save the group's start offsets before a member learns of its partitions, so that records from now on belong to
    the group even if the broker restarts."""
    found = []
    for topic, number in partitions:
        with contextlib.suppress(StreamNotFound, PartitionNotFound, AccessRefused):  # deleted, or no permission
            found.append(topics.partition(topic, number))
    await context.coordination.shares.begin(group, found)


def check_kind(context: KafkaContext, group_id: str) -> None:
    """Raise if the group is of another kind: a group keeps its kind until it is deleted."""
    known = context.coordination
    if known.groups.exists(group_id) and known.shares.find(group_id) is None:
        raise GroupNotFound(group_id)  # it exists, but is not a share group


async def share_group_describe(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    with_operations = fields.include_authorized_operations
    describing = partial(describe, context)
    return await describe_each(context, request, fields.group_ids, describing, with_operations=with_operations)


def describe(context: KafkaContext, group_id: str) -> dict[str, Any]:
    group = context.coordination.shares.find(group_id)
    if group is None:
        return not_found(group_id, "is not a share group")
    return {
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.epoch,
        "assignor_name": ASSIGNOR,
        "members": [
            {
                "member_id": member.member_id,
                "rack_id": member.rack_id,
                "member_epoch": member.epoch,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "subscribed_topic_names": sorted(member.topics),
                "assignment": {"topic_partitions": by_topic(context, member.assigned, names=True)},
            }
            for member in group.members.values()
        ],
    }


async def acknowledge_all(
    context: KafkaContext, readable: Topics, group: ShareGroup, member_id: str, topics: Any
) -> dict[Key, tuple[Code, str | None]]:
    """Apply the acknowledgements of a request; (code, message) for each partition that has some."""
    shares = context.coordination.shares
    results: dict[Key, tuple[Code, str | None]] = {}
    changed: list[int] = []
    is_changed = False
    for topic in topics:
        for part in topic.partitions:
            if not part.acknowledgement_batches:
                continue
            key = (topic.topic_id, part.partition_index)
            try:
                log_id = readable.partition(topic.topic_id, part.partition_index).log_id
                share, batches = shares.partition(group, log_id), part.acknowledgement_batches
                was_full = share.is_full
                acknowledge(share, member_id, batches, shares.lock_deadline(group))
                is_changed = is_changed or was_full or any(RELEASE in one.acknowledge_types for one in batches)
                changed.append(log_id)
                results[key] = (Code.NONE, None)
            except HeadraceError as error:
                results[key] = (code_of(error), str(error))
    if changed:
        try:
            await shares.save(group, changed, is_news=is_changed)
        except HeadraceError as error:
            return dict.fromkeys(results, (code_of(error), str(error)))
    return results


def acknowledge(share: SharePartition, member_id: str, batches: Any, deadline: float) -> None:
    """Apply all of them or none: a client that gets an error assumes that nothing was acknowledged."""
    ranges = [(one.first_offset, one.last_offset, one.acknowledge_types or [ACCEPT]) for one in batches]
    ranges.sort(key=lambda one: one[0])
    for (first, last, types), before in zip(ranges, [-1, *(last for _, last, _ in ranges)], strict=False):
        share.check(member_id, first, last, types)
        if first <= before:
            raise InvalidRecordState(f"offset {first} is acknowledged twice")
    for first, last, types in ranges:
        share.acknowledge(member_id, first, last, types, deadline)


async def share_acknowledge(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    if fields.share_session_epoch == NEW:  # a session starts with a ShareFetch
        return {"error_code": Code.INVALID_SHARE_SESSION_EPOCH}
    session, code = context.share_sessions.open(request.connection.share_sessions, fields)
    if session is None:
        return {"error_code": code}
    try:
        group = context.coordination.shares.check_member(fields.group_id or "", fields.member_id or "")
    except HeadraceError as error:
        return {"error_code": code_of(error), "error_message": str(error)}
    readable = context.access_of(request).reads
    results = await acknowledge_all(context, readable, group, fields.member_id or "", fields.topics)
    if fields.share_session_epoch == FINAL:
        context.coordination.shares.release_member(group, fields.member_id or "")
    topics: dict[bytes, list[dict[str, Any]]] = {}
    for (topic_id, number), (error_code, message) in results.items():
        topics.setdefault(topic_id, []).append(
            {"partition_index": number, "error_code": error_code, "error_message": message}
        )
    return {
        "acquisition_lock_timeout": context.coordination.group_configs.get(group.group_id).lock_ms,
        "responses": [{"topic_id": topic_id, "partitions": parts} for topic_id, parts in topics.items()],
    }


async def share_fetch(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    only_renews = request.version >= RENEWS_FROM and fields.is_renew_ack
    if only_renews and any((fields.max_wait, fields.min_bytes, fields.max_bytes, fields.max_records)):
        return {"error_code": Code.INVALID_REQUEST, "error_message": "a fetch that renews locks cannot request records"}
    session, code = context.share_sessions.open(request.connection.share_sessions, fields)
    if session is None:
        if code is Code.SHARE_SESSION_LIMIT_REACHED:  # wait as if nothing were readable: the client retries at once
            await asyncio.sleep(min(fields.max_wait, context.config.read_wait_ms_max) / 1000)
        return {"error_code": code}
    member_id = fields.member_id or ""
    shares = context.coordination.shares
    try:
        group = shares.check_member(fields.group_id or "", member_id)
    except HeadraceError as error:
        return {"error_code": code_of(error), "error_message": str(error)}
    if not context.share_sessions.update(session, fields):
        return {"error_code": Code.SHARE_SESSION_LIMIT_REACHED}
    readable = context.access_of(request).reads
    results = await acknowledge_all(context, readable, group, member_id, fields.topics)
    read: dict[Key, dict[str, Any]] = {}
    if fields.share_session_epoch == FINAL:
        shares.release_member(group, member_id)
    elif not only_renews:
        try:
            await start_reading(context, readable, group, session.wanted)
        except HeadraceError as error:
            return {"error_code": code_of(error), "error_message": str(error)}
        read = await acquire(context, request, group, session, member_id, fields)
    return {
        "acquisition_lock_timeout": context.coordination.group_configs.get(group.group_id).lock_ms,
        "responses": responses(results, read),
    }


def responses(results: dict[Key, tuple[Code, str | None]], read: dict[Key, dict[str, Any]]) -> list[dict[str, Any]]:
    topics: dict[bytes, list[dict[str, Any]]] = {}
    for key in {**results, **read}:
        error_code, message = results.get(key, (Code.NONE, None))
        answer = {
            "partition_index": key[1],
            "acknowledge_error_code": error_code,
            "acknowledge_error_message": message,
            **read.get(key, {}),
        }
        topics.setdefault(key[0], []).append(answer)
    return [{"topic_id": topic_id, "partitions": parts} for topic_id, parts in topics.items()]


async def acquire(
    context: KafkaContext, request: Request, group: ShareGroup, session: ShareSession, member_id: str, fields: Any
) -> dict[Key, dict[str, Any]]:
    """Records for the member; waits for some until the request's max_wait."""
    deadline = context.loop.time() + min(fields.max_wait, context.config.read_wait_ms_max) / 1000
    arrivals: Arrivals | None = None
    try:
        while True:
            if not context.admits(request):  # the users may have changed during the wait
                return {}
            config = context.coordination.group_configs.get(group.group_id)
            if arrivals is not None and arrivals.committed is config.reads_committed:
                keys = arrivals.take_fired(session.wanted)
            else:
                if arrivals is not None:
                    arrivals.close()
                arrivals, keys = Arrivals(group, committed=config.reads_committed), list(session.wanted)
            # Before reading: a read from disk takes a while, and records that arrive meanwhile must wake this fetch.
            watch(context, arrivals, keys, config)
            read = await acquire_now(context, request, group, keys, session, member_id, fields)
            left_s = deadline - context.loop.time()
            if read or left_s <= 0 or request.connection.is_closed:
                return read
            await arrivals.wait(left_s)
    finally:
        if arrivals is not None:
            arrivals.close()


def watch(context: KafkaContext, arrivals: Arrivals, keys: Iterable[Key], config: GroupConfig) -> None:
    for key in keys:
        with contextlib.suppress(HeadraceError):
            partition = context.topics.partition(*key)
            arrivals.watch(key, partition, end_of(partition, config))


async def acquire_now(
    context: KafkaContext,
    request: Request,
    group: ShareGroup,
    keys: Iterable[Key],
    session: ShareSession,
    member_id: str,
    fields: Any,
) -> dict[Key, dict[str, Any]]:
    shares = context.coordination.shares
    topics = context.access_of(request).reads
    room = max(1, fields.max_records) if fields.max_records else 500
    bytes_max = bytes_left = min(fields.max_bytes, context.config.read_bytes_max)
    read: dict[Key, dict[str, Any]] = {}
    for key in keys:
        if room <= 0 or bytes_left <= 0:
            break
        try:
            partition = topics.partition(*key)
            share = shares.partition(group, partition.log_id)
            find = partial(_next_chunk, context, partition, share, min(CHUNK_BYTES, bytes_left))
            found = await when_loaded(find)
            if request.connection.is_closed:
                break  # it closed during the read: records acquired now would not be released
            if found is None:
                continue
            first, chunk = found
            if bytes_left < bytes_max and len(chunk.data) > bytes_left:
                continue  # only the first batch of a response may exceed its limit
            taken = share.acquire(member_id, first, chunk.next_offset, room, shares.lock_deadline(group))
        except HeadraceError as error:
            read[key] = {"error_code": code_of(error), "error_message": str(error)}
            session.wanted.pop(key, None)
            continue
        if not taken:
            continue
        count = sum(one.last - one.first + 1 for one in taken)
        data = chunk.data if taken[-1].last + 1 >= chunk.next_offset else batches_until(chunk.data, taken[-1].last)
        room -= count
        bytes_left -= len(data)
        context.stats.messages_out += count
        context.stats.bytes_out += len(data)
        read[key] = {
            "records": data,
            "acquired_records": [
                {"first_offset": one.first, "last_offset": one.last, "delivery_count": one.delivery_count}
                for one in taken
            ],
        }
        if key in session.wanted:  # not forgotten meanwhile; partitions with records move to the end
            del session.wanted[key]
            session.wanted[key] = None
        if session.is_new:
            # The first response has records of one partition only, as in Kafka, which answers with the partition whose
            # state is loaded first. Otherwise the first of several new members would acquire everything.
            session.is_new = False
            break
    return read


def batches_until(data: Buffer, last: int) -> Buffer:
    """The batches up to the one that contains the offset, for a member that acquired only a part of them."""
    for info in codec.scan(data, verify_crc=False):
        if info.next_offset > last:
            return memoryview(data)[: info.end]
    return data


def _next_chunk(
    context: KafkaContext, partition: Partition, share: SharePartition, bytes_max: int
) -> tuple[int, Chunk] | None:
    """(first offset, chunk) of the next available records. Called again after a wait for the disk, because another
    member may have acquired them."""
    reads_committed = share.settings.reads_committed
    aborted = context.coordination.producers.aborted(partition.log_id) if reads_committed else NO_ABORTS
    while True:
        end = end_of(partition, share.settings)
        first = share.available(partition.start_offset, end)
        if first is None:
            return None
        chunk = partition.read_now(first, bytes_max, end=end)
        for info in aborted_batches(chunk, aborted):
            share.archive(info.base_offset, info.next_offset)
        if share.available(partition.start_offset, end) == first:
            return first, chunk


def end_of(partition: Partition, config: GroupConfig) -> int:
    return partition.stable_end if config.reads_committed else partition.end_offset
