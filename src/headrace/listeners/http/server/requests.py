"""What a request carries: names in its path, parameters in its query, its body. All bounded and checked."""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

from starlette.requests import Request
from starlette.types import Receive

from headrace.errors import (
    BodyTooLarge,
    DecompressedTooLarge,
    InvalidInput,
    MalformedJson,
    Overloaded,
    UnsupportedMedia,
)
from headrace.listeners.common.per_source_limit import SOURCE_PART
from headrace.wire.http import bodies, strict_json

OFFSET_MAX = 2**63 - 1
PARAMETERS_MAX = 32
DIGITS_MAX = 19
INTEGER = re.compile(rf"-?\d{{1,{DIGITS_MAX}}}")
SECONDS = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(ms|s|m)?")
SCALES = {None: 1.0, "s": 1.0, "ms": 0.001, "m": 60.0}
P = ParamSpec("P")
T = TypeVar("T")
# One thread: a body unfolds to several times its size while it is worked on, and the sum must stay bounded.
BODY_EXECUTOR = ThreadPoolExecutor(1, "http-body")
THREAD_BYTES_MIN = 256 * 1024  # below this a thread costs more than it frees the loop from


class Gone(Exception):
    """The client hung up: nobody is left to answer."""


class Budget:
    """Bytes that requests and answers may hold in memory, all together. One address does not get the last of them: who
    is slow, or means ill, keeps only its like waiting."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._by_source: dict[str, int] = {}

    @contextmanager
    def share(self, source: str) -> Iterator["BudgetShare"]:
        share = BudgetShare(self, source)
        try:
            yield share
        finally:
            share.give_back()

    def has_room(self, source: str, size: int, own: int) -> bool:
        """For `size` more bytes. Who is alone may have more than there is; of those in use `own` are no others'."""
        of_source = self._by_source.get(source, 0)
        if of_source > own and of_source + size > self.bytes_max * SOURCE_PART:
            return False
        return self.used <= own or self.used + size <= self.bytes_max

    def move(self, source: str, size: int) -> None:
        self.used += size
        of_source = self._by_source.get(source, 0) + size
        if of_source:
            self._by_source[source] = of_source
        else:
            self._by_source.pop(source, None)


class BudgetShare:
    """One request's part of the budget, given back when it ends."""

    __slots__ = ("_budget", "_source", "held")

    def __init__(self, budget: Budget, source: str) -> None:
        self._budget = budget
        self._source = source
        self.held = 0

    def check(self, size: int, own: int = 0) -> None:
        if not self._budget.has_room(self._source, size, own):
            raise Overloaded("too many bytes are on their way in or out; try again in a moment")

    def take(self, size: int) -> None:
        self.check(size)
        self._move(size)

    def take_piece(self, size: int) -> None:
        """Of a body that was let in."""
        self.check(size, self.held)
        self._move(size)

    def _move(self, size: int) -> None:
        self._budget.move(self._source, size)
        self.held += size

    def give_back(self) -> int:
        """All of it, before the end: how much it was."""
        size, self.held = self.held, 0
        if size:
            self._budget.move(self._source, -size)
        return size


def whole_number(text: str, most: int = OFFSET_MAX) -> int | None:
    """None when it is not one, or larger. Its length first: Python reads no number of thousands of digits."""
    return int(text) if len(text) <= DIGITS_MAX and text.isdecimal() and int(text) <= most else None


def path_name(request: Request, parameter: str) -> str:
    """A name in the path: any characters, percent-encoded UTF-8 (so %2F is part of a name, not a border)."""
    try:
        return unquote_to_bytes(request.path_params[parameter]).decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the name of the {parameter} in the path is not UTF-8") from None


