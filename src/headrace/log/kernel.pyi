from typing_extensions import Buffer

def find_position(entries: bytes, relative_offset: int) -> int: ...
def find_entry(entries: bytes, relative_offset: int) -> tuple[int, int]: ...
def first_damaged_time_entry(entries: Buffer, segment_base: int) -> int: ...
def find_offset_for_time(entries: Buffer, segment_base: int, timestamp: int) -> int: ...

class Walker:
    base: int
    interval: int
    position: int
    next_offset: int
    max_timestamp: int
    records: int
    batches: int
    headers_crc: int
    index: bytearray
    time_index: bytearray
    def __init__(
        self,
        base: int,
        interval: int,
        *,
        position: int = 0,
        next_offset: int = -1,
        max_timestamp: int = -1,
        records: int = 0,
        batches: int = 0,
        headers_crc: int = 0,
        last_indexed: int = -1,
    ) -> None: ...
    @property
    def last_indexed_position(self) -> int: ...
    def find_pending(self, relative_offset: int) -> int: ...
    def find_pending_entry(self, relative_offset: int) -> tuple[int, int] | None: ...
    def skip_to(self, offset: int) -> None: ...
    def walk(self, data: Buffer, start: int = 0, end: int = -1) -> int: ...
