"""per_partition: the loop of handlers that answer each partition of a request on its own."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.errors import HeadraceError
from headrace.listeners.kafka.errors import code_of

NOTHING: Mapping[str, Any] = MappingProxyType({})


async def per_partition(
    topics: Iterable[Any],
    answer: Callable[[Any, Any], Awaitable[Mapping[str, Any]]],
    *,
    topic_field: str = "name",
    index_field: str = "partition_index",
    partitions_field: str = "partitions",
    default: Mapping[str, Any] = NOTHING,
    has_message: bool = False,
) -> list[dict[str, Any]]:
    """The topics of a response, with one entry per partition of the request, in the same order.

    An entry has the partition's index, the default fields and the fields that answer(topic, partition) returns. If
    answer raises a HeadraceError, the entry has its error code instead, and its text if has_message. Other work of the
    event loop runs in between.
    """
    work = YieldEvery()
    results = []
    for topic in topics:
        parts = []
        async for wanted in work.each(getattr(topic, partitions_field)):
            index = wanted if isinstance(wanted, int) else getattr(wanted, index_field)
            part = {index_field: index, **default}
            try:
                part.update(await answer(topic, wanted))
            except HeadraceError as error:
                part["error_code"] = code_of(error)
                if has_message:
                    part["error_message"] = str(error)
            parts.append(part)
        results.append({topic_field: getattr(topic, topic_field), "partitions": parts})
        await work.maybe_yield()
    return results
