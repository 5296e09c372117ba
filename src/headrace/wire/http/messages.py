"""Messages in the HTTP API's JSON and NDJSON, converted to and from records.

A message is `{"key", "value", "headers", "partition", "timestamp"}`; only the value is required. A string is stored
as UTF-8, null is a tombstone, and any other JSON value is stored as the JSON text that was sent. `"encoding": "base64"`
marks key and value as bytes; an object sets the encoding of "key", "value" and "headers" separately. A message that was
read can be published again unchanged.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, cast

import msgspec
from msgspec import Meta

from headrace.errors import MalformedJson, MalformedMessage
from headrace.record.amqp.validate import properties_fault
from headrace.record.layout import AMQP_PROPERTIES_HEADER
from headrace.record.types import Record
from headrace.wire.http import json_text, strict_json
from headrace.wire.http.amqp import AmqpMessage, amqp_message

Headers = tuple[tuple[str, bytes | None], ...]
JsonHeaders = dict[str, str | None] | list[tuple[str, str | None]]
LINE = re.compile(rb"\s*+([^\n]+)")  # possessive, so that blank lines are scanned only once
NOW = -1  # timestamp of a message without one: the broker sets it
TIMESTAMP_MAX = 253_402_300_799_999  # end of the year 9999; larger values are microseconds sent by mistake
PARTITION_MAX = 2**31 - 1
OFFSET_MAX = 2**63 - 1

Offset = Annotated[int, Meta(ge=0, le=OFFSET_MAX, extra_json_schema={"format": "int64"})]
PartitionNumber = Annotated[int, Meta(ge=0, le=PARTITION_MAX, extra_json_schema={"format": "int32"})]
TimestampMs = Annotated[int, Meta(ge=0, le=TIMESTAMP_MAX, extra_json_schema={"format": "int64"})]
EncodingName = Literal["text", "base64"]


class Encodings(TypedDict, total=False):
    """Encoding of key, value and header values, each on its own; text is the default."""

    key: EncodingName
    value: EncodingName
    headers: EncodingName


class Message(TypedDict):
    """A message to publish."""

    value: Annotated[Any, Meta(description="A string, null for a tombstone, or any JSON, which is stored as text.")]
    key: NotRequired[Annotated[Any, Meta(description="Like value; null means no key.")]]
    headers: NotRequired[
        Annotated[
            dict[str, Any] | list[tuple[str, Any]] | None,
            Meta(description="An object, or a list of [name, value] pairs, in which a name may repeat."),
        ]
    ]
    partition: NotRequired[PartitionNumber | None]
    timestamp: NotRequired[TimestampMs | None]
    encoding: NotRequired[
        Annotated[EncodingName | Encodings | None, Meta(description="Encoding of key and value, or of each part.")]
    ]
    offset: NotRequired[Annotated[Any, Meta(description="Ignored, so that a message that was read can be published.")]]
    amqp: NotRequired[Annotated[Any, Meta(description="Ignored: the headers contain the same information.")]]


class ReadMessage(TypedDict):
    """A message as it was read. `encoding` is present when a part is not text, `amqp` when it was sent over AMQP."""

    partition: PartitionNumber
    offset: Offset
    timestamp: Annotated[int, Meta(extra_json_schema={"format": "int64"})]
    key: str | None
    value: str | None
    headers: JsonHeaders
    encoding: NotRequired[EncodingName | Encodings]
    amqp: NotRequired[AmqpMessage]


class Draft(NamedTuple):
    """A message to publish, before it has an offset and, possibly, a partition."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    partition: int | None = None
    timestamp: int = NOW


class _RawParts(msgspec.Struct):
    """Parts of a message as JSON text."""

    value: msgspec.Raw
    key: msgspec.Raw = msgspec.Raw()
    headers: msgspec.Raw = msgspec.Raw()


LARGE_BYTES = 64 * 1024  # of a record; a larger one is rendered by `render_large`, in a thread
SMALL_FIELDS_BYTES = 256
FIELDS = frozenset(Message.__annotations__)
PARTS = frozenset(Encodings.__annotations__)
ENCODINGS = ("text", "base64")
PLAIN: Encodings = {}
BASE64: Encodings = {"key": "base64", "value": "base64"}
HEADERS_SHAPE = "headers must be an object or a list of [name, value] pairs"


def parse_json(body: bytes | bytearray, count_max: int) -> list[Draft]:
    """Parse one message or an array of messages."""
    strict_json.refuse_too_many_values(body)
    text = strict_json.text_of(body)
    mark, at = strict_json.first_character(text)
    if mark != "[":
        return [_draft(0, strict_json.loads(body), text)]
    drafts: list[Draft] = []
    for value, start, end in strict_json.elements(text, at):
        _refuse_too_many(len(drafts), count_max)
        drafts.append(_draft(len(drafts), value, text, start, end))
    return drafts


