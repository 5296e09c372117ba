"""Authorization: every route declares the permission it needs, and `dispatch` checks it before the handler runs."""

import functools
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from headrace.broker.types.vhost_names import DEFAULT
from headrace.listeners.http.server.authentication import ADMINISTRATOR, MANAGEMENT, MONITORING, POLICYMAKER, Caller
from headrace.listeners.http.server.context import CHUNK_BYTES, ChunkedResponse, HttpContext, PiecewiseResponse
from headrace.listeners.http.server.memory_budget import BudgetShare
from headrace.listeners.http.server.requests import path_name

Need = Callable[[Caller, Request], None]
Handler = Callable[[HttpContext, Request], Awaitable[Response]]
Handlers = dict[str, tuple[Handler, Need]]
READ_METHODS = frozenset({"GET", "HEAD"})
BUDGETED_BYTES_MIN = CHUNK_BYTES


def public(caller: Caller, request: Request) -> None:
    """No authentication."""


def known(caller: Caller, request: Request) -> None:
    """Any authenticated user."""


# Native API: topics are in the default virtual host, with permissions by name.


def enters(caller: Caller, request: Request) -> None:
    if request.method in READ_METHODS:
        caller.must_see(DEFAULT)
    else:
        caller.rights_in(DEFAULT)


def configures(parameter: str) -> Need:
    return lambda caller, request: caller.configure(path_name(request, parameter))


def writes(parameter: str) -> Need:
    return lambda caller, request: caller.write(path_name(request, parameter))


def reads(parameter: str) -> Need:
    return lambda caller, request: caller.read(path_name(request, parameter))


def rewrites(parameter: str) -> Need:
    """Replacing stored messages needs both permissions."""

    def need(caller: Caller, request: Request) -> None:
        caller.configure(path_name(request, parameter))
        caller.write(path_name(request, parameter))

    return need


def stages(caller: Caller, request: Request) -> None:
    """Uploads take disk space, and only users who may write can commit them."""
    caller.write_something()


def monitors(caller: Caller, request: Request) -> None:
    caller.must_be(MONITORING)


def follows(caller: Caller, request: Request) -> None:
    """A standby receives everything, including password hashes, so this needs authentication even while it is off."""
    caller.must_be(ADMINISTRATOR)


# Management API: tags grant access to endpoints, permissions to the contents of a virtual host.


def _tagged(tags: frozenset[str]) -> Need:
    def need(caller: Caller, request: Request) -> None:
        caller.must_be(tags)
        if "vhost" not in request.path_params:
            return
        vhost = path_name(request, "vhost")
        if request.method in READ_METHODS:
            caller.must_see(vhost)
        else:
            caller.rights_in(vhost)

    return need


management, monitoring, policymaker = map(_tagged, (MANAGEMENT, MONITORING, POLICYMAKER))


def manages_topics(caller: Caller, request: Request) -> None:
    """Consumer groups and cursors belong to the default virtual host."""
    caller.must_be(MANAGEMENT)
    enters(caller, request)


def administrator(caller: Caller, request: Request) -> None:
    """Administrators manage virtual hosts and users without permissions in any virtual host."""
    caller.must_be(ADMINISTRATOR)


def _in_vhost(right: Callable[[Caller, str, str], None], parameter: str = "name") -> Need:
    def need(caller: Caller, request: Request) -> None:
        management(caller, request)
        right(caller, path_name(request, parameter), path_name(request, "vhost"))

    return need


configures_it, writes_it, reads_it = map(_in_vhost, (Caller.configure, Caller.write, Caller.read))


def binds(caller: Caller, request: Request) -> None:
    """A binding needs read permission for its source and write permission for its destination."""
    management(caller, request)
    vhost = path_name(request, "vhost")
    caller.write(path_name(request, "destination"), vhost)
    caller.read(path_name(request, "source"), vhost)


# Dispatch


def router(
    context: HttpContext,
    routes: Iterable[tuple[str, str, Handler, Need]],
    *,
    prefix: str = "",
    always_authenticate: bool = False,
) -> Router:
    """A router by path and method. `always_authenticate`: needs authentication even while guest is the only user."""
    by_path: dict[str, Handlers] = {}
    for method, path, handler, need in routes:
        by_path.setdefault(prefix + path, {})[method] = (handler, need)
    made = [
        Route(path, functools.partial(dispatch, context, handlers, always_authenticate), methods=list(handlers))
        for path, handlers in by_path.items()
    ]
    return Router(made, redirect_slashes=False)


async def dispatch(context: HttpContext, handlers: Handlers, always_authenticate: bool, request: Request) -> Response:
    """Calls the handler of the method after checking the permission of its route."""
    handler, need = handlers["GET" if request.method == "HEAD" else request.method]
    state = request.scope["state"]
    if need is public:
        state["caller"] = context.gate.any_user
    elif context.gate.is_open and not always_authenticate and need is not follows:
        state["caller"] = context.gate.anonymous(request.scope)
    else:
        state["caller"] = admit(context, need, request)
    state["still_allowed"] = functools.partial(_check_again, context, need, always_authenticate, request)
    if request.method not in READ_METHODS:
        return await handler(context, request)
    response = await handler(context, request)
    _take_budget(response, state["share"])
    return response


def _take_budget(response: Response, share: BudgetShare) -> None:
    """Takes memory budget for a large response. Small ones are free, so that errors can be sent under load, and only
    responses to GET are counted: a change that is done can no longer be refused."""
    size = response.size if isinstance(response, ChunkedResponse | PiecewiseResponse) else 0
    if size > BUDGETED_BYTES_MIN and size > share.held:
        share.take(size - share.held)


def admit(context: HttpContext, need: Need, request: Request) -> Caller:
    caller = context.gate.caller(request.scope)
    need(caller, request)
    return caller


def _check_again(context: HttpContext, need: Need, always_authenticate: bool, request: Request) -> None:
    """Checks the permission of a long response again, with the current users and permissions."""
    if always_authenticate or not context.gate.is_open:
        request.scope["state"]["caller"] = admit(context, need, request)


def keep_checking(context: HttpContext, need: Need, request: Request) -> None:
    """Lets a streaming response to another method than GET use an Allowance."""
    request.scope["state"]["still_allowed"] = functools.partial(_check_again, context, need, True, request)


class Allowance:
    """Checks whether the caller of a long response still has its permission. Cheap unless users have changed."""

    def __init__(self, context: HttpContext, request: Request) -> None:
        self._gate = context.gate
        self._check: Callable[[], None] = request.state.still_allowed
        self._version = self._gate.version

    def check(self) -> None:
        """NotAuthorised or Forbidden after the permission was revoked."""
        if self._gate.version != self._version:
            self._check()
            self._version = self._gate.version


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller
