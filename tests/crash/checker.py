"""Checks a history of client operations for violations of the delivery guarantees, for any faults of the broker.

The test records the history, outside of the data folder under test. A message is identified by
(producer, sequence) and the CRC of its body, a position by (stream, partition, offset).

What to record, and when:
- `send` before a message is sent to the broker, once per attempt. An ordered producer sends the next
  message only after the reply to the last one, or pipelines on one connection.
- `confirmed` with the position in the reply; `refused` for a definite error; nothing for a timeout or a
  lost connection: such a message may be stored or not, at most once per attempt.
- `read` for every record that a consumer got, with its session; `settled` when an ack was reported durable;
  `committed` and `fetched_commit` for group offsets; `ends` for the ends that the broker reported.
- `boot` at each start of the broker. `drained` for every record, and `drained_ends` for the ends, read
  from start to end after the last fault, when no producer runs any more. Loss is decided by these alone.

`check` is linear in the number of events.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

Message = tuple[str, int]  # producer, sequence
Partition = tuple[str, int]  # stream, partition


class Violation(NamedTuple):
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class Event(NamedTuple):
    kind: str
    actor: str = ""  # producer, session or group
    sequence: int = -1
    crc: int = -1
    stream: str = ""
    partition: int = -1
    offset: int = -1
    end: int = -1
    flag: bool = False  # redelivered


class History:
    """The recorded events. Several threads may append, because it is a single list."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.events: list[Event] = list(events)

    def boot(self) -> None:
        self.events.append(Event("boot"))

    def send(self, producer: str, sequence: int, crc: int) -> None:
        self.events.append(Event("send", producer, sequence, crc))

    def confirmed(self, producer: str, sequence: int, stream: str, partition: int, offset: int) -> None:
        self.events.append(Event("confirmed", producer, sequence, -1, stream, partition, offset))

    def refused(self, producer: str, sequence: int) -> None:
        self.events.append(Event("refused", producer, sequence))

    def read(
        self, session: str, stream: str, partition: int, offset: int, producer: str, sequence: int, crc: int,
        *, redelivered: bool = False,
    ) -> None:  # fmt: skip
        actor = f"{session}\n{producer}"
        self.events.append(Event("read", actor, sequence, crc, stream, partition, offset, flag=redelivered))

    def seek(self, session: str, stream: str, partition: int) -> None:
        self.events.append(Event("seek", session, stream=stream, partition=partition))

    def settled(self, stream: str, partition: int, offset: int) -> None:
        self.events.append(Event("settled", stream=stream, partition=partition, offset=offset))

    def committed(self, group: str, stream: str, partition: int, offset: int) -> None:
        self.events.append(Event("committed", group, stream=stream, partition=partition, offset=offset))

    def fetched_commit(self, group: str, stream: str, partition: int, offset: int) -> None:
        self.events.append(Event("fetched_commit", group, stream=stream, partition=partition, offset=offset))

    def ends(self, stream: str, partition: int, start: int, end: int) -> None:
        self.events.append(Event("ends", stream=stream, partition=partition, offset=start, end=end))

    def drained(self, stream: str, partition: int, offset: int, producer: str, sequence: int, crc: int) -> None:
        self.events.append(Event("drained", producer, sequence, crc, stream, partition, offset))

    def drained_ends(self, stream: str, partition: int, start: int, end: int) -> None:
        self.events.append(Event("drained_ends", stream=stream, partition=partition, offset=start, end=end))

    def save(self, path: str) -> None:
        with open(path, "w") as file:
            for event in self.events:
                file.write(json.dumps(event) + "\n")

    @classmethod
    def load(cls, path: str) -> "History":
        with open(path) as file:
            return cls(Event(*json.loads(line)) for line in file)


class _Sent:
    __slots__ = ("attempts", "copies", "crc", "position", "refusals")

    def __init__(self, crc: int) -> None:
        self.crc = crc
        self.attempts = 0
        self.refusals = 0
        self.position: tuple[Partition, int] | None = None
        self.copies = 0


