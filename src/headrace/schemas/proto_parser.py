"""Parser of .proto files: proto2, proto3 and editions. proto_printer.py is its inverse.

The result is syntactically valid, but type names are unresolved and rules between definitions are unchecked; see
proto_linker.py. The parser makes one pass without backtracking, so hostile input costs no more than its length.
"""

from collections.abc import Iterator

from headrace.schemas.proto_descriptor import (
    DEPTH_MAX,
    EDITIONS,
    GROUP,
    INT32_MAX,
    KNOWN_OPTIONS,
    LABELS,
    MESSAGE,
    NAME,
    NUMBER_MAX,
    OPTIONAL,
    REPEATED,
    SCALAR_NAMES,
    SCALARS,
    Aggregate,
    Enum,
    EnumValue,
    Field,
    File,
    Ident,
    Message,
    Method,
    Node,
    Oneof,
    Option,
    Range,
    Service,
    Value,
    entry_name,
    fits,
    json_name,
)
from headrace.schemas.proto_printer import escape_bytes, shown_float
from headrace.schemas.proto_tokens import Tokens, joined, shown

MAP_KEYS = SCALARS.keys() - {"double", "float", "bytes"}


def parse_file(text: str) -> File:
    """Parse a file; its types are not resolved yet. Raises InvalidInput with the line."""
    return _Parser(text).file()


