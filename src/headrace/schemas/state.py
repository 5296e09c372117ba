"""The registered schemas, built from the records of the topic `_schemas`.

The records have the format of Confluent's Schema Registry, so either registry can continue with the other's topic.
"""

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.schemas import contract, refusals
from headrace.schemas.kinds import AVRO, DEFAULT_LEVEL, KINDS, LEVELS

logger = logging.getLogger("headrace.schemas")

READWRITE, READONLY, IMPORT = "READWRITE", "READONLY", "IMPORT"
READONLY_TOO = "READONLY_OVERRIDE"  # used by older registries
MODES = (READWRITE, READONLY, READONLY_TOO, IMPORT)
SCHEMA, CONFIG, MODE, DELETE_SUBJECT = "SCHEMA", "CONFIG", "MODE", "DELETE_SUBJECT"
MAGIC = {SCHEMA: 1}  # version of the key format; 0 for the others
LATEST = "latest"
LEVEL, NORMALIZE, GROUP = "compatibilityLevel", "normalize", "compatibilityGroup"  # fields of a config
CONTRACTS = ("defaultMetadata", "overrideMetadata", "defaultRuleSet", "overrideRuleSet")
VERSION_MAX = 2**31 - 1
REFERENCES_MAX = 200  # per schema, including indirect references
REFERRED_CHARS_MAX = (
    8 << 20
)  # of all referenced texts: they are parsed with the schema, which takes 25 times as much memory


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another version that a schema needs, and the name that the schema uses for it."""

    name: str
    subject: str
    version: int


class Content(NamedTuple):
    """The content of a schema id, which several subjects may share."""

    kind: str
    text: str
    references: tuple[Reference, ...]
    metadata: str = ""  # metadata and rules are JSON, as contract.py writes it
    rules: str = ""


class Version(NamedTuple):
    subject: str
    version: int
    id: int
    content: Content
    deleted: bool = False

    def shape(self) -> dict[str, Any]:
        shape = {"subject": self.subject, "version": self.version, "id": self.id, **content_shape(self.content)}
        return {**shape, "deleted": True} if self.deleted else shape


class _Key(msgspec.Struct):
    keytype: str
    subject: str | None = None
    version: int = 0
    magic: int = 0


class _SchemaValue(msgspec.Struct, rename={"kind": "schemaType", "rules": "ruleSet"}):
    subject: str
    version: int
    id: int
    schema: str
    kind: str = AVRO
    references: tuple[Reference, ...] = ()
    metadata: Any = None
    rules: Any = None
    deleted: bool = False


class _ModeValue(msgspec.Struct):
    mode: str


class _DeletedValue(msgspec.Struct):
    subject: str
    version: int


Entry = tuple[bytes, bytes | None]  # a record of the topic
Config = dict[str, Any]  # stored as is, to keep fields that other registries write
Place = tuple[str, int]  # a subject and a version
Key = TypeVar("Key")
Found = TypeVar("Found")


class RegistryState:
    def __init__(self, last_id: int = 0) -> None:
        self._subjects: dict[str, dict[int, Version]] = {}
        self._ids: dict[Content, dict[int, None]] = {}
        # Indexes by id and by referenced version, oldest first: a deletion must not scan every version.
        self._uses: dict[int, dict[Place, None]] = {}
        self._referrers: dict[Place, dict[Place, None]] = {}
        self._configs: dict[str | None, Config] = {}  # None: the global config
        self._modes: dict[str | None, str] = {}
        self.last_id = last_id  # ids are never reused for another schema

    # Records.

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one record of the topic. Foreign records are skipped: any client with permission may write there."""
        try:
            found = msgspec.json.decode(key or b"", type=_Key)
            self._apply(found, value)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.warning("skipped an unreadable record of the schemas topic: %s", error)

    def _apply(self, key: _Key, value: bytes | None) -> None:
        decode = msgspec.json.decode
        if key.keytype == SCHEMA and key.subject is not None:
            if value is None:
                self._forget(key.subject, key.version)
            else:
                made = decode(value, type=_SchemaValue)
                _check_same((key.subject, key.version), (made.subject, made.version))
                self._remember(made)
        elif key.keytype == CONFIG:
            if value is None:
                self._configs.pop(key.subject, None)
            else:
                self._configs[key.subject] = _checked(decode(value, type=Config))
        elif key.keytype == MODE:
            _set(self._modes, key.subject, None if value is None else decode(value, type=_ModeValue).mode, MODES)
        elif key.keytype == DELETE_SUBJECT and value is not None:
            gone = decode(value, type=_DeletedValue)
            _check_same(key.subject, gone.subject)
            for number, one in self._subjects.get(gone.subject, {}).items():
                if number <= gone.version:
                    self._subjects[gone.subject][number] = one._replace(deleted=True)
            self._configs.pop(gone.subject, None)
            self._modes.pop(gone.subject, None)

    def _remember(self, value: _SchemaValue) -> None:
        if value.kind not in KINDS or not 0 < value.version <= VERSION_MAX or not 0 < value.id <= VERSION_MAX:
            raise ValueError(f"version {value.version} of {value.subject!r:.80} has id {value.id}, {value.kind!r:.20}")
        metadata, rules = contract.metadata_read(value.metadata), contract.rules_read(value.rules)
        content = Content(value.kind, value.schema, value.references, metadata, rules)
        versions = self._subjects.setdefault(value.subject, {})
        if (before := versions.pop(value.version, None)) is not None:
            self._unlink(before)
        meant = self._meant(value.id)
        if meant is None or meant == content:
            content = meant or content  # share one copy of the text between subjects
            self._ids.setdefault(content, {})[value.id] = None
        place = value.subject, value.version
        versions[value.version] = Version(*place, value.id, content, value.deleted)
        self._uses.setdefault(value.id, {})[place] = None
        for one in content.references:
            self._referrers.setdefault((one.subject, one.version), {})[place] = None
        self.last_id = max(self.last_id, value.id)

    def _forget(self, subject: str, number: int) -> None:
        versions = self._subjects.get(subject, {})
        gone = versions.pop(number, None)
        if gone is None:
            return
        if not versions:
            del self._subjects[subject]
        self._unlink(gone)

    def _unlink(self, gone: Version) -> None:
        place = gone.subject, gone.version
        _discard(self._uses, gone.id, place)
        if self._meant(gone.id) != gone.content:
            _discard(self._ids, gone.content, gone.id)
        for one in gone.content.references:
            _discard(self._referrers, (one.subject, one.version), place)

    def _meant(self, schema_id: int) -> Content | None:
        """The content of an id: the oldest one, in case another registry used the id several times."""
        for subject, number in self._uses.get(schema_id, ()):
            return self._subjects[subject][number].content
        return None

    # Queries.

    def subjects(self, *, deleted: bool = False) -> list[str]:
        return sorted(name for name in self._subjects if self.versions(name, deleted=deleted))

    def versions(self, subject: str, *, deleted: bool = False) -> list[Version]:
        """The versions of a subject in order; empty if the subject does not exist."""
        found = self._subjects.get(subject, {})
        return [found[number] for number in sorted(found) if deleted or not found[number].deleted]

    def version(self, subject: str, number: int | str, *, deleted: bool = False) -> Version:
        """A version by number or "latest". Raises RegistryError if it does not exist."""
        known = self.versions(subject, deleted=deleted)
        if not known:
            raise refusals.subject_not_found(subject)
        if number == LATEST:
            return known[-1]
        found = self._subjects[subject].get(int(number))
        if found is None or (found.deleted and not deleted):
            raise refusals.version_not_found(number)
        return found

    def is_there(self, subject: str, number: int) -> bool:
        """Whether the version exists, soft-deleted or not."""
        return number in self._subjects.get(subject, {})

    def content(self, schema_id: int) -> Content:
        found = self._meant(schema_id)
        if found is None:
            raise refusals.schema_not_found(schema_id)
        return found

    def id_of(self, content: Content) -> int | None:
        """The smallest id of this content: an import may have assigned several."""
        return min(self._ids.get(content, ()), default=None)

    def same(self, subject: str, content: Content, *, deleted: bool = False) -> list[Version]:
        """The versions of a subject with this content, newest first. A version property is ignored if only one side has
        it."""
        return [one for one in reversed(self.versions(subject, deleted=deleted)) if is_same(one, content)]

    def completed(self, subject: str, content: Content) -> Content:
        """Add the metadata and rules of a new version: its own or those of the previous version, merged with the
        config's defaults and overrides."""
        config, before = self.config(subject), self.versions(subject)[-1:]
        metadata = content.metadata or (before[0].content.metadata if before else "")
        rules = content.rules or (before[0].content.rules if before else "")
        default, override = (contract.metadata_read(config.get(name)) for name in CONTRACTS[:2])
        metadata = contract.merged_metadata(contract.merged_metadata(default, metadata), override)
        default, override = (contract.rules_read(config.get(name)) for name in CONTRACTS[2:])
        rules = contract.merged_rules(contract.merged_rules(default, rules), override)
        return content._replace(metadata=metadata, rules=rules)

    def uses(self, schema_id: int) -> list[Version]:
        """Every version with this id, including soft-deleted ones."""
        return [self._subjects[subject][number] for subject, number in self._uses.get(schema_id, ())]

    def referred_by(self, subject: str, version: int, *, deleted: bool = False) -> list[Version]:
        """The versions that refer to this one."""
        found = (self._subjects[name][number] for name, number in self._referrers.get((subject, version), ()))
        return [one for one in found if deleted or not one.deleted]

    def referred(self, references: Iterable[Reference]) -> dict[str, str]:
        """Name and text of all direct and indirect references, dependencies first. Raises RegistryError."""
        found: dict[str, str] = {}
        seen: set[tuple[str, int]] = set()
        size = 0

        def add(one: Reference) -> None:
            nonlocal size
            if (one.subject, one.version) in seen:
                return
            seen.add((one.subject, one.version))
            if len(seen) > REFERENCES_MAX:
                raise refusals.invalid_schema(f"it has more than {REFERENCES_MAX} direct and indirect references")
            try:
                content = self.version(one.subject, one.version, deleted=True).content
            except refusals.RegistryError:
                text = f"No schema reference found for subject '{one.subject}' and version {one.version}"
                raise refusals.invalid_schema(text) from None
            size += len(content.text)
            if size > REFERRED_CHARS_MAX:
                raise refusals.invalid_schema(
                    f"its references have more than {REFERRED_CHARS_MAX:,} characters in total"
                )
            for inner in content.references:
                add(inner)
            found[one.name] = content.text

        for one in references:
            add(one)
        return found

    def config(self, subject: str | None = None) -> Config:
        """The effective config: the subject's own settings take precedence over the global ones."""
        return {LEVEL: DEFAULT_LEVEL, **self._configs.get(None, {}), **self._configs.get(subject, {})}

    def own_config(self, subject: str | None) -> Config | None:
        return self._configs.get(subject)

    def level(self, subject: str | None = None) -> str:
        return str(self.config(subject)[LEVEL])

    def has_contract(self, subject: str) -> bool:
        """Whether the config adds metadata or rules to new versions."""
        return not self.config(subject).keys().isdisjoint(CONTRACTS)

    def normalizes(self, subject: str) -> bool:
        return bool(self.config(subject).get(NORMALIZE))

    def mode(self, subject: str | None = None) -> str:
        return self._modes.get(subject) or self._modes.get(None, READWRITE)

    def own_mode(self, subject: str) -> str | None:
        return self._modes.get(subject)


