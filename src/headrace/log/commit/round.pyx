# cython: boundscheck=False, wraparound=False
"""Staging and rounds: the code that runs for every append, and so for nearly every message.

A round is everything that arrived while the previous sync ran. It becomes one journal entry, so all of it is committed
together, and an atomic group is never split over two rounds. scheduler.py runs the rounds, committer.py writes them.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from headrace.record.raw cimport put_le
from headrace.record.batch.scan cimport number_run

from collections import deque

from headrace.errors import BatchTooLarge, LogClosed, Overloaded, StorageFailed
from headrace.log.commit.journal_entry import APPEND, APPEND_FIELDS, END, END_FIELDS, SHARED, SHARED_FIELDS
from headrace.log.state.changes import STATE_FIELDS
from headrace.log.write_mode import WRITE_MODES

cdef enum:
    PART_HEADER_BYTES = 37  # kind, log, epoch, base, next offset, and bytes that follow or the number of the append

cdef int KIND_APPEND = APPEND, KIND_SHARED = SHARED
assert APPEND_FIELDS.size == SHARED_FIELDS.size == PART_HEADER_BYTES, "part_header() packs it by hand"


cdef class Ticket:
    """Resolved on the owner thread once an append, or an atomic group, is durable as its log's write mode wants it.

    No code above the log may use an offset before that: a round can still be refused as a whole.
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
            self.call_all(first, more)
        elif first is not None:
            first(self)

    cdef int call_all(self, first, list more) except -1:
        """Call every callback even if one raises, then raise the first error."""
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
                raise RuntimeError("the shard was opened without make_future, so its tickets cannot be awaited")
            future = self._make_future()
            self.add_callback(lambda _: None if future.done() else future.set_result(None))
            yield from future.__await__()
        if self.error is not None:
            raise self.error
        return self


cdef class TicketGroup:
    """Calls back once, when every ticket that was added has been resolved. The tickets need not be of one round."""

    def __init__(self, callback):
        self._callback = callback
        self._unresolved = 1  # until `close`: a ticket may be resolved at once

    cpdef object add(self, Ticket ticket):
        self._unresolved += 1
        ticket.add_callback(self)

    def __call__(self, Ticket ticket not None):
        if ticket.error is not None:
            self.has_errors = True
        self.close()

    cpdef object close(self):
        """No more tickets are added."""
        self._unresolved -= 1
        if self._unresolved == 0:
            # Released: the callback usually refers to the owner of this group, and a cycle would keep the owner's
            # batches until a garbage collection.
            callback, self._callback = self._callback, None
            callback()


cdef class LogEnd:
    """The end of a log that appends go to: the part of Log that the commit path uses. The rest is in log.py."""

    def __init__(self, Staging staging not None, long long log_id, str slug not None, settings, int epoch):
        self._staging = staging
        self.id = log_id
        self.slug = slug
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
        """Where readers of committed records stop if all other readers stop at `end`."""
        if self._stable_limit is None:
            return end
        return min(max(<long long>self._stable_limit, self.start_offset), end)

    @cython.nonecheck(True)
    cpdef tuple ends_at(self, long long next_offset):
        """Content of the log's slot, as the fields of slots.Ends, once all records before next_offset are in
        segments."""
        cdef long long end = max(next_offset, self.start_offset), durable = end
        if not self._syncs_before_confirm or len(self.tail._written) > 0:
            durable = min(self.durable_end, end)
        return self.id, self.epoch, self.start_offset, end, durable, self.stable_below(end)

    def append(self, batch, infos=None):
        """Stage whole batches. The ticket is resolved when they are durable, and then has their offsets.

        The log owns the buffer until then: it patches base offset and epoch in place.
        """
        cdef Ticket ticket = Ticket.__new__(Ticket)
        cdef RoundPart part = RoundPart.__new__(RoundPart)
        cdef Unit unit = Unit.__new__(Unit)
        self.check_append(batch, infos)
        ticket.base_offset = ticket.next_offset = part.base_offset = part.next_offset = -1
        ticket._make_future = self._staging.make_future
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
            raise Overloaded(f"log {self.id} ({self.slug}) is being truncated")
        cdef Py_ssize_t limit = self._settings.batch_bytes_max
        if len(batch) > limit:  # otherwise no single batch can be larger
            largest = max([info.size for info in infos]) if infos else len(batch)
            if largest > limit:
                raise BatchTooLarge(largest, limit)

    def wake(self):
        """Notify readers that wait for the visible end to move. Overridden by Log."""


cdef class RoundPart:
    """Whole batches for one log. `Round.assign_offsets` numbers them."""

    def __init__(self, LogEnd log not None, data, Ticket ticket not None, bint atomic):
        self.log = log
        self.data = data
        self.ticket = ticket
        self.atomic = atomic
        self.base_offset = self.next_offset = -1


cdef class Unit:
    """One append or one atomic group: always in one round."""

    def __init__(self, Ticket ticket not None):
        self.ticket = ticket
        self.parts = []
        self.changes = []

    cdef bint drop_deleted(self) except -1:
        """Drop the parts of logs that have been deleted since. False if that leaves nothing to write."""
        cdef RoundPart part
        for part in self.parts:
            if part.log.is_deleted:
                break
        else:
            return True
        self.parts = [part for part in self.parts if not part.log.is_deleted]
        return bool(self.parts or self.changes)


