"""Planning of bulk reads, for Spark and the like: log ends of a topic, and leases on the segments to read."""

from collections.abc import Iterable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.partition import Partition
from headrace.errors import InvalidInput, MalformedJson
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.native.types import (
    HOLDER_CHARS_MAX,
    LEASE_SEGMENTS_MAX,
    Lease,
    Leased,
    Logs,
    OffsetRange,
)
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, decode, read_json

LEASE_BYTES_MAX = 16 << 20


async def logs(context: HttpContext, request: Request) -> Response:
    """Id, epoch and end offsets of the logs of a topic."""
    Query(request)
    stream = topic_of(context, request)
    found: Logs = {
        "topic": stream.name,
        "partitions": [
            {
                "partition": p.number,
                "log": p.log_id,
                "epoch": p.epoch,
                "start": p.start_offset,
                "end": p.end_offset,
                "stable_end": p.stable_end,
                "durable_end": p.durable_end,
                "held_from": p.compaction_pin,
                "size_bytes": p.size_bytes,
            }
            for p in stream.partitions
        ],
    }
    return json_response(found)


async def lease(context: HttpContext, request: Request) -> Response:
    """Keeps segments readable for a while, even if retention or compaction would delete them. A new lease of a holder
    replaces its earlier one. For ranges of offsets the response lists the segments that contain them, so that planning
    and leasing are one step."""
    Query(request)
    fields = await read_json(request, request.state.share, LEASE_BYTES_MAX)
    holder = fields.get("holder")
    if "holder" in fields and (type(holder) is not str or not 0 < len(holder) <= HOLDER_CHARS_MAX):
        raise InvalidInput(f"holder must be a string of 1 to {HOLDER_CHARS_MAX} characters")
    wanted = decode(fields, Lease)
    for_ms, slices, ranges = wanted.for_ms, wanted.slices, wanted.ranges
    if (slices is msgspec.UNSET) == (ranges is msgspec.UNSET):
        raise MalformedJson(f"a lease has either slices or ranges; an example is {Lease.EXAMPLE}")
    until_ms, leases = context.broker.clock.now_ms() + for_ms, context.broker.read_leases
    if slices is not msgspec.UNSET:
        _check_count("slices", len(slices))
        keys = [(log_id, base, number) for log_id, base, number in map(msgspec.structs.astuple, slices)]
        _check_read(context, request, {log_id for log_id, _, _ in keys})
        missing = leases.hold_segments(keys, for_ms, holder)
        gone: Leased = {
            "until": until_ms,
            "gone": [{"log": log_id, "segment": base, "generation": number} for log_id, base, number in missing],
        }
        return json_response(gone)
    assert ranges is not msgspec.UNSET
    _check_count("ranges", len(ranges))
    held = leases.hold_ranges([_found(context, request, one) for one in ranges], for_ms, holder)
    leased: Leased = {
        "until": until_ms,
        "ranges": [
            {
                "segments": [
                    {"segment": one.segment, "generation": one.generation, "next_offset": one.next_offset}
                    for one in planned
                ]
            }
            for planned in held
        ],
    }
    return json_response(leased)


def _check_count(name: str, count: int) -> None:
    if count > LEASE_SEGMENTS_MAX:
        raise InvalidInput(f"a lease may have at most {LEASE_SEGMENTS_MAX:,} {name}")


def _check_read(context: HttpContext, request: Request, log_ids: Iterable[int]) -> None:
    """Forbidden unless the caller may read the topics: without this check any user could fill the disk with leases.
    Logs of deleted topics are not checked: of those only segments with a lease are left."""
    for log_id in log_ids:
        found = context.broker.streams.of_log(log_id)
        if found is not None:
            caller_of(request).read(found[0].name, found[0].vhost)


def _found(context: HttpContext, request: Request, wanted: OffsetRange) -> tuple[Partition, int, int]:
    caller_of(request).read(wanted.topic)
    return context.broker.streams.get(wanted.topic).partition(wanted.partition), wanted.start, wanted.end
