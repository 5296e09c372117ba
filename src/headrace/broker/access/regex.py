"""Regular expressions from users: of policies, permissions and Kafka subscriptions. All use RE2.

RE2's time is linear in the length of the name for every pattern, while a dozen characters can keep Python's engine busy
for hours. RE2 has neither back references nor look-around. Guides often recommend one kind of look-around,
^(?!amq\\.).*, so a look-ahead at the very beginning is supported here, as a second pattern.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import re2

from headrace.errors import InvalidPattern

# Of a compiled pattern with its cache. RE2 refuses a pattern that would need more.
MEMORY_BYTES_MAX = 1 << 20
COMPILED_MAX = 512
EVERYTHING = frozenset((".*", "^.*", ".*$"))  # not ^.*$: its dots do not match a line break
# Most patterns are a name, a prefix or a suffix. Comparing strings is ten times faster than RE2, which matters when a
# policy is applied to ten thousand queues.
_PLAIN = re.compile(r"(\^?)((?:[A-Za-z0-9_-]|\\[.:/-])+)(\$?)")
_AHEAD = {"(?!": False, "(?=": True}


class Pattern:
    """A compiled pattern. RE2 matches names as UTF-8."""

    __slots__ = ("_body", "_guards", "search", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.search: Callable[[str], bool] = _compared(text) or self._search
        """Whether the pattern is found anywhere in a name."""
        guards, body = _split_look_ahead(text)
        self._guards = [(_regexp(f"^(?:{inner})", text), wanted) for inner, wanted in guards]
        self._body = _regexp(body, text)

    def _search(self, name: str) -> bool:
        return self._tried(name, self._body.search)

    def fullmatch(self, name: str) -> bool:
        """Whether the pattern matches the whole name."""
        return self._tried(name, self._body.fullmatch)

    def _tried(self, name: str, body: Any) -> bool:
        data = name.encode("utf-8", "surrogatepass")
        if any((guard.search(data) is not None) != wanted for guard, wanted in self._guards):
            return False
        return body(data) is not None


@lru_cache(maxsize=COMPILED_MAX)
def compile_pattern(text: str) -> Pattern:
    """Raises InvalidPattern with the pattern and RE2's reason."""
    return Pattern(text)


def _compared(text: str) -> Callable[[str], bool] | None:
    """The pattern as a string comparison, if it is one."""
    if text in EVERYTHING:
        return lambda name: True
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        return None
    literal = plain[2].replace("\\", "")
    if plain[1] and plain[3]:
        return literal.__eq__
    if plain[1]:
        return lambda name: name.startswith(literal)
    return (lambda name: name.endswith(literal)) if plain[3] else (lambda name: literal in name)


def escape(text: str) -> str:
    """A pattern that matches exactly this text."""
    return str(re2.escape(text))


def _regexp(text: str, whole: str) -> Any:
    options = re2.Options()
    options.log_errors = False  # they would go to stderr, not to the log
    options.max_mem = MEMORY_BYTES_MAX
    options.never_capture = True
    try:
        return re2.compile(text.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else error
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidPattern(f"{whole[:200]!r}: {reason}") from None


def _split_look_ahead(text: str) -> tuple[list[tuple[str, bool]], str]:
    """The look-aheads at the beginning, each with whether it must match, and the rest of the pattern."""
    guards: list[tuple[str, bool]] = []
    rest = text.removeprefix("^")
    while rest != text and rest[:3] in _AHEAD and "\\Q" not in text:
        end, _ = _scan(rest)
        if end is None:
            break  # RE2 will report the error
        guards.append((rest[3:end], _AHEAD[rest[:3]]))
        rest = rest[end + 1 :]
    if not guards:
        return [], text
    if _scan(rest)[1]:
        raise InvalidPattern(f"{text[:200]!r}: after a look-ahead, a choice (|) belongs in parentheses")
    return guards, f"^{rest}"


def _scan(text: str) -> tuple[int | None, bool]:
    """(index of the parenthesis that closes the first one, whether there is a | outside all parentheses)."""
    depth, at, has_choice = 0, 0, False
    closed: int | None = None
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "[":
            at = _class_end(text, at)
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0 and closed is None:
                closed = at
        elif character == "|" and depth == 0:
            has_choice = True
        at += 1
    return closed, has_choice


def _class_end(text: str, at: int) -> int:
    """The index of the end of a character class such as [^]a-z[:digit:]\\]]."""
    at += 1
    if text[at : at + 1] == "^":
        at += 1
    if text[at : at + 1] == "]":
        at += 1
    while at < len(text) and text[at] != "]":
        if text[at] == "\\":
            at += 1
        elif text.startswith("[:", at):
            end = text.find(":]", at)
            at = end + 1 if end >= 0 else at
        at += 1
    return at
