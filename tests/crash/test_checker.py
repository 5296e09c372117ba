"""Tests of the checker itself: each kind of violation is planted once and must be found."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash import checker
from tests.crash.checker import Event, History, check


def crc(producer: str, sequence: int) -> int:
    return hash((producer, sequence)) & 0xFFFF


def clean() -> History:
    """Two producers, two partitions, a kill, a refusal, and two lost replies, one of a message that was stored."""
    history = History()
    history.boot()
    offsets = {0: 0, 1: 0}
    log: list[tuple[int, int, str, int]] = []

    def send(producer: str, sequence: int, partition: int, *, stored: bool = True, answer: bool = True) -> None:
        history.send(producer, sequence, crc(producer, sequence))
        if stored:
            offset = offsets[partition]
            offsets[partition] += 1
            log.append((partition, offset, producer, sequence))
            if answer:
                history.confirmed(producer, sequence, "t", partition, offset)

    for sequence in range(10):
        send("p", sequence, sequence % 2)
        send("q", sequence, 0)
    history.send("q", 10, crc("q", 10))
    history.refused("q", 10)
    for partition, offset, producer, sequence in log[:12]:
        history.read("reader", "t", partition, offset, producer, sequence, crc(producer, sequence))
    history.ends("t", 0, 0, offsets[0])
    history.committed("group", "t", 0, 5)
    send("p", 10, 0, answer=False)
    send("q", 11, 1, stored=False, answer=False)
    history.boot()
    history.fetched_commit("group", "t", 0, 5)
    for sequence in range(12, 20):
        send("p", sequence, 0)
        send("q", sequence, 1)
    for partition, offset, producer, sequence in log:
        history.drained("t", partition, offset, producer, sequence, crc(producer, sequence))
    for partition, end in offsets.items():
        history.drained_ends("t", partition, 0, end)
    return history


def edit(history: History, kind: str, change: Callable[[Event], Event | None], nth: int = 0) -> History:
    """Replace (or drop) the nth event of a kind."""
    seen = 0
    events = []
    for event in history.events:
        if event.kind == kind:
            if seen == nth:
                seen += 1
                changed = change(event)
                if changed is not None:
                    events.append(changed)
                continue
            seen += 1
        events.append(event)
    return History(events)


def confirmed_position_of(history: History, producer: str, sequence: int) -> Event:
    confirmed = (e for e in history.events if e.kind == "confirmed")
    return next(e for e in confirmed if (e.actor, e.sequence) == (producer, sequence))


def lost(h: History) -> History:
    return edit(h, "drained", lambda e: None, 3)


def lost_tail(h: History) -> History:
    last = max(e.offset for e in h.events if e.kind == "drained" and e.partition == 1)
    events = [e for e in h.events if not (e.kind == "drained" and e.partition == 1 and e.offset == last)]
    return History(e._replace(end=last) if e.kind == "drained_ends" and e.partition == 1 else e for e in events)


def taken_back(h: History) -> History:
    """An unconfirmed record that a consumer has read is missing after the crash."""
    at = next(i for i, e in enumerate(h.events) if e.kind == "boot" and i)
    read = Event("read", "other\nq", 11, crc("q", 11), "t", 1, 5)
    return History([*h.events[:at], read, *h.events[at:]])


def phantom(h: History) -> History:
    return edit(h, "drained", lambda e: e._replace(actor="unknown"), 4)


def corrupt_body(h: History) -> History:
    return edit(h, "read", lambda e: e._replace(crc=e.crc ^ 1), 4)


def inconsistent_offset(h: History) -> History:
    return edit(h, "read", lambda e: e._replace(actor="reader\nq", sequence=9, crc=crc("q", 9)), 4)


def offset_reused(h: History) -> History:
    return edit(h, "confirmed", lambda e: e._replace(offset=e.offset - 1), 7)


def offset_moved(h: History) -> History:
    one, two = confirmed_position_of(h, "p", 16), confirmed_position_of(h, "p", 17)
    swap = {one.offset: two.offset, two.offset: one.offset}
    return History(
        e._replace(offset=swap[e.offset]) if e.kind == "drained" and e.partition == 0 and e.offset in swap else e
        for e in h.events
    )


def aborted_read(h: History) -> History:
    extra = Event("drained", "q", 10, crc("q", 10), "t", 1, 13)
    moved = [e._replace(end=14) if e.kind == "drained_ends" and e.partition == 1 else e for e in h.events]
    return History([*moved, extra])


def duplicate(h: History) -> History:
    extra = Event("drained", "q", 19, crc("q", 19), "t", 1, 13)
    moved = [e._replace(end=14) if e.kind == "drained_ends" and e.partition == 1 else e for e in h.events]
    return History([*moved, extra])


def producer_order(h: History) -> History:
    """Both are unconfirmed, so their offsets are not promised, but the order is."""
    return History(
        e for e in offset_moved(h).events if not (e.kind == "confirmed" and e.actor == "p" and e.sequence in (16, 17))
    )


def session_order(h: History) -> History:
    first = next(e for e in h.events if e.kind == "read")
    at = max(i for i, e in enumerate(h.events) if e.kind == "read")
    return History([*h.events[: at + 1], first, *h.events[at + 1 :]])


def session_skip(h: History) -> History:
    return edit(h, "read", lambda e: None, 5)


def commit_went_back(h: History) -> History:
    return edit(h, "fetched_commit", lambda e: e._replace(offset=4))


def commit_past_end(h: History) -> History:
    return edit(h, "fetched_commit", lambda e: e._replace(offset=1000))


def log_shrank(h: History) -> History:
    return edit(h, "ends", lambda e: e._replace(end=1000))


def start_went_back(h: History) -> History:
    return edit(h, "ends", lambda e: e._replace(offset=3))


def offset_hole(h: History) -> History:
    """No confirmed message is missing, but an offset holds no record."""
    return edit(h, "drained_ends", lambda e: e._replace(end=e.end + 1))


def not_live(h: History) -> History:
    return History([*h.events, Event("boot"), Event("boot")])


MUTATIONS = [
    (lost, "lost"),
    (lost, "offset-hole"),
    (lost_tail, "lost"),
    (taken_back, "taken-back"),
    (phantom, "phantom"),
    (corrupt_body, "corrupt-body"),
    (inconsistent_offset, "inconsistent-offset"),
    (offset_reused, "offset-reused"),
    (offset_moved, "offset-moved"),
    (aborted_read, "aborted-read"),
    (duplicate, "duplicate"),
    (producer_order, "producer-order"),
    (session_order, "session-order"),
    (session_skip, "session-skip"),
    (commit_went_back, "commit-went-back"),
    (commit_past_end, "commit-past-end"),
    (log_shrank, "log-shrank"),
    (start_went_back, "start-went-back"),
    (offset_hole, "offset-hole"),
    (not_live, "not-live"),
]


def test_check_accepts_a_valid_history() -> None:
    assert check(clean()) == []


@pytest.mark.parametrize(("mutate", "kind"), MUTATIONS, ids=[f"{m.__name__}-{k}" for m, k in MUTATIONS])
def test_check_finds_a_planted_violation(mutate: Callable[[History], History], kind: str) -> None:
    assert kind in {violation.kind for violation in check(mutate(clean()))}


def test_every_kind_of_violation_is_planted() -> None:
    reported = set(re.findall(r'_report\(\s*"([\w-]+)"', inspect.getsource(checker))) | {"lost", "taken-back"}
    planted = {kind for _, kind in MUTATIONS} | {"redelivered-flag-missing", "read-after-settle"}
    assert reported == planted


def test_a_message_sent_again_after_a_lost_reply_may_be_stored_twice() -> None:
    history = History()
    history.send("p", 0, 1)
    history.send("p", 0, 1)
    history.confirmed("p", 0, "t", 0, 1)
    for offset in (0, 1):
        history.drained("t", 0, offset, "p", 0, 1)
    history.drained_ends("t", 0, 0, 2)
    assert check(history) == []
    history.drained("t", 0, 2, "p", 0, 1)
    assert {v.kind for v in check(history)} == {"duplicate", "offset-hole"}


def test_records_removed_by_retention_are_not_lost() -> None:
    history = History()
    for sequence in range(3):
        history.send("p", sequence, 1)
        history.confirmed("p", sequence, "t", 0, sequence)
    history.drained("t", 0, 2, "p", 2, 1)
    history.drained_ends("t", 0, 2, 3)
    assert check(history) == []


def test_a_second_delivery_by_a_queue_without_the_flag_is_reported() -> None:
    history = History()
    history.send("p", 0, 1)
    history.confirmed("p", 0, "t", 0, 0)
    history.read("a", "t", 0, 0, "p", 0, 1)
    again = History(history.events)
    again.read("b", "t", 0, 0, "p", 0, 1, redelivered=True)
    assert check(again, queue=True) == []
    again = History(history.events)
    again.read("b", "t", 0, 0, "p", 0, 1)
    assert [v.kind for v in check(again, queue=True)] == ["redelivered-flag-missing"]


def test_a_delivery_after_a_durable_ack_is_reported() -> None:
    history = History()
    history.send("p", 0, 1)
    history.read("a", "t", 0, 0, "p", 0, 1)
    history.settled("t", 0, 0)
    history.read("b", "t", 0, 0, "p", 0, 1, redelivered=True)
    assert [v.kind for v in check(history, queue=True)] == ["read-after-settle"]


def test_a_history_can_be_saved_and_loaded(tmp_path: Path) -> None:
    history = clean()
    history.save(str(tmp_path / "h"))
    assert History.load(str(tmp_path / "h")).events == history.events
