from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from headrace.errors import CorruptLog, HeadraceError
from headrace.log.commit.journal_entry import StateChange
from headrace.log.commit.log_writer import Tail
from headrace.log.settings import StreamSettings
from headrace.log.status import ShardStatus
from headrace.log.write_mode import WriteMode
from headrace.record.types import BatchInfo

class Ticket:
    done: bool
    error: HeadraceError | None
    base_offset: int
    next_offset: int
    def __init__(self, make_future: Callable[[], Any] | None = None) -> None: ...
    def add_callback(self, callback: Callable[[Ticket], object]) -> None: ...
    def resolve(self, error: HeadraceError | None = None) -> None: ...
    def __await__(self) -> Generator[Any, None, Ticket]: ...

class TicketGroup:
    @property
    def has_errors(self) -> bool: ...
    def __init__(self, callback: Callable[[], object]) -> None: ...
    def add(self, ticket: Ticket) -> None: ...
    def __call__(self, ticket: Ticket) -> None: ...
    def close(self) -> None: ...

class LogEnd:
    id: int
    settings: StreamSettings
    @property
    def write_mode(self) -> WriteMode: ...
    @property
    def slug(self) -> str: ...
    epoch: int
    epochs: list[tuple[int, int]]
    tail: Tail
    start_offset: int
    next_offset: int
    visible_end: int
    durable_end: int
    unflushed_bytes: int  # confirmed without a sync, and written since the last flush
    damage: CorruptLog | None
    is_closed: bool
    is_deleted: bool
    is_frozen: bool  # being truncated: no appends
    _stable_limit: int | None  # the first offset of the oldest open transaction
    def __init__(self, staging: Staging, log_id: int, slug: str, settings: StreamSettings, epoch: int) -> None: ...
    def stable_below(self, end: int) -> int: ...
    def ends_at(self, next_offset: int) -> tuple[int, int, int, int, int, int]: ...
    def append(self, batch: bytearray | memoryview, infos: Sequence[BatchInfo] | None = None) -> Ticket: ...
    def check_append(self, batch: bytearray | memoryview, infos: Sequence[BatchInfo] | None) -> None: ...
    def wake(self) -> None: ...

class RoundPart:
    log: LogEnd
    data: bytearray | memoryview
    ticket: Ticket
    atomic: bool
    base_offset: int
    next_offset: int
    def __init__(self, log: LogEnd, data: bytearray | memoryview, ticket: Ticket, atomic: bool) -> None: ...

class Unit:
    ticket: Ticket
    parts: list[RoundPart]
    changes: list[StateChange]
    size: int
    lazy: bool
    rides_alone: bool
    def __init__(self, ticket: Ticket) -> None: ...

def resolve_all(waiting: Sequence[Unit | RoundPart], error: HeadraceError | None = None) -> None: ...

class Staging:
    in_flight: Round | None
    pending_bytes: int
    is_scheduled: bool
    start_round: Callable[[], None] | None
    @property
    def status(self) -> ShardStatus: ...
    @property
    def pending(self) -> deque[Unit]: ...
    @property
    def defer(self) -> Callable[[Callable[[], object]], object]: ...
    @property
    def make_future(self) -> Callable[[], Any] | None: ...
    def __init__(
        self,
        status: ShardStatus,
        defer: Callable[[Callable[[], object]], object],
        make_future: Callable[[], Any] | None = None,
    ) -> None: ...
    def stage(self, unit: Unit) -> None: ...

class Round:
    units: list[Unit]
    parts: list[RoundPart]
    changes: list[StateChange]
    ends: list[tuple[int, int, int]]
    size: int
    must_sync: bool
    bypasses_journal: bool
    def fill(self, pending: deque[Unit], bytes_max: int) -> list[Unit]: ...
    def assign_offsets(self) -> list[LogEnd]: ...
    @property
    def has_one_log(self) -> bool: ...
    @property
    def has_groups(self) -> bool: ...
    @property
    def shares_bytes(self) -> bool: ...
    def apply(self) -> tuple[int, dict[int, LogEnd]]: ...

Run = tuple[LogEnd, list[RoundPart]]

def by_log(parts: list[RoundPart]) -> list[Run]: ...
def encode(
    parts: list[RoundPart], changes: list[StateChange], ends: list[tuple[int, int, int]]
) -> list[bytes | bytearray | memoryview]: ...
