"""Client logic without I/O, as generators.

A conversation yields the request that it needs, is sent the answer, and returns its result. If the request fails, the
error is raised inside the conversation, at its `yield`. The blocking and the asyncio classes each have one small driver
that performs these requests.
"""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from headrace.client.positions import Query

T = TypeVar("T")


class Get(NamedTuple):
    """Answered with a Response."""

    path: str
    query: Query
    wait_s: float


class Post(NamedTuple):
    """Answered with a Response."""

    path: str
    headers: Mapping[str, str]
    body: bytes


class Follow(NamedTuple):
    """Answered with an open stream of server-sent events."""

    path: str
    headers: Mapping[str, str]


class Listen(NamedTuple):
    """Answered with the bytes that arrived in time, b"" if none did, or None if the stream has ended."""

    stream: Any
    wait_s: float


class Pause(NamedTuple):
    """Answered with None after the given time."""

    wait_s: float


Ask = Get | Post | Follow | Listen | Pause
Conversation = Generator[Ask, Any, T]
