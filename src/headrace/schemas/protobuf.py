"""Protobuf schemas: parse .proto text or a serialized descriptor, print the canonical text, check compatibility.

Incompatibilities and their names are those of Confluent's Schema Registry. It accepts some changes that break readers
(a plain proto3 field that becomes repeated); so do we, because clients rely on being able to register them.
"""

import base64
import re
from collections.abc import Mapping

from headrace.errors import InvalidInput
from headrace.schemas.proto_descriptor import (
    ENUM,
    GROUP,
    REPEATED,
    REQUIRED,
    SCALAR_NAMES,
    Field,
    File,
    Ident,
    Message,
    Option,
    decode,
    encode,
    inner,
)
from headrace.schemas.proto_linker import Linker, Type, is_well_known, speller
from headrace.schemas.proto_parser import parse_file
from headrace.schemas.proto_printer import Spell, in_order, print_file

SIZE_BYTES_MAX = 1_000_000

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}", re.A)
_SCALAR_KINDS = {
    **dict.fromkeys(("int32", "int64", "uint32", "uint64", "bool", "enum"), "general number"),
    **dict.fromkeys(("sint32", "sint64"), "signed number"),
    **dict.fromkeys(("string", "bytes"), "string or bytes"),
    **dict.fromkeys(("fixed32", "sfixed32"), "fixed32"),
    **dict.fromkeys(("fixed64", "sfixed64"), "fixed64"),
    "float": "float",
    "double": "double",
}


class Protobuf:
    """One .proto file with its imports. Files that differ only in white space have the same text."""

    text: str
    references: tuple[str, ...]

    def __init__(self, file: File, types: Mapping[str, Type], text: str, spell: Spell) -> None:
        self._file, self._types, self.text, self._spell = file, types, text, spell
        self.references = tuple(path for path in file.imports if not is_well_known(path))

    @classmethod
    def parse(cls, text: str, references: Mapping[str, str]) -> "Protobuf":
        """Parse .proto text or a base64 FileDescriptorProto. Raises InvalidInput with the line."""
        file, text = _read(text)
        file.name = "default"
        linker = Linker(_read, references)
        linker.link(file, text)
        spell = speller(linker)
        printed = print_file(file, spell)
        _check_size(printed, "canonical ")  # it will be parsed again
        return cls(file, linker.types, printed, spell)

    def normalized(self) -> str:
        return print_file(in_order(self._file), self._spell)

    def serialized(self) -> str:
        """The FileDescriptorProto in base64, with the file name that Confluent's registry uses."""
        return base64.b64encode(encode(self._file)).decode()

    def breaks(self, writer: "Protobuf") -> list[str]:
        """Why a reader with this schema cannot read all data of the writer's schema; empty if it can."""
        return _Comparison(writer, self).differences()


def _check_size(text: str, what: str = "") -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidInput("the schema is not UTF-8") from None
    if size > SIZE_BYTES_MAX:
        raise InvalidInput(f"the {what}text of the schema has {size:,} bytes; the limit is {SIZE_BYTES_MAX:,}")


def _read(text: str) -> tuple[File, str]:
    """The file, and the text that its positions refer to (for a descriptor, the printed text)."""
    _check_size(text)
    compact = "".join(text.split())
    if _BASE64.fullmatch(compact):
        try:
            text = print_file(decode(base64.b64decode(compact, validate=True)))
        except ValueError:
            pass  # not a descriptor: the parser reports what is wrong with the text
        _check_size(text)
    return parse_file(text), text


