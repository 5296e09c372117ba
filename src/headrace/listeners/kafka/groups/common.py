"""Shared by the handlers of all three kinds of groups: classic, consumer and share."""

import asyncio
from collections.abc import Callable
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.errors import AccessRefused
from headrace.listeners.kafka.auth.access import operations_on_group
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka.metadata import UNKNOWN_OPERATIONS


def future_and_callback(context: KafkaContext) -> tuple["asyncio.Future[Any]", Callable[[Any], None]]:
    """A future and the callback that resolves it. Errors are results, too, not exceptions of the future."""
    future: asyncio.Future[Any] = context.loop.create_future()

    def resolve(value: Any) -> None:
        if not future.done():
            future.set_result(value)

    return future, resolve


def is_share_group(context: KafkaContext, group_id: str) -> bool:
    """Whether the group is a share group and no other kind: a group keeps its kind until it is deleted."""
    known = context.coordination
    return known.shares.find(group_id) is not None and not known.groups.exists(group_id)


async def describe_each(
    context: KafkaContext,
    request: Request,
    group_ids: list[str],
    describe: Callable[[str], dict[str, Any]],
    *,
    with_operations: bool,
) -> dict[str, Any]:
    """The response of an API that describes groups. describe returns the fields of one group, or not_found.

    Each group is described once: a request could name a large group thousands of times, and use up the memory.
    """
    allowed = context.access_of(request)

    def describe_one(group_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = {"group_id": group_id, "authorized_operations": UNKNOWN_OPERATIONS}
        try:
            allowed.group(group_id)
        except AccessRefused as error:
            return {**answer, "error_code": code_of(error), "error_message": str(error)}
        answer["authorized_operations"] = operations_on_group(allowed, group_id, asked=with_operations)
        return {**answer, **describe(group_id)}

    return {"groups": await YieldEvery().map(describe_one, list(dict.fromkeys(group_ids)))}


def not_found(group_id: str, why: str) -> dict[str, Any]:
    return {
        "error_code": Code.GROUP_ID_NOT_FOUND,
        "error_message": f"Group {group_id} {why}.",
        "authorized_operations": UNKNOWN_OPERATIONS,
    }
