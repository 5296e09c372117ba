"""What the registry makes of the records of its topic."""

import pytest

from headrace.schemas.kinds import AVRO
from headrace.schemas.refusals import RegistryError
from headrace.schemas.state import (
    LEVEL,
    Content,
    Reference,
    RegistryState,
    Version,
    config_entry,
    deleted_entry,
    forgotten_entry,
    schema_entry,
)


def version(subject: str, number: int, schema_id: int, text: str, *references: tuple[str, int]) -> Version:
    named = tuple(Reference(f"{name}{number}", name, number) for name, number in references)
    return Version(subject, number, schema_id, Content(AVRO, text, named))


def places(found: list[Version]) -> list[tuple[str, int]]:
    return sorted((one.subject, one.version) for one in found)


def test_a_record_nested_too_deep_is_skipped_as_foreign() -> None:
    state = RegistryState()
    deep = b"[" * 100_000
    state.apply(b'{"keytype":"CONFIG","x":' + deep, b"{}")
    state.apply(config_entry(None, {LEVEL: "FULL"})[0], b'{"x":' + deep)
    state.apply(*config_entry(None, {LEVEL: "NONE"}))
    assert state.level() == "NONE"


def test_users_of_ids_and_versions_are_updated_with_every_change() -> None:
    state = RegistryState()
    used, user = version("used", 1, 1, "a"), version("user", 1, 2, "b", ("used", 1))
    for one in (used, version("also", 1, 1, "a"), user, version("user", 2, 3, "c", ("used", 1))):
        state.apply(*schema_entry(one))
    assert places(state.uses(1)) == [("also", 1), ("used", 1)]
    assert places(state.referred_by("used", 1)) == [("user", 1), ("user", 2)]
    state.apply(*schema_entry(version("user", 2, 4, "d")))  # another registry wrote it anew
    assert (state.uses(3), places(state.uses(4))) == ([], [("user", 2)])
    assert places(state.referred_by("used", 1)) == [("user", 1)]
    state.apply(*schema_entry(user._replace(deleted=True)))
    assert state.referred_by("used", 1) == []
    state.apply(*schema_entry(user))
    state.apply(*deleted_entry("user", 2))
    assert (places(state.uses(2)), state.referred_by("used", 1)) == ([("user", 1)], [])
    state.apply(*forgotten_entry(user))
    state.apply(*forgotten_entry(used))
    assert (state.uses(2), places(state.uses(1))) == ([], [("also", 1)])


def test_a_schema_with_two_ids_keeps_the_first_when_the_other_is_removed() -> None:
    state = RegistryState()
    first, second = version("a", 1, 5, "x"), version("b", 1, 9, "x")
    for one in (first, second):
        state.apply(*schema_entry(one))
    state.apply(*forgotten_entry(second))
    assert state.id_of(first.content) == 5


def test_the_total_size_of_a_schema_and_its_references_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.schemas.state.REFERRED_CHARS_MAX", 10)
    state = RegistryState()
    for one in (version("a", 1, 1, "x" * 6), version("b", 1, 2, "y" * 4, ("a", 1)), version("c", 1, 3, "z")):
        state.apply(*schema_entry(one))
    b, c = Reference("b", "b", 1), Reference("c", "c", 1)
    assert [len(text) for text in state.referred([b]).values()] == [6, 4]
    with pytest.raises(RegistryError, match="more than 10 characters"):
        state.referred([b, c])


def test_a_record_whose_value_is_of_another_version_than_its_key_is_left_out() -> None:
    """Compaction goes by the key: it would be there or not, depending on that."""
    state = RegistryState()
    one, other = version("a", 1, 1, "x"), version("b", 1, 2, "y")
    for wrong in (other, version("a", 2, 3, "z")):
        state.apply(schema_entry(one)[0], schema_entry(wrong)[1])
    state.apply(deleted_entry("a", 1)[0], deleted_entry("b", 1)[1])
    state.apply(*schema_entry(other))
    state.apply(deleted_entry("a", 1)[0], deleted_entry("b", 1)[1])
    assert state.subjects() == state.subjects(deleted=True) == ["b"]


def test_rewriting_a_version_with_another_id_removes_the_old_id() -> None:
    state = RegistryState()
    for one in (version("a", 1, 9, "x"), version("a", 1, 5, "y")):
        state.apply(*schema_entry(one))
    with pytest.raises(RegistryError):
        state.content(9)
    assert (state.content(5).text, state.id_of(Content(AVRO, "x", ()))) == ("y", None)


def test_a_schema_with_two_ids_gets_the_other_one_when_the_first_is_removed() -> None:
    state = RegistryState()
    first, second = version("a", 1, 5, "x"), version("b", 1, 9, "x")
    for one in (first, second):
        state.apply(*schema_entry(one))
    state.apply(*forgotten_entry(first))
    assert state.id_of(first.content) == 9


def test_references_in_a_circle_end() -> None:
    state = RegistryState()
    for one in (version("a", 1, 1, "x", ("b", 1)), version("b", 1, 2, "y", ("a", 1))):
        state.apply(*schema_entry(one))
    assert sorted(state.referred([Reference("a", "a", 1)]).values()) == ["x", "y"]
