"""Requests and responses of RabbitMQ's API: lenient booleans and numbers, and lists with columns, pages and sorting."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.errors import InvalidInput, InvalidPattern
from headrace.listeners.http.server.context import ChunkedResponse, HttpContext, PiecewiseResponse
from headrace.listeners.http.server.requests import in_thread_if, read_body
from headrace.wire.http import strict_json
from headrace.wire.http.bodies import JSON, Body

BODY_BYTES_MAX = 1 << 20
MESSAGE_BYTES_MAX = 64 << 20  # of a body that contains a message
PAGE_SIZE, PAGE_SIZE_MAX = 100, 500
ENCODED_AT_ONCE = 64  # objects that are encoded in one event-loop iteration
T = TypeVar("T")
JsonObject = dict[str, Any]


def name_of(request: Request, parameter: str) -> str:
    try:
        return unquote_to_bytes(request.path_params[parameter]).decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the {parameter} in the path is not percent-encoded UTF-8") from None


def query_of(request: Request) -> dict[str, str]:
    """The last value of each query parameter; unknown parameters are ignored, as in RabbitMQ."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=64))
    except ValueError:
        raise InvalidInput("too many query parameters") from None


async def body_of(
    request: Request, bytes_max: int = BODY_BYTES_MAX, values_max: int = strict_json.VALUES_MAX
) -> JsonObject:
    """The JSON object in the body; {} for an empty body. The content type is ignored, since tools send any."""
    data = await read_body(request, request.state.share, bytes_max, bytes_max)
    return await in_thread_if(len(data), _parse_object, data, values_max)


def refuse_too_many_values(data: Body, values_max: int) -> None:
    """InvalidInput before decoding: a body of empty lists would take many times its size in memory."""
    if strict_json.has_more_values(data, values_max):
        raise InvalidInput(f"the request body has more than {values_max:,} JSON values")


def _parse_object(data: Body, values_max: int) -> JsonObject:
    if not data.strip():
        return {}
    refuse_too_many_values(data, values_max)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput("the request body is not valid JSON") from None
    if not isinstance(value, dict):
        raise InvalidInput("the request body must be a JSON object")
    return value


def flag(value: Any, default: bool = False) -> bool:
    """A boolean, also as 1, 0 or a string, since tools in different languages send different things."""
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no", ""):
        return value.lower() in ("true", "1", "yes")
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise InvalidInput(f"{str(value)[:80]!r} is not a boolean")


def number(value: Any, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53) -> int:
    if value is None and default is not None:
        return default
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInput(f"{name} must be an integer from {least} to {most}, not {str(value)[:80]!r}")
    return value


def table(value: Any, name: str) -> dict[str, Any]:
    if value is None or value == "" or value == []:  # an empty table as PHP sends it
        return {}
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            value = None
    if not isinstance(value, dict):
        raise InvalidInput(f"{name} must be a JSON object")
    return value


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} must be a string")
    return value


# Responses


def encode(content: Any) -> bytes:
    try:
        return msgspec.json.encode(content, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_valid_unicode(content), enc_hook=str)


