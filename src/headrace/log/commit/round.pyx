# cython: boundscheck=False, wraparound=False
"""What is staged for a round, and the round: what is done for every append, and so for nearly every message.

A round is everything that arrived since the last sync began. It becomes one journal entry, so everything in
it happens together; what is asked for as one Group is never split over two rounds.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from headrace.record.raw cimport put_le
from headrace.record.batch.scan cimport number_run

from collections import deque

from headrace.errors import BatchTooLarge, DiskFull, LogClosed, Overloaded, StorageFailed
from headrace.log.commit.journal_entry import APPEND, APPEND_FIELDS, END, END_FIELDS, SHARED, SHARED_FIELDS, STATE_FIELDS
from headrace.log.write_mode import WRITE_MODES

cdef enum:
    FACTS_BYTES = 37  # kind, log, epoch, base, next offset, and bytes that follow or the number of the append

cdef int KIND_APPEND = APPEND, KIND_SHARED = SHARED
assert APPEND_FIELDS.size == SHARED_FIELDS.size == FACTS_BYTES, "packed by hand below"


cdef class Ticket:
    """The answer to "is it safe yet?". Resolved on the owner thread once the round is on stable storage.

    Nothing above the log uses an offset before that: until then it does not exist.
    """

    def __init__(self, make_future=None):
        self.base_offset = self.next_offset = -1
        self._make_future = make_future

    cpdef object add_callback(self, callback):
        if self.done:
            callback(self)
        elif self._callback is None:
            self._callback = callback
        elif self._more is None:
            self._more = [callback]
        else:
            self._more.append(callback)

    cpdef object resolve(self, error=None):
        assert not self.done, "a ticket is resolved once"
        self.done = True
        self.error = error
        first, more = self._callback, self._more
        self._callback = self._more = None
        if more is not None:
            self.tell_all(first, more)
        elif first is not None:
            first(self)

    cdef int tell_all(self, first, list more) except -1:
        """Each of them, whatever another does; the first thing that one raised is raised after that."""
        raised = None
        for callback in (first, *more):
            try:
                callback(self)
            except Exception as bug:
                if raised is None:
                    raised = bug
        if raised is not None:
            raise raised
        return 0

    def __await__(self):
        if not self.done:
            if self._make_future is None:
                raise RuntimeError("this shard was opened without make_future: its tickets cannot be awaited")
            future = self._make_future()
            self.add_callback(lambda _: None if future.done() else future.set_result(None))
            yield from future.__await__()
        if self.error is not None:
            raise self.error
        return self


cdef class LogEnd:
    """The end of a log that is written to: what every append touches. The rest is in log.py."""

    def __init__(self, Staging staging not None, long long log_id, settings, int epoch):
        self._staging = staging
        self.id = log_id
        self.settings = settings
        self.epoch = epoch
        self.epochs = []  # (epoch, first offset), oldest first

    @property
    def settings(self):
        return self._settings

    @settings.setter
    def settings(self, settings):
        mode = WRITE_MODES[settings.write_mode]
        self._settings = settings
        self.write_mode = mode
        self._syncs_before_confirm = mode.syncs_before_confirm
        self._goes_through_journal = mode.goes_through_journal
        self._rides_alone = mode.rides_alone

    cpdef long long stable_below(self, long long end) except? -1:
        """Where readers of committed records stop, if `end` is where others do."""
        if self._stable_hold is None:
            return end
        return min(max(<long long>self._stable_hold, self.start_offset), end)

    @cython.nonecheck(True)
    cpdef tuple ends_at(self, long long next_offset):
        """What its slot says, as slots.Ends, once all before next_offset is in its segments."""
        cdef long long end = max(next_offset, self.start_offset), durable = end
        if not self._syncs_before_confirm or len(self.tail._written) > 0:
            durable = min(self.durable_end, end)
        return self.id, self.epoch, self.start_offset, end, durable, self.stable_below(end)

    def append(self, batch, infos=None):
        """Stage whole batches; the ticket says when they are durable and at which offset.

        The buffer belongs to the log until then: base offset and epoch are patched in place.
        """
        cdef Ticket ticket = Ticket.__new__(Ticket)
        cdef RoundPart part = RoundPart.__new__(RoundPart)
        cdef Unit unit = Unit.__new__(Unit)
        self.check_append(batch, infos)
        ticket.base_offset = ticket.next_offset = part.base_offset = part.next_offset = -1
        ticket._make_future = self._staging.shard.make_future
        part.log = self
        part.data = batch
        part.ticket = unit.ticket = ticket
        unit.parts = [part]
        unit.changes = []
        unit.size = len(batch)
        unit.rides_alone = self._rides_alone
        self._staging.stage(unit)
        return ticket

    cpdef object check_append(self, batch, infos):
        if self.is_closed:
            raise LogClosed(f"log {self.id} ({self.slug}) is closed")
        if self.damage is not None:
            raise self.damage
        if self.is_frozen:
            raise Overloaded(f"log {self.id} ({self.slug}) is being cut back")
        cdef Py_ssize_t limit = self._settings.batch_bytes_max
        if len(batch) > limit:  # else none of them is larger
            largest = max([info.size for info in infos]) if infos else len(batch)
            if largest > limit:
                raise BatchTooLarge(largest, limit)


cdef class RoundPart:
    """Whole batches for one log. Offsets are given out when the round is sealed."""

    def __init__(self, LogEnd log not None, data, Ticket ticket not None, bint atomic):
        self.log = log
        self.data = data
        self.ticket = ticket
        self.atomic = atomic
        self.base_offset = self.next_offset = -1


cdef class Unit:
    """What must stay together: one append, or one group."""

    def __init__(self, Ticket ticket not None):
        self.ticket = ticket
        self.parts = []
        self.changes = []

    cdef bint leave_out_deleted(self) except -1:
        """Leave out what was staged for a log that is deleted by now; whether the rest, if it had more, goes on."""
        cdef RoundPart part
        for part in self.parts:
            if part.log.is_deleted:
                break
        else:
            return True
        self.parts = [part for part in self.parts if not part.log.is_deleted]
        return bool(self.parts or self.changes)


def resolve_all(list told not None, error=None):
    """The tickets of units or parts: every one is told, whatever the callbacks of another do; the first thing that one
    of them raised is raised when that is done."""
    cdef Ticket ticket
    raised = None
    for one in told:
        ticket = (<Unit>one).ticket if isinstance(one, Unit) else (<RoundPart?>one).ticket
        try:
            ticket.resolve(error)
        except Exception as bug:
            if raised is None:
                raised = bug
    if raised is not None:
        raise raised


cdef class Staging:
    """What waits for the next round. The round that is under way, and what becomes of it: intake.py."""

    def __init__(self, shard):
        self.shard = shard
        self.pending = deque()

    cpdef object stage(self, Unit unit):
        shard = self.shard
        if shard.failure is not None:
            raise StorageFailed(str(shard.failure)) from shard.failure
        if shard.is_closing or shard.is_closed:
            raise LogClosed("the broker is stopping")
        if shard.is_full and unit.parts:
            shard.counters.refused_full += 1
            raise DiskFull(f"less than {shard.settings.disk_reserve:,} bytes are free at {shard.root}")
        self.pending.append(unit)
        self.pending_bytes += unit.size
        if self.in_flight is None and not self.is_scheduled:
            # Not at once: what else arrives in this turn of the loop rides along.
            self.is_scheduled = True
            shard.defer(self.start_round)


cdef class Round:
    cdef public list units, parts, changes, ends
    cdef public Py_ssize_t size
    cdef public bint must_sync
    cdef public bint bypasses_journal  # the write mode of some log in it does

    def __init__(self):
        self.units = []
        self.parts = []
        self.changes = []
        self.ends = []  # log, epoch, end: synced past the journal since the last entry

    def fill(self, pending, Py_ssize_t bytes_max):
        """Take from the front of pending what fits; at least one unit. Returns those that nothing is left of: their
        logs were deleted meanwhile."""
        cdef Unit unit
        cdef list gone = []
        while pending:
            unit = pending[0]
            if self.units and (unit.rides_alone or self.size + unit.size > bytes_max):
                break
            pending.popleft()
            if not unit.leave_out_deleted():
                gone.append(unit)
                continue
            self.add(unit)
            if unit.rides_alone:
                break
        return gone

    cdef int add(self, Unit unit) except -1:
        cdef RoundPart part
        self.units.append(unit)
        self.size += unit.size
        if unit.changes:
            self.changes += unit.changes
            if not unit.lazy:
                self.must_sync = True
        for part in unit.parts:
            self.parts.append(part)
            if not part.log._goes_through_journal:
                self.bypasses_journal = True
            if part.log._syncs_before_confirm:
                self.must_sync = True
        return 0

    def number(self):
        """Give out offsets: densely, in the order of arrival. The logs that begin a new epoch with it."""
        cdef RoundPart part
        cdef LogEnd log
        cdef list begun = []
        for part in self.parts:
            log = part.log
            part.base_offset = log.next_offset
            log.next_offset = part.next_offset = number_run(
                part.data, 0, len(part.data), part.base_offset, log.epoch)
            if not log.epochs or log.epochs[len(log.epochs) - 1][0] != log.epoch:
                log.epochs.append((log.epoch, part.base_offset))
                begun.append(log)
        return begun

    @property
    def has_one_log(self):
        """Whether all of it belongs to one log, and nothing of it to a group."""
        cdef RoundPart part
        cdef LogEnd log = None
        for part in self.parts:
            if part.atomic or (log is not None and part.log is not log):
                return False
            log = part.log
        return log is not None

    @property
    def has_groups(self):
        """Whether some of it is to be there as a whole or not at all."""
        cdef RoundPart part
        for part in self.parts:
            if part.atomic:
                return True
        return False

    @property
    def shares_bytes(self):
        """Whether the same bytes go to several logs."""
        if len(self.parts) < 2:
            return False
        cdef RoundPart part
        cdef set seen = set()
        for part in self.parts:
            seen.add(<size_t><void*>part.data)
        return len(seen) < len(self.parts)

    def take_in(self):
        """It is durable: move the ends of its logs, and tell the tickets their offsets, but nobody else yet.
        (records, the logs by id)."""
        cdef RoundPart part
        cdef Ticket ticket
        cdef LogEnd log
        cdef dict touched = {}
        cdef int64_t records = 0
        for part in self.parts:
            log, ticket = part.log, part.ticket
            records += part.next_offset - part.base_offset
            log.visible_end = part.next_offset
            if log._syncs_before_confirm:
                log.durable_end = part.next_offset
            else:
                log.unflushed_bytes += len(part.data)
            touched[log.id] = log
            if ticket.base_offset < 0:
                ticket.base_offset = part.base_offset
            ticket.next_offset = part.next_offset
        return records, touched


def by_log(list parts not None):
    """One run per log, in the order of their first part: one write each. A deleted log has no place to write to."""
    cdef RoundPart part
    cdef LogEnd log
    cdef dict runs = {}
    for part in parts:
        log = part.log
        if log.is_deleted:
            continue
        run = runs.get(log.id)
        if run is None:
            runs[log.id] = (log, [part])
        else:
            (<list>run[1]).append(part)
    return list(runs.values())


cdef bytes facts(int kind, RoundPart part, uint32_t last):
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, FACTS_BYTES)
    cdef uint8_t* at = <uint8_t*>PyBytes_AS_STRING(packed)
    at[0] = kind
    put_le(at + 1, <uint64_t>part.log.id, 8)
    put_le(at + 9, <uint64_t>part.log.epoch, 8)
    put_le(at + 17, <uint64_t>part.base_offset, 8)
    put_le(at + 25, <uint64_t>part.next_offset, 8)
    put_le(at + 33, last, 4)
    return packed


def encode(list parts not None, list changes not None, list ends not None):
    """The body of a journal entry, as rounds.decode reads it. Equal bytes for many logs (fan-out) are stored once."""
    cdef RoundPart part
    cdef list body = []
    cdef dict stored = {}
    for part in parts:
        key = <size_t><void*>part.data
        number = stored.get(key)
        if number is None:
            stored[key] = len(stored)
            body.append(facts(KIND_APPEND, part, len(part.data)))
            body.append(part.data)
        else:
            body.append(facts(KIND_SHARED, part, number))
    for change in changes:
        table = change.table.encode()
        body.append(STATE_FIELDS.pack(change.kind, len(table), len(change.key), len(change.value)))
        body += [table, change.key, change.value]
    for end in ends:
        body.append(END_FIELDS.pack(END, *end))
    return body
