"""Consuming a queue over HTTP: receive messages with a visibility timeout, then ack, nack or extend their receipts."""

import asyncio
from base64 import b64encode
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.receipts import Outcome, Pull, Received
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import InvalidInput
from headrace.listeners.http.management.representations import properties_json
from headrace.listeners.http.native.types import (
    Extension,
    Receipt,
    ReceivedMessage,
    ReceivedMessages,
    ReceiveRequest,
    Settled,
    Settlement,
)
from headrace.listeners.http.server.authentication import Caller
from headrace.listeners.http.server.authorization import Allowance
from headrace.listeners.http.server.context import ChunkedResponse, HttpContext, json_response
from headrace.listeners.http.server.requests import (
    ClientDisconnected,
    Query,
    R,
    decode,
    in_thread_if,
    path_name,
    read_json,
    wait_for_disconnect,
)
from headrace.wire.http import json_text
from headrace.wire.http.messages import LARGE_BYTES


def consumes(caller: Caller, request: Request) -> None:
    """The permission that AMQP's basic.consume and basic.get need."""
    caller.read(path_name(request, "queue"), _vhost(request))


def _vhost(request: Request) -> str:
    return Query(request, "vhost").text("vhost") or DEFAULT


async def _parse(context: HttpContext, request: Request, kind: type[R]) -> tuple[Queue, R]:
    wanted = decode(await read_json(request, request.state.share), kind)
    queue = context.broker.vhosts.get(_vhost(request)).queue(path_name(request, "queue"), None)
    if queue.is_stream:
        text = f"'{queue.name}' is a stream, which has no acks: read it with GET /topics/{queue.name}/messages"
        raise InvalidInput(text)
    return queue, wanted


async def receive(context: HttpContext, request: Request) -> Response:
    """Takes messages from the queue, waiting for the first. Each returns to the queue unless it is settled in time."""
    queue, wanted = await _parse(context, request, ReceiveRequest)
    context.receipts.check_room(wanted.count)
    bytes_max = context.config.read_bytes_max
    wait_s = min(wanted.wait_ms, context.config.read_wait_ms_max) / 1000
    queue.vhost.flushes.flush_memory()
    await queue.prepare_get()
    pull = Pull(queue, wanted.count, bytes_max)
    try:
        queue.serve()
        if not pull.received and wait_s > 0:
            await _wait(context, request, pull, wait_s)
        size = sum(len(one.message.body) for one in pull.received)
        request.state.share.take(size)
    except BaseException:
        pull.give_back()
        raise
    finally:
        pull.close()
    received = pull.received
    receipts = context.receipts.add(queue, received, wanted.visibility_timeout_ms / 1000)
    context.stats.messages_out += len(received)
    answer = await in_thread_if(size, _render, receipts, received)
    context.stats.bytes_out += len(answer.body)
    return answer


async def _wait(context: HttpContext, request: Request, pull: Pull, wait_s: float) -> None:
    allowance = Allowance(context, request)
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({pull.first, gone, context.stopping}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnected
        allowance.check()
    finally:
        gone.cancel()


def _render(receipts: Sequence[str], received: Sequence[Received]) -> ChunkedResponse:
    found: ReceivedMessages = {
        "messages": [_message(receipt, one) for receipt, one in zip(receipts, received, strict=True)]
    }
    return json_response(found)


def _message(receipt: str, received: Received) -> ReceivedMessage:
    message = received.message
    shape: ReceivedMessage = {
        "receipt": receipt,
        "redelivered": received.redelivered,
        "exchange": message.exchange.encode("utf-8", "surrogateescape").decode("utf-8", "replace"),
        "routing_key": message.key.decode("utf-8", "replace"),
        "timestamp": message.timestamp,
        "properties": properties_json(message.properties),
        "value": "",
    }
    body = message.body
    # A large body of control characters would take six times its size as text.
    if 0 <= json_text.text_size(body) <= max(2 * len(body) + 2, LARGE_BYTES):
        shape["value"] = body.decode()
    else:
        shape["value"], shape["encoding"] = b64encode(body).decode("ascii"), {"value": "base64"}
    return shape


async def ack(context: HttpContext, request: Request) -> Response:
    """Removes messages from the queue; the removal is durable when the response is sent."""
    queue, wanted = await _parse(context, request, Receipt)
    outcome = context.receipts.ack(queue, wanted.receipts)
    if outcome.done and queue.durable:
        await queue.vhost.flushes.wait_settles_stored()
    return _settled(outcome)


async def nack(context: HttpContext, request: Request) -> Response:
    """Returns messages to the queue, or dead-letters them."""
    queue, wanted = await _parse(context, request, Settlement)
    if wanted.requeue:
        return _settled(context.receipts.requeue(queue, wanted.receipts))
    outcome = context.receipts.reject(queue, wanted.receipts)
    await queue.rejects_moved()
    await queue.vhost.flushes.wait_settles_stored()
    return _settled(outcome)


async def extend(context: HttpContext, request: Request) -> Response:
    """Starts the visibility timeout of messages anew."""
    queue, wanted = await _parse(context, request, Extension)
    return _settled(context.receipts.extend(queue, wanted.receipts, wanted.visibility_timeout_ms / 1000))


def _settled(outcome: Outcome) -> Response:
    body: Settled = {"done": outcome.done, "unknown": outcome.unknown}
    return json_response(body)
