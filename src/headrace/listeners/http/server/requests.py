"""Parsing of requests: names in the path, query parameters, bodies. Everything is bounded and validated."""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, ParamSpec, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from headrace.errors import (
    BodyTooLarge,
    DecompressedTooLarge,
    InvalidInput,
    MalformedJson,
    UnsupportedMedia,
)
from headrace.listeners.http.server.memory_budget import BudgetShare
from headrace.wire.http import bodies, strict_json
from headrace.wire.http.messages import OFFSET_MAX

PARAMETERS_MAX = 32
DIGITS_MAX = 19
INTEGER = re.compile(rf"-?\d{{1,{DIGITS_MAX}}}")
SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)?")
SCALES = {None: 1.0, "s": 1.0, "ms": 0.001, "m": 60.0}
P = ParamSpec("P")
T = TypeVar("T")
# One thread: a body takes several times its size while it is decompressed and parsed, and the sum must stay bounded.
BODY_EXECUTOR = ThreadPoolExecutor(1, "http-body")
THREAD_BYTES_MIN = 256 * 1024  # for smaller bodies, handing over to the thread costs more than the work


class ClientDisconnected(Exception):
    """The client disconnected, so no response is needed."""


def whole_number(text: str, most: int = OFFSET_MAX) -> int | None:
    """None if the text is not an integer from 0 to `most`. The length is checked first: int() refuses thousands of
    digits."""
    return int(text) if len(text) <= DIGITS_MAX and text.isdecimal() and int(text) <= most else None


def path_name(request: Request, parameter: str) -> str:
    """A percent-encoded UTF-8 name in the path; %2F is part of the name, not a separator."""
    try:
        return unquote_to_bytes(request.path_params[parameter]).decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the {parameter} in the path is not percent-encoded UTF-8") from None


class Query:
    """Query parameters. Unknown ones are refused, so that a typo is noticed, except with `ignore_unknown`, for clients
    of another product's API that send more parameters than we know."""

    def __init__(self, request: Request, *known: str, octets: Sequence[str] = (), ignore_unknown: bool = False) -> None:
        """`octets` names the known parameters whose values are any bytes, percent-encoded."""
        text = request.scope["query_string"]
        try:
            pairs = parse_qsl(
                text.decode("ascii"), keep_blank_values=True, errors="surrogateescape", max_num_fields=PARAMETERS_MAX
            )
            for name, value in pairs:
                (name if name in octets else name + value).encode()
        except ValueError:
            raise InvalidInput(f"the query string must be at most {PARAMETERS_MAX} name=value pairs in UTF-8") from None
        self._pairs = pairs
        self._values: dict[str, str] = {}
        for name, value in pairs:
            if name not in known and not ignore_unknown:
                allowed = f"allowed are {', '.join(known)}" if known else "none are allowed here"
                raise InvalidInput(f"unknown query parameter {name[:80]!r}; {allowed}")
            if name in self._values and not ignore_unknown:
                raise InvalidInput(f"query parameter {name} is given twice")
            self._values.setdefault(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def octets(self, name: str) -> bytes | None:
        value = self._values.get(name)
        return None if value is None else value.encode("utf-8", "surrogateescape")

    def texts(self, name: str) -> list[str]:
        """All values of a parameter that may be repeated."""
        return [value for one, value in self._pairs if one == name]

    def choice(self, name: str, *choices: str) -> str | None:
        value = self._values.get(name)
        if value is not None and value not in choices:
            raise InvalidInput(f"{name} must be one of {', '.join(choices)}, not {value[:80]!r}")
        return value

    def integer(self, name: str, *, least: int = 0, most: int = OFFSET_MAX) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if INTEGER.fullmatch(value) is None or not least <= int(value) <= most:
            raise InvalidInput(f"{name} must be an integer from {least} to {most}, not {value[:80]!r}")
        return int(value)

    def seconds(self, name: str) -> float:
        """Seconds, or with a unit: 5, 0.5, 500ms, 1m."""
        value = self._values.get(name)
        if value is None:
            return 0.0
        match = SECONDS.fullmatch(value)
        if match is None:
            raise InvalidInput(f"{name} must be a duration such as 5, 0.5 or 500ms, not {value[:80]!r}")
        return float(match[1]) * SCALES[match[2]]


async def read_body(request: Request, share: BudgetShare, bytes_max: int, decompressed_max: int) -> bodies.Body:
    """The whole body, decompressed. A body that is too long is refused before it is read."""
    headers = request.headers
    declared = headers.get("content-length")
    if declared is not None:
        _check_size(int(declared), bytes_max)  # the HTTP parser accepts only numbers
        share.check(int(declared))  # bytes are taken as they arrive: announcing a body reserves nothing
    body = bytearray()
    async for chunk in _chunks(request):
        _check_size(len(body) + len(chunk), bytes_max)
        share.take_chunk(len(chunk))
        body += chunk
    encoding = headers.get("content-encoding")
    if encoding is None:
        return body
    decompressed = await _decompress(body, encoding, decompressed_max)
    share.take(len(decompressed))
    return decompressed


async def _decompress(body: bodies.Body, encoding: str, limit_bytes: int) -> bodies.Body:
    """Decompress in a thread if the body is large or turns out to be: a few kilobytes may decompress to megabytes."""
    if len(body) < THREAD_BYTES_MIN:
        try:
            return bodies.decompress(body, encoding, min(limit_bytes, THREAD_BYTES_MIN))
        except DecompressedTooLarge:
            if limit_bytes <= THREAD_BYTES_MIN:
                raise
    return await in_thread(bodies.decompress, body, encoding, limit_bytes)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise BodyTooLarge(f"the request body exceeds the limit of {bytes_max:,} bytes")


async def read_json(request: Request, share: BudgetShare, bytes_max: int = 1 << 20) -> dict[str, Any]:
    """The fields of a small JSON object; for everything but messages."""
    if bodies.media_type(request.headers.get("content-type"), default=bodies.JSON) != bodies.JSON:
        raise UnsupportedMedia(f"the content type must be {bodies.JSON}")
    value = strict_json.loads(await read_body(request, share, bytes_max, bytes_max))
    if type(value) is not dict:
        raise MalformedJson("the request body must be a JSON object")
    return value


class RequestBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of the request bodies in `native/types.py`. Unknown fields are refused, so that a typo is noticed."""

    EXAMPLE: ClassVar[str] = "{}"


R = TypeVar("R", bound=RequestBody)


def decode(fields: dict[str, Any], kind: type[R]) -> R:
    """The fields of a request body as a Struct; MalformedJson if they do not match its type."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        try:
            return msgspec.convert(_with_integers(fields), kind)
        except msgspec.ValidationError:
            raise MalformedJson(f"malformed request: {error}; an example is {kind.EXAMPLE}") from None


def _with_integers(value: Any) -> Any:
    """3.0 is the same JSON number as 3, but msgspec refuses it for an int."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refuse_unknown(fields: dict[str, Any], kind: type[RequestBody]) -> None:
    """InvalidInput if a request has a field that its type does not have."""
    for name in fields:
        if name not in kind.__struct_fields__:
            raise InvalidInput(f"unknown field {name[:80]!r}; allowed are {', '.join(kind.__struct_fields__)}")


async def in_thread_if(size: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run work on many bytes in a thread, so that the event loop serves other connections meanwhile."""
    return work(*args, **named) if size < THREAD_BYTES_MIN else await in_thread(work, *args, **named)


async def in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    call = functools.partial(work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(BODY_EXECUTOR, call)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass
