"""The schema registry under /registry: Confluent's REST API, so that its clients and serializers work unchanged.

Users who may read or write the topic `_schemas` may do so here.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.schemas.registry import check_subject
from headrace.broker.schemas.topic import TOPIC
from headrace.errors import InvalidInput, MalformedJson
from headrace.listeners.http.registry import PREFIX
from headrace.listeners.http.server.authentication import Caller
from headrace.listeners.http.server.authorization import Handler, Need, router
from headrace.listeners.http.server.context import ChunkedResponse, HttpContext
from headrace.listeners.http.server.problems import PROBLEMS, headers_of
from headrace.listeners.http.server.requests import ClientDisconnected, Query, path_name, read_body, whole_number
from headrace.schemas import contract, refusals
from headrace.schemas.kinds import AVRO, KINDS, LEVELS, PROTOBUF
from headrace.schemas.refusals import RegistryError
from headrace.schemas.state import (
    CONTRACTS,
    GROUP,
    LATEST,
    LEVEL,
    MODES,
    NORMALIZE,
    VERSION_MAX,
    Config,
    Content,
    Reference,
    RegistryState,
    Version,
    content_shape,
)
from headrace.version import __version__
from headrace.wire.http import strict_json

logger = logging.getLogger("headrace.http")

MEDIA = "application/vnd.schemaregistry.v1+json"
BODY_BYTES_MAX = 4 << 20
DEFAULT_CONTEXT, ALL_CONTEXTS = ":.:", ":*:"  # newer clients put a context before names and prefixes
LISTED_MAX = 1_000  # schemas in one response; Confluent's limit
UNSUPPORTED = ("alias", "aliasForDeks", "compatibilityPolicy", "validateFields", "validateRules")  # fields of a config


class _Body(msgspec.Struct):
    schema: str | None = None
    schemaType: str | None = None  # noqa: N815 - the name in Confluent's API
    references: tuple[Reference, ...] | None = None
    id: int | None = None
    version: int | None = None
    metadata: Any = None
    ruleSet: Any = None  # noqa: N815


# Requests


def _query(request: Request) -> Query:
    return Query(request, ignore_unknown=True)


def _is(query: Query, name: str) -> bool:
    return (query.text(name) or "").lower() == "true"


def _subject(request: Request) -> str:
    name = path_name(request, "subject").removeprefix(DEFAULT_CONTEXT)
    check_subject(name)
    return name


def _version(request: Request) -> int | str:
    text = path_name(request, "version")
    if text in (LATEST, "-1"):
        return LATEST
    number = whole_number(text, VERSION_MAX)
    if not number:
        raise refusals.invalid_version(text)
    return number


def _id(request: Request) -> int:
    number = whole_number(path_name(request, "id"), VERSION_MAX)
    if number is None:
        raise RegistryError(404, "HTTP 404 Not Found")
    return number


async def _json(request: Request) -> dict[str, Any]:
    """The JSON object in the body, with any content type: clients send several."""
    value = strict_json.loads(await read_body(request, request.state.share, BODY_BYTES_MAX, BODY_BYTES_MAX))
    if type(value) is not dict:
        raise MalformedJson("the request body must be a JSON object")
    return value


async def _body(request: Request) -> _Body:
    value = await _json(request)
    try:
        return msgspec.convert(value, _Body)
    except msgspec.ValidationError as error:
        raise RegistryError(422, f"Unprocessable request: {error}") from None


def _content(body: _Body) -> Content:
    metadata = "" if body.metadata is None else contract.metadata_text(body.metadata)
    rules = "" if body.ruleSet is None else contract.rules_text(body.ruleSet)
    return Content(body.schemaType or AVRO, body.schema or "", body.references or (), metadata, rules)


def _response(content: Any, status: int = 200) -> Response:
    return ChunkedResponse(msgspec.json.encode(content), status, media_type=MEDIA)


def _page(query: Query, found: Sequence[Any], most: int | None = None) -> Sequence[Any]:
    offset, limit = query.integer("offset") or 0, query.integer("limit", least=-VERSION_MAX)
    limits = [one for one in (limit, most) if one is not None and one > 0]
    return found[offset : offset + min(limits)] if limits else found[offset:]


async def _rendered(context: HttpContext, query: Query, content: Content) -> dict[str, Any]:
    shape = content_shape(content)
    if query.text("format") == "serialized" and content.kind == PROTOBUF:
        shape["schema"] = await context.broker.schemas.registry.serialized(content)
    return shape


# Schemas by id


async def types(context: HttpContext, request: Request) -> Response:
    return _response(list(KINDS))


async def by_id(context: HttpContext, request: Request) -> Response:
    known, query = await context.broker.schemas.registry.current(), _query(request)
    shape = await _rendered(context, query, known.content(_id(request)))
    return _response({**shape, "maxId": known.last_id} if _is(query, "fetchMaxId") else shape)


async def text_by_id(context: HttpContext, request: Request) -> Response:
    known, query = await context.broker.schemas.registry.current(), _query(request)
    shape = await _rendered(context, query, known.content(_id(request)))
    return ChunkedResponse(shape["schema"].encode(), 200, media_type=MEDIA)


async def uses(context: HttpContext, request: Request) -> Response:
    """Subjects, or subjects and versions, that use a schema id."""
    known, query = await context.broker.schemas.registry.current(), _query(request)
    number = _id(request)
    known.content(number)
    found = [one for one in known.uses(number) if _is(query, "deleted") or not one.deleted]
    if request.scope["path"].endswith("/subjects"):
        return _response(_page(query, sorted({one.subject for one in found})))
    return _response(_page(query, [{"subject": one.subject, "version": one.version} for one in sorted(found)]))


async def list_schemas(context: HttpContext, request: Request) -> Response:
    known, query = await context.broker.schemas.registry.current(), _query(request)
    found: list[Version] = []
    for subject in _names(known, query):
        versions = known.versions(subject, deleted=_is(query, "deleted"))
        found += versions[-1:] if _is(query, "latestOnly") else versions
    if rule_type := query.text("ruleType"):
        found = [one for one in found if contract.has_rule_of(one.content.rules, rule_type)]
    listed = _page(query, found, LISTED_MAX)
    size = sum(len(part) for one in listed for part in (one.content.text, one.content.metadata, one.content.rules))
    request.state.share.take(size)  # before encoding doubles the memory
    return _response([one.shape() for one in listed])


# Subjects


def _names(known: RegistryState, query: Query) -> list[str]:
    prefix = (query.text("subjectPrefix") or "").removeprefix(DEFAULT_CONTEXT).removeprefix(ALL_CONTEXTS)
    names = known.subjects(deleted=_is(query, "deleted") or _is(query, "deletedOnly"))
    if _is(query, "deletedOnly"):
        names = [name for name in names if not known.versions(name)]
    return [name for name in names if name.startswith(prefix)]


async def list_subjects(context: HttpContext, request: Request) -> Response:
    known, query = await context.broker.schemas.registry.current(), _query(request)
    return _response(_page(query, _names(known, query)))


async def look_up(context: HttpContext, request: Request) -> Response:
    query, body = _query(request), await _body(request)
    subject, wanted = _subject(request), {name: _is(query, name) for name in ("deleted", "normalize")}
    found = await context.broker.schemas.registry.look_up(subject, _content(body), **wanted)
    return _response(found.shape())


async def latest_with_metadata(context: HttpContext, request: Request) -> Response:
    """The latest version whose metadata has all the given properties."""
    known, query, subject = await context.broker.schemas.registry.current(), _query(request), _subject(request)
    wanted = dict(zip(query.texts("key"), query.texts("value"), strict=False))
    versions = known.versions(subject, deleted=_is(query, "deleted"))
    if not versions:
        raise refusals.subject_not_found(subject)
    for one in reversed(versions):
        if one.content.metadata and wanted.items() <= contract.properties(one.content.metadata).items():
            return _response({**one.shape(), **await _rendered(context, query, one.content)})
    raise refusals.schema_not_found()


async def delete_subject(context: HttpContext, request: Request) -> Response:
    permanent = _is(_query(request), "permanent")
    return _response(await context.broker.schemas.registry.delete_subject(_subject(request), permanent=permanent))


async def list_versions(context: HttpContext, request: Request) -> Response:
    known, query, subject = await context.broker.schemas.registry.current(), _query(request), _subject(request)
    only, as_negative = _is(query, "deletedOnly"), _is(query, "deletedAsNegative")
    found = known.versions(subject, deleted=_is(query, "deleted") or only or as_negative)
    if not found:
        raise refusals.subject_not_found(subject)
    numbers = [-one.version if one.deleted and as_negative else one.version for one in found if one.deleted or not only]
    return _response(_page(query, numbers))


async def register(context: HttpContext, request: Request) -> Response:
    query = _query(request)
    subject, body = _subject(request), await _body(request)
    context.broker.pressure.check()
    for number in (body.id, body.version):
        if (number or 0) > VERSION_MAX or body.id == 0:
            raise refusals.invalid_version(str(number))
    made = await context.broker.schemas.registry.register(
        subject,
        _content(body),
        schema_id=body.id if (body.id or 0) > 0 else None,
        version=body.version if (body.version or 0) > 0 else None,
        normalize=_is(query, "normalize"),
    )
    # Without the schema: clients cache the response, and Protobuf clients need the form that they sent.
    return _response({"id": made.id, "version": made.version})


async def get_version(context: HttpContext, request: Request) -> Response:
    known, query, subject = await context.broker.schemas.registry.current(), _query(request), _subject(request)
    found = known.version(subject, _version(request), deleted=_is(query, "deleted"))
    return _response({**found.shape(), **await _rendered(context, query, found.content)})


async def get_text(context: HttpContext, request: Request) -> Response:
    known, query, subject = await context.broker.schemas.registry.current(), _query(request), _subject(request)
    found = known.version(subject, _version(request), deleted=_is(query, "deleted"))
    shape = await _rendered(context, query, found.content)
    return ChunkedResponse(shape["schema"].encode(), 200, media_type=MEDIA)


async def referred_by(context: HttpContext, request: Request) -> Response:
    known, query, subject = await context.broker.schemas.registry.current(), _query(request), _subject(request)
    one = known.version(subject, _version(request), deleted=True)
    users = known.referred_by(subject, one.version, deleted=_is(query, "deleted"))
    return _response(_page(query, sorted({user.id for user in users})))


async def delete_version(context: HttpContext, request: Request) -> Response:
    permanent = _is(_query(request), "permanent")
    subject, number = _subject(request), _version(request)
    return _response(await context.broker.schemas.registry.delete_version(subject, number, permanent=permanent))


# Compatibility


async def compare(context: HttpContext, request: Request) -> Response:
    """Checks against one version, or against those that the subject's compatibility level requires."""
    query, subject, body = _query(request), _subject(request), await _body(request)
    number = _version(request) if "version" in request.path_params else None
    normalize, verbose = _is(query, "normalize"), _is(query, "verbose")
    try:
        found = await context.broker.schemas.registry.differences(subject, _content(body), number, normalize=normalize)
    except RegistryError as error:
        if not verbose or error.code != refusals.INVALID_SCHEMA:
            raise
        found = [str(error)]
    shape: dict[str, Any] = {"is_compatible": not found}
    return _response({**shape, "messages": found} if verbose else shape)


