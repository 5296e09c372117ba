"""Strict JSON parsing: refuses duplicate names, NaN, lone surrogates, huge numbers and deep nesting.

Every function returns the value or raises MalformedJson. A body can neither exhaust the stack nor take much more memory
than it has bytes.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from headrace.errors import MalformedJson

# `[],[],[],...` takes 20 bytes of memory per byte sent, so values are counted before anything is parsed.
VALUES_MAX = 1_000_000
WHITESPACE = re.compile(r"[ \t\r\n]*")
STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"')
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(body: bytes | bytearray | memoryview) -> str:
    try:
        return str(body, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"not UTF-8 at byte {error.start}") from None


def loads(body: bytes | bytearray) -> Any:
    """The single JSON value of a body."""
    refuse_too_many_values(body)
    text = text_of(body)
    value, end = scan(text, _skip(text, 0))
    if _skip(text, end) != len(text):
        raise MalformedJson(f"unexpected data after the JSON value at character {end}")
    return value


def scan(text: str, at: int) -> tuple[Any, int]:
    """The value that starts at a character, and the character after it."""
    try:
        value, end = _SCANNER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise MalformedJson(f"not JSON: {reason[:1].lower()}{reason[1:]} at character {error.pos}") from None
    except RecursionError:
        raise MalformedJson("JSON is nested too deeply") from None
    except ValueError:  # int() refuses thousands of digits, which would take quadratic time
        raise MalformedJson("a JSON number has too many digits") from None
    if SURROGATE.search(text, at, end):
        _refuse_lone_surrogates(value)
    return value, end


def elements(text: str, at: int) -> Iterator[tuple[Any, int, int]]:
    """Elements of the array that starts at a character, each with its start and end. Lazy, so that the caller can stop
    at its limit."""
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        _expect_end(text, at + 1)
        return
    while True:
        value, end = scan(text, at)
        yield value, at, end
        at = _skip(text, end)
        mark = text[at : at + 1]
        if mark == "]":
            _expect_end(text, at + 1)
            return
        if mark != ",":
            raise MalformedJson(f"not JSON: expecting ',' or ']' at character {at}")
        at = _skip(text, at + 1)


def first_character(text: str) -> tuple[str, int]:
    """The first character that is not white space, and its position."""
    at = _skip(text, 0)
    return text[at : at + 1], at


def refuse_too_many_values(body: bytes | bytearray) -> None:
    if has_more_values(body, VALUES_MAX):
        raise MalformedJson(f"the JSON has more than {VALUES_MAX:,} values; send NDJSON instead")


def has_more_values(body: bytes | bytearray, most: int) -> bool:
    if len(body) < most or _values(body) <= most:
        return False
    # Commas and brackets inside strings (of a CSV file, say) cost nothing, so count again without strings.
    outside = at = 0
    for match in STRING.finditer(body):
        outside += _values(body[at : match.start()])
        at = match.end()
        if outside > most:
            return True
    return outside + _values(body[at:]) > most


def _values(data: bytes | bytearray) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _skip(text: str, at: int) -> int:
    match = WHITESPACE.match(text, at)
    assert match is not None
    return match.end()


def _expect_end(text: str, at: int) -> None:
    if _skip(text, at) != len(text):
        raise MalformedJson(f"unexpected data after the JSON value at character {at}")


def _refuse_lone_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedJson("a \\u escape is a lone surrogate") from None
    except RecursionError:
        raise MalformedJson("JSON is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise MalformedJson(f"name {twice[:80]!r} appears twice in one object")
    return result


def _refuse_constant(name: str) -> Any:
    raise MalformedJson(f"{name} is not valid JSON")


_SCANNER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