def parse_ndjson(body: bytes | bytearray, count_max: int) -> list[Draft]:
    """Parse one message per line; empty lines are skipped."""
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
    """Non-empty lines. Not split(): a body of millions of empty lines would become millions of objects."""
    at = 0
    while match := LINE.match(body, at):
        yield match[1]
        at = match.end()


def _refuse_too_many(count: int, count_max: int) -> None:
    if count >= count_max:
        raise MalformedMessage(count, f"a request may contain at most {count_max:,} messages")


def _draft(index: int, fields: Any, text: str, start: int = 0, end: int | None = None) -> Draft:
    try:
        if type(fields) is not dict:
            raise MalformedJson("a message must be a JSON object")
        if not fields.keys() <= FIELDS:
            unknown = sorted(fields.keys() - FIELDS)[0]
            raise MalformedJson(f"unknown field {unknown[:80]!r}; a message may have {', '.join(sorted(FIELDS))}")
        if "value" not in fields:
            raise MalformedJson("a message needs the field value; null publishes a tombstone")
        key, value, headers = fields.get("key"), fields["value"], fields.get("headers")
        encoding = _encoding(fields["encoding"]) if "encoding" in fields else PLAIN
        sent = _SentText(text, start, end)
        return Draft(
            _data(key, "key", encoding, sent),
            _data(value, "value", encoding, sent),
            _headers(headers, encoding, sent) if headers else _no_headers(headers),
            _integer(fields.get("partition"), "partition", most=PARTITION_MAX),
            _timestamp(fields.get("timestamp")),
        )
    except MalformedJson as error:
        raise MalformedMessage(index, str(error)) from None


class _SentText:
    """JSON text of one message, split into its parts when the text of one is first needed."""

    __slots__ = ("_end", "_parts", "_start", "_text")

    def __init__(self, text: str, start: int, end: int | None) -> None:
        self._text, self._start, self._end = text, start, end
        self._parts: _RawParts | None = None

    def __getitem__(self, part: str) -> bytes:
        if self._parts is None:
            self._parts = msgspec.json.decode(self._text[self._start : self._end], type=_RawParts)
        return bytes(getattr(self._parts, part))


def _data(value: Any, part: str, encoding: Encodings, sent: _SentText) -> bytes | None:
    if value is None:
        return None
    if encoding.get(part) == "base64":
        return _from_base64(value, part)
    if type(value) is str:
        return value.encode()
    return sent[part]


