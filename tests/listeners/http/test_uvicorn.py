"""BoundedHttp overrides private members of uvicorn's protocol: these tests fail when a new version changes them."""

import inspect

import pytest
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.listeners.http.server.bounded_protocol import BoundedHttp

OVERRIDDEN = {
    "connection_made": ("self", "transport"),
    "connection_lost": ("self", "exc"),
    "eof_received": ("self",),
    "data_received": ("self", "data"),
    "pause_writing": ("self",),
    "resume_writing": ("self",),
    "shutdown": ("self",),
    "send_400_response": ("self", "msg"),
    "on_message_begin": ("self",),
    "on_url": ("self", "url"),
    "on_header": ("self", "name", "value"),
    "on_headers_complete": ("self",),
    "on_body": ("self", "body"),
    "on_message_complete": ("self",),
    "_start_asgi_task": ("self", "cycle", "app"),
}
CALLED = {"_unset_keepalive_if_required": ("self",), "timeout_keep_alive_handler": ("self",)}
ATTRIBUTES = {
    "client",
    "connections",
    "cycle",
    "expect_100_continue",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scheme",
    "tasks",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
}
CYCLE_ATTRIBUTES = {
    "disconnected",
    "keep_alive",
    "message_event",
    "more_body",
    "response_complete",
    "response_started",
    "transport",
}


@pytest.mark.parametrize(("name", "parameters"), [*OVERRIDDEN.items(), *CALLED.items()])
def test_uvicorn_still_has_the_method_with_the_same_parameters(name: str, parameters: tuple[str, ...]) -> None:
    assert tuple(inspect.signature(getattr(HttpToolsProtocol, name)).parameters) == parameters


def test_every_override_is_listed() -> None:
    own = {name for name, value in vars(BoundedHttp).items() if inspect.isfunction(value) and name != "__init__"}
    assert {name for name in own if hasattr(HttpToolsProtocol, name)} == set(OVERRIDDEN)


def test_uvicorn_still_has_the_attributes() -> None:
    source = inspect.getsource(HttpToolsProtocol.__init__)
    assert {name for name in ATTRIBUTES if f"self.{name}" not in source} == set()
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert {name for name in CYCLE_ATTRIBUTES if f"self.{name}" not in source} == set()


def test_uvicorn_still_calls_the_overridden_methods() -> None:
    assert "self._start_asgi_task(" in inspect.getsource(HttpToolsProtocol.on_headers_complete)
    assert "self._start_asgi_task(" in inspect.getsource(HttpToolsProtocol.on_response_complete)
    assert STATUS_LINE[404] == b"HTTP/1.1 404 Not Found\r\n"