def _valid_unicode(value: Any) -> Any:
    """JSON must be UTF-8: bytes of names that are not become the replacement character."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {_valid_unicode(key): _valid_unicode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid_unicode(item) for item in value]
    return value


def json_response(content: Any, status: int = 200) -> Response:
    return ChunkedResponse(encode(content), status, {"cache-control": "no-store"}, media_type=JSON)


def no_content() -> Response:
    return Response(status_code=204)


def created(*, new: bool) -> Response:
    return Response(status_code=201 if new else 204)


def with_columns(shape: JsonObject, columns: Sequence[str]) -> JsonObject:
    """Only the requested columns; a.b selects a field of a nested object."""
    kept: JsonObject = {}
    for column in columns:
        source: Any = shape
        target = kept
        parts = column.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(source, Mapping) or part not in source:
                break
            source = source[part]
            if depth == len(parts) - 1:
                target[part] = source
            else:
                target = target.setdefault(part, {})
                if not isinstance(target, dict):
                    break
    return kept


def value_at(shape: JsonObject, path: str) -> Any:
    found: Any = shape
    for part in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def comparable(value: Any) -> tuple[int, Any]:
    """A key that makes values of any type comparable: null, then numbers, then everything else as text."""
    if value is None:
        return (0, 0)
    if isinstance(value, int | float):
        return (1, value)
    return (2, str(value))


def matcher(query: Mapping[str, str]) -> Callable[[str], bool]:
    wanted = query.get("name") or ""
    if not wanted:
        return lambda name: True
    if flag(query.get("use_regex")):
        from headrace.broker.groups.subscription_patterns import compile_pattern

        try:
            pattern = compile_pattern(wanted)
        except InvalidPattern as error:
            raise InvalidInput(str(error)) from None
        return pattern.search
    folded = wanted.lower()
    return lambda name: folded in name.lower()


async def listing(
    context: HttpContext,
    request: Request,
    items: Iterable[T],
    shape: Callable[[T], JsonObject],
    *,
    name: Callable[[T], str] | None = None,
    quick: Mapping[str, Callable[[T], Any]] | None = None,
) -> Response:
    """A list as the query parameters ask for it: filtered, sorted, paged, with some columns only.

    `name` and `quick` read the name and common sort columns of an item without its whole representation, so that one
    page of ten thousand queues costs a hundred representations.
    """
    query = query_of(request)
    columns = [column for column in (query.get("columns") or "").split(",") if column]
    paged = "page" in query or flag(query.get("pagination"))
    yielding = YieldEvery()
    everything = list(items)
    await yielding.maybe_yield()
    total = len(everything)
    if columns and quick is not None and all(column in quick for column in columns):
        getters = [(column, quick[column]) for column in columns]
        shape = lambda item: {column: getter(item) for column, getter in getters}  # noqa: E731
    chosen = everything
    if query.get("name"):
        matches = matcher(query)
        name_of_item = name or (lambda item: str(shape(item).get("name", "")))
        fitting = await yielding.map(lambda item: matches(name_of_item(item)), everything)
        chosen = [item for item, is_wanted in zip(everything, fitting, strict=True) if is_wanted]
    sort = query.get("sort")
    if sort:
        getter = (quick or {}).get(sort) or (lambda item: value_at(shape(item), sort))
        chosen = await _sorted(yielding, chosen, getter, reverse=flag(query.get("sort_reverse")))
    if not paged:
        return await _whole_list(yielding, chosen, shape, columns)
    page = number(query.get("page"), "page", 1, least=1)
    size = number(query.get("page_size"), "page_size", PAGE_SIZE, least=1, most=PAGE_SIZE_MAX)
    pages = max(1, -(-len(chosen) // size))
    if page > pages and page > 1:
        raise InvalidInput(f"page_out_of_range: page {page} of {pages}")
    part = await yielding.map(shape, chosen[(page - 1) * size : page * size])
    return json_response(
        {
            "filtered_count": len(chosen),
            "item_count": len(part),
            "items": [with_columns(s, columns) if columns else s for s in part],
            "page": page,
            "page_count": pages,
            "page_size": size,
            "total_count": total,
        }
    )


async def _sorted(yielding: YieldEvery, items: Sequence[T], value: Callable[[T], Any], *, reverse: bool) -> list[T]:
    keys: list[Any] = await yielding.map(value, items)
    if not (all(type(key) is int for key in keys) or all(type(key) is str for key in keys)):
        keys = await yielding.map(comparable, keys)  # of mixed types: made comparable, which is four times slower
    await yielding.maybe_yield()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if reverse:
        order.reverse()
    await yielding.maybe_yield()
    return [items[at] for at in order]


async def _whole_list(
    yielding: YieldEvery, items: Sequence[T], shape: Callable[[T], JsonObject], columns: Sequence[str]
) -> Response:
    """The whole list, encoded in pieces: ten thousand queues are ten million bytes."""
    pieces = [b"["]
    for at in range(0, len(items), ENCODED_AT_ONCE):
        shapes = await yielding.map(shape, items[at : at + ENCODED_AT_ONCE])
        if at:
            pieces.append(b",")
        pieces.append(encode([with_columns(s, columns) for s in shapes] if columns else shapes)[1:-1])
        await yielding.maybe_yield()
    return PiecewiseResponse([*pieces, b"]"], {"cache-control": "no-store"}, media_type=JSON)


def object_response(request: Request, shape: JsonObject) -> Response:
    columns = [column for column in (query_of(request).get("columns") or "").split(",") if column]
    return json_response(with_columns(shape, columns) if columns else shape)
