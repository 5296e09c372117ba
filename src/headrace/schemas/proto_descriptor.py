"""The parts of a .proto file, named as in descriptor.proto, and the codec of FileDescriptorProto.

The classes are the messages of descriptor.proto; a table maps field numbers to attributes, so that encoding and
decoding are one walk over that table. Options are kept by name, as in the text; a custom option is encoded as the
uninterpreted_option that protoc's parser produces.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

DEPTH_MAX = 100
NUMBER_MAX = (1 << 29) - 1
INT32_MAX = (1 << 31) - 1
NAME = re.compile(r"[A-Za-z_]\w*", re.A)
DOTTED = re.compile(r"\.?[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.A)

OPTIONAL, REQUIRED, REPEATED = 1, 2, 3
LABELS = {"optional": OPTIONAL, "required": REQUIRED, "repeated": REPEATED}
SCALAR_NAMES = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32", 8: "bool"}
SCALAR_NAMES |= {9: "string", 12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64"}
SCALARS = {name: code for code, name in SCALAR_NAMES.items()}
GROUP, MESSAGE, ENUM = 10, 11, 14
EDITIONS = {"2023": 1000, "2024": 1001}


def json_name(name: str) -> str:
    """The default JSON name of a field."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def entry_name(field: str) -> str:
    """The name of the message that protoc generates for the entries of a map."""
    return "".join(part[:1].upper() + part[1:] for part in field.split("_")) + "Entry"


def inner(scope: str, name: str) -> str:
    """The full name of a name in a scope; the outermost scope is empty."""
    return f"{scope}.{name}" if scope else name


class Ident(str):
    """A bare word as the value of an option: true, SPEED, inf."""


class Aggregate(str):
    """The text between the braces of an option's value."""


Value = Ident | Aggregate | bytes | int | float


class Option(NamedTuple):
    name: str  # as written: java_package, features.enum_type, (acme.unit).label
    value: Value


@dataclass(slots=True)
class Node:
    at: int = -1  # its position in the text, or -1


@dataclass(slots=True)
class Range(Node):
    start: int = 0
    end: int = 0  # exclusive in a message, inclusive in an enum
    options: list[Option] = field(default_factory=list)


@dataclass(slots=True)
class EnumValue(Node):
    name: str = ""
    number: int = 0
    options: list[Option] = field(default_factory=list)


@dataclass(slots=True)
class Enum(Node):
    name: str = ""
    values: list[EnumValue] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    reserved_ranges: list[Range] = field(default_factory=list)
    reserved_names: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Field(Node):
    name: str = ""
    extendee: str = ""
    number: int = 0
    label: int = OPTIONAL
    type: int | None = None  # None until type_name is resolved
    type_name: str = ""
    default: str | None = None
    options: list[Option] = field(default_factory=list)
    oneof: int | None = None
    json_name: str = ""
    proto3_optional: bool = False


@dataclass(slots=True)
class Oneof(Node):
    name: str = ""
    options: list[Option] = field(default_factory=list)


@dataclass(slots=True)
class Message(Node):
    name: str = ""
    fields: list[Field] = field(default_factory=list)
    messages: list["Message"] = field(default_factory=list)
    enums: list[Enum] = field(default_factory=list)
    extension_ranges: list[Range] = field(default_factory=list)
    extensions: list[Field] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    oneofs: list[Oneof] = field(default_factory=list)
    reserved_ranges: list[Range] = field(default_factory=list)
    reserved_names: list[str] = field(default_factory=list)

    @property
    def is_map_entry(self) -> bool:
        return Option("map_entry", Ident("true")) in self.options


@dataclass(slots=True)
class Method(Node):
    name: str = ""
    input: str = ""
    output: str = ""
    options: list[Option] = field(default_factory=list)
    client_streaming: bool = False
    server_streaming: bool = False


@dataclass(slots=True)
class Service(Node):
    name: str = ""
    methods: list[Method] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)


@dataclass(slots=True)
class File(Node):
    name: str = ""
    package: str = ""
    imports: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    enums: list[Enum] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    extensions: list[Field] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    public_imports: list[int] = field(default_factory=list)
    weak_imports: list[int] = field(default_factory=list)
    syntax: str = ""  # "" is proto2, as protoc writes it
    edition: int | None = None
    import_places: list[int] = field(default_factory=list)  # in the text, as Node.at