class Query:
    """The parameters after the question mark. What nobody knows is refused: a typing error is not silent.
    But where clients of somebody else's interface say more than it has (`takes_all`), it is left alone."""

    def __init__(self, request: Request, *known: str, takes_all: bool = False) -> None:
        text = request.scope["query_string"]
        try:
            pairs = parse_qsl(
                text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX
            )
        except ValueError:
            raise InvalidInput(f"the query is not up to {PARAMETERS_MAX} UTF-8 name=value pairs") from None
        self._pairs = pairs
        self._values: dict[str, str] = {}
        for name, value in pairs:
            if name not in known and not takes_all:
                allowed = f"there are {', '.join(known)}" if known else "there are none here"
                raise InvalidInput(f"no such parameter: {name[:80]!r}; {allowed}")
            if name in self._values and not takes_all:
                raise InvalidInput(f"the parameter {name} is given twice")
            self._values.setdefault(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def texts(self, name: str) -> list[str]:
        """Of a parameter that may be there several times."""
        return [value for one, value in self._pairs if one == name]

    def choice(self, name: str, *choices: str) -> str | None:
        value = self._values.get(name)
        if value is not None and value not in choices:
            raise InvalidInput(f"{name} is one of {', '.join(choices)}, not {value[:80]!r}")
        return value

    def integer(self, name: str, *, least: int = 0, most: int = OFFSET_MAX) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if INTEGER.fullmatch(value) is None or not least <= int(value) <= most:
            raise InvalidInput(f"{name} is a whole number from {least} to {most}, not {value[:80]!r}")
        return int(value)

    def seconds(self, name: str) -> float:
        """Seconds, or with a unit: 5, 0.5, 500ms, 1m."""
        value = self._values.get(name)
        if value is None:
            return 0.0
        match = SECONDS.fullmatch(value)
        if match is None:
            raise InvalidInput(f"{name} is a time in seconds, such as 5, 0.5 or 500ms, not {value[:80]!r}")
        return float(match[1]) * SCALES[match[2]]


async def read_body(request: Request, share: BudgetShare, bytes_max: int, unfolded_max: int) -> bodies.Body:
    """The whole body without its content encoding. Too long a one is refused before it is read."""
    headers = request.headers
    declared = headers.get("content-length")
    if declared is not None:
        _check_size(int(declared), bytes_max)  # the parser has made sure that it is a number
        share.check(int(declared))  # taken as it comes: what is only announced is kept from nobody
    body = bytearray()
    async for chunk in _chunks(request):
        _check_size(len(body) + len(chunk), bytes_max)
        share.take_piece(len(chunk))
        body += chunk
    encoding = headers.get("content-encoding")
    if encoding is None:
        return body
    unfolded = await _unfold(body, encoding, unfolded_max)
    share.take(len(unfolded))
    return unfolded


async def _unfold(body: bodies.Body, encoding: str, limit_bytes: int) -> bodies.Body:
    """In a thread if it is large or becomes it: what a few kilobytes unfold to is not known before."""
    if len(body) < THREAD_BYTES_MIN:
        try:
            return bodies.unfold(body, encoding, min(limit_bytes, THREAD_BYTES_MIN))
        except DecompressedTooLarge:
            if limit_bytes <= THREAD_BYTES_MIN:
                raise
    return await in_thread(bodies.unfold, body, encoding, limit_bytes)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Gone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _check_size(size: int, bytes_max: int) -> None:
    if size > bytes_max:
        raise BodyTooLarge(f"the body is over the limit of {bytes_max:,} bytes")


async def read_json(request: Request, share: BudgetShare, bytes_max: int = 1 << 20) -> dict[str, Any]:
    """A small JSON object, for everything but messages."""
    if bodies.media_type(request.headers.get("content-type"), default=bodies.JSON) != bodies.JSON:
        raise UnsupportedMedia(f"this takes {bodies.JSON}")
    value = strict_json.loads(await read_body(request, share, bytes_max, bytes_max))
    if type(value) is not dict:
        raise MalformedJson("the body is a JSON object")
    return value


async def in_thread_if(size: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Work on many bytes goes to a thread, so that other connections are served meanwhile."""
    return work(*args, **named) if size < THREAD_BYTES_MIN else await in_thread(work, *args, **named)


async def in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    call = functools.partial(work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(BODY_EXECUTOR, call)


async def hung_up(receive: Receive) -> None:
    """Returns when the client has closed the connection (or has its answer)."""
    while (await receive())["type"] != "http.disconnect":
        pass