class Checker:
    """One pass over the events, then one over the drained records. `dense` is off for compacted streams,
    `ordered` for producers without an order. With `queue`, a second delivery must have the redelivered flag
    in any session."""

    def __init__(self, *, dense: bool = True, ordered: bool = True, queue: bool = False) -> None:
        self._dense = dense
        self._ordered = ordered
        self._queue = queue
        self._found: list[Violation] = []
        self._sent: dict[Message, _Sent] = {}
        self._at: dict[tuple[Partition, int], Message] = {}  # the message that was read or confirmed at a position
        self._read: dict[tuple[Partition, int], Message] = {}
        self._session_next: dict[tuple[str, Partition], int] = {}
        self._ends: dict[Partition, tuple[int, int]] = {}
        self._commits: dict[tuple[str, Partition], int] = {}
        self._settled: set[tuple[Partition, int]] = set()
        self._delivered: set[tuple[Partition, int]] = set()
        self._drained: dict[Partition, dict[int, Message]] = defaultdict(dict)
        self._drained_ends: dict[Partition, tuple[int, int]] = {}
        self._confirmed_since_boot = 0
        self._booted = False

    def run(self, history: History) -> list[Violation]:
        handlers = {
            "boot": self._on_boot,
            "send": self._on_send,
            "confirmed": self._on_confirmed,
            "refused": self._on_refused,
            "read": self._on_read,
            "seek": self._on_seek,
            "settled": self._on_settled,
            "committed": self._on_committed,
            "fetched_commit": self._on_fetched_commit,
            "ends": self._on_ends,
            "drained": self._on_drained,
            "drained_ends": self._on_drained_ends,
        }
        for event in history.events:
            handlers[event.kind](event)
        self._check_loss()
        self._check_refusals()
        self._check_density()
        self._check_order()
        return self._found

    def _report(self, kind: str, detail: str) -> None:
        self._found.append(Violation(kind, detail))

    # -- the pass over the events -----------------------------------------------------------------

    def _on_boot(self, event: Event) -> None:
        if self._booted and self._sent and not self._confirmed_since_boot:
            self._report("not-live", "nothing was confirmed between two boots")
        self._booted = True
        self._confirmed_since_boot = 0

    def _on_send(self, event: Event) -> None:
        message = (event.actor, event.sequence)
        sent = self._sent.get(message)
        if sent is None:
            sent = self._sent[message] = _Sent(event.crc)
        sent.attempts += 1

    def _on_confirmed(self, event: Event) -> None:
        self._confirmed_since_boot += 1
        message, partition = (event.actor, event.sequence), (event.stream, event.partition)
        sent = self._sent.get(message)
        if sent is None:
            self._report("phantom", f"{message} was confirmed and never sent")
            return
        position = (partition, event.offset)
        other = self._at.get(position)
        if other is not None and other != message:
            self._report("offset-reused", f"{position} was assigned to {other} and to {message}")
        if sent.position is not None and sent.position != position and sent.attempts < 2:
            self._report("offset-moved", f"{message} was confirmed at {sent.position} and at {position}")
        sent.position = position
        self._at[position] = message

    def _on_refused(self, event: Event) -> None:
        sent = self._sent.get((event.actor, event.sequence))
        if sent is not None:
            sent.refusals += 1

    def _on_read(self, event: Event) -> None:
        session, _, producer = event.actor.partition("\n")
        message, partition = (producer, event.sequence), (event.stream, event.partition)
        position = (partition, event.offset)
        self._observe(message, position, event.crc)
        self._read[position] = message
        expected = self._session_next.get((session, partition))
        if expected is not None and not (self._queue and event.flag):
            if event.offset < expected:
                self._report("session-order", f"{session} read {position} after {expected - 1}")
            elif event.offset > expected and self._dense and not self._queue:
                self._report("session-skip", f"{session} read {position} when {expected} was next")
        self._session_next[session, partition] = max(event.offset + 1, expected or 0)
        if self._queue:
            if position in self._delivered and not event.flag:
                self._report("redelivered-flag-missing", f"{position} was delivered again without the flag")
            self._delivered.add(position)
            if position in self._settled:
                self._report("read-after-settle", f"{position} was delivered again after its ack was durable")

    def _on_seek(self, event: Event) -> None:
        self._session_next.pop((event.actor, (event.stream, event.partition)), None)

    def _on_settled(self, event: Event) -> None:
        self._settled.add(((event.stream, event.partition), event.offset))

    def _on_committed(self, event: Event) -> None:
        self._commits[event.actor, (event.stream, event.partition)] = event.offset

    def _on_fetched_commit(self, event: Event) -> None:
        partition = (event.stream, event.partition)
        committed = self._commits.get((event.actor, partition), -1)
        if event.offset < committed:
            self._report("commit-went-back", f"{event.actor} committed {committed}, now {event.offset}")
        end = self._ends.get(partition, (0, 1 << 62))[1]
        if event.offset > max(end, committed):
            self._report("commit-past-end", f"{event.actor} is at {event.offset}, the log ends at {end}")

    def _on_ends(self, event: Event) -> None:
        partition = (event.stream, event.partition)
        start, end = self._ends.get(partition, (0, 0))
        if event.end < end:
            self._report("log-shrank", f"{partition} ended at {end}, now at {event.end}")
        if event.offset < start:
            self._report("start-went-back", f"{partition} started at {start}, now at {event.offset}")
        self._ends[partition] = (max(start, event.offset), max(end, event.end))

    def _on_drained(self, event: Event) -> None:
        message, partition = (event.actor, event.sequence), (event.stream, event.partition)
        position = (partition, event.offset)
        self._observe(message, position, event.crc)
        stored = self._drained[partition]
        if event.offset in stored:
            self._report("inconsistent-offset", f"{position} was drained twice")
        stored[event.offset] = message
        sent = self._sent.get(message)
        if sent is not None:
            sent.copies += 1

    def _on_drained_ends(self, event: Event) -> None:
        self._on_ends(event)
        self._drained_ends[event.stream, event.partition] = (event.offset, event.end)

    def _observe(self, message: Message, position: tuple[Partition, int], crc: int) -> None:
        sent = self._sent.get(message)
        if sent is None:
            self._report("phantom", f"{message} at {position} was never sent")
            return
        if crc != sent.crc:
            self._report("corrupt-body", f"{message} at {position} differs from the bytes that were sent")
        other = self._at.setdefault(position, message)
        if other != message:
            self._report("inconsistent-offset", f"{position} held {other} and then {message}")

    # -- checks of the whole history --------------------------------------------------------------

    def _check_loss(self) -> None:
        """No confirmed message and no message that was ever read is missing, except before the start offset."""
        for message, sent in self._sent.items():
            if sent.position is not None:
                self._check_stored(message, sent.position, "lost", "was confirmed")
        for position, message in self._read.items():
            known = self._sent.get(message)
            if known is None or known.position != position:
                self._check_stored(message, position, "taken-back", "was read by a consumer")

    def _check_stored(self, message: Message, position: tuple[Partition, int], kind: str, why: str) -> None:
        partition, offset = position
        ends = self._drained_ends.get(partition)
        if ends is None or offset < ends[0] or not self._dense:
            return
        if self._drained[partition].get(offset) == message:
            return
        elsewhere = [p for p in self._drained if message in self._drained[p].values()]
        if elsewhere and kind == "lost":
            self._report("offset-moved", f"{message} {why} at {position} but is stored in {elsewhere}")
        else:
            self._report(kind, f"{message} {why} at {position} but is missing")

    def _check_refusals(self) -> None:
        for message, sent in self._sent.items():
            allowed = sent.attempts - sent.refusals
            if sent.copies and allowed <= 0:
                self._report("aborted-read", f"{message} was refused but is stored")
            elif sent.copies > allowed:
                self._report("duplicate", f"{message} is stored {sent.copies} times after {allowed} attempts")

    def _check_density(self) -> None:
        for partition, (start, end) in self._drained_ends.items():
            stored = self._drained[partition]
            if self._dense and len(stored) != end - start:
                holes = [o for o in range(start, end) if o not in stored]
                self._report("offset-hole", f"{partition} from {start} to {end} lacks {holes[:5]}")
            outside = [o for o in stored if not start <= o < end]
            if outside:
                self._report("offset-hole", f"{partition} from {start} to {end} also holds {outside[:5]}")

    def _check_order(self) -> None:
        """In each partition, the messages of a producer are in the order in which they were sent. Messages that were
        sent again after a lost reply are skipped, because a later message may overtake them."""
        if not self._ordered:
            return
        for partition, stored in self._drained.items():
            last: dict[str, int] = {}
            for offset in sorted(stored):
                producer, sequence = stored[offset]
                sent = self._sent.get((producer, sequence))
                if sent is None or sent.attempts > 1:
                    continue
                if sequence < last.get(producer, -1):
                    detail = f"{producer} {sequence} is after a later message in {partition}"
                    self._report("producer-order", detail)
                last[producer] = sequence


def check(history: History, *, dense: bool = True, ordered: bool = True, queue: bool = False) -> list[Violation]:
    return Checker(dense=dense, ordered=ordered, queue=queue).run(history)
