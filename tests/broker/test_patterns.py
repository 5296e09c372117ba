"""Patterns of people: what they mean, what is refused, and that the short cuts mean the same."""

import pytest
import re2
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.broker.access.regex import compile_pattern
from headrace.errors import InvalidPattern


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        (r"^(?!amq\.).*", "orders", "amq.topic"),
        (r"^(?!amq\.|tmp).*$", "orders", "tmp-1"),
        (r"^(?!a)(?!b)(?=..).", "cd", "c"),
        (r"^(?![)|(]).*(x|y)$", "ay", ")y"),
        (r"^(?![]\])a|]).", "b", "|"),
        ("^(a+)+$", "a" * 30, "a" * 30 + "b"),
        ("", "anything", ""),
        (".*", "", ""),
        ("ä$", "ä", "a"),
    ],
)
def test_common_patterns_match_as_expected(pattern: str, fits: str, fits_not: str) -> None:
    compiled = compile_pattern(pattern)
    assert compiled.search(fits)
    if fits_not:
        assert not compiled.search(fits_not)


@pytest.mark.parametrize("pattern", ["(?!a).*", "^(?!a)b|c", "^(?!a", "a(?=b)", r"^(?!\Qa\E)b", "^(?!(?!a)b)c"])
def test_an_unsupported_lookahead_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        compile_pattern(pattern)


def test_a_name_of_broken_text_is_only_a_name_that_does_not_fit() -> None:
    assert not compile_pattern("^[a-z]+$").search("\ud800")
    assert compile_pattern("a").search("a\udcff")


PIECES = st.sampled_from(["a", "B", "7", "-", "_", r"\.", r"\:", r"\/", r"\-", ".", "*", "é", "^", "$", "|", "(?i)"])
NAMES = st.text(st.sampled_from(list("aB7-_.:/é\n")), max_size=6)


@given(st.sampled_from(["", "^"]), st.lists(PIECES, max_size=5).map("".join), st.sampled_from(["", "$"]), NAMES)
@example("^", "a", "$", "a\n")  # where Python's engine and RE2 differ
@example("", "", "", "")
@example("^", ".*", "$", "a\nb")
@example("^", ".*", "", "a\nb")
@example("", ".*", "$", "a\nb")
@example("", ".*", "", "a\nb")
def test_optimized_patterns_match_like_re2(start: str, middle: str, end: str, name: str) -> None:
    pattern = start + middle + end
    try:
        compiled = compile_pattern(pattern)
    except InvalidPattern:
        return
    options = re2.Options()
    options.log_errors = False
    assert compiled.search(name) is (re2.compile(pattern, options).search(name) is not None)
    assert compiled.fullmatch(name) is (re2.compile(pattern, options).fullmatch(name) is not None)
