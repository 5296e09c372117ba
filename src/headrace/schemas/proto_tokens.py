"""The tokenizer of .proto files, and a cursor over the tokens."""

import re
from collections.abc import Iterator
from itertools import pairwise

from headrace.errors import InvalidInput

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<float>(?:(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)[fF]?(?![\w.]))
    |(?P<int>(?:0[xX][0-9a-fA-F]+|\d+)(?![\w.]))
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<sign>[{}()\[\]<>;:,=.+/-])""",
    re.X | re.S | re.A,
)
_ESCAPE = re.compile(r"\\(?:[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.S)
_ESCAPED = dict(zip("abfnrtv\\'\"?", b"\a\b\f\n\r\t\v\\'\"?", strict=True))

REASON_LENGTH_MAX = 500


def at_line(text: str, at: int, reason: str) -> InvalidInput:
    """An error with its line. The reason is truncated, because it may contain a very long name."""
    return InvalidInput(f"line {text.count(chr(10), 0, at) + 1}: {reason}"[:REASON_LENGTH_MAX])


class Tokens:
    """A cursor over the tokens that only moves forward."""

    def __init__(self, text: str) -> None:
        self.text, self.tokens, self.index = text, list(_tokens(text)), 0

    @property
    def kind(self) -> str:
        return self.tokens[self.index][0]

    @property
    def next(self) -> str:
        return self.tokens[self.index][1]

    @property
    def at(self) -> int:
        return self.tokens[self.index][2]

    def fail(self, reason: str, at: int | None = None) -> InvalidInput:
        return at_line(self.text, self.at if at is None else at, reason)

    def unexpected(self, wanted: str) -> InvalidInput:
        return self.fail(f"expected {wanted}, found {shown(self.next) if self.next else 'the end'}")

    def advance(self) -> str:
        self.index += 1
        return self.tokens[self.index - 1][1]

    def take(self, word: str) -> bool:
        if self.next != word or self.kind == "end":
            return False
        self.index += 1
        return True

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise self.unexpected(f"'{word}'")

    def name(self, what: str) -> str:
        if self.kind != "name":
            raise self.unexpected(what)
        return self.advance()

    def dotted(self, what: str) -> str:
        parts = ["."] if self.take(".") else []
        parts.append(self.name(what))
        while self.take("."):
            parts += [".", self.name(what)]
        return "".join(parts)

    def integer(self, what: str, low: int, high: int) -> int:
        at, sign = self.at, -1 if self.take("-") else 1
        if self.kind != "int":
            raise self.unexpected(what)
        digits = self.advance()
        try:
            value = sign * int(digits, 8 if re.fullmatch(r"0\d+", digits) else 0) if len(digits) < 100 else high + 1
        except ValueError:
            raise self.fail(f"{digits} is not an octal number", at) from None
        if not low <= value <= high:
            raise self.fail(f"{what} must be from {low} to {high}", at)
        return value

    def string(self, what: str) -> bytes:
        if self.kind != "string":
            raise self.unexpected(what)
        value = bytearray()
        while self.kind == "string":  # adjacent strings are concatenated, as in C
            try:
                value += _unescape(self.next)
            except ValueError as e:
                raise self.fail(str(e)) from None
            self.index += 1
        return bytes(value)

    def unicode(self, what: str) -> str:
        at = self.at
        try:
            return self.string(what).decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8", at) from None


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 1 if text.startswith("\ufeff") else 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise at_line(text, at, f"unexpected character at {shown(text[at : at + 20])}")
        if match.lastgroup != "skip":
            yield match.lastgroup or "", match[0], at
        at = match.end()
    for _ in range(2):  # two, because the parser looks one token ahead
        yield "end", "", len(text)


def joined(tokens: list[tuple[str, str, int]]) -> str:
    """Join tokens as people write them, { a: -1 b: [1, 2] }: some parsers reject a space between all tokens."""
    parts = []
    for (kind, text, _), (next_kind, next_text, _) in pairwise([*tokens, ("end", "", 0)]):
        parts.append(text)
        name_goes_on = (text in (".", "/") and next_kind == "name") or (kind == "name" and next_text in (".", "/"))
        if not (name_goes_on or text in ("-", "[") or next_text in (":", ",", "]", "")):
            parts.append(" ")
    return "".join(parts)


def shown(text: str) -> str:
    return repr(text[:40] + "..." if len(text) > 40 else text)


def _unescape(literal: str) -> bytes:
    out, at, body = bytearray(), 0, literal[1:-1]
    for match in _ESCAPE.finditer(body):
        out += body[at : match.start()].encode()
        hexadecimal, short, long, octal, other = match.groups()
        if hexadecimal or octal:
            out.append(int(hexadecimal, 16) if hexadecimal else int(octal, 8) & 0xFF)
        elif short or long:
            out += chr(int(short or long, 16)).encode()
        elif other in _ESCAPED:
            out.append(_ESCAPED[other])
        else:
            raise ValueError(f"unknown escape {match[0]!r}")
        at = match.end()
    return bytes(out + body[at:].encode())
