"""Connections, channels and consumers of all listeners."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.clients import Client
from headrace.broker.cooperative import YieldEvery
from headrace.errors import NotFound
from headrace.listeners.http.management import parameters
from headrace.listeners.http.management.parameters import JsonObject, listing, name_of, object_response
from headrace.listeners.http.management.visibility import visible_client, visible_clients
from headrace.listeners.http.server.authentication import ADMINISTRATOR
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext


def _connection(client: Client) -> JsonObject:
    shape: JsonObject = client.describe()
    return shape


async def list_all(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, visible_clients(context, request), _connection)


async def list_in_vhost(context: HttpContext, request: Request) -> Response:
    vhost = context.broker.vhosts.get(name_of(request, "vhost")).name
    shaped = await YieldEvery().map(_connection, visible_clients(context, request))
    found = [shape for shape in shaped if shape["vhost"] == vhost]
    return await listing(context, request, found, lambda shape: shape)


async def list_of_user(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    shaped = await YieldEvery().map(_connection, visible_clients(context, request))
    return await listing(context, request, [shape for shape in shaped if shape["user"] == name], lambda shape: shape)


async def get(context: HttpContext, request: Request) -> Response:
    return object_response(request, _connection(visible_client(context, request, name_of(request, "name"))))


async def channels_of(context: HttpContext, request: Request) -> Response:
    client = visible_client(context, request, name_of(request, "name"))
    return await listing(context, request, client.describe_channels(), lambda shape: shape)


async def close(context: HttpContext, request: Request) -> Response:
    reason = request.headers.get("x-reason") or "Closed via management plugin"
    client, caller = visible_client(context, request, name_of(request, "name")), caller_of(request)
    if client.describe()["user"] != caller.name:
        caller.must_be(ADMINISTRATOR)
    client.close_for(reason[:200])
    return parameters.no_content()


async def channels(context: HttpContext, request: Request) -> Response:
    described = await YieldEvery().map(lambda client: client.describe_channels(), visible_clients(context, request))
    found = [channel for channels_ in described for channel in channels_]
    vhost = _vhost(context, request)
    return await listing(context, request, [c for c in found if vhost in (None, c["vhost"])], lambda shape: shape)


async def channel(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    for client in visible_clients(context, request):
        for found in client.describe_channels():
            if found["name"] == name:
                return object_response(request, found)
    raise NotFound(f"unknown channel {name!r}")


async def consumers(context: HttpContext, request: Request) -> Response:
    vhost = _vhost(context, request)
    described = await YieldEvery().map(lambda client: client.describe_consumers(), visible_clients(context, request))
    found = [
        consumer for consumers_ in described for consumer in consumers_ if vhost in (None, consumer["queue"]["vhost"])
    ]
    return await listing(context, request, found, lambda shape: shape)


def _vhost(context: HttpContext, request: Request) -> str | None:
    if "vhost" not in request.path_params:
        return None
    return context.broker.vhosts.get(name_of(request, "vhost")).name
