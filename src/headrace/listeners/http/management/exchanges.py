"""Exchanges and bindings: list, declare, look at, delete, publish."""

from collections.abc import Iterable
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import Binding, Exchange, Topic, is_kind
from headrace.broker.vhosts.publish_message import publish_message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import InvalidInput, NotFound
from headrace.listeners.http.management import parameters, representations
from headrace.listeners.http.management.messages import parse_message
from headrace.listeners.http.management.parameters import (
    Shape,
    answer,
    body_of,
    flag,
    listing,
    name_of,
    one,
    table,
    text,
)
from headrace.listeners.http.management.queues import host_of, queue_bindings
from headrace.listeners.http.management.visibility import hosts_seen
from headrace.listeners.http.server.authentication import Caller
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext


def exchange_of(site: HttpContext, request: Request, parameter: str = "name") -> tuple[VirtualHost, Exchange]:
    host, name = host_of(site, request), name_of(request, parameter)
    return host, host.routing.exchange("" if name == representations.DEFAULT_EXCHANGE else name)


async def list_all(site: HttpContext, request: Request) -> Response:
    return await _list(site, request, hosts_seen(site, request))


async def list_in_vhost(site: HttpContext, request: Request) -> Response:
    return await _list(site, request, [host_of(site, request)])


async def _list(site: HttpContext, request: Request, hosts: Iterable[VirtualHost]) -> Response:
    found = [(host.name, exchange) for host in hosts for _, exchange in sorted(host.routing.exchanges.items())]
    return await listing(
        site,
        request,
        found,
        lambda item: representations.exchange_shape(site, *item),
        name=lambda item: item[1].name,
        quick={"name": lambda item: item[1].name, "type": lambda item: item[1].declared_kind},
    )


async def get(site: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(site, request)
    return one(request, {**representations.exchange_shape(site, host.name, exchange), "incoming": [], "outgoing": []})


async def put(site: HttpContext, request: Request) -> Response:
    host, name = host_of(site, request), name_of(request, "name")
    fields = await body_of(request)
    kind = text(fields.get("type", "direct"), "type")  # as RabbitMQ
    if not is_kind(kind):
        raise InvalidInput(f"unknown exchange type {kind[:80]!r}")
    known = name in host.routing.exchanges
    arguments = table(fields.get("arguments"), "arguments")
    otherwise_to = arguments.get("alternate-exchange")
    if isinstance(otherwise_to, str) and not known:
        caller_of(request).read(name, host.name)
        caller_of(request).write(otherwise_to, host.name)
    await host.declare_exchange(
        name,
        kind,
        durable=flag(fields.get("durable"), True),
        auto_delete=flag(fields.get("auto_delete")),
        internal=flag(fields.get("internal")),
        arguments=arguments,
    )
    return parameters.created(new=not known)


async def delete(site: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(site, request)
    await host.delete_exchange(exchange.name, if_unused=flag(parameters.query_of(request).get("if-unused")))
    return parameters.no_content()


async def publish(site: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(site, request)
    fields, caller = await body_of(request, parameters.MESSAGE_BYTES_MAX), caller_of(request)
    message = parse_message(exchange.name, fields)
    keys = message.take_receivers()
    if isinstance(exchange, Topic):
        for key in keys:
            caller.write_key(exchange.name, key, host.name)
    _check_user_id(fields, caller)
    taken = await publish_message(host, site.broker.pressure, message, keys)
    site.stats.messages_in += 1
    return answer({"routed": taken > 0})


def _check_user_id(fields: Shape, caller: Caller) -> None:
    """A message carries the name of whoever sends it, or none."""
    claimed = (fields.get("properties") or {}).get("user_id")
    if claimed is not None and claimed != caller.name and not caller.user.may_impersonate:
        raise InvalidInput(f"user_id property set to {str(claimed)[:80]!r} but authenticated user was {caller.name!r}")


# Bindings.


async def bindings_from(site: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(site, request)
    if not exchange.name:
        names = sorted(host.queues)
        return await listing(site, request, names, lambda name: representations.default_binding_shape(host.name, name))
    found = list(exchange.bindings.values())
    return await listing(site, request, found, lambda binding: representations.binding_shape(host.name, binding))


async def bindings_to(site: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(site, request)
    return answer([representations.binding_shape(host.name, binding) for binding in host.routing.bindings_to(exchange)])


async def list_bindings(site: HttpContext, request: Request) -> Response:
    return await listing(site, request, await _bindings(hosts_seen(site, request)), lambda shape: shape)


async def list_bindings_in_vhost(site: HttpContext, request: Request) -> Response:
    return await listing(site, request, await _bindings([host_of(site, request)]), lambda shape: shape)


async def _bindings(hosts: Iterable[VirtualHost]) -> list[Shape]:
    turns = YieldEvery()
    found: list[Shape] = []
    for host in hosts:
        async for queue in turns.each(list(map(host.queues.__getitem__, sorted(host.queues)))):
            found += queue_bindings(host, queue)
        for exchange in list(host.routing.exchanges.values()):
            async for binding in turns.each(list(exchange.bindings.values())):
                if not binding.to_queue:
                    found.append(representations.binding_shape(host.name, binding))
    return found


def _ends(site: HttpContext, request: Request) -> tuple[VirtualHost, str, Queue | Exchange]:
    host = host_of(site, request)
    source = name_of(request, "source")
    destination = name_of(request, "destination")
    if request.path_params["kind"] == "q":
        known = host.queues.get(destination)
        return host, source, host.queue(destination, known.owner if known is not None else None)
    return host, source, host.routing.exchange(destination)


def _between(host: VirtualHost, source: str, destination: Queue | Exchange) -> list[Binding]:
    name = "" if source == representations.DEFAULT_EXCHANGE else source
    return [binding for binding in host.routing.bindings_to(destination) if binding.source == name]


async def list_between(site: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(site, request)
    if source in ("", representations.DEFAULT_EXCHANGE) and isinstance(destination, Queue):
        return answer([representations.default_binding_shape(host.name, destination.name)])
    return answer(
        [representations.binding_shape(host.name, binding) for binding in _between(host, source, destination)]
    )


def _check_key(request: Request, host: VirtualHost, source: str, key: str) -> None:
    if isinstance(host.routing.exchange(source), Topic):
        caller_of(request).read_key(source, key, host.name)


async def bind(site: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(site, request)
    fields = await body_of(request)
    key = text(fields.get("routing_key", ""), "routing_key")
    arguments = table(fields.get("arguments"), "arguments")
    _check_key(request, host, source, key)
    await host.bind(source, destination, key, arguments)
    properties_key = Binding(source, destination, key, arguments).properties_key
    location = f"/api{request.scope['path'].removeprefix('/api').rstrip('/')}/{quote(properties_key, safe='~')}"
    return Response(status_code=201, headers={"location": location})


def _one_binding(host: VirtualHost, source: str, destination: Queue | Exchange, properties_key: str) -> Binding:
    found = _between(host, source, destination)
    for binding in found:
        if binding.properties_key == properties_key:
            return binding
    for binding in found:  # tools that make the name themselves take the routing key as it is
        if binding.key == properties_key and not binding.arguments:
            return binding
    raise NotFound("no such binding")


async def get_binding(site: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(site, request)
    found = _one_binding(host, source, destination, name_of(request, "properties_key"))
    return one(request, representations.binding_shape(host.name, found))


async def unbind(site: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(site, request)
    found = _one_binding(host, source, destination, name_of(request, "properties_key"))
    _check_key(request, host, found.source, found.key)
    await host.unbind(found.source, destination, found.key, found.arguments)
    return parameters.no_content()
