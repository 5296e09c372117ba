"""Where everything of the management API is, and how its refusals look."""

import functools
import logging
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from headrace import errors
from headrace.doors.http.api import (
    access,
    browse,
    connections,
    dead_letters,
    definitions,
    exchanges,
    groups,
    overview,
    own,
    policies,
    queues,
)
from headrace.doors.http.api.values import answer
from headrace.doors.http.problems import PROBLEMS
from headrace.doors.http.requests import Gone
from headrace.doors.http.site import Site

logger = logging.getLogger("headrace.http")
Handler = Callable[[Site, Request], Awaitable[Response]]
BETWEEN = "/bindings/{vhost}/e/{source}/{kind}/{destination}"
ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/overview", overview.overview),
    ("GET", "/cluster-name", overview.cluster_name),
    ("GET", "/nodes", overview.nodes),
    ("GET", "/nodes/{name}", overview.node),
    ("GET", "/nodes/{name}/memory", overview.node_memory),
    ("GET", "/extensions", overview.extensions),
    ("GET", "/auth", overview.auth),
    ("GET", "/whoami", overview.whoami),
    ("GET", "/vhosts", overview.vhosts),
    ("GET", "/vhosts/{vhost}", overview.vhost),
    ("PUT", "/vhosts/{vhost}", overview.put_vhost),
    ("DELETE", "/vhosts/{vhost}", overview.delete_vhost),
    ("GET", "/vhosts/{vhost}/permissions", overview.vhost_permissions),
    ("GET", "/vhosts/{vhost}/topic-permissions", overview.empty),
    ("GET", "/vhosts/{vhost}/connections", connections.list_in_vhost),
    ("GET", "/vhosts/{vhost}/channels", connections.channels),
    ("GET", "/users", overview.users),
    ("GET", "/users/without-permissions", overview.empty),
    ("GET", "/users/{name}", overview.user),
    ("PUT", "/users/{name}", overview.not_yet),
    ("DELETE", "/users/{name}", overview.not_yet),
    ("GET", "/users/{name}/permissions", overview.permissions),
    ("GET", "/users/{name}/topic-permissions", overview.empty),
    ("GET", "/permissions", overview.permissions),
    ("GET", "/permissions/{vhost}/{name}", overview.one_permission),
    ("PUT", "/permissions/{vhost}/{name}", overview.not_yet),
    ("DELETE", "/permissions/{vhost}/{name}", overview.not_yet),
    ("GET", "/topic-permissions", overview.empty),
    ("GET", "/parameters", overview.empty),
    ("GET", "/parameters/{component}", overview.empty),
    ("GET", "/parameters/{component}/{vhost}", overview.empty),
    ("GET", "/global-parameters", overview.empty),
    ("GET", "/vhost-limits", overview.empty),
    ("GET", "/vhost-limits/{vhost}", overview.empty),
    ("GET", "/user-limits", overview.empty),
    ("GET", "/feature-flags", overview.empty),
    ("GET", "/deprecated-features", overview.empty),
    ("GET", "/deprecated-features/used", overview.empty),
    ("GET", "/federation-links", overview.empty),
    ("GET", "/shovels", overview.empty),
    ("GET", "/connections", connections.list_all),
    ("GET", "/connections/{name}", connections.get),
    ("DELETE", "/connections/{name}", connections.close),
    ("GET", "/connections/{name}/channels", connections.channels_of),
    ("GET", "/channels", connections.channels),
    ("GET", "/channels/{name}", connections.channel),
    ("GET", "/consumers", connections.consumers),
    ("GET", "/consumers/{vhost}", connections.consumers),
    ("GET", "/exchanges", exchanges.list_all),
    ("GET", "/exchanges/{vhost}", exchanges.list_in_vhost),
    ("GET", "/exchanges/{vhost}/{name}", exchanges.get),
    ("PUT", "/exchanges/{vhost}/{name}", exchanges.put),
    ("DELETE", "/exchanges/{vhost}/{name}", exchanges.delete),
    ("GET", "/exchanges/{vhost}/{name}/bindings/source", exchanges.bindings_from),
    ("GET", "/exchanges/{vhost}/{name}/bindings/destination", exchanges.bindings_to),
    ("POST", "/exchanges/{vhost}/{name}/publish", exchanges.publish),
    ("GET", "/queues", queues.list_all),
    ("GET", "/queues/detailed", queues.list_all),
    ("GET", "/queues/{vhost}", queues.list_in_vhost),
    ("GET", "/queues/{vhost}/{name}", queues.get),
    ("PUT", "/queues/{vhost}/{name}", queues.put),
    ("DELETE", "/queues/{vhost}/{name}", queues.delete),
    ("DELETE", "/queues/{vhost}/{name}/contents", queues.purge),
    ("GET", "/queues/{vhost}/{name}/bindings", queues.bindings),
    ("POST", "/queues/{vhost}/{name}/get", queues.get_messages),
    ("POST", "/queues/{vhost}/{name}/actions", queues.actions),
    ("GET", "/bindings", exchanges.list_bindings),
    ("GET", "/bindings/{vhost}", exchanges.list_bindings_in_vhost),
    ("GET", BETWEEN, exchanges.list_between),
    ("POST", BETWEEN, exchanges.bind),
    ("GET", f"{BETWEEN}/{{properties_key}}", exchanges.get_binding),
    ("DELETE", f"{BETWEEN}/{{properties_key}}", exchanges.unbind),
    *(
        route
        for kind in ("policies", "operator-policies")
        for route in (
            ("GET", f"/{kind}", policies.list_all),
            ("GET", f"/{kind}/{{vhost}}", policies.list_in_vhost),
            ("GET", f"/{kind}/{{vhost}}/{{name}}", policies.get),
            ("PUT", f"/{kind}/{{vhost}}/{{name}}", policies.put),
            ("DELETE", f"/{kind}/{{vhost}}/{{name}}", policies.delete),
        )
    ),
    ("GET", "/definitions", definitions.export),
    ("POST", "/definitions", definitions.import_),
    ("PUT", "/definitions", definitions.import_),
    ("GET", "/definitions/{vhost}", definitions.export_vhost),
    ("POST", "/definitions/{vhost}", definitions.import_vhost),
    ("PUT", "/definitions/{vhost}", definitions.import_vhost),
    ("GET", "/all-configuration", definitions.export),
    ("POST", "/all-configuration", definitions.import_),
    ("GET", "/aliveness-test/{vhost}", overview.aliveness),
    ("GET", "/healthchecks/node", overview.health),
    ("GET", "/healthchecks/node/{name}", overview.health),
    ("GET", "/health/checks/alarms", overview.health),
    ("GET", "/health/checks/local-alarms", overview.health),
    ("GET", "/health/checks/ready-to-serve-clients", overview.health),
    ("GET", "/health/checks/virtual-hosts", overview.health),
    ("GET", "/health/checks/node-is-mirror-sync-critical", overview.health),
    ("GET", "/health/checks/node-is-quorum-critical", overview.health),
    ("GET", "/health/checks/is-in-service", overview.health),
    ("GET", "/health/checks/below-node-connection-limit", overview.health),
    ("GET", "/health/checks/certificate-expiration/{within}/{unit}", overview.health),
    ("GET", "/health/checks/port-listener/{port}", overview.health_port),
    ("GET", "/health/checks/protocol-listener/{protocol}", overview.health_protocol),
    ("PUT", "/rebalance/queues", overview.nothing),
    ("POST", "/rebalance/queues", overview.nothing),
    ("DELETE", "/reset", overview.nothing),
    ("DELETE", "/reset/{name}", overview.nothing),
    # Ours.
    ("GET", "/headrace/overview", own.overview),
    ("GET", "/headrace/overview/stream", own.live),
    ("GET", "/headrace/settings", own.settings),
    ("GET", "/headrace/streams", own.list_streams),
    ("GET", "/headrace/streams/{vhost}/{name}", own.get_stream),
    ("GET", "/headrace/streams/{vhost}/{name}/messages", browse.messages),
    ("GET", "/headrace/streams/{vhost}/{name}/stream", browse.tail),
    ("GET", "/headrace/readers", groups.list_all),
    ("GET", "/headrace/readers/{kind}/{group}", groups.get),
    ("DELETE", "/headrace/readers/{kind}/{group}", groups.delete),
    ("POST", "/headrace/readers/{kind}/{group}/reset", groups.reset),
    ("GET", "/headrace/dead-letters", dead_letters.list_queues),
    ("GET", "/headrace/dead-letters/{vhost}/{name}", dead_letters.get),
    ("GET", "/headrace/dead-letters/{vhost}/{name}/messages", dead_letters.messages),
    ("POST", "/headrace/dead-letters/{vhost}/{name}/replay", dead_letters.replay),
    ("GET", "/headrace/replays", dead_letters.list_replays),
    ("GET", "/headrace/replays/{replay}", dead_letters.get_replay),
    ("DELETE", "/headrace/replays/{replay}", dead_letters.stop_replay),
)
PREFIX = "/api"


