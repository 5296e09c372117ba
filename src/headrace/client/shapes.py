"""The JSON of messages and responses over HTTP, converted to and from Python values and errors."""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from headrace.client.exchange import Response
from headrace.errors import (
    AccessRefused,
    AlreadyExists,
    BrokerRefused,
    BrokerUnreachable,
    Conflict,
    HeadraceError,
    InvalidInput,
    NotFound,
    OffsetOutOfRange,
    Overloaded,
    SegmentGone,
    StorageError,
)

NDJSON = "application/x-ndjson"
JSON = "application/json"
REGISTRY_CONFLICTS = (42205, 42206)  # the mode forbids it; other schemas refer to it
ABOUT_ONE = ("malformed_message", "malformed_json", "partition_not_found")  # codes caused by one message

T = TypeVar("T")
Data = bytes | str
Headers = Mapping[str, Data | None] | Iterable[tuple[str, Data | None]]


class Message(msgspec.Struct, frozen=True):
    """A message that was read from a topic."""

    partition: int
    offset: int
    timestamp: int  # milliseconds since 1970
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()

    def text(self) -> str:
        """The value as text; bytes that are not UTF-8 are escaped."""
        return (self.value or b"").decode(errors="backslashreplace")

    def header(self, name: str) -> bytes | None:
        """The first header with that name, or None."""
        return next((value for key, value in self.headers if key == name), None)


class Published(msgspec.Struct, frozen=True):
    """The place of a stored message."""

    partition: int
    offset: int


class Range(msgspec.Struct, frozen=True):
    """The readable offsets of one partition; `end` is the offset that the next message will get."""

    partition: int
    start: int
    end: int


class _Draft(msgspec.Struct, omit_defaults=True):
    value: str | msgspec.UnsetType | None = msgspec.UNSET  # null is a tombstone and must be sent
    key: str | None = None
    headers: dict[str, str | None] | list[tuple[str, str | None]] | None = None
    partition: int | None = None
    timestamp: int | None = None
    encoding: dict[str, str] | None = None


class _ReadMessage(msgspec.Struct):
    partition: int
    offset: int
    timestamp: int
    key: str | None = None
    value: str | None = None
    headers: dict[str, str | None] | list[tuple[str, str | None]] = msgspec.field(default_factory=dict)
    encoding: str | dict[str, str] = msgspec.field(default_factory=dict)


class _ReadAnswer(msgspec.Struct):
    messages: list[_ReadMessage]
    next_offset: int


class _KeysAnswer(msgspec.Struct):
    messages: list[_ReadMessage]
    next: str | None


class _PublishAnswer(msgspec.Struct):
    messages: list[Published]


class _OffsetsAnswer(msgspec.Struct):
    partitions: list[Range]


class _Problem(msgspec.Struct):
    title: str = ""
    detail: str = ""
    code: str = ""
    message: str = ""  # message and error_code are the schema registry's
    error_code: int = 0
    start: int | None = None
    end: int | None = None
    offset: int | None = None


_encoder = msgspec.json.Encoder()
_read_answer = msgspec.json.Decoder(_ReadAnswer)
_read_message = msgspec.json.Decoder(_ReadMessage)
_keys_answer = msgspec.json.Decoder(_KeysAnswer)
_publish_answer = msgspec.json.Decoder(_PublishAnswer)
_offsets_answer = msgspec.json.Decoder(_OffsetsAnswer)
_problem = msgspec.json.Decoder(_Problem)


def encode(value: object) -> bytes:
    return _encoder.encode(value)


def message_line(
    value: Data | None,
    *,
    key: Data | None = None,
    headers: Headers = (),
    partition: int | None = None,
    timestamp: int | None = None,
) -> bytes:
    """One line of NDJSON. Bytes that are not UTF-8 or contain NUL are sent as base64 and stored unchanged."""
    encoding: dict[str, str] = {}
    draft = _Draft(
        value=_text(value, "value", encoding),
        key=_text(key, "key", encoding),
        partition=partition,
        timestamp=timestamp,
    )
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    if pairs:
        draft.headers = _header_texts(pairs, encoding)
    if encoding:
        draft.encoding = encoding
    return _encoder.encode(draft) + b"\n"