def resolve_all(list waiting not None, error=None):
    """Resolve the tickets of units or parts. All of them are resolved even if a callback raises; then the first error
    is raised."""
    cdef Ticket ticket
    raised = None
    for one in waiting:
        ticket = (<Unit>one).ticket if isinstance(one, Unit) else (<RoundPart?>one).ticket
        try:
            ticket.resolve(error)
        except Exception as bug:
            if raised is None:
                raised = bug
    if raised is not None:
        raise raised


cdef class Staging:
    """Units that wait for the next round. Logs and atomic groups put them here; the RoundScheduler takes them."""

    def __init__(self, status, defer, make_future=None):
        self.status = status
        self.defer = defer  # calls a function in the next event-loop iteration of the owner thread
        self.make_future = make_future
        self.pending = deque()
        self.start_round = None  # set by the RoundScheduler, as is in_flight

    cpdef object stage(self, Unit unit):
        status = self.status
        if status.failure is not None:
            raise StorageFailed(str(status.failure)) from status.failure
        if status.refuses:
            raise LogClosed("the broker is stopping")
        if status.is_full and unit.parts:
            raise status.refused_for_space()
        self.pending.append(unit)
        self.pending_bytes += unit.size
        if self.in_flight is None and not self.is_scheduled:
            # Deferred, so that everything else that arrives in this event-loop iteration joins the round.
            self.is_scheduled = True
            self.defer(self.start_round)


cdef class Round:
    """The units that are committed together."""
    cdef public list units, parts, changes, ends
    cdef public Py_ssize_t size
    cdef public bint must_sync
    cdef public bint bypasses_journal  # the write mode of some log in it does

    def __init__(self):
        self.units = []
        self.parts = []
        self.changes = []
        self.ends = []  # (log, epoch, end): synced in the segments since the last journal entry

    def fill(self, pending, Py_ssize_t bytes_max):
        """Move units from the front of `pending` into the round, at least one, up to bytes_max. Returns the units that
        were dropped because all of their logs have been deleted."""
        cdef Unit unit
        cdef list dropped = []
        while pending:
            unit = pending[0]
            if self.units and (unit.rides_alone or self.size + unit.size > bytes_max):
                break
            pending.popleft()
            if not unit.drop_deleted():
                dropped.append(unit)
                continue
            self.add(unit)
            if unit.rides_alone:
                break
        return dropped

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

    def assign_offsets(self):
        """Number the records without gaps, in order of arrival. Returns the logs whose first records of this epoch are
        in the round."""
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
        """All parts belong to one log and none to an atomic group."""
        cdef RoundPart part
        cdef LogEnd log = None
        for part in self.parts:
            if part.atomic or (log is not None and part.log is not log):
                return False
            log = part.log
        return log is not None

    @property
    def has_groups(self):
        """Some part belongs to an atomic group."""
        cdef RoundPart part
        for part in self.parts:
            if part.atomic:
                return True
        return False

    @property
    def shares_bytes(self):
        """The same buffer goes to several logs."""
        if len(self.parts) < 2:
            return False
        cdef RoundPart part
        cdef set seen = set()
        for part in self.parts:
            seen.add(<size_t><void*>part.data)
        return len(seen) < len(self.parts)

    def apply(self):
        """The round is committed: move the ends of its logs and give the tickets their offsets, without resolving them.
        Returns (number of records, the logs by id)."""
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
    """Group the parts by log, in the order of each log's first part: each run is one write. Skips deleted logs."""
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


cdef bytes part_header(int kind, RoundPart part, uint32_t last):
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, PART_HEADER_BYTES)
    cdef uint8_t* at = <uint8_t*>PyBytes_AS_STRING(packed)
    at[0] = kind
    put_le(at + 1, <uint64_t>part.log.id, 8)
    put_le(at + 9, <uint64_t>part.log.epoch, 8)
    put_le(at + 17, <uint64_t>part.base_offset, 8)
    put_le(at + 25, <uint64_t>part.next_offset, 8)
    put_le(at + 33, last, 4)
    return packed


def encode(list parts not None, list changes not None, list ends not None):
    """The body of a journal entry, as journal_entry.decode reads it. A buffer for several logs (fan-out) is stored
    once."""
    cdef RoundPart part
    cdef list body = []
    cdef dict stored = {}
    for part in parts:
        key = <size_t><void*>part.data
        number = stored.get(key)
        if number is None:
            stored[key] = len(stored)
            body.append(part_header(KIND_APPEND, part, len(part.data)))
            body.append(part.data)
        else:
            body.append(part_header(KIND_SHARED, part, number))
    for change in changes:
        table = change.table.encode()
        body.append(STATE_FIELDS.pack(change.kind, len(table), len(change.key), len(change.value)))
        body += [table, change.key, change.value]
    for end in ends:
        body.append(END_FIELDS.pack(END, *end))
    return body
