"""Exchanges and bindings: list, declare, describe, delete, and publish."""

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
from headrace.listeners.http.management.parameters import (
    JsonObject,
    body_of,
    flag,
    json_response,
    listing,
    name_of,
    object_response,
    table,
    text,
)
from headrace.listeners.http.management.queues import host_of, queue_bindings
from headrace.listeners.http.management.representations import parse_message
from headrace.listeners.http.management.visibility import visible_hosts
from headrace.listeners.http.server.authentication import Caller
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext


def exchange_of(context: HttpContext, request: Request, parameter: str = "name") -> tuple[VirtualHost, Exchange]:
    host, name = host_of(context, request), name_of(request, parameter)
    return host, host.routing.exchange("" if name == representations.DEFAULT_EXCHANGE else name)


async def list_all(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, visible_hosts(context, request))


async def list_in_vhost(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, [host_of(context, request)])


async def _list(context: HttpContext, request: Request, hosts: Iterable[VirtualHost]) -> Response:
    found = [(host.name, exchange) for host in hosts for _, exchange in sorted(host.routing.exchanges.items())]
    return await listing(
        context,
        request,
        found,
        lambda item: representations.exchange_json(context, *item),
        name=lambda item: item[1].name,
        quick={"name": lambda item: item[1].name, "type": lambda item: item[1].declared_kind},
    )


async def get(context: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(context, request)
    return object_response(
        request, {**representations.exchange_json(context, host.name, exchange), "incoming": [], "outgoing": []}
    )


async def put(context: HttpContext, request: Request) -> Response:
    host, name = host_of(context, request), name_of(request, "name")
    fields = await body_of(request)
    kind = text(fields.get("type", "direct"), "type")  # RabbitMQ's default
    if not is_kind(kind):
        raise InvalidInput(f"unknown exchange type {kind[:80]!r}")
    known = name in host.routing.exchanges
    arguments = table(fields.get("arguments"), "arguments")
    alternate = arguments.get("alternate-exchange")
    if isinstance(alternate, str) and not known:
        caller_of(request).read(name, host.name)
        caller_of(request).write(alternate, host.name)
    await host.declare_exchange(
        name,
        kind,
        durable=flag(fields.get("durable"), True),
        auto_delete=flag(fields.get("auto_delete")),
        internal=flag(fields.get("internal")),
        arguments=arguments,
    )
    return parameters.created(new=not known)


async def delete(context: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(context, request)
    await host.delete_exchange(exchange.name, if_unused=flag(parameters.query_of(request).get("if-unused")))
    return parameters.no_content()


async def publish(context: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(context, request)
    fields, caller = await body_of(request, parameters.MESSAGE_BYTES_MAX), caller_of(request)
    message = parse_message(exchange.name, fields)
    keys = message.take_receivers()
    if isinstance(exchange, Topic):
        for key in keys:
            caller.write_key(exchange.name, key, host.name)
    _check_user_id(fields, caller)
    taken = await publish_message(host, context.broker.pressure, message, keys)
    context.stats.messages_in += 1
    return json_response({"routed": taken > 0})


def _check_user_id(fields: JsonObject, caller: Caller) -> None:
    """The user_id of a message must be the name of the caller, as in AMQP."""
    claimed = (fields.get("properties") or {}).get("user_id")
    if claimed is not None and claimed != caller.name and not caller.user.may_impersonate:
        raise InvalidInput(f"user_id property set to {str(claimed)[:80]!r} but authenticated user was {caller.name!r}")


# Bindings


async def bindings_from(context: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(context, request)
    if not exchange.name:
        names = sorted(host.queues)
        return await listing(
            context, request, names, lambda name: representations.default_binding_json(host.name, name)
        )
    found = list(exchange.bindings.values())
    return await listing(context, request, found, lambda binding: representations.binding_json(host.name, binding))


async def bindings_to(context: HttpContext, request: Request) -> Response:
    host, exchange = exchange_of(context, request)
    return json_response(
        [representations.binding_json(host.name, binding) for binding in host.routing.bindings_to(exchange)]
    )


async def list_bindings(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, await _bindings(visible_hosts(context, request)), lambda shape: shape)


async def list_bindings_in_vhost(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, await _bindings([host_of(context, request)]), lambda shape: shape)


async def _bindings(hosts: Iterable[VirtualHost]) -> list[JsonObject]:
    yielding = YieldEvery()
    found: list[JsonObject] = []
    for host in hosts:
        async for queue in yielding.each(list(map(host.queues.__getitem__, sorted(host.queues)))):
            found += queue_bindings(host, queue)
        for exchange in list(host.routing.exchanges.values()):
            async for binding in yielding.each(list(exchange.bindings.values())):
                if not binding.to_queue:
                    found.append(representations.binding_json(host.name, binding))
    return found


def _ends(context: HttpContext, request: Request) -> tuple[VirtualHost, str, Queue | Exchange]:
    host = host_of(context, request)
    source = name_of(request, "source")
    destination = name_of(request, "destination")
    if request.path_params["kind"] == "q":
        known = host.queues.get(destination)
        return host, source, host.queue(destination, known.owner if known is not None else None)
    return host, source, host.routing.exchange(destination)


def _between(host: VirtualHost, source: str, destination: Queue | Exchange) -> list[Binding]:
    name = "" if source == representations.DEFAULT_EXCHANGE else source
    return [binding for binding in host.routing.bindings_to(destination) if binding.source == name]


async def list_between(context: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(context, request)
    if source in ("", representations.DEFAULT_EXCHANGE) and isinstance(destination, Queue):
        return json_response([representations.default_binding_json(host.name, destination.name)])
    return json_response(
        [representations.binding_json(host.name, binding) for binding in _between(host, source, destination)]
    )


def _check_key(request: Request, host: VirtualHost, source: str, key: str) -> None:
    if isinstance(host.routing.exchange(source), Topic):
        caller_of(request).read_key(source, key, host.name)


async def bind(context: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(context, request)
    fields = await body_of(request)
    key = text(fields.get("routing_key", ""), "routing_key")
    arguments = table(fields.get("arguments"), "arguments")
    _check_key(request, host, source, key)
    await host.bind(source, destination, key, arguments)
    # Relative to the request's path, as in RabbitMQ: a proxy may serve this API under another path.
    names = (destination.name, Binding(source, destination, key, arguments).properties_key)
    location = "/".join(quote(name, safe="~", errors="surrogateescape") for name in names)
    return Response(status_code=201, headers={"location": location})


def _one_binding(host: VirtualHost, source: str, destination: Queue | Exchange, properties_key: str) -> Binding:
    found = _between(host, source, destination)
    for binding in found:
        if binding.properties_key == properties_key:
            return binding
    for binding in found:  # some tools use the unescaped routing key as properties_key
        if binding.key == properties_key and not binding.arguments:
            return binding
    raise NotFound("unknown binding")


async def get_binding(context: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(context, request)
    found = _one_binding(host, source, destination, name_of(request, "properties_key"))
    return object_response(request, representations.binding_json(host.name, found))


async def unbind(context: HttpContext, request: Request) -> Response:
    host, source, destination = _ends(context, request)
    found = _one_binding(host, source, destination, name_of(request, "properties_key"))
    _check_key(request, host, found.source, found.key)
    await host.unbind(found.source, destination, found.key, found.arguments)
    return parameters.no_content()
