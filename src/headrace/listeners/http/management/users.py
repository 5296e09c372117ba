"""Users, their limits and permissions, as in RabbitMQ's API."""

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.access import passwords
from headrace.broker.access.permissions import Permission, TopicPermission
from headrace.broker.access.users import User
from headrace.errors import InvalidInput, NotFound
from headrace.listeners.http.management import parameters, representations
from headrace.listeners.http.management.parameters import (
    JsonObject,
    body_of,
    json_response,
    listing,
    name_of,
    number,
    object_response,
    query_of,
    table,
    text,
)
from headrace.listeners.http.management.queues import host_of
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext

LIMITS = ("max-connections", "max-channels")  # -1: none


def user_json(user: User) -> JsonObject:
    return {
        "name": user.name,
        "password_hash": user.password_hash,
        "hashing_algorithm": user.hashing_algorithm,
        "tags": list(user.tags),
        "limits": user.limits,
    }


async def whoami(context: HttpContext, request: Request) -> Response:
    user, logged_in = caller_of(request).user, "authorization" in request.headers
    shape = {"name": user.name, "tags": list(user.tags), "is_internal_user": True}
    return json_response({**shape, "is_logged_in": logged_in})  # else guest on this machine


async def hash_password(context: HttpContext, request: Request) -> Response:
    return json_response({"ok": passwords.hash_password(name_of(request, "password"))})


async def list_all(context: HttpContext, request: Request) -> Response:
    return await listing(context, request, context.broker.users.users(), user_json, name=lambda user: user.name)


async def without_permissions(context: HttpContext, request: Request) -> Response:
    able = {user for _, user in context.broker.users.permissions()}
    found = [user for user in context.broker.users.users() if user.name not in able]
    return await listing(context, request, found, user_json)


async def get(context: HttpContext, request: Request) -> Response:
    return object_response(request, user_json(context.broker.users.user(name_of(request, "name"))))


async def put(context: HttpContext, request: Request) -> Response:
    """Without password and password_hash the password is kept."""
    name, fields = name_of(request, "name"), await body_of(request)
    given = [fields.get("password"), fields.get("password_hash")]
    password, password_hash = (None if secret is None else text(secret, "the password") for secret in given)
    if password is not None and password_hash is not None:
        raise InvalidInput("password and password_hash exclude each other")
    if fields.get("tags") is None:
        raise InvalidInput("tags are required: a list, or a comma-separated string")
    known = any(user.name == name for user in context.broker.users.users())
    await context.broker.users.put_user(
        name,
        password=password,
        password_hash=password_hash,
        hashing_algorithm=text(fields.get("hashing_algorithm") or passwords.SHA256, "hashing_algorithm"),
        tags=tags_of(fields["tags"]),
        limits=table(fields["limits"], "limits") if "limits" in fields else None,
    )
    return parameters.created(new=not known)


def tags_of(given: Any) -> list[str]:
    if isinstance(given, str):
        return given.split(",")
    if isinstance(given, list) and all(isinstance(tag, str) for tag in given):
        return given
    raise InvalidInput("tags must be a list of strings or a comma-separated string")


async def delete(context: HttpContext, request: Request) -> Response:
    await context.broker.users.remove_user(name_of(request, "name"))
    return parameters.no_content()


async def bulk_delete(context: HttpContext, request: Request) -> Response:
    names = (await body_of(request)).get("users")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput('the body must be {"users": ["name", ...]}')
    there = {user.name for user in context.broker.users.users()}
    for name in dict.fromkeys(names):
        if name in there:  # unknown users are ignored, as in RabbitMQ
            await context.broker.users.remove_user(name)
    return parameters.no_content()


# Limits, enforced by the AMQP listener


def _limits(users: Iterable[User]) -> list[JsonObject]:
    return [{"user": user.name, "value": user.limits} for user in users if user.limits]


async def limits(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, _limits(context.broker.users.users()))


async def limits_of(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, _limits([context.broker.users.user(name_of(request, "name"))]))


async def put_limit(context: HttpContext, request: Request) -> Response:
    user, limit = context.broker.users.user(name_of(request, "name")), name_of(request, "limit")
    if limit not in LIMITS:
        raise InvalidInput(f"the limit must be {' or '.join(LIMITS)}, not {limit[:80]!r}")
    value = number((await body_of(request)).get("value"), "value", least=-1, most=2**31)
    await context.broker.users.put_user(user.name, limits={**user.limits, limit: value})
    return parameters.no_content()


async def delete_limit(context: HttpContext, request: Request) -> Response:
    user, limit = context.broker.users.user(name_of(request, "name")), name_of(request, "limit")
    if limit not in user.limits:
        raise NotFound(f"user {user.name!r} has no limit {limit[:80]!r}")
    rest = {name: value for name, value in user.limits.items() if name != limit}
    await context.broker.users.put_user(user.name, limits=rest)
    return parameters.no_content()


