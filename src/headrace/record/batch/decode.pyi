from headrace.record.types import Buffer, Record

def records(
    buf: Buffer,
    start: int = 0,
    end: int | None = None,
    *,
    from_offset: int = 0,
    to_offset: int = ...,
    limit: int = ...,
    decompressed_bytes_max: int = ...,
    verify_crc: bool = False,
    control: bool = False,
) -> list[Record]: ...

# (records, next offset, bytes)
def records_of(
    buf: Buffer,
    position: int,
    *,
    from_offset: int = 0,
    to_offset: int = ...,
    limit: int = ...,
    bytes_max: int = ...,
    record_bytes_max: int = ...,
    decompressed_bytes_max: int = ...,
    values: bool = True,
    in_thread: bool = False,
) -> tuple[list[Record], int, int]: ...
def value_sizes(
    buf: Buffer,
    position: int,
    *,
    from_offset: int = 0,
    to_offset: int = ...,
    limit: int = ...,
    decompressed_bytes_max: int = ...,
    in_thread: bool = False,
) -> tuple[list[tuple[int, int]], int]: ...
def first_at(
    buf: Buffer,
    position: int,
    timestamp_ms: int,
    *,
    from_offset: int = 0,
    to_offset: int = ...,
    decompressed_bytes_max: int = ...,
    in_thread: bool = False,
) -> tuple[int, int] | None: ...