def message_json(message: Message, topic: str | None = None) -> bytes:
    """A message as one line of JSON, in the format of the broker's responses."""
    encoding: dict[str, str] = {}
    shape: dict[str, object] = {} if topic is None else {"topic": topic}
    shape |= {"partition": message.partition, "offset": message.offset, "timestamp": message.timestamp}
    shape["key"] = _text(message.key, "key", encoding)
    shape["value"] = _text(message.value, "value", encoding)
    shape["headers"] = _header_texts(list(message.headers), encoding) if message.headers else {}
    if encoding:
        shape["encoding"] = encoding
    return _encoder.encode(shape) + b"\n"


def _text(data: Data | None, part: str, encoding: dict[str, str]) -> str | None:
    if data is None or isinstance(data, str):
        return data
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidInput(f"the {part} of a message must be bytes, str or None, not {type(data).__name__}")
    try:
        text = str(data, "utf-8")
        if "\0" not in text:  # JSON escapes NUL as six characters, which could push binary data over a size limit
            return text
    except UnicodeDecodeError:
        pass
    encoding[part] = "base64"
    return b64encode(data).decode("ascii")


def _header_texts(
    pairs: list[tuple[str, Data | None]], encoding: dict[str, str]
) -> dict[str, str | None] | list[tuple[str, str | None]]:
    for name, _ in pairs:
        if not isinstance(name, str):  # a name in bytes would be stored as base64, and no reader would find it
            raise InvalidInput(f"the name of a header must be str, not {type(name).__name__}")
    unsure: dict[str, str] = {}
    texts = [(name, _text(value, "headers", unsure)) for name, value in pairs]
    if unsure:  # a single binary header makes all of them base64
        encoding["headers"] = "base64"
        texts = [(name, None if value is None else _base64(value)) for name, value in pairs]
    as_object = dict(texts)
    return as_object if len(as_object) == len(texts) else texts


def _base64(data: Data) -> str:
    return b64encode(data.encode() if isinstance(data, str) else data).decode("ascii")


def parse_read(response: Response) -> tuple[list[Message], int]:
    """The messages of a read, and the next offset to read."""
    raise_for(response)
    answer = _decode(_read_answer, response)
    return [_message(shape) for shape in answer.messages], answer.next_offset


def parse_found(response: Response) -> Message:
    """The message of a response with a single one."""
    raise_for(response)
    return _message(_decode(_read_message, response))


def parse_keys(response: Response) -> tuple[list[Message], str | None]:
    """The messages of a page of keys, and the percent-encoded key that the next page begins with."""
    raise_for(response)
    answer = _decode(_keys_answer, response)
    return [_message(shape) for shape in answer.messages], answer.next