class _Parser(Tokens):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth, self.syntax, self.paths = 0, "", set[str]()

    # The file

    def file(self) -> File:
        file = File()
        if self.next in ("syntax", "edition"):
            self.edition(file, self.advance())
        has_package = False
        while self.kind != "end":
            at = self.at
            if self.take(";"):
                continue
            word = self.name("a statement")
            if word == "package":
                if has_package:
                    raise self.fail("the package is declared twice", at)
                file.package, has_package = self.dotted("the name of the package").lstrip("."), True
                self.expect(";")
            elif word == "import":
                self.imported(file)
            elif word == "option":
                self.option_statement(File, file.options)
            elif word == "message":
                file.messages.append(self.message(at))
            elif word == "enum":
                file.enums.append(self.enum(at))
            elif word == "extend":
                self.extend(file.extensions, file.messages)
            elif word == "service":
                file.services.append(self.service(at))
            else:
                raise self.fail(f"unexpected {shown(word)}", at)
        return file

    def edition(self, file: File, word: str) -> None:
        self.expect("=")
        at, value = self.at, self.unicode(f"the {word}")
        if word == "edition" and value in EDITIONS:
            self.syntax, file.edition = "editions", EDITIONS[value]
        elif word == "syntax" and value in ("proto2", "proto3"):
            self.syntax = value.replace("proto2", "")
        else:
            raise self.fail(f"unknown {word} {shown(value)}", at)
        file.syntax = self.syntax
        self.expect(";")

    def imported(self, file: File) -> None:
        how = self.advance() if self.next in ("public", "weak") else ""
        at, path = self.at, self.unicode("the path of an import")
        if path in self.paths:
            raise self.fail(f"{shown(path)} is imported twice", at)
        self.paths.add(path)
        if how:
            (file.public_imports if how == "public" else file.weak_imports).append(len(file.imports))
        file.imports.append(path)
        file.import_places.append(at)
        self.expect(";")

    # Options

    def option_statement(self, node: type[Node], options: list[Option]) -> None:
        self.option(node, options)
        self.expect(";")

    def option_list(self, node: type[Node], field: Field | None = None) -> list[Option]:
        options: list[Option] = []
        if self.take("["):
            while True:
                if field is not None and self.next in ("default", "json_name"):
                    self.pseudo_option(field, self.advance())
                else:
                    self.option(node, options)
                if not self.take(","):
                    break
            self.expect("]")
        return options

    def option(self, node: type[Node], options: list[Option]) -> None:
        at, parts = self.at, list[str]()
        while not parts or self.take("."):
            if self.take("("):
                parts.append(f"({self.dotted('the name of an option')})")
                self.expect(")")
            else:
                parts.append(self.name("the name of an option"))
        self.expect("=")
        option = Option(".".join(parts), self.value())
        known = KNOWN_OPTIONS[node].get(option.name)
        if known is not None:
            if not fits(known[1], option.value):
                raise self.fail(f"the value of option {option.name} is of the wrong type", at)
            if option.name != "targets" and any(option.name == other.name for other in options):
                raise self.fail(f"option {option.name} is set twice", at)
        options.append(option)

    def value(self) -> Value:
        if self.kind == "string":
            return self.string("a value")
        if self.next == "{":
            return self.aggregate()
        if self.kind == "name":
            return Ident(self.advance())
        if self.next == "-" and self.tokens[self.index + 1][1] in ("inf", "nan"):
            self.index += 2
            return -float(self.tokens[self.index - 1][1])
        if self.kind == "float" or (self.next == "-" and self.tokens[self.index + 1][0] == "float"):
            sign = -1.0 if self.take("-") else 1.0
            return sign * float(self.advance().rstrip("fF"))
        return self.integer("a value", -(1 << 63), (1 << 64) - 1)

    def aggregate(self) -> Aggregate:
        """Only brackets are matched: the meaning depends on an extension that may be defined elsewhere."""
        start, closing = self.index + 1, [""]
        while len(closing) > 1 or self.index < start:
            if self.kind == "end" or len(closing) > DEPTH_MAX:
                raise self.fail("the value in braces is unterminated or nested too deeply")
            word = self.advance()
            if word in ("{", "[", "<"):
                closing.append({"{": "}", "[": "]", "<": ">"}[word])
            elif word in ("}", "]", ">") and closing.pop() != word:
                raise self.fail(f"unmatched '{word}'")
        return Aggregate(joined(self.tokens[start : self.index - 1]))

    def pseudo_option(self, field: Field, word: str) -> None:
        self.expect("=")
        at = self.at
        if word == "json_name":
            field.json_name = self.unicode("json_name")
            return
        if field.default is not None or field.label == REPEATED or field.type == MESSAGE:
            raise self.fail("this field cannot have a default", at)
        if self.syntax == "proto3":
            raise self.fail("proto3 has no defaults", at)
        field.default = self.default(field.type)
        if field.default is None:
            raise self.fail(f"the default of {field.name} is not of its type", at)

    def default(self, type: int | None) -> str | None:
        """The default as text for the descriptor; None if the value does not fit the type."""
        at, value = self.at, self.value()
        kind = SCALAR_NAMES.get(type or 0, "enum")
        if kind == "string" and isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise self.fail("the default is not UTF-8", at) from None
        if kind == "bytes" and isinstance(value, bytes):
            return escape_bytes(value)
        if kind in ("float", "double") and (isinstance(value, int | float) or value in ("inf", "nan")):
            return shown_float(float(value))
        if kind == "enum" or (kind == "bool" and value in ("true", "false")):
            return str(value) if isinstance(value, Ident) else None
        if not isinstance(value, int) or kind not in _RANGES:
            return None
        low, high = _RANGES[kind]
        return str(value) if low <= value <= high else None

    # Messages

    def message(self, at: int) -> Message:
        message = Message(at=at, name=self.name("the name of a message"))
        self.message_body(message)
        return message

    def message_body(self, message: Message) -> None:
        self.expect("{")
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise self.fail(f"messages are nested more than {DEPTH_MAX} levels deep")
        while not self.take("}"):
            self.message_statement(message)
        self.depth -= 1
        taken = {field.name for field in message.fields} | {oneof.name for oneof in message.oneofs}
        taken |= {nested.name for nested in message.messages} | {enum.name for enum in message.enums}
        for field in message.fields:
            if field.proto3_optional:  # its presence is represented by a synthetic oneof
                name = field.name if field.name.startswith("_") else f"_{field.name}"
                while name in taken:
                    name = f"X{name}"
                taken.add(name)
                field.oneof = len(message.oneofs)
                message.oneofs.append(Oneof(at=field.at, name=name))

    def message_statement(self, message: Message) -> None:
        at = self.at
        if self.take(";"):
            pass
        elif self.take("message"):
            message.messages.append(self.message(at))
        elif self.take("enum"):
            message.enums.append(self.enum(at))
        elif self.take("option"):
            self.option_statement(Message, message.options)
        elif self.take("oneof"):
            self.oneof(message, at)
        elif self.take("extend"):
            self.extend(message.extensions, message.messages)
        elif self.take("reserved"):
            self.reserved(message.reserved_ranges, message.reserved_names, 1, NUMBER_MAX, past=1)
        elif self.take("extensions"):
            ranges = list(self.ranges(1, NUMBER_MAX, past=1))
            options = self.option_list(Range)
            for range_ in ranges:
                range_.options = options
            message.extension_ranges += ranges
            self.expect(";")
        else:
            message.fields.append(self.field(message.messages))

    def oneof(self, message: Message, at: int) -> None:
        oneof = Oneof(at=at, name=self.name("the name of a oneof"))
        self.expect("{")
        before = len(message.fields)
        while not self.take("}"):
            if self.take("option"):
                self.option_statement(Oneof, oneof.options)
            elif not self.take(";"):
                message.fields.append(self.field(message.messages, within="a oneof"))
                message.fields[-1].oneof = len(message.oneofs)
        if len(message.fields) == before:
            raise self.fail(f"oneof {oneof.name} has no fields", at)
        message.oneofs.append(oneof)

    def extend(self, extensions: list[Field], messages: list[Message]) -> None:
        extendee = self.dotted("the message to extend")
        self.expect("{")
        while not self.take("}"):
            if not self.take(";"):
                extensions.append(self.field(messages, within="an extension"))
                extensions[-1].extendee = extendee
                if extensions[-1].json_name != json_name(extensions[-1].name):
                    raise self.fail("an extension cannot have a json_name", extensions[-1].at)

    def field(self, messages: list[Message], within: str = "") -> Field:
        """Parse a field; the message that a map or group implies is added to `messages`."""
        at = self.at
        written = self.advance() if self.next in LABELS else ""
        field = Field(at=at, label=LABELS.get(written, OPTIONAL))
        entry = None
        if self.next == "map" and self.tokens[self.index + 1][1] == "<":
            entry = self.map_type(field, written or within)
        elif self.next == "group" and self.tokens[self.index + 1][0] == "name":
            self.index += 1
            field.type = GROUP
        else:
            type_name = self.dotted("a type")
            field.type = SCALARS.get(type_name)
            field.type_name = "" if field.type else type_name
        self.check_label(field, written, within, is_map=entry is not None)
        field.name = self.name("the name of a field")
        self.expect("=")
        field.number = self.integer("the number of a field", 1, NUMBER_MAX)
        field.options = self.option_list(Field, field)
        field.json_name = field.json_name or json_name(field.name)
        if entry is not None:
            entry.name = field.type_name = entry_name(field.name)
            messages.append(entry)
        if field.type == GROUP:
            self.group(field, messages, at)
        else:
            self.expect(";")
        return field

    def check_label(self, field: Field, written: str, within: str, is_map: bool) -> None:
        if within == "a oneof" and written:
            raise self.fail("a field of a oneof cannot have a label", field.at)
        if self.syntax == "" and not written and within != "a oneof" and not is_map:
            raise self.fail("a proto2 field needs a label: optional, required or repeated", field.at)
        if self.syntax != "" and (written == "required" or field.type == GROUP):
            raise self.fail(f"only proto2 has {'groups' if field.type == GROUP else 'required fields'}", field.at)
        if self.syntax == "editions" and written == "optional":
            raise self.fail("editions have no label optional; set features.field_presence", field.at)
        field.proto3_optional = self.syntax == "proto3" and written == "optional"

    def map_type(self, field: Field, unfit: str) -> Message:
        if unfit:
            raise self.fail(f"a map cannot be in {unfit}" if " " in unfit else f"a map cannot be {unfit}")
        field.type, field.label, self.index = MESSAGE, REPEATED, self.index + 2
        if self.next not in MAP_KEYS:
            raise self.unexpected("a type for the keys of a map")
        key = Field(at=field.at, name="key", number=1, type=SCALARS[self.advance()], json_name="key")
        self.expect(",")
        type_name = self.dotted("a type")
        value = Field(at=field.at, name="value", number=2, type=SCALARS.get(type_name), json_name="value")
        value.type_name = "" if value.type else type_name
        self.expect(">")
        return Message(at=field.at, fields=[key, value], options=[Option("map_entry", Ident("true"))])

    def group(self, field: Field, messages: list[Message], at: int) -> None:
        if not field.name[0].isupper():
            raise self.fail("the name of a group must start with a capital letter", at)
        group = Message(at=at, name=field.name)
        messages.append(group)
        field.type_name, field.name, field.json_name = group.name, group.name.lower(), group.name.lower()
        self.message_body(group)

    def ranges(self, low: int, high: int, past: int) -> Iterator[Range]:
        while True:
            at = self.at
            start = end = self.integer("a number", low, high)
            if self.take("to"):
                end = high if self.take("max") else self.integer("a number", low, high)
            if end < start:
                raise self.fail(f"{start} to {end} is an empty range", at)
            yield Range(at=at, start=start, end=end + past)
            if not self.take(","):
                return

    def reserved(self, ranges: list[Range], names: list[str], low: int, high: int, past: int) -> None:
        if self.kind == "int" or self.next == "-":
            ranges.extend(self.ranges(low, high, past))
        else:
            while True:
                at, name = self.at, self.advance() if self.kind == "name" else self.unicode("a number or a name")
                if not NAME.fullmatch(name):
                    raise self.fail(f"{shown(name)} is not a name", at)
                names.append(name)
                if not self.take(","):
                    break
        self.expect(";")

    # Enums and services

    def enum(self, at: int) -> Enum:
        enum = Enum(at=at, name=self.name("the name of an enum"))
        self.expect("{")
        while not self.take("}"):
            at = self.at
            if self.take(";"):
                continue
            if self.next == "option" and self.tokens[self.index + 1][1] != "=":
                self.index += 1
                self.option_statement(Enum, enum.options)
            elif self.next == "reserved" and self.tokens[self.index + 1][1] != "=":
                self.index += 1
                self.reserved(enum.reserved_ranges, enum.reserved_names, -INT32_MAX - 1, INT32_MAX, past=0)
            else:
                value = EnumValue(at=at, name=self.name("the name of a value"))
                self.expect("=")
                value.number = self.integer("the number of a value", -INT32_MAX - 1, INT32_MAX)
                value.options = self.option_list(EnumValue)
                enum.values.append(value)
                self.expect(";")
        return enum

    def service(self, at: int) -> Service:
        service = Service(at=at, name=self.name("the name of a service"))
        self.expect("{")
        while not self.take("}"):
            at = self.at
            if self.take("option"):
                self.option_statement(Service, service.options)
            elif not self.take(";"):
                self.expect("rpc")
                service.methods.append(self.method(at))
        return service

    def method(self, at: int) -> Method:
        method = Method(at=at, name=self.name("the name of a method"))
        self.expect("(")
        method.client_streaming, method.input = self.take("stream"), self.dotted("a message")
        self.expect(")")
        self.expect("returns")
        self.expect("(")
        method.server_streaming, method.output = self.take("stream"), self.dotted("a message")
        self.expect(")")
        if self.take("{"):
            while not self.take("}"):
                if not self.take(";"):
                    self.expect("option")
                    self.option_statement(Method, method.options)
        else:
            self.expect(";")
        return method


_RANGES = {
    name: (0, (1 << bits) - 1) if name[0] in "uf" else (-(1 << bits - 1), (1 << bits - 1) - 1)
    for name in SCALARS
    if (bits := 64 if "64" in name else 32 if "32" in name else 0)
}
