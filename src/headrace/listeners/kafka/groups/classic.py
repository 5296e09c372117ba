"""Handlers of the classic group protocol, and of the APIs that list, describe and delete groups."""

from functools import partial
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.classic.members import GroupState, Join, JoinResult, Synced
from headrace.broker.groups.coordinator import Listed, check_group_id
from headrace.errors import (
    GroupKindMismatch,
    HeadraceError,
    InconsistentProtocol,
    InvalidGroupId,
    InvalidInput,
    MemberIdRequired,
)
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of, group_code
from headrace.listeners.kafka.groups.common import (
    describe_each,
    future_and_callback,
    is_share_group,
    not_found,
)
from headrace.listeners.kafka.request_pipeline import Request

GROUP, TRANSACTION = 0, 1
SYNC_NAMES_PROTOCOL_FROM = 5
NOT_FOUND_FROM = 6  # before, DescribeGroups calls a missing group Dead


async def find_coordinator(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    if request.version < 4:
        return coordinator(context, request, fields.key_type, fields.key)

    def of(key: str) -> dict[str, Any]:
        return {"key": key, **coordinator(context, request, fields.key_type, key)}

    return {"coordinators": await YieldEvery().map(of, fields.coordinator_keys)}


def coordinator(context: KafkaContext, request: Request, kind: int, key: str) -> dict[str, Any]:
    allowed = context.access_of(request)
    try:
        if kind == TRANSACTION:
            allowed.transaction(key)
        elif kind == GROUP:
            allowed.group(key)
        else:  # the share coordinator's keys are used between brokers only
            raise InvalidInput(f"Unknown coordinator type received: {kind}")
    except HeadraceError as error:
        return {"error_code": code_of(error), "error_message": str(error), "node_id": -1, "host": "", "port": -1}
    host, port = context.address_of(request)
    return {"node_id": context.node_id, "host": host, "port": port}


async def join_group(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    rebalance_ms = fields.rebalance_timeout if fields.rebalance_timeout > 0 else fields.session_timeout
    join = Join(
        member_id=fields.member_id,
        instance_id=fields.group_instance_id,
        client_id=request.client_id,
        client_host=request.connection.client_host,
        session_timeout_ms=fields.session_timeout,
        rebalance_timeout_ms=rebalance_ms,
        protocol_type=fields.protocol_type,
        protocols=tuple((one.name, one.metadata) for one in fields.protocols),
        id_required=request.version >= 4,
        can_skip_assignment=request.version >= 9,
    )
    future, resolve = future_and_callback(context)
    groups = context.coordination.groups
    try:
        # Before the kind of the group, as in Kafka.
        check_group_id(fields.group_id)
        groups.settings.check_session_timeout(fields.session_timeout)
        if is_share_group(context, fields.group_id):
            raise GroupKindMismatch(f"group {fields.group_id!r} is a share group")
        groups.join(fields.group_id, join, resolve)
        joined = await future
        if isinstance(joined, HeadraceError):
            raise joined
    except MemberIdRequired as error:
        return join_refused(request, Code.MEMBER_ID_REQUIRED, error.member_id)
    except HeadraceError as error:
        return join_refused(request, group_code(code_of(error)), fields.member_id)
    assert isinstance(joined, JoinResult)
    return {
        "generation_id": joined.generation,
        "protocol_type": joined.protocol_type,
        "protocol_name": joined.protocol,
        "leader": joined.leader,
        "member_id": joined.member_id,
        "skip_assignment": joined.skip_assignment,
        "members": [
            {"member_id": member_id, "group_instance_id": instance, "metadata": metadata}
            for member_id, instance, metadata in joined.members
        ],
    }


def join_refused(request: Request, code: Code, member_id: str) -> dict[str, Any]:
    name = None if request.version >= 7 else ""
    return {"error_code": code, "generation_id": -1, "protocol_name": name, "member_id": member_id}


async def sync_group(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    future, resolve = future_and_callback(context)
    try:
        if request.version >= SYNC_NAMES_PROTOCOL_FROM and None in (fields.protocol_type, fields.protocol_name):
            raise InconsistentProtocol("SyncGroup must name the protocol type and the protocol")
        context.coordination.groups.known_classic(fields.group_id).sync(
            fields.member_id,
            fields.group_instance_id,
            fields.generation_id,
            fields.protocol_type,
            fields.protocol_name,
            {one.member_id: one.assignment for one in fields.assignments},
            resolve,
        )
        synced = await future
        if isinstance(synced, HeadraceError):
            raise synced
    except HeadraceError as error:
        return {"error_code": group_code(code_of(error))}
    assert isinstance(synced, Synced)
    return {
        "protocol_type": synced.protocol_type,
        "protocol_name": synced.protocol,
        "assignment": synced.assignment,
    }


async def heartbeat(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    try:
        group = context.coordination.groups.known_classic(fields.group_id)
        group.heartbeat(fields.member_id, fields.group_instance_id, fields.generation_id)
    except HeadraceError as error:
        return {"error_code": code_of(error)}
    return {}


async def leave_group(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    groups = context.coordination.groups
    if request.version < 3:
        try:
            groups.known_classic(fields.group_id).leave(fields.member_id, None)
        except HeadraceError as error:
            return {"error_code": code_of(error)}
        return {}
    try:
        check_group_id(fields.group_id)
    except InvalidGroupId as error:
        return {"error_code": code_of(error)}
    members = []
    async for one in YieldEvery().each(fields.members):
        answer: dict[str, Any] = {"member_id": one.member_id, "group_instance_id": one.group_instance_id}
        try:
            groups.known_classic(fields.group_id).leave(one.member_id, one.group_instance_id)
        except HeadraceError as error:
            answer["error_code"] = code_of(error)
        members.append(answer)
    return {"members": members}


async def list_groups(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    states = {state.lower() for state in fields.states_filter}
    kinds = {kind.lower() for kind in fields.types_filter}
    allowed = context.access_of(request)
    return {
        "groups": [
            {
                "group_id": one.group_id,
                "protocol_type": one.protocol_type,
                "group_state": one.state,
                "group_type": one.kind,
            }
            for one in [*context.coordination.groups.listing(), *share_groups(context)]
            if (not states or one.state.lower() in states)
            and (not kinds or one.kind in kinds)
            and allowed.shows_group(one.group_id)
        ]
    }


def share_groups(context: KafkaContext) -> list[Listed]:
    return [Listed(one.group_id, "share", one.state, "share") for one in context.coordination.shares.all()]


async def describe_groups(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    describe = partial(describe_group, context, request.version)
    with_operations = fields.include_authorized_operations
    return await describe_each(context, request, fields.groups, describe, with_operations=with_operations)


def describe_group(context: KafkaContext, version: int, group_id: str) -> dict[str, Any]:
    groups = context.coordination.groups
    group = groups.find(group_id)
    if not isinstance(group, ClassicGroup):
        if group is None and groups.exists(group_id):
            return {"group_state": GroupState.EMPTY.value}
        is_other = group is not None or is_share_group(context, group_id)
        missing = not_found(group_id, "is not a classic group" if is_other else "not found")
        return {**(missing if version >= NOT_FOUND_FROM else {}), "group_state": "Dead"}
    is_stable = group.state is GroupState.STABLE
    return {
        "group_state": group.state.value,
        "protocol_type": group.protocol_type,
        "protocol_data": group.protocol if is_stable else "",
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata(group.protocol) if is_stable else b"",
                "member_assignment": member.assignment if is_stable else b"",
            }
            for member in group.members.values()
        ],
    }


async def delete_groups(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    allowed = context.access_of(request)
    results = []
    async for group_id in YieldEvery().each(dict.fromkeys(fields.groups_names)):
        answer: dict[str, Any] = {"group_id": group_id}
        future, resolve = future_and_callback(context)
        try:
            allowed.group(group_id)
            if context.coordination.shares.find(group_id) is not None:
                await context.coordination.shares.delete(group_id)
                results.append(answer)
                continue
            context.coordination.groups.delete(group_id, resolve)
            error = await future
            if error is not None:
                raise error
        except HeadraceError as error:
            answer["error_code"] = code_of(error)
        results.append(answer)
    return {"results": results}
