"""One HTTP/1.1 exchange as bytes: building the request and parsing the response. No sockets, so that the blocking and
the asyncio client share it."""

import re
from collections.abc import Callable, Mapping
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import httptools
import msgspec

from headrace.errors import BrokerUnreachable, InvalidInput
from headrace.version import __version__

DEFAULT_URL = "http://localhost:15672"
HEADERS_MAX = 200
RESPONSE_BYTES_MAX = 1 << 30  # a broker's responses are far smaller; another server on the port might send more


class Trust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files for TLS, with the names that RabbitMQ uses in its URIs."""

    cacertfile: str = ""  # the CA to trust instead of the system's CAs
    certfile: str = ""  # our client certificate, for brokers that require one
    keyfile: str = ""
    pinnedcertfile: str = ""  # the only certificate to accept, with any host name


class Endpoint(msgspec.Struct, frozen=True):
    """The address of a broker's HTTP listener."""

    host: str
    port: int
    tls: bool = False
    base: str = ""  # path prefix, if a proxy adds one
    authorization: str = ""
    trust: Trust = Trust()

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.base}"

    def __repr__(self) -> str:
        return f"Endpoint({self})"  # never shows the password


class Response(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def is_json(self) -> bool:
        return re.match(r"application/(?:[\w.-]+\+)?json\b", self.headers.get("content-type", "")) is not None


def without_password(url: str) -> str:
    """The URL with its password masked, even if the URL is malformed."""
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, mark, userinfo = head.rpartition("//")
    return f"{scheme}{mark}{userinfo.partition(':')[0]}:***@{tail}" if ":" in userinfo else url


def login_of(url: str) -> tuple[str, str] | None:
    """User and password of a URL, or None if it has none."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))


def parse_url(url: str) -> Endpoint:
    """http://host:port, https://host:port?cacertfile=..., or just host:port."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as error:
        raise InvalidInput(f"{without_password(url)!r} is not the address of a broker: {error}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or not _is_host(parts.hostname):
        raise InvalidInput(f"{without_password(url)!r} is not the address of a broker; write http://HOST:PORT")
    authorization = ""
    login = login_of(url)
    if login is not None:
        from base64 import b64encode

        authorization = "Basic " + b64encode(":".join(login).encode()).decode()
    tls = parts.scheme == "https"
    try:
        trust = msgspec.convert(dict(parse_qsl(parts.query)) if tls else {}, Trust)
    except msgspec.ValidationError:
        names = ", ".join(Trust.__struct_fields__)
        shown = without_password(url)
        raise InvalidInput(f"{shown!r} is not the address of a broker: the parameters after ? are {names}") from None
    return Endpoint(
        host=parts.hostname,
        port=port if port is not None else (443 if tls else 15672),
        tls=tls,
        base=parts.path.rstrip("/"),
        authorization=authorization,
        trust=trust,
    )


def _is_host(name: str) -> bool:
    """Whether the name can be resolved at all: empty and overlong labels make the lookup raise UnicodeError."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def path_of(*parts: str | bytes) -> str:
    """A path of percent-encoded parts: a topic or a key may have any name, including `..` and `a/b`.

    Except the empty name: its path would be that of the whole collection.
    """
    if not all(parts):
        raise InvalidInput("a name is empty")
    quoted = [quote(part, safe="") for part in parts]
    return "".join("/" + (one if one.strip(".") else one.replace(".", "%2E")) for one in quoted)


def request_bytes(
    endpoint: Endpoint,
    method: str,
    path: str,
    *,
    query: Mapping[str, str | int | None] | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> bytes:
    target = endpoint.base + path
    given = {name: value for name, value in (query or {}).items() if value is not None}
    if given:
        target += "?" + urlencode(given)
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {endpoint.authority}",
        f"User-Agent: headrace/{__version__}",
    ]
    if endpoint.authorization:
        lines.append(f"Authorization: {endpoint.authorization}")
    for name, value in (headers or {}).items():
        if not value.isprintable():
            raise InvalidInput(f"the header {name} has characters that a header cannot contain")
        lines.append(f"{name}: {value}")
    if body or method in {"POST", "PUT", "PATCH"}:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class ResponseReader:
    """An incremental parser; `response` is set once the response is complete.

    `on_body` receives the body in pieces instead, for responses without an end. A response to HEAD ends after its
    headers, even if they announce a body.
    """

    def __init__(self, on_body: Callable[[bytes], None] | None = None, *, to_head: bool = False) -> None:
        self._to_head = to_head
        self.status = 0  # set once the headers are complete
        self.headers: dict[str, str] = {}
        self.response: Response | None = None
        self.keep_alive = False
        self.started = False
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._on_body = on_body

    def feed(self, data: bytes) -> None:
        self.started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            sentence = "the server does not speak HTTP: use the port of the HTTP listener"
            raise BrokerUnreachable(sentence) from None

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) < HEADERS_MAX:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._to_head:
            self.on_message_complete()

    def on_body(self, piece: bytes) -> None:
        if self._on_body is not None and self.status < 400:
            self._on_body(piece)
            return
        self._body_bytes += len(piece)
        if self._body_bytes > RESPONSE_BYTES_MAX:
            raise BrokerUnreachable("the response is larger than any response of a broker")
        self._body.append(piece)

    def on_message_complete(self) -> None:
        if self.response is not None:
            return
        if self.status < 200:  # 1xx: the final response follows
            self.headers = {}
            return
        self.keep_alive = self._parser.should_keep_alive()
        self.response = Response(self.status, self.headers, b"".join(self._body))
