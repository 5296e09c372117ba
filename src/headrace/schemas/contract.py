"""Data contracts: the metadata and rules of a schema. The registry stores and returns them; serializers apply them.

Both are stored as canonical JSON, so that equal contracts have equal texts.
"""

from typing import Any, Literal

import msgspec

from headrace.schemas import refusals

VERSION = "confluent:version"  # the property with the version under which the schema was registered
NAME_MAX = 256
CHARS_MAX = 1 << 20  # for each of the two
MIGRATIONS = ("UPGRADE", "DOWNGRADE", "UPDOWN")
Mode = Literal["UPGRADE", "DOWNGRADE", "UPDOWN", "WRITE", "READ", "WRITEREAD"]


class Metadata(msgspec.Struct, omit_defaults=True):
    tags: dict[str, set[str]] | None = None  # path in the schema -> tags
    properties: dict[str, str] | None = None
    sensitive: set[str] | None = None  # names of sensitive properties


class Rule(msgspec.Struct, omit_defaults=True, rename="camel"):
    name: str | None = None
    doc: str | None = None
    kind: Literal["TRANSFORM", "CONDITION"] | None = None
    mode: Mode | None = None
    type: str | None = None
    tags: set[str] | None = None
    params: dict[str, str] | None = None
    expr: str | None = None
    on_success: str | None = None
    on_failure: str | None = None
    disabled: bool | None = None


class RuleSet(msgspec.Struct, omit_defaults=True, rename="camel"):
    migration_rules: list[Rule] | None = None
    domain_rules: list[Rule] | None = None
    encoding_rules: list[Rule] | None = None
    enable_at: Literal["ALL", "CLIENT", "GATEWAY", "SERVER", "NONE"] | None = None


def metadata_text(value: Any) -> str:
    """The canonical text of metadata; raises RegistryError."""
    return _bounded(_metadata_text(_converted(value, Metadata)))


def metadata_read(value: Any) -> str:
    """Metadata from the topic; empty if missing or unknown. A schema must not be lost because another registry wrote
    metadata that this version does not understand."""
    try:
        return "" if value is None else _metadata_text(msgspec.convert(value, Metadata))
    except msgspec.ValidationError:
        return ""


def rules_read(value: Any) -> str:
    """Like metadata_read, for rules. They were validated when they were registered."""
    try:
        return "" if value is None else _rules_text(msgspec.convert(value, RuleSet))
    except msgspec.ValidationError:
        return ""


def _metadata_text(found: Metadata) -> str:
    kept = Metadata(found.tags or None, found.properties or None, found.sensitive or None)
    return _text(kept)


def rules_text(value: Any) -> str:
    """The canonical text of a rule set; raises RegistryError if it is invalid or no serializer could apply it."""
    found = _converted(value, RuleSet)
    names: set[str] = set()
    for rules, modes, which in (
        (found.migration_rules, MIGRATIONS, "Migration rules can only be UPGRADE, DOWNGRADE, UPDOWN"),
        (found.domain_rules, None, "Domain rules can only be WRITE, READ, WRITEREAD"),
        (found.encoding_rules, None, "Encoding rules can only be WRITE, READ, WRITEREAD"),
    ):
        for rule in rules or ():
            _check(rule, names)
            if (rule.mode in MIGRATIONS) != (modes is not None):
                raise refusals.invalid_rules(which)
    return _bounded(_rules_text(found))


def _rules_text(found: RuleSet) -> str:
    return _text(
        RuleSet(
            _kept(found.migration_rules),
            _kept(found.domain_rules),
            _kept(found.encoding_rules),
            enable_at=found.enable_at,
        )
    )


def _converted(value: Any, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refusals.RegistryError(422, f"Unprocessable request: {error}") from None


def _bounded(text: str) -> str:
    if len(text) > CHARS_MAX:
        raise refusals.RegistryError(422, f"metadata and rules may have at most {CHARS_MAX:,} characters each")
    return text


def _text(value: Any) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _check(rule: Rule, names: set[str]) -> None:
    name = rule.name
    if not name or len(name) > NAME_MAX or not (name[0].isalpha() or name[0] == "_"):
        raise refusals.invalid_rules(f"a rule name consists of letters, digits, _ and -, not {str(name)[:80]!r}")
    if not all(one.isalnum() or one in "_-" for one in name):
        raise refusals.invalid_rules(f"Illegal character in rule name: {name[:80]}")
    if name in names:
        raise refusals.invalid_rules(f"Found rule with duplicate name '{name}'")
    names.add(name)
    if rule.type is None:
        raise refusals.invalid_rules("Missing rule type")
    is_pair = any("," in (action or "") for action in (rule.on_success, rule.on_failure))
    if is_pair and rule.mode not in (None, "WRITEREAD", "UPDOWN"):
        raise refusals.invalid_rules("Multiple actions only valid with WRITEREAD and UPDOWN")


def _kept(rules: list[Rule] | None) -> list[Rule] | None:
    """Fill in the defaults of rules, as Confluent's registry stores them."""
    return [
        msgspec.structs.replace(
            rule,
            kind=rule.kind or "TRANSFORM",
            mode=rule.mode or "WRITEREAD",
            tags=rule.tags or None,
            params=rule.params or None,
            disabled=bool(rule.disabled),
        )
        for rule in rules or ()
    ] or None


def properties(metadata: str) -> dict[str, str]:
    return (msgspec.json.decode(metadata, type=Metadata).properties if metadata else None) or {}


def has_rule_of(rules: str, kind: str) -> bool:
    found = msgspec.json.decode(rules, type=RuleSet) if rules else RuleSet()
    lists = (found.migration_rules, found.domain_rules, found.encoding_rules)
    return any(rule.type == kind for listed in lists for rule in listed or ())


def with_version(metadata: str, version: int | None) -> str:
    """The metadata with this version property; None removes it."""
    found = msgspec.json.decode(metadata, type=Metadata) if metadata else Metadata()
    kept = {name: value for name, value in (found.properties or {}).items() if name != VERSION}
    if version is not None:
        kept[VERSION] = str(version)
    return _text(msgspec.structs.replace(found, properties=kept or None))


def merged_metadata(before: str, after: str) -> str:
    if not before or not after:
        return after or before
    old, new = (msgspec.json.decode(text, type=Metadata) for text in (before, after))
    return _text(
        Metadata(
            {**(old.tags or {}), **(new.tags or {})} or None,
            {**(old.properties or {}), **(new.properties or {})} or None,
            (old.sensitive or set()) | (new.sensitive or set()) or None,
        )
    )


def merged_rules(before: str, after: str) -> str:
    if not before or not after:
        return after or before
    old, new = (msgspec.json.decode(text, type=RuleSet) for text in (before, after))

    def both(first: list[Rule] | None, then: list[Rule] | None) -> list[Rule] | None:
        names = {rule.name for rule in then or ()}
        return [*(rule for rule in first or () if rule.name not in names), *(then or ())] or None

    return _text(
        RuleSet(
            both(old.migration_rules, new.migration_rules),
            both(old.domain_rules, new.domain_rules),
            both(old.encoding_rules, new.encoding_rules),
            enable_at=new.enable_at or old.enable_at,
        )
    )