async def get_config(context: HttpContext, request: Request) -> Response:
    known, query = await context.broker.schemas.registry.current(), _query(request)
    if "subject" not in request.path_params:
        return _response(known.config())
    subject = _subject(request)
    config = known.config(subject) if _is(query, "defaultToGlobal") else known.own_config(subject)
    if config is None:
        raise refusals.no_level(subject)
    return _response(config)


async def put_config(context: HttpContext, request: Request) -> Response:
    """Changes only the given fields; null restores the default."""
    _query(request)
    subject = _subject(request) if "subject" in request.path_params else None
    config = await context.broker.schemas.registry.set_config(subject, _changes(await _json(request)))
    if LEVEL in config:
        config = {"compatibility": config.pop(LEVEL), **config}
    return _response(config)


def _changes(asked: dict[str, Any]) -> Config:
    changes: Config = {}
    if "compatibility" in asked:
        level = asked["compatibility"]
        if level is not None and not (isinstance(level, str) and level.upper() in LEVELS):
            raise refusals.invalid_level()
        changes[LEVEL] = level and level.upper()
    if NORMALIZE in asked:
        if not isinstance(asked[NORMALIZE], bool | None):
            raise RegistryError(422, "normalize must be true or false")
        changes[NORMALIZE] = asked[NORMALIZE]
    if GROUP in asked:
        if not isinstance(asked[GROUP], str | None):
            raise RegistryError(422, f"{GROUP} must be the name of a property")
        changes[GROUP] = asked[GROUP]
    for name in CONTRACTS:
        if name in asked:
            text = contract.metadata_text if name.endswith("Metadata") else contract.rules_text
            changes[name] = None if asked[name] is None else msgspec.json.decode(text(asked[name]))
    for name in UNSUPPORTED:
        if asked.get(name):
            raise RegistryError(422, f"{name} is not supported")
    if not changes and asked.keys().isdisjoint(UNSUPPORTED):
        raise refusals.invalid_level()  # so that a typo is noticed
    return changes