def is_same(one: Version, content: Content) -> bool:
    if one.content == content:
        return True
    if one.content._replace(metadata="") != content._replace(metadata=""):
        return False
    stored, asked = (contract.properties(it.metadata).get(contract.VERSION) for it in (one.content, content))
    if (stored is None) == (asked is None) or (asked is not None and asked != str(one.version)):
        return False
    return contract.with_version(one.content.metadata, None) == contract.with_version(content.metadata, None)


def _discard(places: dict[Key, dict[Found, None]], key: Key, place: Found) -> None:
    left = places.get(key, {})
    left.pop(place, None)
    if not left:
        places.pop(key, None)


def _check_same(key: object, value: object) -> None:
    """Key and value must agree, because compaction and deletion use the key."""
    if key != value:
        raise ValueError(f"the key belongs to {key!r:.80}, the value to {value!r:.80}")


def _checked(config: Config) -> Config:
    config.pop("subject", None)
    found = {key: value for key, value in config.items() if value is not None}
    if found.get(LEVEL, DEFAULT_LEVEL) not in LEVELS or not isinstance(found.get(NORMALIZE, False), bool):
        raise ValueError(f"invalid config: {config!r:.80}")
    return found


def _set(where: dict[str | None, str], subject: str | None, value: str | None, choices: tuple[str, ...]) -> None:
    if value is None:
        where.pop(subject, None)
    elif value in choices:
        where[subject] = value
    else:
        raise ValueError(f"invalid value {value[:40]!r}")