def _known(listed: str, features: int) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    """Option name -> (its field numbers, its kind: string, bool, or the names of an enum from zero)."""
    table: dict[str, tuple[tuple[int, ...], list[str]]] = {}
    for name, number, kind in (entry.split(":") for entry in listed.split()):
        table[name] = ((int(number),), kind.split(","))
    for at, (name, kind) in enumerate((entry.split(":") for entry in _FEATURES.split()), 1):
        table[f"features.{name}"] = ((features, at), kind.split(","))
    return table


_FEATURES = """
    field_presence:,EXPLICIT,IMPLICIT,LEGACY_REQUIRED enum_type:,OPEN,CLOSED repeated_field_encoding:,PACKED,EXPANDED
    utf8_validation:,,VERIFY,NONE message_encoding:,LENGTH_PREFIXED,DELIMITED json_format:,ALLOW,LEGACY_BEST_EFFORT
    enforce_naming_style:,STYLE2024,STYLE_LEGACY
    default_symbol_visibility:,EXPORT_ALL,EXPORT_TOP_LEVEL,LOCAL_ALL,STRICT
"""
KNOWN_OPTIONS: Final = {
    File: _known(
        """java_package:1:string java_outer_classname:8:string optimize_for:9:,SPEED,CODE_SIZE,LITE_RUNTIME
        java_multiple_files:10:bool go_package:11:string cc_generic_services:16:bool java_generic_services:17:bool
        py_generic_services:18:bool java_generate_equals_and_hash:20:bool deprecated:23:bool
        java_string_check_utf8:27:bool cc_enable_arenas:31:bool objc_class_prefix:36:string csharp_namespace:37:string
        swift_prefix:39:string php_class_prefix:40:string php_namespace:41:string php_generic_services:42:bool
        php_metadata_namespace:44:string ruby_package:45:string""",
        features=50,
    ),
    Message: _known(
        """message_set_wire_format:1:bool no_standard_descriptor_accessor:2:bool deprecated:3:bool map_entry:7:bool
        deprecated_legacy_json_field_conflicts:11:bool""",
        features=12,
    ),
    Field: _known(
        """ctype:1:STRING,CORD,STRING_PIECE packed:2:bool deprecated:3:bool lazy:5:bool
        jstype:6:JS_NORMAL,JS_STRING,JS_NUMBER weak:10:bool unverified_lazy:15:bool debug_redact:16:bool
        retention:17:RETENTION_UNKNOWN,RETENTION_RUNTIME,RETENTION_SOURCE
        targets:19:TARGET_TYPE_UNKNOWN,TARGET_TYPE_FILE,TARGET_TYPE_EXTENSION_RANGE,TARGET_TYPE_MESSAGE,"""
        "TARGET_TYPE_FIELD,TARGET_TYPE_ONEOF,TARGET_TYPE_ENUM,TARGET_TYPE_ENUM_ENTRY,TARGET_TYPE_SERVICE,"
        "TARGET_TYPE_METHOD",
        features=21,
    ),
    Oneof: _known("", features=1),
    Enum: _known("allow_alias:2:bool deprecated:3:bool deprecated_legacy_json_field_conflicts:6:bool", features=7),
    EnumValue: _known("deprecated:1:bool debug_redact:3:bool", features=2),
    Range: _known("verification:3:DECLARATION,UNVERIFIED", features=50),
    Service: _known("deprecated:33:bool", features=34),
    Method: _known(
        "deprecated:33:bool idempotency_level:34:IDEMPOTENCY_UNKNOWN,NO_SIDE_EFFECTS,IDEMPOTENT", features=35
    ),
}
_UNINTERPRETED = 999


def sorted_options(node: type[Node], options: list[Option]) -> list[Option]:
    """Sorted by field number, the only order that a descriptor keeps; custom options last, as written."""
    known = KNOWN_OPTIONS[node]
    return sorted(options, key=lambda option: known[option.name][0] if option.name in known else (_UNINTERPRETED,))


