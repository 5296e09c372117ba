"""Messages as people write them in JSON, NDJSON or raw bytes, and as the log keeps them.

A message is {"key", "value", "headers", "partition", "timestamp"}; all but the value are optional. Strings
are kept as they are; `"encoding": "base64"` says that key and value are bytes, and may name "key", "value",
"headers" apart; any other JSON type is kept as its JSON text, to the character; a null value is a tombstone.
What a read answers can be published again as it stands.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from headrace.errors import MalformedJson, MalformedMessage
from headrace.record.amqp.validate import properties_fault
from headrace.record.layout import AMQP_PROPERTIES_HEADER
from headrace.record.types import Record
from headrace.wire.http import strict_json
from headrace.wire.http.amqp import amqp_shape

Headers = tuple[tuple[str, bytes | None], ...]
LINE = re.compile(rb"\s*+([^\n]+)")  # possessive: blank lines are passed over once, never again
NOW = -1  # a timestamp the broker fills in
TIMESTAMP_MAX = 253_402_300_799_999  # the end of the year 9999: later ones are microseconds sent by mistake
PARTITION_MAX = 2**31 - 1


class Draft(NamedTuple):
    """A message on its way in: it has no offset yet, and maybe no partition."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int = NOW


class _Texts(msgspec.Struct):
    """The same object again, with its parts as the text they were sent as."""

    value: msgspec.Raw
    key: msgspec.Raw = msgspec.Raw()
    headers: msgspec.Raw = msgspec.Raw()


# "offset" and "amqp" are taken and not used, so that what was read can be sent back.
FIELDS = frozenset({"key", "value", "headers", "partition", "timestamp", "encoding", "offset", "amqp"})
PARTS = ("key", "value", "headers")
ENCODINGS = ("text", "base64")
PLAIN: dict[str, str] = {}
BASE64 = {"key": "base64", "value": "base64"}


def parse_json(body: bytes | bytearray, count_max: int) -> list[Draft]:
    """One message, or an array of them."""
    strict_json.refuse_too_many_pieces(body)
    text = strict_json.text_of(body)
    mark, at = strict_json.first_mark(text)
    if mark != "[":
        return [_draft(0, strict_json.loads(body), text)]
    drafts: list[Draft] = []
    for value, start, end in strict_json.elements(text, at):
        _refuse_too_many(len(drafts), count_max)
        drafts.append(_draft(len(drafts), value, text, start, end))
    return drafts


def parse_ndjson(body: bytes | bytearray, count_max: int) -> list[Draft]:
    """One message a line; empty lines are skipped."""
    drafts: list[Draft] = []
    for line in _lines(body):
        index = len(drafts)
        _refuse_too_many(index, count_max)
        try:
            drafts.append(_draft(index, strict_json.loads(line), str(line, "utf-8")))
        except MalformedJson as error:
            raise MalformedMessage(index, str(error)) from None
    return drafts


def _lines(body: bytes | bytearray) -> Iterator[bytes]:
    """Not split(), nor a loop over empty lines: a body may be nothing but millions of them."""
    at = 0
    while match := LINE.match(body, at):
        yield match[1]
        at = match.end()


def _refuse_too_many(count: int, count_max: int) -> None:
    if count >= count_max:
        raise MalformedMessage(count, f"one request holds at most {count_max:,} messages")


def _draft(index: int, fields: Any, text: str, start: int = 0, end: int | None = None) -> Draft:
    try:
        if type(fields) is not dict:
            raise MalformedJson("a message is a JSON object")
        if not fields.keys() <= FIELDS:
            unknown = sorted(fields.keys() - FIELDS)[0]
            raise MalformedJson(f"no such field: {unknown[:80]!r}; there are {', '.join(sorted(FIELDS))}")
        if "value" not in fields:
            raise MalformedJson("a message needs a value; null is a tombstone")
        key, value, headers = fields.get("key"), fields["value"], fields.get("headers")
        encoding = _encoding(fields["encoding"]) if "encoding" in fields else PLAIN
        texts = _Sent(text, start, end)
        return Draft(
            _data(key, "key", encoding, texts),
            _data(value, "value", encoding, texts),
            _headers(headers, encoding, texts) if headers else _no_headers(headers),
            integer(fields.get("partition"), "partition", most=PARTITION_MAX),
            _timestamp(fields.get("timestamp")),
        )
    except MalformedJson as error:
        raise MalformedMessage(index, str(error)) from None


class _Sent:
    """The text of one message, cut into its parts only when a part is needed as text."""

    __slots__ = ("_end", "_parts", "_start", "_text")

    def __init__(self, text: str, start: int, end: int | None) -> None:
        self._text, self._start, self._end = text, start, end
        self._parts: _Texts | None = None

    def __getitem__(self, part: str) -> bytes:
        if self._parts is None:
            self._parts = msgspec.json.decode(self._text[self._start : self._end], type=_Texts)
        return bytes(getattr(self._parts, part))


