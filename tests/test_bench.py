"""What the benchmarks say of what they measured: a verdict that is too kind would be believed."""

import pytest
from bench.kafka_latency import Found, Trial, report
from bench.kafka_peers import KAFKA, KAFKA_FLUSH, NOTHING, OURS, OURS_CACHED, PLAIN


def held(rate: int, cpu_s: float = 1.0) -> Trial:
    return Trial(rate, p99_ms=10.0, cpu_s=cpu_s, client_cpu_s=0.5, stolen_s=0.0)


def rows(*trials: Trial | None) -> Found:
    return {f"row {number}": trial for number, trial in enumerate(trials)}


def said(ours: Found, kafka: Found, nothing: Found | None = None) -> list[str]:
    found = {OURS: ours, KAFKA_FLUSH: kafka}
    return list(report(found if nothing is None else found | {NOTHING: nothing}))


def by_clock(lines: list[str]) -> str:
    [line] = [line for line in lines if line.startswith("  twice the messages/s")]
    return line


def test_each_ratio_is_shown_with_that_of_a_program_that_does_nothing() -> None:
    lines = said(rows(held(300, 0.5)), rows(held(100, 1.0)), rows(held(450, 0.25)))
    [row] = [line for line in lines if line.startswith("  row 0")]
    assert row.split()[2:] == ["3.00x", "4.50x", "6.00x", "18.00x"]
    [head] = [line for line in lines if "at most" in line]
    assert head.split() == 2 * ["ours", "at", "most"]
    assert len(head) == len(row), "the columns are below their names"


def test_the_plain_program_is_reported_but_does_not_change_the_verdict() -> None:
    kafka, plain = rows(held(100), held(100)), rows(held(210, 2.0), held(190, 0.5))
    found = {OURS: rows(held(300), held(150)), KAFKA_FLUSH: kafka, NOTHING: rows(held(400), held(400)), PLAIN: plain}
    lines = list(report(found))
    [row] = [line for line in lines if line.startswith("  row 0")]
    assert row.split()[2:] == ["3.00x", "4.00x", "2.10x", "3.00x", "4.00x", "1.05x"]
    assert by_clock(lines).endswith("MISSED")
    assert lines[-1] == f"  {PLAIN} is twice {KAFKA_FLUSH} in 1 of 2 rows, per CPU-second in 1"


def test_the_plain_program_that_syncs_is_not_put_beside_a_page_cache() -> None:
    one = rows(held(100))
    lines = list(report({OURS_CACHED: one, KAFKA: one, NOTHING: one, PLAIN: one}))
    assert lines and not [line for line in lines if PLAIN in line]


def test_a_row_that_the_client_can_not_reach_is_named_and_does_not_count_as_reached() -> None:
    kafka = rows(held(100), held(100), held(100))
    lines = said(rows(held(300), held(150), held(150)), kafka, rows(held(400), held(190), held(300)))
    assert by_clock(lines) == (
        "  twice the messages/s: 1 of 3 rows"
        " (in 1 of the others not even a program that does nothing is twice as fast), median 1.50x  MISSED"
    )


def test_the_verdict_says_if_all_reachable_rows_are_twice_as_fast() -> None:
    lines = said(rows(held(300), held(150)), rows(held(100), held(100)), rows(held(400), held(190)))
    assert by_clock(lines).endswith("median 3.00x  reached wherever the client can")
    assert "1 of 2 rows (in 1 of the others not even" in by_clock(lines)


def test_where_it_can_be_reached_in_no_row_it_is_missed() -> None:
    assert by_clock(said(rows(held(150)), rows(held(100)), rows(held(190)))).endswith("MISSED")


@pytest.mark.parametrize("nothing", [400, 190])
def test_a_reached_row_counts_as_reachable(nothing: int) -> None:
    line = by_clock(said(rows(held(200)), rows(held(100)), rows(held(nothing))))
    assert line == "  twice the messages/s: 1 of 1 rows (within reach in all), median 2.00x  reached"


@pytest.mark.parametrize(("nothing", "verdict"), [(None, "MISSED"), (130, "MISSED"), (137, "reached wherever")])
def test_a_program_that_held_less_than_a_broker_excuses_nothing(nothing: int | None, verdict: str) -> None:
    """By more than a step of the search: then it had a bad minute."""
    one = held(nothing) if nothing else None
    line = by_clock(said(rows(held(300), held(150)), rows(held(100), held(100)), rows(held(400), one)))
    assert verdict in line


def test_per_cpu_second_the_bound_is_its_own() -> None:
    ours, kafka, nothing = rows(held(300, 2.0), held(400)), rows(held(100), held(100)), rows(held(400, 2.5), held(500))
    lines = said(ours, kafka, nothing)
    assert by_clock(lines).endswith("reached")
    assert lines[-1] == (
        "  twice per CPU-second: 1 of 2 rows"
        " (in 1 of the others not even a program that does nothing is twice as cheap), median 4.00x"
        "  reached wherever the system can"
    )


def test_a_broker_that_holds_no_rate_has_missed_and_one_beside_it_has_reached() -> None:
    lines = said(rows(None, held(100)), rows(held(100), None), rows(held(400), held(400)))
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith("  row")] == [
        f"{OURS} holds no rate",
        f"{KAFKA_FLUSH} holds no rate",
    ]
    assert "1 of 2 rows (within reach in all), median infx  MISSED" in by_clock(lines)


def test_without_the_plain_program_only_measured_ratios_are_reported() -> None:
    lines = said(rows(held(300), held(150)), rows(held(100), held(100)))
    assert not [line for line in lines if "at most" in line]
    assert by_clock(lines) == "  twice the messages/s: 1 of 2 rows, median 3.00x  MISSED"
