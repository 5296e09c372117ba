"""Export and import of definitions in RabbitMQ's format."""

import asyncio
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.vhosts import definitions
from headrace.errors import InvalidInput
from headrace.listeners.http.management.parameters import (
    body_of,
    encode,
    json_response,
    query_of,
    refuse_too_many_values,
)
from headrace.listeners.http.management.queues import host_of
from headrace.listeners.http.server.context import HttpContext, PiecewiseResponse
from headrace.listeners.http.server.requests import in_thread_if, read_body
from headrace.version import __version__
from headrace.wire.http.bodies import JSON

RABBITMQ_VERSION = "3.13.7"  # the version whose format is used
BYTES_MAX = 64 << 20
VALUES_MAX = 4_000_000  # a binding has nine values and 150 bytes


async def export(context: HttpContext, request: Request) -> Response:
    document: dict[str, Any] = {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "Headrace",
        "product_version": __version__,
        "rabbitmq_definition_format": "cluster",
        "original_cluster_name": context.broker.global_parameters.cluster_name,
        "explanation": "Definitions of Headrace",
    }
    document |= await definitions.export(context.broker)
    # Encode one list per event-loop iteration: ten thousand bindings take milliseconds.
    pieces = [b"{"]
    for number, (name, content) in enumerate(document.items()):
        pieces += [b"," if number else b"", encode(name), b":", encode(content)]
        await asyncio.sleep(0)
    response = PiecewiseResponse([*pieces, b"}"], {"cache-control": "no-store"}, media_type=JSON)
    if "download" in query_of(request):
        name = re.sub(r"[^A-Za-z0-9._-]", "_", query_of(request)["download"]) or "definitions.json"
        response.headers["content-disposition"] = f"attachment; filename={name}"
    return response


async def export_vhost(context: HttpContext, request: Request) -> Response:
    host = host_of(context, request)
    found = await definitions.export(context.broker, host.name)
    metadata = definitions.metadata_json(host)
    head = {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "Headrace",
        "product_version": __version__,
        "rabbitmq_definition_format": "single_virtual_host",
        "original_vhost_name": host.name,
        "explanation": f"Definitions of virtual host '{host.name}'",
        "metadata": metadata,
        **metadata,
        "limits": dict(host.limits),
    }
    return json_response({**head, **found})


async def import_(context: HttpContext, request: Request) -> Response:
    return await _import(context, request, None)


async def import_vhost(context: HttpContext, request: Request) -> Response:
    return await _import(context, request, host_of(context, request).name)


async def _import(context: HttpContext, request: Request, vhost: str | None) -> Response:
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        document = await _from_form(request)
    else:
        document = await body_of(request, BYTES_MAX, VALUES_MAX)
    await definitions.import_(context.broker, document, vhost)
    return Response(status_code=204)


async def _from_form(request: Request) -> dict[str, Any]:
    """The first JSON part of a form upload, which RabbitMQ's own page uses."""
    data = bytes(await read_body(request, request.state.share, BYTES_MAX, BYTES_MAX))
    return await in_thread_if(len(data), _first_object, data, request.headers["content-type"])


def _first_object(data: bytes, content_type: str) -> dict[str, Any]:
    match = re.search(rb"boundary=\"?([^\";]+)", content_type.encode("latin-1"))
    for part in data.split(b"--" + match[1]) if match else []:
        content = part.partition(b"\r\n\r\n")[2].strip()
        if content.startswith(b"{"):
            refuse_too_many_values(content, VALUES_MAX)
            try:
                found = msgspec.json.decode(content)
            except msgspec.DecodeError:
                continue
            if isinstance(found, dict):
                return found
    raise InvalidInput("the upload contains no definitions")
