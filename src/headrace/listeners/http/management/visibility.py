"""Visibility: a caller sees its virtual hosts and its own connections; users with the tag monitoring see everything."""

from starlette.requests import Request

from headrace.broker.clients import Client
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import NotFound
from headrace.listeners.http.server.authentication import MONITORING
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext


def visible_hosts(context: HttpContext, request: Request) -> list[VirtualHost]:
    caller = caller_of(request)
    return [host for host in context.broker.vhosts if caller.sees(host.name)]


def visible_clients(context: HttpContext, request: Request) -> list[Client]:
    caller, clients = caller_of(request), context.broker.clients.all()
    if caller.is_one_of(MONITORING):
        return clients
    return [client for client in clients if client.describe()["user"] == caller.name]


def visible_client(context: HttpContext, request: Request, name: str) -> Client:
    for client in visible_clients(context, request):
        if client.describe()["name"] == name:
            return client
    raise NotFound(f"unknown connection {name!r}")