def _from_base64(value: Any, part: str) -> bytes:
    if type(value) is not str:
        raise MalformedJson(f"{part} has encoding base64 and must be a string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise MalformedJson(f"{part} has encoding base64 but is not valid base64") from None


def _timestamp(given: Any) -> int:
    stamp = _integer(given, "timestamp", most=TIMESTAMP_MAX)
    return NOW if stamp is None else stamp


def _no_headers(headers: Any) -> Headers:
    if headers is None or headers == {} or headers == []:
        return ()
    raise MalformedJson(HEADERS_SHAPE)


def _headers(headers: Any, encoding: Encodings, sent: _SentText) -> Headers:
    pairs: Iterable[Any]
    if type(headers) is dict:
        pairs = headers.items()
    elif type(headers) is list:
        pairs = headers
    else:
        raise MalformedJson(HEADERS_SHAPE)
    binary = encoding.get("headers") == "base64"
    texts: list[bytes] | None = None
    result: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        if len(pair) != 2 if type(pair) is list else type(pair) is not tuple:
            raise MalformedJson(HEADERS_SHAPE)
        name, value = pair
        if type(name) is not str:
            raise MalformedJson("a header name must be a string")
        if value is None:
            result.append((name, None))
        elif binary:
            result.append((name, _from_base64(value, "a header value")))
        elif type(value) is str:
            result.append((name, value.encode()))
        else:
            if texts is None:
                texts = _header_texts(sent["headers"], type(headers) is dict)
            result.append((name, texts[len(result)]))
    return check_headers(result)


def check_headers(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """Refuse malformed AMQP properties: AMQP consumers receive that header unchanged."""
    found = tuple(headers)
    for name, value in found:
        if name == AMQP_PROPERTIES_HEADER and value is not None and properties_fault(value) == "bad":
            raise MalformedJson(f"header {name} must contain valid AMQP properties")
    return found


def _header_texts(text: bytes, is_object: bool) -> list[bytes]:
    if is_object:
        return [bytes(raw) for raw in msgspec.json.decode(text, type=dict[str, msgspec.Raw]).values()]
    return [bytes(raw) for _, raw in msgspec.json.decode(text, type=list[tuple[str, msgspec.Raw]])]


def _encoding(given: Any) -> Encodings:
    if given == "base64":
        return BASE64
    if given is None or given == "text":
        return PLAIN
    if type(given) is dict and all(part in PARTS and name in ENCODINGS for part, name in given.items()):
        return cast(Encodings, given)
    raise MalformedJson(
        'encoding must be "base64", "text", or an object with one of them for each of key, value and headers'
    )


def _integer(value: Any, name: str, *, most: int) -> int | None:
    if value is None:
        return None
    if type(value) is float and value.is_integer():  # 3.0 is the same JSON number as 3
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise MalformedJson(f"{name} must be an integer from 0 to {most}")
    return value


def record_bytes(record: Record) -> int:
    """The bytes of the key, the value and the headers."""
    size = len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name) + len(value or b"")
    return size


def render(partition: int, record: Record, *, binary: bool = False) -> ReadMessage:
    """JSON form of a record."""
    encoding: Encodings = {}
    key = _as_text(record.key, "key", encoding, binary)
    value = _as_text(record.value, "value", encoding, binary)
    message: ReadMessage = {
        "partition": partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": key,
        "value": value,
        "headers": _render_headers(record.headers, encoding, binary) if record.headers else {},
    }
    if encoding:
        message["encoding"] = _named(encoding, record)
    amqp = amqp_message(record.headers) if record.headers else None
    if amqp is not None:
        message["amqp"] = amqp
    return message


def _named(encoding: Encodings, record: Record) -> EncodingName | Encodings:
    """The word base64 if it holds for key and value."""
    key_is_text = record.key is not None and "key" not in encoding
    value_is_text = record.value is not None and "value" not in encoding
    return encoding if key_is_text or value_is_text or "headers" in encoding else "base64"


def large_size(record: Record, *, binary: bool = False) -> int:
    """About how many bytes `render_large` returns. Takes no memory; for a thread."""
    values = [record.key, record.value, *(value for _, value in record.headers)]
    names = sum(json_text.text_size(name.encode()) + 1 for name, _ in record.headers)
    return names + sum(_string_size(value, binary) for value in values if value is not None) + SMALL_FIELDS_BYTES


def _string_size(data: bytes, binary: bool) -> int:
    size = -1 if binary else json_text.text_size(data)
    return json_text.base64_size(len(data)) if size < 0 else size


def render_large(partition: int, record: Record, *, binary: bool = False) -> list[bytes]:
    """The encoded JSON form of a record, in pieces that are not copied into one. For a thread: it releases the GIL
    while it encodes large parts."""
    encoding: Encodings = {}
    start = {"partition": partition, "offset": record.offset, "timestamp": record.timestamp}
    key = _as_json(record.key, "key", encoding, binary)
    value = _as_json(record.value, "value", encoding, binary)
    headers = msgspec.json.encode(_headers_as_json(record.headers, encoding, binary))
    rest: dict[str, Any] = {}
    if encoding:
        rest["encoding"] = _named(encoding, record)
    amqp = amqp_message(record.headers) if record.headers else None
    if amqp is not None:
        rest["amqp"] = amqp
    end = b"," + msgspec.json.encode(rest)[1:] if rest else b"}"
    return [msgspec.json.encode(start)[:-1] + b',"key":', key, b',"value":', value, b',"headers":', headers, end]


def _as_json(data: bytes | None, part: Literal["key", "value"], encoding: Encodings, binary: bool) -> bytes:
    if data is None:
        return b"null"
    if not binary and json_text.text_size(data) >= 0:
        return json_text.text(data)
    encoding[part] = "base64"
    return json_text.base64_text(data)


def _headers_as_json(headers: Headers, encoding: Encodings, binary: bool) -> Any:
    is_text = not binary and all(value is None or json_text.text_size(value) >= 0 for _, value in headers)
    if headers and not is_text:
        encoding["headers"] = "base64"
    encode = json_text.text if is_text else json_text.base64_text
    pairs = [(name, None if value is None else msgspec.Raw(encode(value))) for name, value in headers]
    as_object = dict(pairs)
    return as_object if len(as_object) == len(pairs) else pairs


def _as_text(data: bytes | None, part: Literal["key", "value"], encoding: Encodings, binary: bool) -> str | None:
    if data is None:
        return None
    if not binary:
        try:
            return data.decode()
        except UnicodeDecodeError:
            pass
    encoding[part] = "base64"
    return base64.b64encode(data).decode("ascii")


def _render_headers(headers: Headers, encoding: Encodings, binary: bool) -> JsonHeaders:
    values: list[str | None]
    try:
        if binary:
            raise ValueError
        values = [None if value is None else value.decode() for _, value in headers]
    except ValueError:  # a single binary value makes all of them base64
        encoding["headers"] = "base64"
        values = [None if value is None else base64.b64encode(value).decode("ascii") for _, value in headers]
    pairs = [(name, value) for (name, _), value in zip(headers, values, strict=True)]
    as_object = dict(pairs)
    return as_object if len(as_object) == len(pairs) else pairs
