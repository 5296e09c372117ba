"""Topic patterns of subscriptions. Python's regular expressions can be made to run for hours, so only
those are taken whose matching time is bounded by their shape."""

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from headrace.errors import InvalidPattern

sre: Any = import_module("re._constants")
sre_parser: Any = import_module("re._parser")

PATTERN_CHARACTERS_MAX = 512
UNBOUNDED_MAX = 4  # n of them cost at most 249 ** n steps on a topic's name; nested ones have no bound
_REPEATS = {sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT}
_REFUSED = {sre.GROUPREF, sre.GROUPREF_EXISTS, sre.ASSERT, sre.ASSERT_NOT}


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> "re.Pattern[str]":
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidPattern(f"a pattern of {len(pattern)} characters")
    try:
        parsed = sre_parser.parse(pattern)
        if _unbounded(parsed, inside=False) > UNBOUNDED_MAX:
            raise InvalidPattern(f"too many repeats in {pattern!r}")
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidPattern(f"{pattern!r}: {error}") from None


def _unbounded(parsed: Any, *, inside: bool) -> int:
    """How many repeats of open length there are. Raises for repeats and choices inside a repeat."""
    total = 0
    for operation, argument in parsed:
        if operation in _REFUSED:
            raise InvalidPattern("back references and look-around are not supported")
        if operation in _REPEATS:
            _, high, body = argument
            if inside:
                raise InvalidPattern("a repeat inside a repeat")
            total += (high is sre.MAXREPEAT or high > 1) + _unbounded(body, inside=True)
        elif operation is sre.BRANCH:
            if inside:
                raise InvalidPattern("a choice inside a repeat")
            total += sum(_unbounded(branch, inside=inside) for branch in argument[1])
        elif operation is sre.SUBPATTERN:
            total += _unbounded(argument[3], inside=inside)
        elif operation is sre.ATOMIC_GROUP:
            total += _unbounded(argument, inside=inside)
    return total
