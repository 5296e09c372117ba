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