def fits(kind: list[str], value: Value) -> bool:
    """Whether an option of this kind (see KNOWN_OPTIONS) can have this value."""
    if kind == ["string"]:
        return isinstance(value, bytes)
    return isinstance(value, Ident) and value in (["true", "false"] if kind == ["bool"] else kind)


# Field number in descriptor.proto -> attribute, and what it holds (one, or each of the list): a pattern is a
# string that it must match.
_PARTS: Final[dict[type[Node], dict[int, tuple[str, Any]]]] = {
    Range: {1: ("start", int), 2: ("end", int), 3: ("options", Option)},
    EnumValue: {1: ("name", NAME), 2: ("number", int), 3: ("options", Option)},
    Enum: {
        1: ("name", NAME),
        2: ("values", EnumValue),
        3: ("options", Option),
        4: ("reserved_ranges", Range),
        5: ("reserved_names", str),
    },
    Field: {
        1: ("name", NAME),
        2: ("extendee", DOTTED),
        3: ("number", int),
        4: ("label", int),
        5: ("type", int),
        6: ("type_name", DOTTED),
        7: ("default", str),
        8: ("options", Option),
        9: ("oneof", int),
        10: ("json_name", str),
        17: ("proto3_optional", bool),
    },
    Oneof: {1: ("name", NAME), 2: ("options", Option)},
    Message: {
        1: ("name", NAME),
        2: ("fields", Field),
        3: ("messages", Message),
        4: ("enums", Enum),
        5: ("extension_ranges", Range),
        6: ("extensions", Field),
        7: ("options", Option),
        8: ("oneofs", Oneof),
        9: ("reserved_ranges", Range),
        10: ("reserved_names", str),
    },
    Method: {
        1: ("name", NAME),
        2: ("input", DOTTED),
        3: ("output", DOTTED),
        4: ("options", Option),
        5: ("client_streaming", bool),
        6: ("server_streaming", bool),
    },
    Service: {1: ("name", NAME), 2: ("methods", Method), 3: ("options", Option)},
    File: {
        1: ("name", str),
        2: ("package", DOTTED),
        3: ("imports", str),
        4: ("messages", Message),
        5: ("enums", Enum),
        6: ("services", Service),
        7: ("extensions", Field),
        8: ("options", Option),
        10: ("public_imports", int),
        11: ("weak_imports", int),
        12: ("syntax", str),
        14: ("edition", int),
    },
}
_DEFAULTS = {(node, part.name): part.default for node in _PARTS for part in fields(node)}
_ALWAYS = {"number", "start", "end", "label"}  # readers of descriptors require these even with default values


