from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from headrace.clock import Clock
from headrace.log.disk.disk import Disk
from headrace.log.disk.io_chain import Step
from headrace.log.segments.index import Walker
from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings

Bytes = bytes | bytearray | memoryview
JOURNAL_ID: int

class OpenFile:
    path: str
    file: int
    users: int
    def __init__(self, path: str, file: int) -> None: ...

class OpenFiles:
    disk: Disk
    _lock: Lock
    _open: dict[str, OpenFile]
    _idle: OrderedDict[str, OpenFile]  # those that may be closed: neither in use nor dirty
    _dirty: set[str]  # all of them open
    def __init__(self, disk: Disk, lock: Lock, idle: OrderedDict[str, OpenFile]) -> None: ...
    def _use(self, entry: OpenFile) -> OpenFile: ...
    def hold(self, path: str) -> OpenFile | None: ...
    def let_go(self, entry: OpenFile, dirty: bool = False) -> None: ...

class JournalEnd:
    _file: int | None
    _failure: OSError | None
    _file_bytes: int
    _number: int
    _position: int
    _synced: int
    sequence: int  # of the last entry written
    bytes_written: int
    def __init__(self, file_bytes: int) -> None: ...
    def step(self, buffers: list[Bytes]) -> Step | None: ...
    def wrote(self, step: Step) -> None: ...
    def sync_step(self) -> Step | None: ...
    def synced_all(self) -> None: ...
    @property
    def synced(self) -> int: ...
    @property
    def is_unsynced(self) -> bool: ...

class SlotFile:
    _file: int | None
    _places: dict[int, int]
    _free: list[int]
    _next: int
    def __init__(self) -> None: ...
    def step(self, ends: tuple[int, int, int, int, int, int]) -> Step: ...
    def sequence_step(self, sequence: int) -> Step: ...

class SegmentEnd:
    segment: Segment
    walker: Walker
    is_torn: bool  # a write broke off: bytes may lie behind its end
    def __init__(self, segment: Segment, walker: Walker) -> None: ...
    @property
    def index_is_due(self) -> bool: ...
    def appended(self, data: Sequence[Bytes]) -> None: ...
    def _publish(self) -> None: ...

class TailEnd:
    settings: StreamSettings
    _clock: Clock
    _written: dict[str, int]  # data file with bytes that no journal entry holds: its last write
    def __init__(self, files: OpenFiles, settings: StreamSettings, clock: Clock) -> None: ...
    def hold(self, size: int) -> OpenFile | None: ...
    def _is_full(self, writer: SegmentEnd, size: int) -> bool: ...
    @property
    def is_unsynced(self) -> bool: ...