def content_shape(content: Content) -> dict[str, Any]:
    """The JSON that clients expect: AVRO, the default type, and empty references are omitted."""
    shape: dict[str, Any] = {} if content.kind == AVRO else {"schemaType": content.kind}
    if content.references:
        shape["references"] = references_shape(content)
    if content.metadata:
        shape["metadata"] = msgspec.Raw(content.metadata.encode())
    if content.rules:
        shape["ruleSet"] = msgspec.Raw(content.rules.encode())
    return {**shape, "schema": content.text}


def references_shape(content: Content) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(one) for one in content.references]


# Records to be written.


def schema_entry(one: Version) -> Entry:
    value = {"subject": one.subject, "version": one.version, "id": one.id, **content_shape(one.content)}
    return _key(SCHEMA, one.subject, one.version), msgspec.json.encode({**value, "deleted": one.deleted})


def forgotten_entry(one: Version) -> Entry:
    return _key(SCHEMA, one.subject, one.version), None


def deleted_entry(subject: str, last: int) -> Entry:
    return _key(DELETE_SUBJECT, subject), msgspec.json.encode({"subject": subject, "version": last})


def config_entry(subject: str | None, config: Config | None) -> Entry:
    return _key(CONFIG, subject), None if config is None else msgspec.json.encode(config)


def mode_entry(subject: str | None, mode: str | None) -> Entry:
    return _key(MODE, subject), None if mode is None else msgspec.json.encode({"mode": mode})


def _key(keytype: str, subject: str | None, version: int | None = None) -> bytes:
    """Byte for byte the key that Confluent's registry writes, because compaction compares keys."""
    key: dict[str, Any] = {"keytype": keytype, "subject": subject}
    if version is not None:
        key["version"] = version
    return msgspec.json.encode({**key, "magic": MAGIC.get(keytype, 0)})
