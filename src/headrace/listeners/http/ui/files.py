"""Serves the dashboard's files. All are read at the first request; no other file can be requested.

Two modules are installed with npm (`make install`). Without them, a page says how to install them.
"""

import hashlib
from importlib import resources
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import NotFound
from headrace.listeners.http.server.context import HttpContext

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CLI_HELP = b"""rabbitmqadmin manages this broker from the command line. It needs Python 3.10 or newer:

    curl -O %s/cli/rabbitmqadmin && python3 rabbitmqadmin help
"""
VENDOR = ("vendor/preact.js", "vendor/uplot.js", "vendor/uplot.css")
# Scripts and styles only from this origin and never inline: names chosen by clients cannot become code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",  # revalidated each time (304), so that an upgrade shows at once
}


class File(NamedTuple):
    data: bytes
    kind: str
    tag: str


def _load() -> dict[str, File]:
    found: dict[str, File] = {}
    waiting = [(resources.files("headrace.listeners.http.ui").joinpath("static"), "")]
    while waiting:
        folder, prefix = waiting.pop()
        if not folder.is_dir():
            continue
        for entry in folder.iterdir():
            name = prefix + entry.name
            if entry.is_dir():
                waiting.append((entry, name + "/"))
            elif (kind := TYPES.get("." + entry.name.rpartition(".")[2])) is not None:
                data = entry.read_bytes()
                found[name] = File(data, kind, f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return found


class Files:
    def __init__(self) -> None:
        self._files: dict[str, File] | None = None

    def get(self, name: str) -> File:
        if self._files is None or not self.is_complete:
            self._files = _load()
        if name == "index.html" and not self.is_complete:
            name = "incomplete.html"
        found = self._files.get(name)
        if found is None:
            raise NotFound("the dashboard has no such file")
        return found

    @property
    def is_complete(self) -> bool:
        return self._files is not None and all(name in self._files for name in VENDOR)


FILES = Files()


def _response(request: Request, name: str) -> Response:
    file = FILES.get(name)
    headers = {**HEADERS, "etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, 200, {**headers, "content-type": file.kind})


async def cli_help(context: HttpContext, request: Request) -> Response:
    origin = f"{request.url.scheme}://{request.url.netloc}".encode("ascii", "replace")
    return Response(CLI_HELP % origin, 200, {**HEADERS, "content-type": "text/plain; charset=utf-8"})


async def rabbitmqadmin(context: HttpContext, request: Request) -> Response:
    """A tool with the command line of RabbitMQ's rabbitmqadmin 3.x, where installation scripts download that."""
    script = resources.files("headrace.listeners.http.ui").joinpath("rabbitmqadmin.py").read_bytes()
    return Response(script, 200, {**HEADERS, "content-type": "application/octet-stream"})


async def index(context: HttpContext, request: Request) -> Response:
    return _response(request, "index.html")


async def file(context: HttpContext, request: Request) -> Response:
    return _response(request, request.path_params["path"])


async def icon(context: HttpContext, request: Request) -> Response:
    return _response(request, "icon.svg")
