"""Connections, channels and consumers of all listeners."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.clients import Client
from headrace.broker.cooperative import YieldEvery
from headrace.errors import NotFound
from headrace.listeners.http.management import message_stats, parameters
from headrace.listeners.http.management.parameters import JsonObject, listing, name_of, object_response
from headrace.listeners.http.management.visibility import visible_client, visible_clients
from headrace.listeners.http.server.authentication import ADMINISTRATOR
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext

RATED = ("recv_oct", "recv_cnt", "send_oct", "send_cnt")


def _connection(context: HttpContext, client: Client) -> JsonObject:
    shape: JsonObject = client.describe()
    return shape | message_stats.measured(context, ("connection", shape["name"]), {name: shape[name] for name in RATED})


def _channels(context: HttpContext, client: Client) -> list[JsonObject]:
    found: list[JsonObject] = client.describe_channels()
    for shape in found:
        shape["message_stats"] = message_stats.measured(context, ("channel", shape["name"]), shape["message_stats"])
    return found


async def list_all(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, visible_clients(context, request), partial(_connection, context))


async def list_in_vhost(context: HttpContext, request: Request) -> Response:
    vhost = context.broker.vhosts.get(name_of(request, "vhost")).name
    shaped = await YieldEvery().map(partial(_connection, context), visible_clients(context, request))
    found = [shape for shape in shaped if shape["vhost"] == vhost]
    return await listing(context, request, found, lambda shape: shape)


async def list_of_user(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    shaped = await YieldEvery().map(partial(_connection, context), visible_clients(context, request))
    return await listing(context, request, [shape for shape in shaped if shape["user"] == name], lambda shape: shape)


async def get(context: HttpContext, request: Request) -> Response:
    return object_response(request, _connection(context, visible_client(context, request, name_of(request, "name"))))


async def channels_of(context: HttpContext, request: Request) -> Response:
    client = visible_client(context, request, name_of(request, "name"))
    return await listing(context, request, _channels(context, client), lambda shape: shape)


async def close(context: HttpContext, request: Request) -> Response:
    client, caller = visible_client(context, request, name_of(request, "name")), caller_of(request)
    if client.describe()["user"] != caller.name:
        caller.must_be(ADMINISTRATOR)
    client.close_for(_reason(request))
    return parameters.no_content()


async def close_of_user(context: HttpContext, request: Request) -> Response:
    """Closes all connections of a user; succeeds without any, as in RabbitMQ."""
    name, caller = name_of(request, "name"), caller_of(request)
    if name != caller.name:
        caller.must_be(ADMINISTRATOR)
    reason = _reason(request)
    async for client in YieldEvery().each(context.broker.clients.all()):
        if client.describe()["user"] == name:
            client.close_for(reason)
    return parameters.no_content()


def _reason(request: Request) -> str:
    return (request.headers.get("x-reason") or "Closed via management plugin")[:200]


async def channels(context: HttpContext, request: Request) -> Response:
    described = await YieldEvery().map(partial(_channels, context), visible_clients(context, request))
    found = [channel for channels_ in described for channel in channels_]
    vhost = _vhost(context, request)
    return await listing(context, request, [c for c in found if vhost in (None, c["vhost"])], lambda shape: shape)


async def channel(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    for client in visible_clients(context, request):
        for found in _channels(context, client):
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