# Writing


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _block(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def encode(node: Node) -> bytes:
    """The encoded descriptor of this part."""
    out = bytearray()
    for number, (attribute, kind) in _PARTS[type(node)].items():
        value = getattr(node, attribute)
        if kind is Option:
            if value:
                out += _block(number, _encode_options(type(node), value))
        elif isinstance(value, list):
            for one in value:
                out += _encode_one(number, one)
        elif value != _DEFAULTS[type(node), attribute] or attribute in _ALWAYS:
            out += _encode_one(number, value)
    return bytes(out)


def _encode_one(number: int, value: Node | str | int) -> bytes:
    if isinstance(value, Node):
        return _block(number, encode(value))
    return _block(number, value.encode()) if isinstance(value, str) else _number(number, value)


def _encode_options(node: type[Node], options: list[Option]) -> bytes:
    out = bytearray()
    for name, value in sorted_options(node, options):
        if name not in KNOWN_OPTIONS[node]:
            out += _block(_UNINTERPRETED, _encode_uninterpreted(name, value))
            continue
        (*outer, number), kind = KNOWN_OPTIONS[node][name]
        if isinstance(value, bytes):
            data = _block(number, value)
        else:
            assert isinstance(value, Ident)  # checked by the parser
            data = _number(number, value == "true" if kind == ["bool"] else kind.index(value))
        out += _block(outer[0], data) if outer else data
    return bytes(out)


def _encode_uninterpreted(name: str, value: Value) -> bytes:
    out = bytearray()
    for part in re.findall(r"\([^)]*\)|\w+", name):
        out += _block(2, _block(1, part.strip("()").encode()) + _number(2, part.startswith("(")))
    if isinstance(value, bytes):
        return bytes(out + _block(7, value))
    if isinstance(value, str):
        return bytes(out + _block(8 if isinstance(value, Aggregate) else 3, value.encode()))
    if isinstance(value, float):
        return bytes(out + _varint(6 << 3 | 1) + struct.pack("<d", value))
    return bytes(out + _number(4 if value >= 0 else 5, value))


# Reading


def decode(data: bytes) -> File:
    """Decode a FileDescriptorProto. Raises ValueError."""
    file: File = _decode(File, memoryview(data), 0)
    if file.syntax not in ("", "proto2", "proto3", "editions") or any("\n" in path for path in file.imports):
        raise ValueError("not a FileDescriptorProto")
    return file


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("unterminated varint")


def _parts(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) pairs; the value is an int for varints and bytes otherwise."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        if key < 8:
            raise ValueError("a field without a number")
        if key & 7 == 0:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(key & 7, -1)
        if key & 7 == 2:
            length, at = _read_varint(data, at)
        if length < 0 or at + length > len(data):
            raise ValueError("truncated field, or unknown wire type")
        yield key >> 3, data[at : at + length]
        at += length


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _decode(node: type[Any], data: memoryview, depth: int) -> Any:
    if depth > DEPTH_MAX:
        raise ValueError("nested too deeply")
    made = node()
    for number, raw in _parts(data):
        if number not in _PARTS[node]:
            continue
        attribute, kind = _PARTS[node][number]
        values = _decode_one(node, kind, raw, depth)
        if isinstance(getattr(made, attribute), list):
            getattr(made, attribute).extend(values)
        else:
            setattr(made, attribute, values[-1])
    return made


def _decode_one(node: type[Any], kind: Any, raw: int | memoryview, depth: int) -> list[Any]:
    if kind in (int, bool):
        if isinstance(raw, int):
            return [kind(_signed(raw))]
        return [_signed(value) for value in _packed(raw)]
    if isinstance(raw, int):
        raise ValueError("a varint where bytes are expected")
    if kind is Option:
        return list(_decode_options(node, raw))
    if kind is str:
        return [str(raw, "utf-8")]
    if isinstance(kind, re.Pattern):
        return [_matching(kind, raw)]
    return [_decode(kind, raw, depth + 1)]


def _matching(pattern: re.Pattern[str], raw: memoryview) -> str:
    text = str(raw, "utf-8")
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is not a name")
    return text


def _packed(raw: memoryview) -> Iterator[int]:
    at = 0
    while at < len(raw):
        value, at = _read_varint(raw, at)
        yield value


def _decode_options(node: type[Node], data: memoryview, outer: tuple[int, ...] = ()) -> Iterator[Option]:
    """The known options; extension values are skipped, because only their numbers are known."""
    names = {numbers: (name, kind) for name, (numbers, kind) in KNOWN_OPTIONS[node].items()}
    features = {numbers[0] for numbers in names if len(numbers) > 1}
    for number, raw in _parts(data):
        path = (*outer, number)
        if path in names:
            name, kind = names[path]
            if not isinstance(raw, int):
                yield Option(name, bytes(raw))
            elif kind == ["bool"]:
                yield Option(name, Ident("true" if raw else "false"))
            elif raw < len(kind) and kind[raw]:
                yield Option(name, Ident(kind[raw]))
        elif not outer and number in features and not isinstance(raw, int):
            yield from _decode_options(node, raw, path)
        elif path == (_UNINTERPRETED,) and not isinstance(raw, int):
            yield _decode_uninterpreted(raw)


def _decode_uninterpreted(data: memoryview) -> Option:
    names: list[str] = []
    value: Value = Ident("true")
    for number, raw in _parts(data):
        if isinstance(raw, int):
            value = _signed(raw) if number == 5 else raw
        elif number == 2:
            part = dict(_parts(raw))
            name = part.get(1, 0)
            text = _matching(DOTTED, memoryview(b"") if isinstance(name, int) else name)
            names.append(f"({text})" if part.get(2) else text)
        elif number == 6 and len(raw) == 8:
            value = float(struct.unpack("<d", raw)[0])
        elif number == 7:
            value = bytes(raw)
        else:
            value = (Ident if number == 3 else Aggregate)(str(raw, "utf-8"))
    return Option(".".join(names), value)
