"""What a route asks of whoever calls it. Every route names its need; there is no route without one."""

import functools
from collections.abc import Awaitable, Callable, Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from headrace.broker.types.vhost_names import DEFAULT
from headrace.listeners.http.server.authentication import ADMINISTRATOR, MANAGEMENT, MONITORING, POLICYMAKER, Caller
from headrace.listeners.http.server.context import PIECE_BYTES, Answer, HttpContext, Pieces
from headrace.listeners.http.server.requests import BudgetShare, path_name

Need = Callable[[Caller, Request], None]
Handler = Callable[[HttpContext, Request], Awaitable[Response]]
Handlers = dict[str, tuple[Handler, Need]]
LOOKING = frozenset({"GET", "HEAD"})
COUNTED_BYTES_MIN = PIECE_BYTES


def public(caller: Caller, request: Request) -> None:
    """Nobody is asked, not even for a name."""


def known(caller: Caller, request: Request) -> None:
    """A user, whoever it is."""


# Our own routes: topics are in the default virtual host, and what may be done to them is a matter of their names.


def enters(caller: Caller, request: Request) -> None:
    if request.method in LOOKING:
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
    """Other messages in the place of those that are there."""

    def need(caller: Caller, request: Request) -> None:
        caller.configure(path_name(request, parameter))
        caller.write(path_name(request, parameter))

    return need


def stages(caller: Caller, request: Request) -> None:
    """What is uploaded takes room on the disk, and is of use only to who may write."""
    caller.write_something()


def monitors(caller: Caller, request: Request) -> None:
    caller.must_be(MONITORING)


def follows(caller: Caller, request: Request) -> None:
    """A standby is given all there is, queues and password hashes, too: asked also while guest is the only user."""
    caller.must_be(ADMINISTRATOR)


# The management API: tags say which pages, permissions what may be done in a virtual host.


def _tagged(tags: frozenset[str]) -> Need:
    def need(caller: Caller, request: Request) -> None:
        caller.must_be(tags)
        if "vhost" not in request.path_params:
            return
        vhost = path_name(request, "vhost")
        if request.method in LOOKING:
            caller.must_see(vhost)
        else:
            caller.rights_in(vhost)

    return need


management, monitoring, policymaker = map(_tagged, (MANAGEMENT, MONITORING, POLICYMAKER))


def manages_topics(caller: Caller, request: Request) -> None:
    """Readers of topics are in the default virtual host, whatever their address says."""
    caller.must_be(MANAGEMENT)
    enters(caller, request)


def administrator(caller: Caller, request: Request) -> None:
    """May look after virtual hosts and users without a permission anywhere."""
    caller.must_be(ADMINISTRATOR)


def _in_vhost(right: Callable[[Caller, str, str], None], parameter: str = "name") -> Need:
    def need(caller: Caller, request: Request) -> None:
        management(caller, request)
        right(caller, path_name(request, parameter), path_name(request, "vhost"))

    return need


configures_it, writes_it, reads_it = map(_in_vhost, (Caller.configure, Caller.write, Caller.read))


def binds(caller: Caller, request: Request) -> None:
    """Reading from the source, writing to the destination."""
    management(caller, request)
    vhost = path_name(request, "vhost")
    caller.write(path_name(request, "destination"), vhost)
    caller.read(path_name(request, "source"), vhost)


# Letting in.


def router(
    site: HttpContext, routes: Iterable[tuple[str, str, Handler, Need]], *, prefix: str = "", asks_always: bool = False
) -> Router:
    """By path and method. `asks_always`: also while guest is the only user."""
    by_path: dict[str, Handlers] = {}
    for method, path, handler, need in routes:
        by_path.setdefault(prefix + path, {})[method] = (handler, need)
    made = [
        Route(path, functools.partial(dispatch, site, handlers, asks_always), methods=list(handlers))
        for path, handlers in by_path.items()
    ]
    return Router(made, redirect_slashes=False)


async def dispatch(site: HttpContext, handlers: Handlers, asks_always: bool, request: Request) -> Response:
    """To the handler of the method, if the caller has what its route needs."""
    handler, need = handlers["GET" if request.method == "HEAD" else request.method]
    state = request.scope["state"]
    if need is public:
        state["caller"] = site.gate.anybody
    elif site.gate.is_open and not asks_always and need is not follows:
        state["caller"] = site.gate.whoever(request.scope)
    else:
        state["caller"] = admit(site, need, request)
    if request.method not in LOOKING:
        return await handler(site, request)
    state["still_allowed"] = functools.partial(_again, site, need, asks_always, request)  # only these wait or go on
    response = await handler(site, request)
    _count(response, state["share"])
    return response


def _count(response: Response, share: BudgetShare) -> None:
    """What waits to be read takes memory, too. Small answers are let go: a full house is no reason not to say so. Only
    of those who look: what was done cannot be refused any more."""
    size = response.size if isinstance(response, Answer | Pieces) else 0
    if size > COUNTED_BYTES_MIN and size > share.held:
        share.take(size - share.held)


def admit(site: HttpContext, need: Need, request: Request) -> Caller:
    caller = site.gate.caller(request.scope)
    need(caller, request)
    return caller


def _again(site: HttpContext, need: Need, asks_always: bool, request: Request) -> None:
    """For answers that go on: the same question, to what users and rights are now."""
    if asks_always or not site.gate.is_open:
        request.scope["state"]["caller"] = admit(site, need, request)


def goes_on(site: HttpContext, need: Need, request: Request) -> None:
    """For an answer to anything but GET that goes on, and so needs an Allowance."""
    request.scope["state"]["still_allowed"] = functools.partial(_again, site, need, True, request)


class Allowance:
    """Lets an answer wait or go on as long as its caller might ask for it now. Asks only when something changed."""

    def __init__(self, site: HttpContext, request: Request) -> None:
        self._gate = site.gate
        self._ask: Callable[[], None] = request.state.still_allowed
        self._version = self._gate.version

    def check(self) -> None:
        """NotAuthorised or Forbidden, once it is over."""
        if self._gate.version != self._version:
            self._ask()
            self._version = self._gate.version


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller
