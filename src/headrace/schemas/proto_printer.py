"""Prints the canonical text of a .proto file: equal for files that differ only in white space, comments and spelling.

A descriptor does not record where an enum stands among the fields, so every kind of part has a fixed place. The order
of nested messages is kept, because clients identify a message by its index; map entries and group bodies count too.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby
from math import isfinite

from headrace.schemas.proto_descriptor import (
    EDITIONS,
    GROUP,
    INT32_MAX,
    NUMBER_MAX,
    REPEATED,
    REQUIRED,
    SCALAR_NAMES,
    Aggregate,
    Enum,
    Field,
    File,
    Message,
    Node,
    Oneof,
    Option,
    Range,
    Service,
    Value,
    inner,
    json_name,
    sorted_options,
)

Spell = Callable[[str, str], str]  # (scope, full name of a type) -> its spelling in that scope


def print_file(file: File, spell: Spell = lambda scope, full: full) -> str:
    """Print a file. Raises ValueError if it has no text form: a map or group without its message."""
    return "\n".join(_Printer(file, spell).file()) + "\n"


def in_order(file: File) -> File:
    """A copy with sorted fields, numbers and imports, whose order has no meaning. Messages keep their order (clients
    use their index), and so does the first value of an enum (its default)."""
    public, weak = ({file.imports[index] for index in places} for places in (file.public_imports, file.weak_imports))
    imports = sorted(set(file.imports))
    return replace(
        file,
        imports=imports,
        public_imports=[index for index, path in enumerate(imports) if path in public],
        weak_imports=[index for index, path in enumerate(imports) if path in weak],
        messages=[_message_in_order(message, inner(file.package, message.name)) for message in file.messages],
        enums=[_enum_in_order(enum) for enum in file.enums],
    )


def _message_in_order(message: Message, scope: str) -> Message:
    messages = [_message_in_order(nested, inner(scope, nested.name)) for nested in message.messages]
    fields = sorted(message.fields, key=lambda field: field.number)
    by_name = {nested.name: (nested, nested.is_map_entry) for nested in messages}
    brought = [_Printer.brought(field, by_name, scope) for field in fields]
    places = {id(nested): index for index, nested in enumerate(messages)}
    indexes = [places[id(nested)] for nested in brought if nested is not None]
    if indexes != sorted(indexes):  # map entries and group bodies would be reordered
        fields = message.fields
    return replace(
        message,
        fields=fields,
        messages=messages,
        enums=[_enum_in_order(enum) for enum in message.enums],
        extension_ranges=_ranges_in_order(message.extension_ranges),
        reserved_ranges=_ranges_in_order(message.reserved_ranges),
        reserved_names=sorted(message.reserved_names),
    )


def _enum_in_order(enum: Enum) -> Enum:
    return replace(
        enum,
        values=[*enum.values[:1], *sorted(enum.values[1:], key=lambda value: (value.number, value.name))],
        reserved_ranges=_ranges_in_order(enum.reserved_ranges),
        reserved_names=sorted(enum.reserved_names),
    )


def _ranges_in_order(ranges: list[Range]) -> list[Range]:
    return sorted(ranges, key=lambda one: one.start)


def shown_float(value: float) -> str:
    """A float as descriptors print it."""
    short = f"{value:.15g}"
    return short if not isfinite(value) or float(short) == value else f"{value:.17g}"


def escape_bytes(value: bytes) -> str:
    return "".join(_escape(chr(byte)) if byte < 0x7F else f"\\{byte:03o}" for byte in value)


def _escape(char: str) -> str:
    named = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
    return named.get(char) or (char if char.isprintable() else "".join(f"\\{byte:03o}" for byte in char.encode()))


def _quote(value: bytes | str) -> str:
    try:
        return f'"{"".join(map(_escape, value if isinstance(value, str) else value.decode()))}"'
    except UnicodeDecodeError as e:
        return f'"{escape_bytes(e.object)}"'


def _value(value: Value) -> str:
    if isinstance(value, Aggregate):
        return f"{{ {value} }}" if value else "{}"
    if isinstance(value, bytes):
        return _quote(value)
    return value if isinstance(value, str) else repr(value)


def _indented(lines: Iterator[str]) -> Iterator[str]:
    return ("  " + line for line in lines)


def _block(opening: str, lines: Iterator[str]) -> Iterator[str]:
    yield opening + " {"
    yield from _indented(lines)
    yield "}"


def _options(node: Node, options: list[Option]) -> Iterator[str]:
    for name, value in sorted_options(type(node), options):
        yield f"{name} = {_value(value)}"


def _statements(node: Node, options: list[Option]) -> Iterator[str]:
    for option in _options(node, options):
        yield f"option {option};"


def _listed(options: Iterable[str]) -> str:
    listed = ", ".join(options)
    return f" [{listed}]" if listed else ""


def _ranges(ranges: list[Range], past: int, last: int) -> str:
    """`past` is the distance between an end and the last number; `last` is the number spelled max."""
    spans = ((r.start, r.end - past) for r in ranges)
    return ", ".join(
        str(start) if start == end else f"{start} to {end if end < last else 'max'}" for start, end in spans
    )


class _Printer:
    def __init__(self, file: File, spell: Spell) -> None:
        self.root, self.spell = file, spell

    def file(self) -> Iterator[str]:
        file, scope = self.root, self.root.package
        editions = {number: name for name, number in EDITIONS.items()}
        if file.syntax == "editions":
            yield f'edition = "{editions.get(file.edition or 0, file.edition)}";'
        else:
            yield f'syntax = "{file.syntax or "proto2"}";'
        if scope:
            yield f"package {scope};"
        public, weak = set(file.public_imports), set(file.weak_imports)
        for index, path in enumerate(file.imports):
            yield f"import {'public ' if index in public else 'weak ' if index in weak else ''}{_quote(path)};"
        yield from _statements(file, file.options)
        yield from self.members(Message(messages=file.messages, extensions=file.extensions, enums=file.enums), scope)
        for service in file.services:
            yield from _block(f"service {service.name}", self.service(service, inner(scope, service.name)))

    def message(self, message: Message, scope: str) -> Iterator[str]:
        yield from _statements(message, message.options)
        if message.reserved_ranges:
            yield f"reserved {_ranges(message.reserved_ranges, 1, NUMBER_MAX)};"
        yield from self.reserved_names(message.reserved_names)
        for range_ in message.extension_ranges:
            yield f"extensions {_ranges([range_], 1, NUMBER_MAX)}{_listed(_options(range_, range_.options))};"
        yield from self.members(message, scope)

    def members(self, message: Message, scope: str) -> Iterator[str]:
        """Nested messages follow the fields, but precede a field that implies a later message."""
        by_name = {nested.name: (nested, nested.is_map_entry) for nested in message.messages}
        brought = {
            id(field): nested
            for field in (*message.fields, *message.extensions)
            if (nested := self.brought(field, by_name, scope)) is not None
        }
        hidden = {id(nested) for nested in brought.values()}
        waiting = iter(message.messages)

        def up_to(last: Message | None) -> Iterator[str]:
            for nested in waiting:
                if nested is last:
                    return
                if id(nested) not in hidden:
                    yield from _block(f"message {nested.name}", self.message(nested, inner(scope, nested.name)))

        for oneof, fields in self.units(message):
            later = [brought[id(field)] for field in fields if id(field) in brought]
            if later:
                yield from up_to(later[-1])
            lines = (line for field in fields for line in self.field(field, brought.get(id(field)), scope))
            if oneof is None:
                yield from lines
            else:
                yield from _block(f"oneof {oneof.name}", chain(_statements(oneof, oneof.options), lines))
        yield from up_to(None)
        for enum in message.enums:
            yield from _block(f"enum {enum.name}", self.enum(enum))
        for extendee, extensions in groupby(message.extensions, key=lambda field: field.extendee):
            lines = (line for field in extensions for line in self.field(field, brought.get(id(field)), scope))
            yield from _block(f"extend {self.spell(scope, extendee)}", lines)

    @staticmethod
    def brought(field: Field, by_name: dict[str, tuple[Message, bool]], scope: str) -> Message | None:
        """The message that this field's text implies: a map entry or a group body."""
        name = field.type_name.rpartition(".")[2]
        local = field.type_name in (name, "." + inner(scope, name))
        nested, is_entry = by_name.get(name, (None, False)) if local else (None, False)
        if field.type == GROUP and nested is None:
            raise ValueError(f"group {field.name} has no message")
        return nested if field.type == GROUP or is_entry else None

    @staticmethod
    def units(message: Message) -> Iterator[tuple[Oneof | None, list[Field]]]:
        """Each field; a oneof with its fields stands at its first field."""
        members: dict[int, list[Field]] = {}
        for field in message.fields:
            if field.oneof is not None and not field.proto3_optional:
                members.setdefault(field.oneof, []).append(field)
        for field in message.fields:
            if field.oneof is None or field.proto3_optional:
                yield None, [field]
            elif field.oneof in members:
                if not 0 <= field.oneof < len(message.oneofs):
                    raise ValueError(f"field {field.name} refers to a missing oneof")
                yield message.oneofs[field.oneof], members.pop(field.oneof)

    def field(self, field: Field, nested: Message | None, scope: str) -> Iterator[str]:
        name, type_name = field.name, SCALAR_NAMES.get(field.type or 0) or self.spell(scope, field.type_name)
        label = ""
        if nested is not None and field.type != GROUP:
            if [part.number for part in nested.fields] != [1, 2]:
                raise ValueError(f"{nested.name} is not a map entry")
            entry = inner(scope, nested.name)
            key, value = (
                SCALAR_NAMES.get(part.type or 0) or self.spell(entry, part.type_name) for part in nested.fields
            )
            type_name = f"map<{key}, {value}>"
        elif field.label == REPEATED or field.proto3_optional:
            label = "repeated " if field.label == REPEATED else "optional "
        elif self.root.syntax in ("", "proto2") and field.oneof is None:
            label = "required " if field.label == REQUIRED else "optional "
        if nested is not None and field.type == GROUP:
            name, type_name = nested.name, "group"
        options = [*self.pseudo_options(field), *_options(field, field.options)]
        opening = f"{label}{type_name} {name} = {field.number}{_listed(options)}"
        if nested is not None and field.type == GROUP:
            yield from _block(opening, self.message(nested, inner(scope, nested.name)))
        else:
            yield opening + ";"

    @staticmethod
    def pseudo_options(field: Field) -> Iterator[str]:
        if field.default is not None:
            kind = SCALAR_NAMES.get(field.type or 0)
            quoted = {"string": _quote(field.default), "bytes": f'"{field.default}"'}
            yield f"default = {quoted.get(kind or '', field.default)}"
        if field.json_name not in ("", json_name(field.name)) and not field.extendee:
            yield f"json_name = {_quote(field.json_name)}"

    def reserved_names(self, names: list[str]) -> Iterator[str]:
        if names:
            yield f"reserved {', '.join(names if self.root.syntax == 'editions' else map(_quote, names))};"

    def enum(self, enum: Enum) -> Iterator[str]:
        yield from _statements(enum, enum.options)
        if enum.reserved_ranges:
            yield f"reserved {_ranges(enum.reserved_ranges, 0, INT32_MAX)};"
        yield from self.reserved_names(enum.reserved_names)
        for value in enum.values:
            yield f"{value.name} = {value.number}{_listed(_options(value, value.options))};"

    def service(self, service: Service, scope: str) -> Iterator[str]:
        yield from _statements(service, service.options)
        for method in service.methods:
            took, gives = self.spell(scope, method.input), self.spell(scope, method.output)
            took, gives = "stream " * method.client_streaming + took, "stream " * method.server_streaming + gives
            opening = f"rpc {method.name}({took}) returns ({gives})"
            if method.options:
                yield from _block(opening, _statements(method, method.options))
            else:
                yield opening + ";"
