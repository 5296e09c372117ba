"""What bulk readers such as Spark need beside the batches: where logs end, and leases on what they plan to read."""

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.sinks import read_leases
from headrace.broker.streams.partition import Partition
from headrace.errors import InvalidInput, MalformedJson
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import OFFSET_MAX, Query, read_json
from headrace.wire.http.messages import PARTITION_MAX, integer

LEASE_MS_MAX = 24 * 3600 * 1000
HOLDER_CHARS_MAX = 100
SLICES_MAX = read_leases.SEGMENTS_MAX
SLICES = '{"slices": [{"log", "segment", "generation"}], "for_ms": 60000, "holder": "I"}'
RANGES = '{"ranges": [{"topic", "partition", "start", "end"}], "for_ms": 60000, "holder": "I"}'


async def logs(site: HttpContext, request: Request) -> Response:
    """The logs of a topic: id, epoch, and every end there is."""
    Query(request)
    stream = topic_of(site, request)
    return json_answer(
        {
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
    )


async def lease(site: HttpContext, request: Request) -> Response:
    """Keeps segments for a while, even if retention or compaction is done with them. What a holder asks for replaces
    what it held before. Of ranges of offsets the answer says which segments they lie in: planned and held in one."""
    Query(request)
    fields = await read_json(request, request.state.share, 16 << 20)
    wanted = fields.keys() - {"holder", "for_ms"}
    if "for_ms" not in fields or wanted not in ({"slices"}, {"ranges"}) or type(fields[min(wanted)]) is not list:
        raise MalformedJson(f"a lease is {SLICES} or {RANGES}")
    holder = fields.get("holder")
    if "holder" in fields and (type(holder) is not str or not 0 < len(holder) <= HOLDER_CHARS_MAX):
        raise InvalidInput(f"a holder is a string of 1 to {HOLDER_CHARS_MAX} characters")
    if len(fields[min(wanted)]) > SLICES_MAX:
        raise InvalidInput(f"a lease has at most {SLICES_MAX:,} {min(wanted)}")
    for_ms = integer(fields["for_ms"], "for_ms", least=1, most=LEASE_MS_MAX)
    if for_ms is None:
        raise MalformedJson("for_ms is a number")
    until_ms, leases = site.broker.clock.now_ms() + for_ms, site.broker.read_leases
    if "slices" in fields:
        slices = [_slice(entry) for entry in fields["slices"]]
        _check_read(site, request, {log_id for log_id, _, _ in slices})
        gone = leases.hold_segments(slices, for_ms, holder)
        names = ("log", "segment", "generation")
        return json_answer({"until": until_ms, "gone": [dict(zip(names, key, strict=True)) for key in gone]})
    ranges = [_found(site, request, *_range(entry)) for entry in fields["ranges"]]
    held = leases.hold_ranges(ranges, for_ms, holder)
    return json_answer({"until": until_ms, "ranges": [{"segments": [one._asdict() for one in of]} for of in held]})


def _check_read(site: HttpContext, request: Request, log_ids: Iterable[int]) -> None:
    """Who holds what is not for them to read would fill the disk with it. Of a topic that is gone nobody is asked:
    only what somebody holds is left of it."""
    for log_id in log_ids:
        found = site.broker.streams.of_log(log_id)
        if found is not None:
            caller_of(request).read(found[0].name, found[0].vhost)


def _found(
    site: HttpContext, request: Request, topic: str, number: int, start: int, end: int
) -> tuple[Partition, int, int]:
    caller_of(request).read(topic)
    return site.broker.streams.get(topic).partition(number), start, end


def _range(entry: Any) -> tuple[str, int, int, int]:
    if type(entry) is not dict or entry.keys() != {"topic", "partition", "start", "end"}:
        raise MalformedJson("a range has the fields topic, partition, start and end")
    number = integer(entry["partition"], "partition", most=PARTITION_MAX)
    start, end = (integer(entry[name], name, most=OFFSET_MAX) for name in ("start", "end"))
    if type(entry["topic"]) is not str or number is None or start is None or end is None:
        raise MalformedJson("topic is a string; partition, start and end are numbers")
    return entry["topic"], number, start, end


def _slice(entry: Any) -> tuple[int, int, int]:
    if type(entry) is not dict or entry.keys() != {"log", "segment", "generation"}:
        raise MalformedJson("a slice has the fields log, segment and generation")
    found = [integer(entry[name], name, most=OFFSET_MAX) for name in ("log", "segment", "generation")]
    if None in found:
        raise MalformedJson("log, segment and generation are numbers")
    log_id, segment, generation = (number or 0 for number in found)
    return log_id, segment, generation