async def delete_config(context: HttpContext, request: Request) -> Response:
    """Returns the previous value."""
    _query(request)
    subject = _subject(request) if "subject" in request.path_params else None
    return _response(await context.broker.schemas.registry.delete_config(subject))


# Modes


async def get_mode(context: HttpContext, request: Request) -> Response:
    known, query = await context.broker.schemas.registry.current(), _query(request)
    if "subject" not in request.path_params:
        return _response({"mode": known.mode()})
    subject = _subject(request)
    mode = known.own_mode(subject) or (known.mode(subject) if _is(query, "defaultToGlobal") else None)
    if mode is None:
        raise refusals.no_mode(subject)
    return _response({"mode": mode})


async def put_mode(context: HttpContext, request: Request) -> Response:
    query = _query(request)
    subject = _subject(request) if "subject" in request.path_params else None
    mode = (await _json(request)).get("mode")
    if not isinstance(mode, str) or mode.upper() not in MODES:
        raise refusals.invalid_mode()
    await context.broker.schemas.registry.set_mode(subject, mode.upper(), force=_is(query, "force"))
    return _response({"mode": mode.upper()})


async def delete_mode(context: HttpContext, request: Request) -> Response:
    """Returns the previous value."""
    _query(request)
    subject = _subject(request) if "subject" in request.path_params else None
    return _response({"mode": await context.broker.schemas.registry.delete_mode(subject)})


