"""Routes of the management API with the permission each one needs, and its error responses."""

import asyncio
import logging
from importlib import import_module

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace import errors
from headrace.broker.schemas.topic import TOPIC
from headrace.listeners.http.management import (
    browse,
    connections,
    dead_letters,
    definitions,
    exchanges,
    groups,
    overview,
    overview_live,
    policies,
    queues,
    runtime_parameters,
    streams,
    users,
)
from headrace.listeners.http.management.parameters import json_response
from headrace.listeners.http.server.authentication import Caller
from headrace.listeners.http.server.authorization import (
    Handler,
    Need,
    administrator,
    binds,
    configures_it,
    management,
    manages_topics,
    monitoring,
    policymaker,
    public,
    reads_it,
    router,
    writes_it,
)
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.problems import PROBLEMS, headers_of
from headrace.listeners.http.server.requests import ClientDisconnected

logger = logging.getLogger("headrace.http")
BETWEEN = "/bindings/{vhost}/e/{source}/{kind}/{destination}"
TOPIC_PERMISSION = "/topic-permissions/{vhost}/{name}"


def _reads_schemas(caller: Caller, request: Request) -> None:
    management(caller, request)
    caller.read(TOPIC)


def _schemas(name: str) -> Handler:
    """A handler of schemas.py, which is imported when the first of them runs, in a thread: it takes some ten
    milliseconds, and a broker without schemas does not need it."""
    found: Handler | None = None

    async def handler(context: HttpContext, request: Request) -> Response:
        nonlocal found
        if found is None:
            module = await asyncio.to_thread(import_module, "headrace.listeners.http.management.schemas")
            found = getattr(module, name)
        return await found(context, request)

    return handler


