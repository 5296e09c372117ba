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


def _connection(site: HttpContext, client: Client) -> JsonObject:
    shape: JsonObject = client.describe()
    return shape | message_stats.measured(site, ("connection", shape["name"]), {name: shape[name] for name in RATED})


def _channels(site: HttpContext, client: Client) -> list[JsonObject]:
    found: list[JsonObject] = client.describe_channels()
    for shape in found:
        shape["message_stats"] = message_stats.measured(site, ("channel", shape["name"]), shape["message_stats"])
    return found


async def list_all(site: HttpContext, request: Request) -> Response:
    return await listing(site, request, visible_clients(site, request), partial(_connection, site))


async def list_in_vhost(site: HttpContext, request: Request) -> Response:
    vhost = site.broker.vhosts.get(name_of(request, "vhost")).name
    shaped = await YieldEvery().map(partial(_connection, site), visible_clients(site, request))
    found = [shape for shape in shaped if shape["vhost"] == vhost]
    return await listing(site, request, found, lambda shape: shape)


async def list_of_user(site: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    shaped = await YieldEvery().map(partial(_connection, site), visible_clients(site, request))
    return await listing(site, request, [shape for shape in shaped if shape["user"] == name], lambda shape: shape)


async def get(site: HttpContext, request: Request) -> Response:
    return object_response(request, _connection(site, visible_client(site, request, name_of(request, "name"))))


async def channels_of(site: HttpContext, request: Request) -> Response:
    client = visible_client(site, request, name_of(request, "name"))
    return await listing(site, request, _channels(site, client), lambda shape: shape)


async def close(site: HttpContext, request: Request) -> Response:
    client, caller = visible_client(site, request, name_of(request, "name")), caller_of(request)
    if client.describe()["user"] != caller.name:
        caller.must_be(ADMINISTRATOR)
    client.close_for(_reason(request))
    return parameters.no_content()


async def close_of_user(site: HttpContext, request: Request) -> Response:
    """Closes all connections of a user; succeeds without any, as in RabbitMQ."""
    name, caller = name_of(request, "name"), caller_of(request)
    if name != caller.name:
        caller.must_be(ADMINISTRATOR)
    reason = _reason(request)
    async for client in YieldEvery().each(site.broker.clients.all()):
        if client.describe()["user"] == name:
            client.close_for(reason)
    return parameters.no_content()


def _reason(request: Request) -> str:
    return (request.headers.get("x-reason") or "Closed via management plugin")[:200]


async def channels(site: HttpContext, request: Request) -> Response:
    described = await YieldEvery().map(partial(_channels, site), visible_clients(site, request))
    found = [channel for channels_ in described for channel in channels_]
    vhost = _vhost(site, request)
    return await listing(site, request, [c for c in found if vhost in (None, c["vhost"])], lambda shape: shape)


async def channel(site: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    for client in visible_clients(site, request):
        for found in _channels(site, client):
            if found["name"] == name:
                return object_response(request, found)
    raise NotFound(f"unknown channel {name!r}")


async def consumers(site: HttpContext, request: Request) -> Response:
    vhost = _vhost(site, request)
    described = await YieldEvery().map(lambda client: client.describe_consumers(), visible_clients(site, request))
    found = [
        consumer for consumers_ in described for consumer in consumers_ if vhost in (None, consumer["queue"]["vhost"])
    ]
    return await listing(site, request, found, lambda shape: shape)


def _vhost(site: HttpContext, request: Request) -> str | None:
    if "vhost" not in request.path_params:
        return None
    return site.broker.vhosts.get(name_of(request, "vhost")).name
