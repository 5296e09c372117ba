"""What tools send and how they want lists: strings for booleans and numbers, columns, pages, sorting."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.errors import InvalidInput, InvalidPattern
from headrace.listeners.http.server.context import Answer, HttpContext, Pieces
from headrace.listeners.http.server.requests import in_thread_if, read_body
from headrace.wire.http import strict_json
from headrace.wire.http.bodies import JSON, Body

BODY_BYTES_MAX = 1 << 20
MESSAGE_BYTES_MAX = 64 << 20  # of a body with a message in it
PAGE_SIZE, PAGE_SIZE_MAX = 100, 500
ENCODED_AT_ONCE = 64  # shapes that become JSON in one go
T = TypeVar("T")
Shape = dict[str, Any]


def name_of(request: Request, parameter: str) -> str:
    try:
        return unquote_to_bytes(request.path_params[parameter]).decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"the {parameter} in the path is not UTF-8") from None


def query_of(request: Request) -> dict[str, str]:
    """The last value of each parameter; what nobody knows is ignored, as RabbitMQ does."""
    text = request.scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=64))
    except ValueError:
        raise InvalidInput("too many parameters in the query") from None


async def body_of(request: Request, bytes_max: int = BODY_BYTES_MAX, pieces_max: int = strict_json.PIECES_MAX) -> Shape:
    """A JSON object; nothing at all is an empty one. The content type is not looked at: tools send any."""
    data = await read_body(request, request.state.share, bytes_max, bytes_max)
    return await in_thread_if(len(data), _parse_object, data, pieces_max)


def refuse_too_many(data: Body, pieces_max: int) -> None:
    """Before it is decoded: a few kilobytes that unfold to empty lists would take gigabytes of memory."""
    if strict_json.has_more_pieces(data, pieces_max):
        raise InvalidInput(f"the body has too many values, over {pieces_max:,}")


def _parse_object(data: Body, pieces_max: int) -> Shape:
    if not data.strip():
        return {}
    refuse_too_many(data, pieces_max)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidInput("the body is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body is a JSON object")
    return value


def flag(value: Any, default: bool = False) -> bool:
    """true, "true", 1: whatever a tool's language makes of it."""
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no", ""):
        return value.lower() in ("true", "1", "yes")
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise InvalidInput(f"{str(value)[:80]!r} is neither true nor false")


def number(value: Any, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53) -> int:
    if value is None and default is not None:
        return default
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,19}", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInput(f"{name} is a whole number from {least} to {most}, not {str(value)[:80]!r}")
    return value


def table(value: Any, name: str) -> dict[str, Any]:
    if value is None or value == "" or value == []:  # PHP's empty table
        return {}
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            value = None
    if not isinstance(value, dict):
        raise InvalidInput(f"{name} is a JSON object")
    return value


def text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{name} is a string")
    return value


# Answers.


def encode(content: Any) -> bytes:
    try:
        return msgspec.json.encode(content, enc_hook=str)
    except UnicodeEncodeError:
        return msgspec.json.encode(_speakable(content), enc_hook=str)


def _speakable(value: Any) -> Any:
    """Names that are not UTF-8 are no JSON: shown with the replacement character."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, Mapping):
        return {_speakable(key): _speakable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_speakable(item) for item in value]
    return value


def answer(content: Any, status: int = 200) -> Response:
    return Answer(encode(content), status, {"cache-control": "no-store"}, media_type=JSON)


def no_content() -> Response:
    return Response(status_code=204)


def created(*, new: bool) -> Response:
    return Response(status_code=201 if new else 204)


def narrowed(shape: Shape, columns: Sequence[str]) -> Shape:
    """Only the columns asked for; a.b goes into tables."""
    kept: Shape = {}
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


def value_at(shape: Shape, path: str) -> Any:
    found: Any = shape
    for part in path.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found


def sort_key(value: Any) -> tuple[int, Any]:
    """Any two values compare: nothing, numbers, the rest as text."""
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
    site: HttpContext,
    request: Request,
    items: Iterable[T],
    shape: Callable[[T], Shape],
    *,
    name: Callable[[T], str] | None = None,
    quick: Mapping[str, Callable[[T], Any]] | None = None,
) -> Response:
    """A list as it was asked for: filtered, sorted, one page of it, only some columns.

    `name` and `quick` read the name and common sort columns of an item without shaping it, so that a page
    of ten thousand queues costs a hundred shapes.
    """
    query = query_of(request)
    columns = [column for column in (query.get("columns") or "").split(",") if column]
    paged = "page" in query or flag(query.get("pagination"))
    turns = YieldEvery()
    everything = list(items)
    await turns.rest()
    total = len(everything)
    if columns and quick is not None and all(column in quick for column in columns):
        getters = [(column, quick[column]) for column in columns]
        shape = lambda item: {column: getter(item) for column, getter in getters}  # noqa: E731
    chosen = everything
    if query.get("name"):
        fits = matcher(query)
        named = name or (lambda item: str(shape(item).get("name", "")))
        fitting = await turns.map(lambda item: fits(named(item)), everything)
        chosen = [item for item, is_wanted in zip(everything, fitting, strict=True) if is_wanted]
    sort = query.get("sort")
    if sort:
        getter = (quick or {}).get(sort) or (lambda item: value_at(shape(item), sort))
        chosen = await _sorted(turns, chosen, getter, backwards=flag(query.get("sort_reverse")))
    if not paged:
        return await _whole_list(turns, chosen, shape, columns)
    page = number(query.get("page"), "page", 1, least=1)
    size = number(query.get("page_size"), "page_size", PAGE_SIZE, least=1, most=PAGE_SIZE_MAX)
    pages = max(1, -(-len(chosen) // size))
    if page > pages and page > 1:
        raise InvalidInput(f"page_out_of_range: page {page} of {pages}")
    part = await turns.map(shape, chosen[(page - 1) * size : page * size])
    return answer(
        {
            "filtered_count": len(chosen),
            "item_count": len(part),
            "items": [narrowed(s, columns) if columns else s for s in part],
            "page": page,
            "page_count": pages,
            "page_size": size,
            "total_count": total,
        }
    )


async def _sorted(turns: YieldEvery, items: Sequence[T], value: Callable[[T], Any], *, backwards: bool) -> list[T]:
    keys: list[Any] = await turns.map(value, items)
    if not (all(type(key) is int for key in keys) or all(type(key) is str for key in keys)):
        keys = await turns.map(sort_key, keys)  # of all kinds: made comparable, and four times slower to compare
    await turns.rest()
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if backwards:
        order.reverse()
    await turns.rest()
    return [items[at] for at in order]


async def _whole_list(
    turns: YieldEvery, items: Sequence[T], shape: Callable[[T], Shape], columns: Sequence[str]
) -> Response:
    """All of them, made into JSON piece by piece: a list of ten thousand queues has ten million bytes."""
    pieces = [b"["]
    for at in range(0, len(items), ENCODED_AT_ONCE):
        shapes = await turns.map(shape, items[at : at + ENCODED_AT_ONCE])
        if at:
            pieces.append(b",")
        pieces.append(encode([narrowed(s, columns) for s in shapes] if columns else shapes)[1:-1])
        await turns.rest()
    return Pieces([*pieces, b"]"], {"cache-control": "no-store"}, media_type=JSON)


def one(request: Request, shape: Shape) -> Response:
    columns = [column for column in (query_of(request).get("columns") or "").split(",") if column]
    return answer(narrowed(shape, columns) if columns else shape)
