"""Parses kcat's notations for where to start (-o) and how to print a message (-f), and times."""

import re
from collections.abc import Callable
from datetime import datetime

import msgspec

from headrace.client.positions import Start
from headrace.client.shapes import Message
from headrace.config import parse_duration
from headrace.errors import InvalidInput

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "e": "\x1b"}
TOKEN = re.compile(r"%(.)|\\x([0-9a-fA-F]{2})|\\(.)", re.S)


class ReadRange(msgspec.Struct, frozen=True):
    """The range to read: from an offset or a time, up to a time or without end."""

    start: Start = "earliest"
    since_ms: int | None = None
    until_ms: int | None = None


def parse_range(text: str, now_ms: int) -> ReadRange:
    """beginning, end, N, -N (the last N), s@TIME (from), e@TIME (until); comma-separated."""
    where = ReadRange()
    for part in text.split(","):
        word = part.strip().lower()
        if word in {"beginning", "earliest", "start", "oldest"}:
            where = msgspec.structs.replace(where, start="earliest")
        elif word in {"end", "latest", "newest"}:
            where = msgspec.structs.replace(where, start="latest")
        elif re.fullmatch(r"-?\d{1,19}", word):
            where = msgspec.structs.replace(where, start=int(word))
        elif word.startswith("s@"):
            where = msgspec.structs.replace(where, since_ms=parse_time(part.strip()[2:], now_ms))
        elif word.startswith("e@"):
            where = msgspec.structs.replace(where, until_ms=parse_time(part.strip()[2:], now_ms))
        else:
            raise InvalidInput(
                f"{part!r} is not a valid offset; write beginning, end, an offset, -N for the last N, s@TIME or e@TIME"
            )
    return where


def parse_time(text: str, now_ms: int) -> int:
    """Milliseconds since 1970 of 1700000000000, 2026-11-15T10:00 or 1h (ago)."""
    if re.fullmatch(r"\d{10,}", text):
        return int(text)
    try:
        return now_ms - parse_duration(text.removeprefix("-"))
    except ValueError:
        pass
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)  # local time, unless it names a zone
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"{text!r} is not a time; write 1h (ago), 2026-11-15T10:00 or milliseconds since 1970"
        ) from None


def unescape(text: str) -> str:
    r"""Replaces \n, \t, \xHH and similar escapes by the characters they stand for."""
    return re.sub(
        r"\\x([0-9a-fA-F]{2})|\\(.)",
        lambda m: chr(int(m[1], 16)) if m[1] else ESCAPES.get(m[2], m[0]),
        text,
        flags=re.S,
    )


def _length(data: bytes | None) -> bytes:
    return str(-1 if data is None else len(data)).encode()


def _headers(message: Message) -> bytes:
    return b",".join(name.encode() + b"=" + (b"" if value is None else value) for name, value in message.headers)


FIELDS: dict[str, Callable[[Message], bytes]] = {
    "s": lambda m: m.value or b"",
    "S": lambda m: _length(m.value),
    "k": lambda m: m.key or b"",
    "K": lambda m: _length(m.key),
    "T": lambda m: str(m.timestamp).encode(),
    "o": lambda m: str(m.offset).encode(),
    "p": lambda m: str(m.partition).encode(),
    "h": _headers,
}


def compile_format(text: str, topic: str) -> Callable[[Message], bytes]:
    """Compiles kcat's -f into a function: %s value, %S its length, %k key, %K its length, %t topic, %p partition,
    %o offset, %T timestamp, %h headers, %% a percent sign, and backslash escapes."""
    pieces: list[bytes | Callable[[Message], bytes]] = []
    at = 0
    for match in TOKEN.finditer(text):
        pieces.append(text[at : match.start()].encode())
        at = match.end()
        field, code, escape = match.groups()
        if code:
            pieces.append(bytes([int(code, 16)]))
        elif escape:
            pieces.append(ESCAPES.get(escape, match[0]).encode())
        elif field == "t":
            pieces.append(topic.encode())
        elif field == "%":
            pieces.append(b"%")
        elif field in FIELDS:
            pieces.append(FIELDS[field])
        else:
            known = ", ".join(f"%{name}" for name in ("t", *FIELDS))
            raise InvalidInput(f"%{field} is not a format specifier; use {known} or %%")
    pieces.append(text[at:].encode())
    return lambda message: b"".join([p if isinstance(p, bytes) else p(message) for p in pieces])


def printable(data: bytes | None) -> str:
    """Text that is safe to print on a terminal: control characters are escaped."""
    if data is None:
        return "null"
    text = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