class _Comparison:
    """Compares the writer's schema with the reader's.

    Each pair of messages is compared once, however often fields refer to it: following every path would take
    exponential time. If a pair differs, the fields that refer to it differ too; this is propagated at the end.
    """

    def __init__(self, old: Protobuf, new: Protobuf) -> None:
        self.old, self.new = old, new
        self.found: dict[str, None] = {}  # an ordered set
        self.pairs: dict[tuple[str, str], tuple[Message, Message]] = {}
        self.waiting: list[tuple[str, str]] = []
        self.users: dict[
            tuple[str, str], list[tuple[tuple[str, str], str | None]]
        ] = {}  # pair -> (referring pair, place)
        self.broken: list[tuple[str, str]] = []
        self.pair = ("", "")  # the pair in progress

    def differences(self) -> list[str]:
        old, new = self.old._file, self.new._file
        if old.package != new.package:
            self.found["PACKAGE_CHANGED at #/"] = None
        self.nested(old.messages, new.messages, old.package, new.package, "#")
        while self.waiting:
            self.pair = self.waiting.pop()
            self.compare(*self.pairs[self.pair], self.new._types[self.pair[1]])
        seen = set(self.broken)
        while self.broken:
            for user, place in self.users.pop(self.broken.pop(), []):
                if place is not None:
                    self.found[f"FIELD_NAMED_TYPE_CHANGED at {place}"] = None
                if user not in seen:
                    seen.add(user)
                    self.broken.append(user)
        return list(self.found)

    def add(self, difference: str, place: str) -> None:
        self.found[f"{difference} at {place}"] = None
        self.broken.append(self.pair)

    def refer(self, old: str, new: str, messages: tuple[Message, Message], place: str | None) -> None:
        """Schedule the comparison of two messages; their differences also count for the present pair."""
        if (old, new) not in self.pairs:
            self.pairs[old, new] = messages
            self.waiting.append((old, new))
        self.users.setdefault((old, new), []).append((self.pair, place))

    def nested(self, old: list[Message], new: list[Message], old_scope: str, new_scope: str, place: str) -> None:
        by_name = {message.name: message for message in new}
        for message in old:
            if message.name in by_name:
                names = inner(old_scope, message.name), inner(new_scope, message.name)
                self.refer(*names, (message, by_name[message.name]), None)
            elif not message.is_map_entry:
                self.add("MESSAGE_REMOVED", f"{place}/{message.name}")

    def compare(self, old: Message, new: Message, where: Type) -> None:
        place = "#/" + where.name.replace(".", "/")
        if not (old.is_map_entry and new.is_map_entry):  # the key and value of a map are compared at its field
            self.oneofs(old, new, place)
            self.fields(old, new, place)
        self.nested(old.messages, new.messages, *self.pair, place)

    def oneofs(self, old: Message, new: Message, place: str) -> None:
        """Independent fields must not move into the same oneof, because they would exclude each other."""
        homes = _homes(old)
        known = {field.number for field in old.fields}
        members: dict[str, list[int]] = {}
        for number, name in _homes(new).items():
            members.setdefault(name, []).append(number)
        for name, numbers in members.items():
            plain = [number for number in numbers if number in known and number not in homes]
            groups = len(plain) + len({homes[number] for number in numbers if number in homes})
            if groups > 1 and len(plain) > 1:
                self.add("MULTIPLE_FIELDS_MOVED_TO_ONEOF", f"{place}/{name}")
            elif groups > 1:
                self.add("FIELD_MOVED_TO_EXISTING_ONEOF", f"{place}/{name}")

    def fields(self, old: Message, new: Message, place: str) -> None:
        old_homes, new_homes = _homes(old), _homes(new)
        old_fields = {field.number: field for field in old.fields}
        new_fields = {field.number: field for field in new.fields}
        kept = {name for number, name in old_homes.items() if number in new_fields} | set(new_homes.values())
        for number in sorted(old_fields.keys() | new_fields.keys()):
            before, after = old_fields.get(number), new_fields.get(number)
            if before is not None and after is not None:
                home = f"{place}/{new_homes[number]}" if number in new_homes else place
                self.field(before, after, f"{home}/{number}")
            elif before is not None and number in old_homes:
                if old_homes[number] in kept:  # a whole oneof may be removed, but not one of its fields
                    self.add("ONEOF_FIELD_REMOVED", f"{place}/{old_homes[number]}/{number}")
            elif before is not None and _is_required(before):
                self.add("REQUIRED_FIELD_REMOVED", f"{place}/{number}")
            elif after is not None and _is_required(after):
                self.add("REQUIRED_FIELD_ADDED", f"{place}/{number}")

    def field(self, old: Field, new: Field, place: str) -> None:
        old_entry, new_entry = _entry(self.old, old), _entry(self.new, new)
        kinds = [
            "map" if entry else "group" if field.type == GROUP else "scalar" if _scalar(field) else "message"
            for field, entry in ((old, old_entry), (new, new_entry))
        ]
        if kinds[0] != kinds[1]:
            self.add("FIELD_KIND_CHANGED", place)
        elif old_entry is not None and new_entry is not None:
            for old_part, new_part in zip(old_entry.fields, new_entry.fields, strict=True):
                self.field(old_part, new_part, place)
        elif kinds[0] != "scalar":
            self.message(old, new, place)
        elif _scalar(old) != _scalar(new):
            self.add("FIELD_SCALAR_KIND_CHANGED", place)
        elif _scalar(old) != "string or bytes":
            old_label, new_label = _label(self.old, old), _label(self.new, new)
            if old_label and new_label and old_label != new_label:
                self.add("FIELD_NUMERIC_LABEL_CHANGED", place)

    def message(self, old: Field, new: Field, place: str) -> None:
        old_type, new_type = self.old._types[old.type_name[1:]], self.new._types[new.type_name[1:]]
        if old_type.name != new_type.name:
            self.add("FIELD_NAMED_TYPE_CHANGED", place)
        elif isinstance(old_type.node, Message) and isinstance(new_type.node, Message):
            self.refer(old.type_name[1:], new.type_name[1:], (old_type.node, new_type.node), place)


def _homes(message: Message) -> dict[int, str]:
    """Field number -> its oneof. The synthetic oneof of an optional field does not count."""
    return {
        field.number: message.oneofs[field.oneof].name
        for field in message.fields
        if field.oneof is not None and not field.proto3_optional
    }


def _entry(schema: Protobuf, field: Field) -> Message | None:
    found = schema._types[field.type_name[1:]].node if field.type_name else None
    return found if isinstance(found, Message) and found.is_map_entry else None


def _scalar(field: Field) -> str | None:
    return _SCALAR_KINDS.get("enum" if field.type == ENUM else SCALAR_NAMES.get(field.type or 0, ""))


def _is_required(field: Field) -> bool:
    return field.label == REQUIRED or Option("features.field_presence", Ident("LEGACY_REQUIRED")) in field.options


def _label(schema: Protobuf, field: Field) -> int | None:
    """The label in the text: plain proto3 fields and members of a oneof have none."""
    if field.label == REPEATED or field.proto3_optional:
        return field.label
    return field.label if schema._file.syntax == "" and field.oneof is None else None
