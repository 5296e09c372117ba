"""Policies and operator policies."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.vhosts.policies import Policy
from headrace.listeners.http.management import parameters, representations
from headrace.listeners.http.management.parameters import (
    body_of,
    listing,
    name_of,
    number,
    object_response,
    table,
    text,
)
from headrace.listeners.http.management.queues import host_of
from headrace.listeners.http.management.visibility import visible_hosts
from headrace.listeners.http.server.context import HttpContext


def is_operator(request: Request) -> bool:
    return str(request.scope["path"]).startswith("/api/operator-policies")


async def list_all(context: HttpContext, request: Request) -> Response:
    seen = {host.name for host in visible_hosts(context, request)}
    found = [policy for policy in context.broker.policies.list(operator=is_operator(request)) if policy.vhost in seen]
    return await listing(context, request, found, representations.policy_json)


async def list_in_vhost(context: HttpContext, request: Request) -> Response:
    found = context.broker.policies.list(host_of(context, request).name, operator=is_operator(request))
    return await listing(context, request, found, representations.policy_json)


async def get(context: HttpContext, request: Request) -> Response:
    host, name = host_of(context, request), name_of(request, "name")
    found = context.broker.policies.get(host.name, name, operator=is_operator(request))
    return object_response(request, representations.policy_json(found))


async def put(context: HttpContext, request: Request) -> Response:
    host, name = host_of(context, request), name_of(request, "name")
    operator = is_operator(request)
    known = any(p.name == name for p in context.broker.policies.list(host.name, operator=operator))
    await context.broker.policies.put(parse(host.name, name, await body_of(request)), operator=operator)
    return parameters.created(new=not known)


def parse(vhost: str, name: str, fields: Mapping[str, Any]) -> Policy:
    return Policy(
        vhost=vhost,
        name=name,
        pattern=text(fields.get("pattern"), "pattern"),
        definition=table(fields.get("definition"), "definition"),
        priority=number(fields.get("priority"), "priority", 0, least=-(2**31), most=2**31),
        apply_to=text(fields.get("apply-to") or "all", "apply-to"),
    )


async def delete(context: HttpContext, request: Request) -> Response:
    host, name = host_of(context, request), name_of(request, "name")
    await context.broker.policies.delete(host.name, name, operator=is_operator(request))
    return parameters.no_content()