# Permissions


def _permissions(context: HttpContext) -> list[JsonObject]:
    return [
        {"user": user, "vhost": vhost, **msgspec.structs.asdict(rule)}
        for (vhost, user), rule in context.broker.users.permissions().items()
    ]


def _topic_permissions(context: HttpContext) -> list[JsonObject]:
    return [
        {"user": user, "vhost": vhost, "exchange": exchange, **msgspec.structs.asdict(rule)}
        for (vhost, user, exchange), rule in context.broker.users.topic_permissions().items()
    ]


async def _list(context: HttpContext, request: Request, found: Iterable[JsonObject]) -> Response:
    return await listing(context, request, found, lambda shape: shape)


async def permissions(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, _permissions(context))


async def topic_permissions(context: HttpContext, request: Request) -> Response:
    return await _list(context, request, _topic_permissions(context))


async def permissions_of(context: HttpContext, request: Request) -> Response:
    user = context.broker.users.user(name_of(request, "name"))
    return await _list(context, request, [shape for shape in _permissions(context) if shape["user"] == user.name])


async def topic_permissions_of(context: HttpContext, request: Request) -> Response:
    user = context.broker.users.user(name_of(request, "name"))
    return await _list(context, request, [shape for shape in _topic_permissions(context) if shape["user"] == user.name])


async def permissions_in(context: HttpContext, request: Request) -> Response:
    vhost = host_of(context, request).name
    return await _list(context, request, [shape for shape in _permissions(context) if shape["vhost"] == vhost])


async def topic_permissions_in(context: HttpContext, request: Request) -> Response:
    vhost = host_of(context, request).name
    return await _list(context, request, [shape for shape in _topic_permissions(context) if shape["vhost"] == vhost])


def _vhost_and_user(context: HttpContext, request: Request) -> tuple[str, str]:
    """NotFound for an unknown vhost, but InvalidInput for an unknown user, as in RabbitMQ."""
    vhost, name = host_of(context, request).name, name_of(request, "name")
    if request.method == "PUT" and all(user.name != name for user in context.broker.users.users()):
        raise InvalidInput(f"unknown user {name!r}")
    return vhost, name


async def get_permission(context: HttpContext, request: Request) -> Response:
    vhost, name = _vhost_and_user(context, request)
    for shape in _permissions(context):
        if (shape["vhost"], shape["user"]) == (vhost, name):
            return object_response(request, shape)
    raise NotFound(f"user {name!r} has no permissions in vhost {vhost!r}")


async def put_permission(context: HttpContext, request: Request) -> Response:
    vhost, name = _vhost_and_user(context, request)
    fields = await body_of(request)
    known = (vhost, name) in context.broker.users.permissions()
    patterns = {right: text(fields.get(right), right) for right in ("configure", "write", "read")}
    await context.broker.users.set_permission(vhost, name, Permission(**patterns))
    return parameters.created(new=not known)


async def delete_permission(context: HttpContext, request: Request) -> Response:
    await context.broker.users.clear_permission(*_vhost_and_user(context, request))
    return parameters.no_content()


async def get_topic_permissions(context: HttpContext, request: Request) -> Response:
    vhost, name = _vhost_and_user(context, request)
    exchange = _exchange(request)
    found = [
        shape
        for shape in _topic_permissions(context)
        if (shape["vhost"], shape["user"]) == (vhost, name) and exchange in (None, shape["exchange"])
    ]
    if not found:
        raise NotFound(f"user {name!r} has no topic permissions in vhost {vhost!r}")
    return await _list(context, request, found)


async def put_topic_permission(context: HttpContext, request: Request) -> Response:
    vhost, name = _vhost_and_user(context, request)
    fields = await body_of(request)
    exchange = text(fields.get("exchange"), "exchange")
    exchange = "" if exchange == representations.DEFAULT_EXCHANGE else exchange
    known = (vhost, name, exchange) in context.broker.users.topic_permissions()
    rule = TopicPermission(write=text(fields.get("write"), "write"), read=text(fields.get("read"), "read"))
    await context.broker.users.set_topic_permission(vhost, name, exchange, rule)
    return parameters.created(new=not known)


async def delete_topic_permission(context: HttpContext, request: Request) -> Response:
    """Deletes the permissions for all exchanges, or for the one that is named in the path or with ?exchange=."""
    exchange = query_of(request).get("exchange") if _exchange(request) is None else _exchange(request)
    await context.broker.users.clear_topic_permission(*_vhost_and_user(context, request), exchange)
    return parameters.no_content()


def _exchange(request: Request) -> str | None:
    """The exchange in the path, if the path names one."""
    if "exchange" not in request.path_params:
        return None
    name = name_of(request, "exchange")
    return "" if name == representations.DEFAULT_EXCHANGE else name