class Draft(msgspec.Struct, frozen=True):
    """A message to publish, parsed from JSON."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    partition: int | None
    timestamp: int | None


class _WrittenDraft(msgspec.Struct):
    value: msgspec.Raw
    key: str | None = None
    headers: dict[str, str | None] | list[tuple[str, str | None]] = msgspec.field(default_factory=dict)
    encoding: str | dict[str, str] = msgspec.field(default_factory=dict)
    partition: int | None = None
    timestamp: int | None = None


def parse_draft(data: bytes) -> Draft:
    """Parse a message in the format of a read response; fields that only stored messages have are ignored."""
    try:
        written = msgspec.json.decode(data, type=_WrittenDraft)
        text = msgspec.json.decode(written.value)
        is_text = text is None or isinstance(text, str)
        key, value, headers = _parts(written.key, text if is_text else None, written.headers, written.encoding)
        if not is_text:
            value = bytes(written.value)  # numbers, objects and lists are stored as JSON text
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidInput(f"not a JSON message: {error}") from None
    return Draft(value, key, headers, written.partition, written.timestamp)


def parse_message(data: bytes) -> Message:
    return _message(_read_message.decode(data))


def parse_published(response: Response, count: int) -> list[Published]:
    """The places of `count` messages, in the order in which they were sent."""
    raise_for(response)
    messages = _decode(_publish_answer, response).messages
    if len(messages) != count:
        raise BrokerUnreachable(f"the broker confirmed {len(messages)} messages, but {count} were sent")
    return messages


def parse_offsets(response: Response) -> list[Range]:
    raise_for(response)
    return _decode(_offsets_answer, response).partitions


def parse_json(response: Response) -> dict[str, Any]:
    """The JSON object of a response."""
    raise_for(response)
    if not response.body:
        return {}
    return _decode(msgspec.json.Decoder(dict[str, Any]), response)


def _decode(decoder: "msgspec.json.Decoder[T]", response: Response) -> T:
    try:
        return decoder.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BrokerUnreachable(f"the server is not a Headrace broker, or has another version: {error}") from None


def _message(shape: _ReadMessage) -> Message:
    key, value, headers = _parts(shape.key, shape.value, shape.headers, shape.encoding)
    return Message(shape.partition, shape.offset, shape.timestamp, key, value, headers)


def _parts(
    key: str | None,
    value: str | None,
    headers: dict[str, str | None] | list[tuple[str, str | None]],
    encoding: str | dict[str, str],
) -> tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]:
    if isinstance(encoding, str):
        encoding = {"key": encoding, "value": encoding}
    pairs = headers.items() if isinstance(headers, dict) else headers
    return (
        _bytes(key, encoding.get("key")),
        _bytes(value, encoding.get("value")),
        tuple((name, _bytes(text, encoding.get("headers"))) for name, text in pairs),
    )


def _bytes(text: str | None, encoding: str | None) -> bytes | None:
    if text is None:
        return None
    return b64decode(text, validate=True) if encoding == "base64" else text.encode()


def raise_for(response: Response) -> None:
    """Raise the error that an error response stands for; its cause is the BrokerRefused with status and code."""
    if response.status >= 300:
        _raise(response)


def _raise(response: Response) -> NoReturn:
    problem = _Problem()
    if response.is_json:
        try:
            problem = _problem.decode(response.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    detail = problem.detail or problem.message or problem.title or f"the broker responded with status {response.status}"
    raise _error(response, problem, detail) from BrokerRefused(response.status, problem.code, detail)


def _error(response: Response, problem: _Problem, detail: str) -> HeadraceError:
    status = response.status
    if None not in (problem.offset, problem.start, problem.end):
        return OffsetOutOfRange(problem.offset or 0, problem.start or 0, problem.end or 0)
    if status in {429, 503} and "retry-after" in response.headers:
        return Overloaded(detail)
    if status == 401:
        return AccessRefused(f"{detail}; put user and password into the URL: http://USER:PASSWORD@HOST:PORT")
    kinds: dict[int, type[HeadraceError]] = {
        403: AccessRefused,
        404: NotFound,
        409: Conflict,
        503: StorageError,
        507: StorageError,
    }
    if problem.code == "segment_gone":
        return SegmentGone(detail)
    if problem.error_code in REGISTRY_CONFLICTS:
        return Conflict(detail)
    if "exists" in problem.code:
        kinds[409] = AlreadyExists
    if status in kinds:
        return kinds[status](detail)
    return InvalidInput(detail) if 400 <= status < 500 else BrokerRefused(status, problem.code, detail)


def is_about_one(error: HeadraceError) -> bool:
    """Whether a batch was refused because of one of its messages. A missing topic or a wrong address fails all of
    them: sending them one by one would take ten thousand requests for the same error."""
    said = error.__cause__
    return isinstance(said, BrokerRefused) and (said.status == 413 or said.code in ABOUT_ONE)