# Everything else


async def root(context: HttpContext, request: Request) -> Response:
    return _response({})


async def contexts(context: HttpContext, request: Request) -> Response:
    return _response(["."])


async def cluster(context: HttpContext, request: Request) -> Response:
    return _response({"id": "headrace", "scope": {"path": [], "clusters": {}}})


async def version(context: HttpContext, request: Request) -> Response:
    return _response({"version": __version__, "commitId": ""})


def reads(caller: Caller, request: Request) -> None:
    caller.read(TOPIC)


def writes(caller: Caller, request: Request) -> None:
    caller.write(TOPIC)


ROUTES: tuple[tuple[str, str, Handler, Need], ...] = (
    ("GET", "", root, reads),
    ("GET", "/contexts", contexts, reads),
    ("GET", "/v1/metadata/id", cluster, reads),
    ("GET", "/v1/metadata/version", version, reads),
    ("GET", "/schemas", list_schemas, reads),
    ("GET", "/schemas/types", types, reads),
    ("GET", "/schemas/ids/{id}", by_id, reads),
    ("GET", "/schemas/ids/{id}/schema", text_by_id, reads),
    ("GET", "/schemas/ids/{id}/subjects", uses, reads),
    ("GET", "/schemas/ids/{id}/versions", uses, reads),
    ("GET", "/subjects", list_subjects, reads),
    ("POST", "/subjects/{subject}", look_up, reads),
    ("DELETE", "/subjects/{subject}", delete_subject, writes),
    ("GET", "/subjects/{subject}/metadata", latest_with_metadata, reads),
    ("GET", "/subjects/{subject}/versions", list_versions, reads),
    ("POST", "/subjects/{subject}/versions", register, writes),
    ("GET", "/subjects/{subject}/versions/{version}", get_version, reads),
    ("DELETE", "/subjects/{subject}/versions/{version}", delete_version, writes),
    ("GET", "/subjects/{subject}/versions/{version}/schema", get_text, reads),
    ("GET", "/subjects/{subject}/versions/{version}/referencedby", referred_by, reads),
    ("POST", "/compatibility/subjects/{subject}/versions", compare, reads),
    ("POST", "/compatibility/subjects/{subject}/versions/{version}", compare, reads),
    ("GET", "/config", get_config, reads),
    ("PUT", "/config", put_config, writes),
    ("DELETE", "/config", delete_config, writes),
    ("GET", "/config/{subject}", get_config, reads),
    ("PUT", "/config/{subject}", put_config, writes),
    ("DELETE", "/config/{subject}", delete_config, writes),
    ("GET", "/mode", get_mode, reads),
    ("PUT", "/mode", put_mode, writes),
    ("DELETE", "/mode", delete_mode, writes),
    ("GET", "/mode/{subject}", get_mode, reads),
    ("PUT", "/mode/{subject}", put_mode, writes),
    ("DELETE", "/mode/{subject}", delete_mode, writes),
)


class Registry:
    """ASGI application for all paths under /registry."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._router = router(context, ROUTES, prefix=PREFIX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = scope["path"].rstrip("/")
        try:
            await self._router(scope, receive, send)
        except ClientDisconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the outermost handler of this API
            damage = self._context.broker.schemas.registry.damage
            is_missing = isinstance(error, RegistryError) and error.code // 100 == 404
            # A client that gets 404 gives the message up, but the schema may be in the damaged part of the log.
            await _error_response(damage if damage is not None and is_missing else error)(scope, receive, send)


def _error_response(error: Exception) -> Response:
    """Confluent's error format: the code is the status, or the status and two more digits."""
    if isinstance(error, HTTPException):
        return _response({"error_code": error.status_code, "message": f"HTTP {error.status_code}"}, error.status_code)
    if isinstance(error, RegistryError):
        return _response({"error_code": error.code, "message": str(error)}, error.status)
    for kind, status, _ in PROBLEMS:
        if isinstance(error, kind):
            status = 422 if isinstance(error, InvalidInput) and status == 400 else status
            refused = _response({"error_code": status, "message": str(error)}, status)
            refused.headers.update(headers_of(error, status))
            return refused
    logger.error("unexpected error while handling a request to the schema registry", exc_info=error)
    return _response({"error_code": 50001, "message": "internal error; the broker's log has the details"}, 500)
