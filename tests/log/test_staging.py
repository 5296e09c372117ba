"""Staging and rounds, and the compiled encoders against the Python code that reads their bytes."""

from collections import deque
from pathlib import Path
from typing import get_args

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.declared import BY_NAME
from headrace.errors import LogClosed
from headrace.log.commit import journal, slots
from headrace.log.commit.journal_entry import DELETE, MERGE, PUT, ReplayedEnd, ReplayedPart, StateChange, decode
from headrace.log.commit.round import Round, RoundPart, Ticket, TicketGroup, Unit, encode
from headrace.log.log import Log
from headrace.log.segments import index
from headrace.log.settings import StreamSettings, WriteModeName
from headrace.log.write_mode import WRITE_MODES
from headrace.record.types import Buffer
from tests.log.helpers import Bench, batch

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.integers(1, 2**62)
CHANGES = st.builds(
    StateChange,
    st.sampled_from((PUT, DELETE, MERGE)),
    st.text(st.characters(codec="ascii"), min_size=1, max_size=20),
    st.binary(max_size=50),
    st.binary(max_size=50),
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Bench(tmp_path_factory.mktemp("staging")).open(1).log(1)


def unit_of(log: Log, size: int, *, rides_alone: bool = False) -> Unit:
    unit = Unit(Ticket())
    unit.parts.append(RoundPart(log, bytearray(size), unit.ticket, atomic=False))
    unit.size = size
    unit.rides_alone = rides_alone
    return unit


@given(
    data=st.lists(st.tuples(st.binary(max_size=40), INT64, INT64, st.booleans()), max_size=6),
    changes=st.lists(CHANGES, max_size=4),
    ends=st.lists(st.tuples(IDS, st.integers(0, 2**31), INT64), max_size=3),
)
def test_a_decoded_entry_equals_what_was_encoded(
    log: Log,
    data: list[tuple[bytes, int, int, bool]],
    changes: list[StateChange],
    ends: list[tuple[int, int, int]],
) -> None:
    parts: list[RoundPart] = []
    for value, base, following, shares in data:
        same = parts[0].data if shares and parts else bytearray(value)
        part = RoundPart(log, same, Ticket(), atomic=False)
        part.base_offset, part.next_offset = base, following
        parts.append(part)
    body = b"".join(encode(parts, changes, ends))
    found = list(decode(memoryview(body)))
    expected: list[object] = [
        ReplayedPart(log.id, log.epoch, part.base_offset, part.next_offset, memoryview(part.data)) for part in parts
    ]
    assert found == [*expected, *changes, *(ReplayedEnd(*end) for end in ends)]
    assert len(body) >= sum(len(data) for data in {id(part.data): part.data for part in parts}.values())


@given(st.tuples(INT64, INT64, INT64, INT64, INT64, INT64))
def test_the_compiled_slot_packing_matches_its_layout(values: tuple[int, int, int, int, int, int]) -> None:
    ends = slots.Ends(*values)
    raw = slots.pack(ends)
    assert raw[:-4] == slots.SLOT.pack(*values, 0, 0)[:-4]
    assert slots.unpack(raw) == ends


NUMBERS = st.integers(0, 2**64 - 1)


@given(st.lists(st.binary(max_size=600), max_size=5), NUMBERS, NUMBERS, NUMBERS)
def test_the_compiled_journal_entry_matches_its_layout(
    pieces: list[bytes], number: int, sequence: int, synced: int
) -> None:
    whole = b"".join(pieces)
    mixed: list[Buffer] = [bytearray(piece) if number % 2 else memoryview(piece) for number, piece in enumerate(pieces)]
    raw = b"".join(index.journal_entry(number, sequence, synced, mixed))
    rest = journal.ENTRY_HEADER.pack(0, journal.ENTRY_MAGIC, number, sequence, synced, len(whole))[4:] + whole
    entry = crc32c(rest).to_bytes(4, "little") + rest
    assert raw == entry.ljust(journal.padded(len(entry)), b"\0")
    assert index.total(mixed) == len(whole)


def test_a_round_takes_the_units_that_fit_and_at_least_one(log: Log) -> None:
    units = [unit_of(log, size) for size in (900, 60, 60, 10)]
    pending, first, second = deque(units), Round(), Round()
    assert first.fill(pending, 100) == [] and first.units == units[:1]
    assert second.fill(pending, 125) == [] and second.units == units[1:3]
    assert list(pending) == units[3:]
    assert second.size == 120 and second.must_sync and not second.bypasses_journal


def test_a_unit_that_rides_alone_gets_its_own_round(log: Log) -> None:
    before, alone, after = unit_of(log, 10), unit_of(log, 10, rides_alone=True), unit_of(log, 10)
    pending = deque([before, alone, after])
    rounds = [Round(), Round(), Round()]
    for one in rounds:
        one.fill(pending, 1000)
    assert [one.units for one in rounds] == [[before], [alone], [after]]


def test_parts_of_a_deleted_log_are_dropped_and_the_rest_of_their_group_is_committed(tmp_path: Path) -> None:
    shard = Bench(tmp_path).open(1, 2)
    kept, deleted = shard.log(1), shard.log(2)
    group = shard.group()
    mine, gone = group.append(kept, batch([b"mine"])), group.append(deleted, batch([b"gone"]))
    both = group.commit()
    alone = deleted.append(batch([b"alone"]))
    nothing = shard.group().commit()
    shard.delete_log(2)
    shard.pump()
    assert both.error is None and mine.base_offset == 0 and gone.base_offset == -1
    assert isinstance(alone.error, LogClosed)
    assert nothing.done and nothing.error is None, "a group of nothing was not deleted"
    assert kept.visible_end == 1 and shard.staging.pending_bytes == 0


def test_a_callback_for_a_deleted_log_may_stage_another_append(tmp_path: Path) -> None:
    shard = Bench(tmp_path).open(1, 2)
    later: list[Ticket] = []

    def again(_ticket: Ticket) -> None:
        later.append(shard.log(1).append(batch([b"later"])))
        shard.scheduler.start_round()

    shard.log(2).append(batch([b"gone"])).add_callback(again)
    shard.delete_log(2)
    shard.pump()
    assert [ticket.base_offset for ticket in later] == [0]
    assert shard.scheduler.is_idle and shard.staging.pending_bytes == 0


def test_a_round_of_an_async_log_bypasses_the_journal_and_needs_no_sync(tmp_path: Path) -> None:
    shard = Bench(tmp_path).open(1, stream=StreamSettings(write_mode="async"))
    batch_of = Round()
    batch_of.fill(deque([unit_of(shard.log(1), 10)]), 1000)
    assert batch_of.bypasses_journal and not batch_of.must_sync


def test_every_write_mode_that_can_be_set_is_an_object() -> None:
    assert set(WRITE_MODES) == set(get_args(WriteModeName)) == set(BY_NAME["write_mode"].choices)
    assert all(name == mode.name for name, mode in WRITE_MODES.items())


def test_a_ticket_group_calls_back_once_when_all_of_its_tickets_are_resolved() -> None:
    ended: list[bool] = []
    group = TicketGroup(lambda: ended.append(group.has_errors))
    stored, refused = Ticket(), Ticket()
    stored.resolve()
    group.add(stored)  # at once: not the end of a group that is still open
    group.add(refused)
    group.close()
    assert ended == []
    refused.resolve(LogClosed("deleted"))
    assert ended == [True]


def test_a_ticket_group_without_tickets_ends_when_it_is_closed() -> None:
    ended: list[bool] = []
    group = TicketGroup(lambda: ended.append(group.has_errors))
    group.close()
    assert ended == [False]


def test_a_ticket_group_may_span_rounds_of_several_logs(tmp_path: Path) -> None:
    shard = Bench(tmp_path).open(1, 2)
    ended: list[tuple[int, int]] = []
    group = TicketGroup(lambda: ended.append((shard.log(1).visible_end, shard.log(2).visible_end)))
    group.add(shard.log(1).append(batch([b"a"])))
    shard.scheduler.start_round()
    group.add(shard.log(2).append(batch([b"b"])))
    group.close()
    shard.pump()
    assert ended == [(1, 1)]