ROUTES: tuple[tuple[str, str, Handler, Need], ...] = (
    ("GET", "/overview", overview.overview, management),
    ("GET", "/version", overview.version, public),
    ("GET", "/cluster-name", runtime_parameters.cluster_name, management),
    ("PUT", "/cluster-name", runtime_parameters.put_cluster_name, administrator),
    ("GET", "/nodes", overview.nodes, monitoring),
    ("GET", "/nodes/{name}", overview.node, monitoring),
    ("GET", "/nodes/{name}/memory", overview.node_memory, monitoring),
    ("GET", "/extensions", overview.extensions, management),
    ("GET", "/auth", overview.auth, public),
    ("GET", "/auth/hash_password/{password}", users.hash_password, management),
    ("GET", "/whoami", users.whoami, management),
    ("GET", "/vhosts", overview.vhosts, management),
    ("GET", "/vhosts/{vhost}", overview.vhost, management),
    ("PUT", "/vhosts/{vhost}", overview.put_vhost, administrator),
    ("DELETE", "/vhosts/{vhost}", overview.delete_vhost, administrator),
    ("GET", "/vhosts/{vhost}/permissions", users.permissions_in, administrator),
    ("GET", "/vhosts/{vhost}/topic-permissions", users.topic_permissions_in, administrator),
    ("GET", "/vhosts/{vhost}/connections", connections.list_in_vhost, management),
    ("GET", "/vhosts/{vhost}/channels", connections.channels, management),
    ("GET", "/users", users.list_all, administrator),
    ("GET", "/users/without-permissions", users.without_permissions, administrator),
    ("POST", "/users/bulk-delete", users.bulk_delete, administrator),
    ("GET", "/users/{name}", users.get, administrator),
    ("PUT", "/users/{name}", users.put, administrator),
    ("DELETE", "/users/{name}", users.delete, administrator),
    ("GET", "/users/{name}/permissions", users.permissions_of, administrator),
    ("GET", "/users/{name}/topic-permissions", users.topic_permissions_of, administrator),
    ("GET", "/permissions", users.permissions, administrator),
    ("GET", "/permissions/{vhost}/{name}", users.get_permission, administrator),
    ("PUT", "/permissions/{vhost}/{name}", users.put_permission, administrator),
    ("DELETE", "/permissions/{vhost}/{name}", users.delete_permission, administrator),
    ("GET", "/topic-permissions", users.topic_permissions, administrator),
    ("GET", TOPIC_PERMISSION, users.get_topic_permissions, administrator),
    ("PUT", TOPIC_PERMISSION, users.put_topic_permission, administrator),
    ("DELETE", TOPIC_PERMISSION, users.delete_topic_permission, administrator),
    ("GET", f"{TOPIC_PERMISSION}/{{exchange}}", users.get_topic_permissions, administrator),
    ("DELETE", f"{TOPIC_PERMISSION}/{{exchange}}", users.delete_topic_permission, administrator),
    ("GET", "/parameters", runtime_parameters.list_all, policymaker),
    ("GET", "/parameters/{component}", runtime_parameters.list_all, policymaker),
    ("GET", "/parameters/{component}/{vhost}", runtime_parameters.list_all, policymaker),
    ("GET", "/parameters/{component}/{vhost}/{name}", runtime_parameters.get, policymaker),
    ("PUT", "/parameters/{component}/{vhost}/{name}", runtime_parameters.put, administrator),
    ("DELETE", "/parameters/{component}/{vhost}/{name}", runtime_parameters.delete, administrator),
    ("GET", "/global-parameters", runtime_parameters.list_global, administrator),
    ("GET", "/global-parameters/{name}", runtime_parameters.get_global, administrator),
    ("PUT", "/global-parameters/{name}", runtime_parameters.put_global, administrator),
    ("DELETE", "/global-parameters/{name}", runtime_parameters.delete_global, administrator),
    ("GET", "/vhost-limits", overview.vhost_limits, management),
    ("GET", "/vhost-limits/{vhost}", overview.limits_of_vhost, management),
    ("PUT", "/vhost-limits/{vhost}/{limit}", overview.put_vhost_limit, administrator),
    ("DELETE", "/vhost-limits/{vhost}/{limit}", overview.delete_vhost_limit, administrator),
    ("GET", "/user-limits", users.limits, administrator),
    ("GET", "/user-limits/{name}", users.limits_of, administrator),
    ("PUT", "/user-limits/{name}/{limit}", users.put_limit, administrator),
    ("DELETE", "/user-limits/{name}/{limit}", users.delete_limit, administrator),
    ("GET", "/feature-flags", overview.empty, administrator),
    ("GET", "/deprecated-features", overview.deprecated_features, administrator),
    ("GET", "/deprecated-features/used", overview.empty, administrator),
    ("GET", "/federation-links", overview.empty, monitoring),
    ("GET", "/federation-links/{vhost}", overview.empty, monitoring),
    ("GET", "/shovels", overview.empty, monitoring),
    ("GET", "/shovels/{vhost}", overview.empty, monitoring),
    ("GET", "/connections", connections.list_all, management),
    ("GET", "/connections/username/{name}", connections.list_of_user, management),
    ("DELETE", "/connections/username/{name}", connections.close_of_user, management),
    ("GET", "/connections/{name}", connections.get, management),
    ("DELETE", "/connections/{name}", connections.close, management),
    ("GET", "/connections/{name}/channels", connections.channels_of, management),
    ("GET", "/channels", connections.channels, management),
    ("GET", "/channels/{name}", connections.channel, management),
    ("GET", "/consumers", connections.consumers, management),
    ("GET", "/consumers/{vhost}", connections.consumers, management),
    ("GET", "/exchanges", exchanges.list_all, management),
    ("GET", "/exchanges/{vhost}", exchanges.list_in_vhost, management),
    ("GET", "/exchanges/{vhost}/{name}", exchanges.get, management),
    ("PUT", "/exchanges/{vhost}/{name}", exchanges.put, configures_it),
    ("DELETE", "/exchanges/{vhost}/{name}", exchanges.delete, configures_it),
    ("GET", "/exchanges/{vhost}/{name}/bindings/source", exchanges.bindings_from, management),
    ("GET", "/exchanges/{vhost}/{name}/bindings/destination", exchanges.bindings_to, management),
    ("POST", "/exchanges/{vhost}/{name}/publish", exchanges.publish, writes_it),
    ("GET", "/queues", queues.list_all, management),
    ("GET", "/queues/detailed", queues.list_all, management),
    ("GET", "/queues/{vhost}", queues.list_in_vhost, management),
    ("GET", "/queues/{vhost}/{name}", queues.get, management),
    ("PUT", "/queues/{vhost}/{name}", queues.put, configures_it),
    ("DELETE", "/queues/{vhost}/{name}", queues.delete, configures_it),
    ("DELETE", "/queues/{vhost}/{name}/contents", queues.purge, reads_it),
    ("GET", "/queues/{vhost}/{name}/bindings", queues.bindings, management),
    ("POST", "/queues/{vhost}/{name}/get", queues.get_messages, reads_it),
    ("POST", "/queues/{vhost}/{name}/actions", queues.actions, administrator),
    ("GET", "/bindings", exchanges.list_bindings, management),
    ("GET", "/bindings/{vhost}", exchanges.list_bindings_in_vhost, management),
    ("GET", BETWEEN, exchanges.list_between, management),
    ("POST", BETWEEN, exchanges.bind, binds),
    ("GET", f"{BETWEEN}/{{properties_key}}", exchanges.get_binding, management),
    ("DELETE", f"{BETWEEN}/{{properties_key}}", exchanges.unbind, binds),
    *(
        route
        for kind, changed_by in (("policies", policymaker), ("operator-policies", administrator))
        for route in (
            ("GET", f"/{kind}", policies.list_all, policymaker),
            ("GET", f"/{kind}/{{vhost}}", policies.list_in_vhost, policymaker),
            ("GET", f"/{kind}/{{vhost}}/{{name}}", policies.get, policymaker),
            ("PUT", f"/{kind}/{{vhost}}/{{name}}", policies.put, changed_by),
            ("DELETE", f"/{kind}/{{vhost}}/{{name}}", policies.delete, changed_by),
        )
    ),
    ("GET", "/definitions", definitions.export, administrator),
    ("POST", "/definitions", definitions.import_, administrator),
    ("PUT", "/definitions", definitions.import_, administrator),
    ("GET", "/definitions/{vhost}", definitions.export_vhost, administrator),
    ("POST", "/definitions/{vhost}", definitions.import_vhost, administrator),
    ("PUT", "/definitions/{vhost}", definitions.import_vhost, administrator),
    ("GET", "/all-configuration", definitions.export, administrator),
    ("POST", "/all-configuration", definitions.import_, administrator),
    ("GET", "/aliveness-test/{vhost}", overview.aliveness, management),
    ("GET", "/healthchecks/node", overview.health, management),
    ("GET", "/healthchecks/node/{name}", overview.node_health, management),
    ("GET", "/health/checks/alarms", overview.health, management),
    ("GET", "/health/checks/local-alarms", overview.health, management),
    ("GET", "/health/checks/ready-to-serve-clients", overview.health, management),
    ("GET", "/health/checks/virtual-hosts", overview.health, management),
    ("GET", "/health/checks/node-is-mirror-sync-critical", overview.health, management),
    ("GET", "/health/checks/node-is-quorum-critical", overview.health, management),
    ("GET", "/health/checks/is-in-service", overview.health, management),
    ("GET", "/health/checks/below-node-connection-limit", overview.health, management),
    ("GET", "/health/checks/certificate-expiration/{within}/{unit}", overview.health_certificate, management),
    ("GET", "/health/checks/port-listener/{port}", overview.health_port, management),
    ("GET", "/health/checks/protocol-listener/{protocol}", overview.health_protocol, management),
    ("PUT", "/rebalance/queues", overview.nothing, administrator),
    ("POST", "/rebalance/queues", overview.nothing, administrator),
    ("DELETE", "/reset", overview.nothing, administrator),
    ("DELETE", "/reset/{name}", overview.nothing, administrator),
    # Headrace's own
    ("GET", "/headrace/overview", overview_live.overview, management),
    ("GET", "/headrace/overview/stream", overview_live.live, management),
    ("GET", "/headrace/settings", streams.settings, monitoring),
    ("GET", "/headrace/streams", streams.list_streams, management),
    ("GET", "/headrace/streams/{vhost}/{name}", streams.get_stream, management),
    ("GET", "/headrace/streams/{vhost}/{name}/messages", browse.messages, reads_it),
    ("GET", "/headrace/streams/{vhost}/{name}/stream", browse.tail, reads_it),
    ("GET", "/headrace/readers", groups.list_all, manages_topics),
    ("GET", "/headrace/readers/{kind}/{group}", groups.get, manages_topics),
    ("DELETE", "/headrace/readers/{kind}/{group}", groups.delete, manages_topics),
    ("POST", "/headrace/readers/{kind}/{group}/reset", groups.reset, manages_topics),
    ("GET", "/headrace/dead-letters", dead_letters.list_queues, management),
    ("GET", "/headrace/dead-letters/{vhost}/{name}", dead_letters.get, management),
    ("GET", "/headrace/dead-letters/{vhost}/{name}/messages", dead_letters.messages, reads_it),
    ("POST", "/headrace/dead-letters/{vhost}/{name}/replay", dead_letters.replay, reads_it),
    ("GET", "/headrace/registry", _schemas("registry"), _reads_schemas),
    ("GET", "/headrace/schemas", _schemas("list_subjects"), _reads_schemas),
    ("GET", "/headrace/schemas/{subject}", _schemas("get_subject"), _reads_schemas),
    ("GET", "/headrace/schemas/{subject}/versions", _schemas("list_versions"), _reads_schemas),
    ("GET", "/headrace/schemas/{subject}/versions/{version}", _schemas("get_version"), _reads_schemas),
    ("GET", "/headrace/replays", dead_letters.list_replays, management),
    ("GET", "/headrace/replays/{replay}", dead_letters.get_replay, management),
    ("DELETE", "/headrace/replays/{replay}", dead_letters.stop_replay, management),
)
PREFIX = "/api"


