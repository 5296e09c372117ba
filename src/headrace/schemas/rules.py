"""Decisions of the registry as pure functions: what may be registered or deleted, and with which id and version."""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.errors import LimitReached
from headrace.schemas import contract, refusals, state
from headrace.schemas.state import IMPORT, READONLY, READONLY_TOO, Content, RegistryState, Version

VERSIONS_MAX = 100_000
SUBJECT_BYTES_MAX = 1_000


class Wanted(NamedTuple):
    """A request to register a schema."""

    subject: str
    content: Content
    schema_id: int | None
    version: int | None
    normalize: bool


def completed(known: RegistryState, wanted: Wanted) -> Content:
    """The content of a new version: the request, completed from the previous version."""
    subject, content = wanted.subject, wanted.content
    if not content.text.strip():
        before = known.versions(subject)
        if not before:
            raise refusals.invalid_schema("Empty schema")
        last = before[-1].content
        content = content._replace(kind=last.kind, text=last.text, references=last.references)
    content = known.completed(subject, content)
    if wanted.version is not None or contract.VERSION in contract.properties(content.metadata):
        content = content._replace(metadata=contract.with_version(content.metadata, _next_number(known, subject)))
    return content


def _next_number(known: RegistryState, subject: str) -> int:
    everything = known.versions(subject, deleted=True)
    return everything[-1].version + 1 if everything else 1


def next_version(
    known: RegistryState, subject: str, content: Content, schema_id: int | None, version: int | None
) -> Version:
    count = len(known.versions(subject, deleted=True))
    if count >= VERSIONS_MAX:
        raise LimitReached(f"subject {subject!r} already has {count:,} versions, the maximum")
    number = _next_number(known, subject)
    if schema_id is None:
        if version is not None and version != number:
            raise refusals.invalid_schema("Version is not one more than previous version")
        same = known.id_of(content)
        if same is None and known.last_id >= state.VERSION_MAX:
            raise LimitReached(f"the last schema id, {known.last_id}, is in use: no more schemas can be registered")
        return Version(subject, number, known.last_id + 1 if same is None else same, content)
    try:
        taken = known.content(schema_id)
    except refusals.RegistryError:
        taken = content
    if taken != content:
        raise refusals.not_permitted(f"Overwrite new schema with id {schema_id} is not permitted.")
    return Version(subject, number if version is None else version, schema_id, content)


def check_mode(known: RegistryState, subject: str, *, is_import: bool) -> None:
    check_writable(known, subject)
    is_importing = known.mode(subject) == IMPORT
    if is_import and not is_importing:
        raise refusals.not_permitted(f"Subject {subject} is not in import mode")
    if is_importing and not is_import:
        raise refusals.not_permitted(f"Subject {subject} is in import mode: send the schema with its id and version")


def check_writable(known: RegistryState, subject: str | None) -> None:
    if known.mode(subject) in (READONLY, READONLY_TOO):
        raise refusals.not_permitted(f"Subject {subject} is in read-only mode")


def check_unreferred(known: RegistryState, gone: Sequence[Version], *, permanent: bool) -> None:
    """Raise if another version refers to one of these. Versions deleted in the same call do not count. A permanent
    deletion also respects soft-deleted referrers, because they can still be read by id."""
    places = {(one.subject, one.version) for one in gone}
    for one in gone:
        needing = known.referred_by(one.subject, one.version, deleted=permanent)
        if any((user.subject, user.version) not in places for user in needing):
            raise refusals.is_referred_to(one.subject, one.version)


def check_subject(name: str) -> None:
    if not name or len(name.encode()) > SUBJECT_BYTES_MAX or not name.isprintable():
        raise refusals.RegistryError(42208, f"The specified subject '{name[:80]!r}' is not a valid.")
