"""Exactly-once writing over HTTP: upload batches, then commit them under the name of a writer and a number."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.sinks.ledger import LedgerEntry, Line
from headrace.broker.sinks.uploads import Section
from headrace.errors import InvalidInput, MalformedJson
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import OFFSET_MAX, Query, path_name, read_body, read_json, whole_number
from headrace.wire.http.messages import PARTITION_MAX, integer

COMMIT_BYTES_MAX = 16 << 20
PART_FIELDS = {"staged", "topic", "partition", "position", "length"}


async def stage(site: HttpContext, request: Request) -> Response:
    """Whole batches, validated and on stable storage when answered; nobody sees them before the commit."""
    Query(request)
    config = site.config
    site.broker.pressure.check()
    body = await read_body(request, request.state.share, config.request_bytes_max, config.decompressed_bytes_max)
    if not body:
        raise InvalidInput("there is no batch in the request")
    staged = await site.broker.staging.store(
        path_name(request, "staged"),
        body,
        batch_bytes_max=config.stream.batch_bytes_max,
        decompressed_bytes_max=config.decompressed_bytes_max,
    )
    return json_answer({"bytes": staged.bytes, "records": staged.records}, 201)


async def discard(site: HttpContext, request: Request) -> Response:
    Query(request)
    await site.broker.staging.remove([path_name(request, "staged")])
    return Response(status_code=204)


async def commit(site: HttpContext, request: Request) -> Response:
    """All parts or none, once per (writer, batch). Asking again answers with what was stored the first time."""
    Query(request)
    text = request.path_params["batch"]
    batch = whole_number(text)
    if batch is None:
        raise InvalidInput(f"a batch is a number, not {text[:80]!r}")
    fields = await read_json(request, request.state.share, COMMIT_BYTES_MAX)
    if fields.keys() != {"parts"} or type(fields["parts"]) is not list:
        raise MalformedJson('a commit is {"parts": [...]}')
    parts = [_part(entry) for entry in fields["parts"]]
    caller = caller_of(request)
    if not parts:
        caller.write_something()
    for topic in dict.fromkeys(part.topic for part in parts):
        caller.write(topic)
    outcome = await site.broker.ledger.commit(path_name(request, "writer"), batch, parts, caller.claim_writer)
    return json_answer({"duplicate": outcome.duplicate, **describe(outcome.line)})


def _part(entry: Any) -> LedgerEntry:
    if type(entry) is not dict or entry.keys() != PART_FIELDS:
        raise MalformedJson(f"a part has the fields {', '.join(sorted(PART_FIELDS))}")
    staged, topic = entry["staged"], entry["topic"]
    if type(staged) is not str or type(topic) is not str:
        raise MalformedJson("staged and topic are strings")
    partition = integer(entry["partition"], "partition", most=PARTITION_MAX)
    position = integer(entry["position"], "position", most=OFFSET_MAX)
    length = integer(entry["length"], "length", least=1, most=OFFSET_MAX)
    if partition is None or position is None or length is None:
        raise MalformedJson("partition, position and length are numbers")
    return LedgerEntry(Section(staged, position, length), topic, partition)


async def list_writers(site: HttpContext, request: Request) -> Response:
    Query(request)
    lines = site.broker.ledger.lines()
    return json_answer({"writers": [{"writer": name, **describe(lines[name])} for name in sorted(lines)]})


async def get_writer(site: HttpContext, request: Request) -> Response:
    Query(request)
    name = path_name(request, "writer")
    return json_answer({"writer": name, **describe(site.broker.ledger.get(name))})


def describe(line: Line) -> dict[str, Any]:
    return {
        "batch": line.batch,
        "records": line.records,
        "updated": line.updated_ms,
        "stored": [
            {"topic": s.topic, "partition": s.partition, "base_offset": s.base_offset, "next_offset": s.next_offset}
            for s in line.stored
        ],
    }
