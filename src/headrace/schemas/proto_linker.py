"""Links a .proto file: loads its imports, resolves type names and checks the rules of the language.

Names are looked up from the innermost scope outwards, among the definitions of the file and its imports. Afterwards,
every type name in the file is fully qualified. Every error names the line.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from headrace.errors import InvalidInput
from headrace.schemas.proto_descriptor import (
    DEPTH_MAX,
    ENUM,
    GROUP,
    LABELS,
    MESSAGE,
    SCALARS,
    Enum,
    Field,
    File,
    Ident,
    Message,
    Option,
    Range,
    Service,
    entry_name,
    inner,
)
from headrace.schemas.proto_tokens import at_line

NAME_LENGTH_MAX = 1000
IMPORT_DEPTH_MAX = 30  # imports and their nesting must fit into Python's stack
CLOSED = Option("features.enum_type", Ident("CLOSED"))
RESERVED_FOR_PROTOBUF = Range(start=19_000, end=20_000)

# Keywords that are ambiguous where a type name may stand: a type with such a name must be fully qualified.
_KEYWORDS = {
    *(*SCALARS, *LABELS, "message", "enum", "extend", "extensions", "reserved", "option", "oneof", "group", "map"),
    "stream",
}

# Files that clients have without registration: path -> messages, then enums after a bar.
_WELL_KNOWN = {
    "google/protobuf/any.proto": "Any",
    "google/protobuf/api.proto": "Api Method Mixin",
    "google/protobuf/descriptor.proto": """
        FileDescriptorSet FileDescriptorProto DescriptorProto DescriptorProto.ExtensionRange
        DescriptorProto.ReservedRange ExtensionRangeOptions ExtensionRangeOptions.Declaration FieldDescriptorProto
        OneofDescriptorProto EnumDescriptorProto EnumDescriptorProto.EnumReservedRange EnumValueDescriptorProto
        ServiceDescriptorProto MethodDescriptorProto FileOptions MessageOptions FieldOptions
        FieldOptions.EditionDefault FieldOptions.FeatureSupport OneofOptions EnumOptions EnumValueOptions
        ServiceOptions MethodOptions UninterpretedOption UninterpretedOption.NamePart FeatureSet FeatureSetDefaults
        SourceCodeInfo SourceCodeInfo.Location GeneratedCodeInfo GeneratedCodeInfo.Annotation
        | Edition FieldDescriptorProto.Type FieldDescriptorProto.Label FileOptions.OptimizeMode FieldOptions.CType
        FieldOptions.JSType FieldOptions.OptionRetention FieldOptions.OptionTargetType
        MethodOptions.IdempotencyLevel""",
    "google/protobuf/duration.proto": "Duration",
    "google/protobuf/empty.proto": "Empty",
    "google/protobuf/field_mask.proto": "FieldMask",
    "google/protobuf/source_context.proto": "SourceContext",
    "google/protobuf/struct.proto": "Struct Value ListValue | NullValue",
    "google/protobuf/timestamp.proto": "Timestamp",
    "google/protobuf/type.proto": "Type Field Enum EnumValue Option | Field.Kind Field.Cardinality Syntax",
    "google/protobuf/wrappers.proto": """DoubleValue FloatValue Int64Value UInt64Value Int32Value UInt32Value BoolValue
        StringValue BytesValue""",
    "google/type/calendar_period.proto": "| CalendarPeriod",
    "google/type/color.proto": "Color",
    "google/type/date.proto": "Date",
    "google/type/datetime.proto": "DateTime TimeZone",
    "google/type/dayofweek.proto": "| DayOfWeek",
    "google/type/decimal.proto": "Decimal",
    "google/type/expr.proto": "Expr",
    "google/type/fraction.proto": "Fraction",
    "google/type/interval.proto": "Interval",
    "google/type/latlng.proto": "LatLng",
    "google/type/money.proto": "Money",
    "google/type/month.proto": "| Month",
    "google/type/phone_number.proto": "PhoneNumber PhoneNumber.ShortCode",
    "google/type/postal_address.proto": "PostalAddress",
    "google/type/quaternion.proto": "Quaternion",
    "google/type/timeofday.proto": "TimeOfDay",
    "confluent/meta.proto": "Meta",
    "confluent/type/decimal.proto": "Decimal",
    "confluent/type/variant.proto": "Variant",
}


@dataclass(frozen=True, slots=True)
class Type:
    package: str
    name: str  # within its package, e.g. Order.Line
    is_enum: bool
    node: Message | Enum | None  # None for a well-known type


def is_well_known(path: str) -> bool:
    return path in _WELL_KNOWN


class Linker:
    """Links a file after all of its imports. `types` holds every type by full name."""

    def __init__(self, read: Callable[[str], tuple[File, str]], references: Mapping[str, str]) -> None:
        self.read, self.references = read, references
        self.types: dict[str, Type] = {}
        self.symbols: set[str] = set()  # every full name, including types
        self.values: dict[str, Enum] = {}  # full name of a value -> its enum
        self.extended: set[tuple[str, int]] = set()
        self.extendable: dict[str, _Numbers] = {}  # full name of a message -> its extension ranges
        self.exports: dict[str, dict[str, Type]] = {}  # path -> types visible to its importers
        self.open: list[str] = []

    def link(self, file: File, text: str) -> dict[str, Type]:
        """Resolve all names in the file; returns the types that are visible to its importers."""
        visible: dict[str, Type] = {}
        exported: dict[str, Type] = {}
        public = set(file.public_imports)
        for index, path in enumerate(file.imports):
            try:
                found = self.imported(path)
            except InvalidInput as e:
                raise at_line(text, file.import_places[index], str(e)) from None
            visible |= found
            if index in public:
                exported |= found
        own = _Links(file, text, self, visible)
        own.define()
        own.resolve()
        return exported | own.own

    def imported(self, path: str) -> dict[str, Type]:
        if path not in self.exports:
            if path in self.open or len(self.open) >= IMPORT_DEPTH_MAX:
                raise InvalidInput("the import is circular or too deep")
            if path in self.references:
                self.open.append(path)
                try:
                    self.exports[path] = self.link(*self.read(self.references[path]))
                except InvalidInput as e:
                    raise InvalidInput(f"in {path!r}, {e}") from None
                self.open.pop()
            elif path in _WELL_KNOWN:
                self.exports[path] = _well_known(path)
                self.types |= self.exports[path]
                self.symbols |= self.exports[path].keys()
            else:
                raise InvalidInput(f"the import {path!r} is not among the references")
        return self.exports[path]


def _well_known(path: str) -> dict[str, Type]:
    package = path.rpartition("/")[0].replace("/", ".")
    messages, _, enums = _WELL_KNOWN[path].partition("|")
    named = [(name, False) for name in messages.split()] + [(name, True) for name in enums.split()]
    return {f"{package}.{name}": Type(package, name, is_enum, None) for name, is_enum in named}


class _Links:
    """Links the names of one file."""

    def __init__(self, file: File, text: str, linker: Linker, visible: dict[str, Type]) -> None:
        self.file, self.text, self.linker, self.visible = file, text, linker, visible
        self.own: dict[str, Type] = {}
        self.open_enums = file.syntax == "proto3" or (file.syntax == "editions" and CLOSED not in file.options)

    def fail(self, reason: str, at: int) -> InvalidInput:
        return at_line(self.text, at, reason)

    # Definitions

    def define(self) -> None:
        package = self.file.package
        if len(package) > NAME_LENGTH_MAX or package.count(".") >= DEPTH_MAX:
            raise self.fail("the name of the package is too long", 0)
        self.define_all(package, self.file.messages, self.file.enums, self.file.extensions)
        for service in self.file.services:
            self.symbol(package, service.name, service.at)
            for method in service.methods:
                self.symbol(inner(package, service.name), method.name, method.at)
        self.visible |= self.own

    def symbol(self, scope: str, name: str, at: int) -> str:
        full = inner(scope, name)
        if len(full) > NAME_LENGTH_MAX or full.count(".") > 2 * DEPTH_MAX:
            raise self.fail("the name is too long or nested too deeply", at)
        if full in self.linker.symbols:
            raise self.fail(f"{full} is defined twice", at)
        self.linker.symbols.add(full)
        return full

    def define_type(self, scope: str, node: Message | Enum) -> str:
        full = self.symbol(scope, node.name, node.at)
        package = self.file.package
        found = Type(package, full[len(package) + 1 :] if package else full, isinstance(node, Enum), node)
        self.own[full] = self.linker.types[full] = found
        return full

    def define_all(self, scope: str, messages: list[Message], enums: list[Enum], extensions: list[Field]) -> None:
        for message in messages:
            full = self.define_type(scope, message)
            self.linker.extendable[f".{full}"] = _Numbers(message.extension_ranges)
            for field in message.fields:
                self.symbol(full, field.name, field.at)
            for oneof in message.oneofs:
                self.symbol(full, oneof.name, oneof.at)
            self.define_all(full, message.messages, message.enums, message.extensions)
        for enum in enums:
            self.define_type(scope, enum)
            for value in enum.values:
                self.linker.values[self.symbol(scope, value.name, value.at)] = (
                    enum  # enum values are siblings of their enum, as in C++
                )
        for extension in extensions:
            self.symbol(scope, extension.name, extension.at)

    # References

    def resolve(self) -> None:
        package = self.file.package
        self.resolve_all(package, self.file.messages, self.file.enums, self.file.extensions)
        for service in self.file.services:
            self.resolve_service(service, inner(package, service.name))

    def resolve_all(self, scope: str, messages: list[Message], enums: list[Enum], extensions: list[Field]) -> None:
        for message in messages:
            full = inner(scope, message.name)
            for field in message.fields:
                self.resolve_field(field, full)
            self.check_message(message)
            self.resolve_all(full, message.messages, message.enums, message.extensions)
        for enum in enums:
            self.check_enum(enum)
        for extension in extensions:
            self.resolve_field(extension, scope)
            self.check_extension(extension, scope)

    def named(self, scope: str, name: str, at: int) -> tuple[str, Type]:
        """The full name of a type, with a leading dot, and the type."""
        if name.startswith("."):
            scope, name = "", name[1:]
        while True:
            full = inner(scope, name)
            if full in self.visible:
                return f".{full}", self.visible[full]
            if not scope:
                raise self.fail(f"unknown type {name}", at)
            scope = scope.rpartition(".")[0]

    def message(self, scope: str, name: str, at: int) -> tuple[str, Type]:
        full, found = self.named(scope, name, at)
        if found.is_enum:
            raise self.fail(f"{name} is an enum, not a message", at)
        return full, found

    def resolve_service(self, service: Service, scope: str) -> None:
        for method in service.methods:
            method.input, _ = self.message(scope, method.input, method.at)
            method.output, _ = self.message(scope, method.output, method.at)

    def resolve_field(self, field: Field, scope: str) -> None:
        if not field.type_name:
            return
        field.type_name, found = self.named(scope, field.type_name, field.at)
        if field.type != GROUP:
            field.type = ENUM if found.is_enum else MESSAGE
        if field.default is None:
            return
        # Enum values are siblings of their enum.
        beside = f"{field.type_name[1:].rpartition('.')[0]}.{field.default}".lstrip(".")
        if not found.is_enum or (found.node is not None and self.linker.values.get(beside) is not found.node):
            raise self.fail(f"the default of {field.name} is not of its type", field.at)

    # Rules

    def check_message(self, message: Message) -> None:
        reserved = _Numbers(message.reserved_ranges)
        extensions = _Numbers(message.extension_ranges)
        names, numbers, json_names = set(message.reserved_names), set[int](), set[str]()
        strict_json = self.file.syntax == "proto3"
        strict_json &= Option("deprecated_legacy_json_field_conflicts", Ident("true")) not in message.options
        clash = _Numbers([*message.reserved_ranges, *message.extension_ranges]).clash
        if clash is not None:
            raise self.fail(f"{message.name}: overlapping ranges at {clash.start}", clash.at)
        if message.extension_ranges and self.file.syntax == "proto3":
            raise self.fail("proto3 has no extension ranges", message.at)
        for field in message.fields:
            if field.number in numbers:
                raise self.fail(f"{message.name}: field number {field.number} is used twice", field.at)
            if field.number in reserved or field.name in names:
                raise self.fail(f"{message.name}: field {field.name} = {field.number} is reserved", field.at)
            if field.number in extensions:
                raise self.fail(f"{message.name}: {field.number} is reserved for extensions", field.at)
            self.check_number(field)
            if strict_json and field.json_name in json_names:
                raise self.fail(f"{message.name}: two fields have the JSON name {field.json_name!r}", field.at)
            numbers.add(field.number)
            json_names.add(field.json_name)
        self.check_map_entries(message)

    def check_number(self, field: Field) -> None:
        if RESERVED_FOR_PROTOBUF.start <= field.number < RESERVED_FOR_PROTOBUF.end:
            raise self.fail(f"{field.name}: the numbers 19000 to 19999 are reserved by protobuf", field.at)

    def check_map_entries(self, message: Message) -> None:
        """Map entries may be written by hand, as some registries print them; they must equal those of map<,>."""
        users = {entry_name(field.name): field for field in message.fields if field.type == MESSAGE}
        for entry in message.messages:
            if entry.is_map_entry:
                parts = [(part.name, part.number) for part in entry.fields]
                user = users.get(entry.name, Field())
                if parts != [("key", 1), ("value", 2)] or user.type_name.rpartition(".")[2] != entry.name:
                    raise self.fail(f"{entry.name} is not a valid map entry", entry.at)

    def check_enum(self, enum: Enum) -> None:
        is_open = self.open_enums and CLOSED not in enum.options
        if not enum.values:
            raise self.fail(f"enum {enum.name} has no values", enum.at)
        if is_open and enum.values[0].number != 0:
            raise self.fail(f"the first value of enum {enum.name} must be zero", enum.values[0].at)
        reserved, names, numbers = _Numbers(enum.reserved_ranges, past=0), set(enum.reserved_names), set[int]()
        if reserved.clash is not None:
            raise self.fail(f"{enum.name}: overlapping ranges at {reserved.clash.start}", reserved.clash.at)
        alias = Option("allow_alias", Ident("true")) in enum.options
        for value in enum.values:
            if value.number in numbers and not alias:
                raise self.fail(f"{enum.name}: {value.number} is used twice without allow_alias", value.at)
            if value.number in reserved or value.name in names:
                raise self.fail(f"{enum.name}: {value.name} = {value.number} is reserved", value.at)
            numbers.add(value.number)

    def check_extension(self, field: Field, scope: str) -> None:
        field.extendee, found = self.message(scope, field.extendee, field.at)
        if self.file.syntax == "proto3" and not (found.package == "google.protobuf" and found.name.endswith("Options")):
            raise self.fail("proto3 can only extend options", field.at)
        if found.node is not None and field.number not in self.linker.extendable[field.extendee]:
            raise self.fail(f"{found.name} does not allow extension {field.number}", field.at)
        if (field.extendee, field.number) in self.linker.extended:
            raise self.fail(f"extension {field.number} of {found.name} is used twice", field.at)
        self.linker.extended.add((field.extendee, field.number))
        self.check_number(field)


class _Numbers:
    """Ranges of numbers with a fast lookup. `past` is the distance between a range's end and its last number."""

    def __init__(self, ranges: Iterable[Range], past: int = 1) -> None:
        self.sorted = sorted(ranges, key=lambda r: r.start)
        self.starts, self.past = [r.start for r in self.sorted], past

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self.starts, number) - 1
        return index >= 0 and number <= self.sorted[index].end - self.past

    @property
    def clash(self) -> Range | None:
        """The first range that overlaps its predecessor, or None."""
        pairs: Iterator[tuple[Range, Range]] = zip(self.sorted, self.sorted[1:], strict=False)
        return next((b for a, b in pairs if b.start <= a.end - self.past), None)


def speller(linker: Linker) -> Callable[[str, str], str]:
    """Returns a function that spells a type in a scope: by its short name unless a nearer name hides it."""

    def spell(scope: str, full: str) -> str:
        short = full.rpartition(".")[2]
        while short not in _KEYWORDS:
            candidate = inner(scope, short)
            if candidate in linker.symbols:
                return short if f".{candidate}" == full else full
            if not scope:
                break
            scope = scope.rpartition(".")[0]
        return full

    return spell