class Api:
    """ASGI application for all paths under /api."""

    def __init__(self, context: HttpContext) -> None:
        self._router = router(context, ROUTES, prefix=PREFIX, always_authenticate=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        scope["path"] = path.rstrip("/") if path != "/" else path  # Flower requests /api/queues/
        try:
            await self._router(scope, receive, send)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost handler of this API
            await _error_response(error)(scope, receive, send)


def _error(word: str, sentence: str, status: int) -> Response:
    return json_response({"error": word, "reason": sentence, "detail": sentence}, status)


def _error_response(error: Exception) -> Response:
    """RabbitMQ's error format: `error` is a word for programs, `reason` a sentence for people."""
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            return json_response({"error": "method_not_allowed", "reason": "Method Not Allowed"}, 405)
        return json_response({"error": "Object Not Found", "reason": "Not Found"}, 404)
    if isinstance(error, errors.NotFound):
        return json_response({"error": "Object Not Found", "reason": "Not Found", "detail": str(error)}, 404)
    for kind, status, code in PROBLEMS:
        if isinstance(error, kind):
            status = 400 if status in (404, 405, 409, 416) else status
            refused = _error("bad_request" if status == 400 else code, str(error), status)
            refused.headers.update(headers_of(error, status))
            return refused
    if isinstance(error, errors.HeadraceError):
        return _error("bad_request", str(error), 400)
    logger.error("unexpected error while handling a request to the management API", exc_info=error)
    return json_response({"error": "internal_error", "reason": "internal error; the broker's log has the details"}, 500)
