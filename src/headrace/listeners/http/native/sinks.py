"""Exactly-once sinks: upload batches, then commit them under a writer's name and a batch number."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.sinks.ledger import LedgerEntry, Line
from headrace.broker.sinks.uploads import Section
from headrace.errors import InvalidInput
from headrace.listeners.http.native.publish import read_messages_body
from headrace.listeners.http.native.types import SinkBatch, SinkCommit, SinkOutcome, Staged, Writer, Writers
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, decode, path_name, read_json, whole_number

COMMIT_BYTES_MAX = 16 << 20


async def stage(context: HttpContext, request: Request) -> Response:
    """Stores whole batches, validated and durable when the response is sent, but invisible until committed."""
    Query(request)
    config = context.config
    context.broker.pressure.check()
    body = await read_messages_body(context, request)
    if not body:
        raise InvalidInput("the request body contains no record batch")
    stored = await context.broker.uploads.store(
        path_name(request, "staged"),
        body,
        batch_bytes_max=config.stream.batch_bytes_max,
        decompressed_bytes_max=config.decompressed_bytes_max,
    )
    staged: Staged = {"bytes": stored.bytes, "records": stored.records}
    return json_response(staged, 201)


async def discard(context: HttpContext, request: Request) -> Response:
    Query(request)
    await context.broker.uploads.remove([path_name(request, "staged")])
    return Response(status_code=204)


async def commit(context: HttpContext, request: Request) -> Response:
    """Stores all parts or none, once per writer and batch. A repeated commit returns the result of the first."""
    Query(request)
    text = request.path_params["batch"]
    batch = whole_number(text)
    if batch is None:
        raise InvalidInput(f"the batch in the path must be a number, not {text[:80]!r}")
    wanted = decode(await read_json(request, request.state.share, COMMIT_BYTES_MAX), SinkCommit)
    parts = [
        LedgerEntry(Section(part.staged, part.position, part.length), part.topic, part.partition)
        for part in wanted.parts
    ]
    caller = caller_of(request)
    if not parts:
        caller.write_something()
    for topic in dict.fromkeys(part.topic for part in parts):
        caller.write(topic)
    outcome = await context.broker.ledger.commit(path_name(request, "writer"), batch, parts, caller.claim_writer)
    committed: SinkOutcome = {"duplicate": outcome.duplicate, **describe(outcome.line)}
    return json_response(committed)


async def list_writers(context: HttpContext, request: Request) -> Response:
    Query(request)
    lines = context.broker.ledger.lines()
    writers: Writers = {"writers": [{"writer": name, **describe(lines[name])} for name in sorted(lines)]}
    return json_response(writers)


async def get_writer(context: HttpContext, request: Request) -> Response:
    Query(request)
    name = path_name(request, "writer")
    writer: Writer = {"writer": name, **describe(context.broker.ledger.get(name))}
    return json_response(writer)


def describe(line: Line) -> SinkBatch:
    return {
        "batch": line.batch,
        "records": line.records,
        "updated": line.updated_ms,
        "stored": [
            {"topic": s.topic, "partition": s.partition, "base_offset": s.base_offset, "next_offset": s.next_offset}
            for s in line.stored
        ],
    }