def _data(value: Any, part: str, encoding: dict[str, str], sent: _Sent) -> bytes | None:
    if value is None:
        return None
    if encoding.get(part) == "base64":
        return _from_base64(value, part)
    if type(value) is str:
        return value.encode()
    return sent[part]


def _from_base64(value: Any, part: str) -> bytes:
    if type(value) is not str:
        raise MalformedJson(f"{part} is said to be base64, so it must be a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedJson(f"{part} is said to be base64, but is not") from None


def _timestamp(given: Any) -> int:
    stamp = integer(given, "timestamp", most=TIMESTAMP_MAX)
    return NOW if stamp is None else stamp


def _no_headers(headers: Any) -> Headers:
    if headers is None or headers == {} or headers == []:
        return ()
    raise MalformedJson("headers are an object, or a list of [name, value] pairs")


def _headers(headers: Any, encoding: dict[str, str], sent: _Sent) -> Headers:
    pairs: Iterable[Any]
    if type(headers) is dict:
        pairs = headers.items()
    elif type(headers) is list:
        pairs = headers
    else:
        raise MalformedJson("headers are an object, or a list of [name, value] pairs")
    binary = encoding.get("headers") == "base64"
    texts: list[bytes] | None = None
    result: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        if len(pair) != 2 if type(pair) is list else type(pair) is not tuple:
            raise MalformedJson("headers are an object, or a list of [name, value] pairs")
        name, value = pair
        if type(name) is not str:
            raise MalformedJson("the name of a header is a string")
        if value is None:
            result.append((name, None))
        elif binary:
            result.append((name, _from_base64(value, "the value of a header")))
        elif type(value) is str:
            result.append((name, value.encode()))
        else:
            if texts is None:
                texts = _header_texts(sent["headers"], type(headers) is dict)
            result.append((name, texts[len(result)]))
    return checked(result)


def checked(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """One of them is sent as it is to those who read the message over AMQP."""
    found = tuple(headers)
    for name, value in found:
        if name == AMQP_PROPERTIES_HEADER and value is not None and properties_fault(value) == "bad":
            raise MalformedJson(f"the header {name} does not hold properties of AMQP")
    return found


def _header_texts(text: bytes, is_object: bool) -> list[bytes]:
    if is_object:
        return [bytes(raw) for raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).values()]
    return [bytes(raw) for _, raw in msgspec.json.decode(text, type=list[tuple[str, msgspec.Raw]])]


def _encoding(given: Any) -> dict[str, str]:
    if given == "base64":
        return BASE64
    if given is None or given == "text":
        return PLAIN
    if type(given) is dict and all(part in PARTS and name in ENCODINGS for part, name in given.items()):
        return given
    raise MalformedJson('encoding is "base64" or "text", or an object that names key, value, headers apart')


def integer(value: Any, name: str, *, most: int, least: int = 0) -> int | None:
    if value is None:
        return None
    if type(value) is float and value.is_integer():  # 3.0 is the same JSON number as 3
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise MalformedJson(f"{name} is a whole number from {least} to {most}")
    return value


def render(partition: int, record: Record, *, binary: bool = False) -> dict[str, Any]:
    """The message as it is answered; "encoding" is there only when something is not text."""
    encoding: dict[str, str] = {}
    key = _as_text(record.key, "key", encoding, binary)
    value = _as_text(record.value, "value", encoding, binary)
    message: dict[str, Any] = {
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": key,
        "value": value,
        "headers": _render_headers(record.headers, encoding, binary) if record.headers else {},
    }
    if encoding:
        key_is_text = key is not None and "key" not in encoding
        value_is_text = value is not None and "value" not in encoding
        apart = key_is_text or value_is_text or "headers" in encoding
        message["encoding"] = encoding if apart else "base64"
    amqp = amqp_shape(record.headers) if record.headers else None
    if amqp is not None:
        message["amqp"] = amqp
    return message


def _as_text(data: bytes | None, part: str, encoding: dict[str, str], binary: bool) -> str | None:
    if data is None:
        return None
    if not binary:
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
    encoding[part] = "base64"
    return base64.b64encode(data).decode("ascii")


def _render_headers(headers: Headers, encoding: dict[str, str], binary: bool) -> Any:
    values: list[str | None]
    try:
        if binary:
            raise ValueError
        values = [None if value is None else value.decode() for _, value in headers]
    except ValueError:  # one that is not text makes all of them base64
        encoding["headers"] = "base64"
        values = [None if value is None else base64.b64encode(value).decode("ascii") for _, value in headers]
    pairs = [(name, value) for (name, _), value in zip(headers, values, strict=True)]
    as_object = dict(pairs)
    return as_object if len(as_object) == len(pairs) else pairs
