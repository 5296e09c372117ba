"""Runtime parameters, global parameters and the name of the cluster, as in RabbitMQ's API.

A runtime parameter belongs to a component and a virtual host. The components are those that RabbitMQ has without
plugins: operator policies and the limits of virtual hosts. Parameters of federation and shovel are refused, as RabbitMQ
does without these plugins: a shovel that is accepted and moves nothing would mislead its operator.
"""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.vhosts.definitions import OPERATOR, VHOST_LIMITS, runtime_parameters
from headrace.broker.vhosts.global_parameters import CLUSTER_NAME
from headrace.broker.vhosts.settings import LIMITS, parse_limits
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import InvalidInput, NotFound
from headrace.listeners.http.management import parameters
from headrace.listeners.http.management.parameters import (
    JsonObject,
    body_of,
    json_response,
    listing,
    name_of,
    object_response,
    table,
    text,
)
from headrace.listeners.http.management.policies import parse
from headrace.listeners.http.management.queues import host_of
from headrace.listeners.http.management.visibility import visible_hosts
from headrace.listeners.http.server.context import HttpContext

LIMITS_NAME = "limits"  # of the only parameter that the component vhost-limits has in a virtual host


# Of a virtual host


async def list_all(context: HttpContext, request: Request) -> Response:
    hosts = [host_of(context, request)] if "vhost" in request.path_params else visible_hosts(context, request)
    component = name_of(request, "component") if "component" in request.path_params else None
    found = [
        shape
        for host in hosts
        for shape in runtime_parameters(context.broker, host)
        if component in (None, shape["component"])
    ]
    return await listing(context, request, found, lambda shape: shape)


def _find(context: HttpContext, request: Request) -> JsonObject:
    component, name = name_of(request, "component"), name_of(request, "name")
    for shape in runtime_parameters(context.broker, host_of(context, request)):
        if (shape["component"], shape["name"]) == (component, name):
            return shape
    raise NotFound(f"no parameter {name[:80]!r} of component {component[:80]!r}")


async def get(context: HttpContext, request: Request) -> Response:
    return object_response(request, _find(context, request))


async def put(context: HttpContext, request: Request) -> Response:
    host, component, name = host_of(context, request), name_of(request, "component"), name_of(request, "name")
    fields = await body_of(request)
    if "value" not in fields:
        raise InvalidInput("value is required")
    known = any(
        (shape["component"], shape["name"]) == (component, name) for shape in runtime_parameters(context.broker, host)
    )
    await _put(context, host, component, name, table(fields["value"], "value"))
    return parameters.created(new=not known)


async def _put(context: HttpContext, host: VirtualHost, component: str, name: str, value: JsonObject) -> None:
    if component == OPERATOR:
        await context.broker.policies.put(parse(host.name, name, value), operator=True)
    elif component == VHOST_LIMITS:
        if name != LIMITS_NAME:
            raise InvalidInput(f"Validation failed\n\nthe name of the parameter must be {LIMITS_NAME}\n")
        limits = parse_limits(value)
        await context.broker.vhosts.set_limits(host.name, {limit: limits.get(limit) for limit in LIMITS})
    elif component == "policy":
        raise InvalidInput("policies may not be set using this method")
    else:
        raise InvalidInput(f"Validation failed\n\ncomponent {component[:80]} not found\n")


async def delete(context: HttpContext, request: Request) -> Response:
    found, host = _find(context, request), host_of(context, request)
    if found["component"] == OPERATOR:
        await context.broker.policies.delete(host.name, found["name"], operator=True)
    else:
        await context.broker.vhosts.set_limits(host.name, dict.fromkeys(LIMITS))
    return parameters.no_content()


# Of the whole broker


async def list_global(context: HttpContext, request: Request) -> Response:
    values = await context.broker.global_parameters.list()
    return await listing(
        context, request, [{"name": name, "value": value} for name, value in values.items()], lambda shape: shape
    )


async def get_global(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "name")
    return json_response({"name": name, "value": context.broker.global_parameters.get(name)})


async def put_global(context: HttpContext, request: Request) -> Response:
    name, fields = name_of(request, "name"), await body_of(request)
    if "value" not in fields:
        raise InvalidInput("value is required")
    known = name in context.broker.global_parameters
    await context.broker.global_parameters.put(name, fields["value"])
    return parameters.created(new=not known)


async def delete_global(context: HttpContext, request: Request) -> Response:
    await context.broker.global_parameters.delete(name_of(request, "name"))
    return parameters.no_content()


async def cluster_name(context: HttpContext, request: Request) -> Response:
    return json_response({"name": context.broker.global_parameters.cluster_name})


async def put_cluster_name(context: HttpContext, request: Request) -> Response:
    name = text((await body_of(request)).get("name"), "name")
    await context.broker.global_parameters.put(CLUSTER_NAME, name)
    return parameters.no_content()