class Api:
    """An ASGI application for everything under /api."""

    def __init__(self, site: Site) -> None:
        by_path: dict[str, dict[str, Handler]] = {}
        for method, path, handler in ROUTES:
            by_path.setdefault(PREFIX + path, {})[method] = handler
        self._router = Router(
            [
                Route(path, functools.partial(_dispatch, site, handlers), methods=list(handlers))
                for path, handlers in by_path.items()
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        scope["path"] = path.rstrip("/") if path != "/" else path  # Flower asks for /api/queues/
        try:
            await self._router(scope, receive, send)
        except Gone:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost loop of this interface
            await _refusal(error)(scope, receive, send)


async def _dispatch(site: Site, handlers: dict[str, Handler], request: Request) -> Response:
    request.state.user = access.check(request)
    method = "GET" if request.method == "HEAD" else request.method
    return await handlers[method](site, request)


def _say(word: str, sentence: str, status: int) -> Response:
    return answer({"error": word, "reason": sentence, "detail": sentence}, status)


def _refusal(error: Exception) -> Response:
    """RabbitMQ's two fields: a word for programs, a sentence for people."""
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            return answer({"error": "method_not_allowed", "reason": "Method Not Allowed"}, 405)
        return answer({"error": "Object Not Found", "reason": "Not Found"}, 404)
    if isinstance(error, access.NotAuthorised):
        refused = answer({"error": "not_authorised", "reason": str(error)}, 401)
        refused.headers["www-authenticate"] = 'Basic realm="Headrace"'
        return refused
    if isinstance(error, errors.NotFound):
        return answer({"error": "Object Not Found", "reason": "Not Found", "detail": str(error)}, 404)
    for kind, status, code in PROBLEMS:
        if isinstance(error, kind):
            status = 400 if status in (404, 405, 409, 416) else status
            return _say("bad_request" if status == 400 else code, str(error), status)
    if isinstance(error, errors.HeadraceError):
        return _say("bad_request", str(error), 400)
    logger.error("a request to the management API failed in a way nobody foresaw", exc_info=error)
    return answer({"error": "internal_error", "reason": "an error inside the broker; its log says more"}, 500)
