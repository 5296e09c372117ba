"""The schema registry for the dashboard, under /api/headrace: lists of subjects and versions in one request.

Read only, for users who may read the topic `_schemas`; changes go to /registry.
"""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.schemas.topic import TOPIC
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import NotFound
from headrace.listeners.http.management.parameters import (
    JsonObject,
    flag,
    json_response,
    listing,
    name_of,
    number,
    object_response,
    query_of,
)
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext
from headrace.schemas.refusals import RegistryError
from headrace.schemas.state import LEVEL, VERSION_MAX, RegistryState, Version, references_shape

REFERRERS_MAX = 100  # listed in one response; the rest is only counted


def _may_write(request: Request) -> bool:
    return caller_of(request).rights_in(DEFAULT).may_write(TOPIC)


def _subject(known: RegistryState, request: Request) -> str:
    name = name_of(request, "subject")
    if not known.versions(name, deleted=True):
        raise NotFound(f"unknown subject {name!r}")
    return name


def _subject_json(known: RegistryState, name: str) -> JsonObject:
    live = known.versions(name)
    shape: JsonObject = {
        "subject": name,
        "versions": len(live),
        "deleted": not live,
        "compatibility": known.level(name),
        "own_compatibility": (known.own_config(name) or {}).get(LEVEL),
    }
    for last in (live or known.versions(name, deleted=True))[-1:]:  # empty after a permanent delete
        shape |= {"type": last.content.kind, "version": last.version, "id": last.id}
    return shape


async def registry(context: HttpContext, request: Request) -> Response:
    """Global compatibility and mode."""
    known = await context.broker.schemas.registry.current()
    return json_response({"compatibility": known.level(), "mode": known.mode(), "may_write": _may_write(request)})


async def list_subjects(context: HttpContext, request: Request) -> Response:
    known = await context.broker.schemas.registry.current()
    names = known.subjects(deleted=flag(query_of(request).get("deleted")))
    return await listing(
        context, request, names, lambda name: _subject_json(known, name), name=lambda name: name, quick={"subject": str}
    )


async def get_subject(context: HttpContext, request: Request) -> Response:
    known = await context.broker.schemas.registry.current()
    name = _subject(known, request)
    shape = _subject_json(known, name) | {"default_compatibility": known.level(), "mode": known.mode(name)}
    return object_response(request, {**shape, "may_write": _may_write(request)})


async def list_versions(context: HttpContext, request: Request) -> Response:
    """All versions, newest first, including deleted ones, without the schemas themselves."""
    known = await context.broker.schemas.registry.current()
    subject = _subject(known, request)

    def shape(version: Version) -> JsonObject:
        return {
            "version": version.version,
            "id": version.id,
            "type": version.content.kind,
            "deleted": version.deleted,
            "references": len(version.content.references),
            "referred_by": len(known.referred_by(subject, version.version)),
        }

    found = reversed(known.versions(subject, deleted=True))
    return await listing(context, request, found, shape, name=lambda version: str(version.version))


async def get_version(context: HttpContext, request: Request) -> Response:
    """A version with its schema, its references and the versions that refer to it."""
    known = await context.broker.schemas.registry.current()
    asked = number(name_of(request, "version"), "version", least=1, most=VERSION_MAX)
    try:
        found = known.version(name_of(request, "subject"), asked, deleted=True)
    except RegistryError as error:
        raise NotFound(str(error)) from None
    users = sorted((user.subject, user.version) for user in known.referred_by(found.subject, found.version))
    return json_response(
        {
            "subject": found.subject,
            "version": found.version,
            "id": found.id,
            "type": found.content.kind,
            "deleted": found.deleted,
            "schema": found.content.text,
            "references": references_shape(found.content),
            "referred_by": [{"subject": name, "version": version} for name, version in users[:REFERRERS_MAX]],
            "referred_by_total": len(users),
        }
    )
