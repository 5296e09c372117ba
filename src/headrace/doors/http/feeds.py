"""What bulk readers such as Spark need beside the batches: where logs end, and leases on what they plan to read."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.doors.http.requests import OFFSET_MAX, Query, read_json
from headrace.doors.http.site import Site, json_answer
from headrace.doors.http.topics import topic_of
from headrace.errors import InvalidInput, MalformedJson
from headrace.wire.http.messages import integer

LEASE_MS_MAX = 24 * 3600 * 1000
HOLDER_CHARS_MAX = 100
SLICES_MAX = 100_000


async def logs(site: Site, request: Request) -> Response:
    """The logs of a topic: id, epoch, and every end there is."""
    Query(request)
    stream = topic_of(site, request)
    return json_answer(
        {
            "topic": stream.name,
            "partitions": [
                {
                    "partition": p.number,
                    "log": p.log.id,
                    "epoch": p.log.epoch,
                    "start": p.start_offset,
                    "end": p.end_offset,
                    "stable_end": p.stable_end,
                    "durable_end": p.durable_end,
                    "held_from": min(p.log.holds.values(), default=None),
                    "size_bytes": p.log.size_bytes,
                }
                for p in stream.partitions
            ],
        }
    )


async def lease(site: Site, request: Request) -> Response:
    """Keeps the files of segments for a while, even if retention or compaction is done with them. What a holder asks
    for replaces what it held before."""
    Query(request)
    fields = await read_json(request, request.state.share, 16 << 20)
    if fields.keys() - {"holder"} != {"slices", "for_ms"} or type(fields["slices"]) is not list:
        raise MalformedJson('a lease is {"slices": [{"log", "segment", "generation"}], "for_ms": 60000, "holder": "I"}')
    holder = fields.get("holder")
    if "holder" in fields and (type(holder) is not str or not 0 < len(holder) <= HOLDER_CHARS_MAX):
        raise InvalidInput(f"a holder is a string of 1 to {HOLDER_CHARS_MAX} characters")
    if len(fields["slices"]) > SLICES_MAX:
        raise InvalidInput(f"a lease has at most {SLICES_MAX:,} slices")
    for_ms = integer(fields["for_ms"], "for_ms", least=1, most=LEASE_MS_MAX)
    if for_ms is None:
        raise MalformedJson("for_ms is a number")
    wanted = [_slice(entry) for entry in fields["slices"]]
    until_ms = site.broker.clock.now_ms() + for_ms
    site.broker.shard.maintenance.leases.take(wanted, until_ms, holder)
    return json_answer({"until": until_ms})


def _slice(entry: Any) -> tuple[int, int, int]:
    if type(entry) is not dict or entry.keys() != {"log", "segment", "generation"}:
        raise MalformedJson("a slice has the fields log, segment and generation")
    found = [integer(entry[name], name, most=OFFSET_MAX) for name in ("log", "segment", "generation")]
    if None in found:
        raise MalformedJson("log, segment and generation are numbers")
    log_id, segment, generation = (number or 0 for number in found)
    return log_id, segment, generation
