"""What the registry makes of the records of its topic."""

from headrace.schemas.state import State, level_entry


def test_a_record_nested_too_deep_is_left_out_like_any_other_that_is_none_of_the_registrys() -> None:
    state = State()
    deep = b"[" * 100_000
    state.apply(b'{"keytype":"CONFIG","x":' + deep, b"{}")
    state.apply(level_entry(None, "FULL")[0], b'{"x":' + deep)
    state.apply(*level_entry(None, "NONE"))
    assert state.level() == "NONE"
