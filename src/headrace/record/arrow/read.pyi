from collections.abc import Iterable

from headrace.record.types import Buffer, Columns

def columns(
    buf: Buffer,
    start: int = 0,
    end: int | None = None,
    *,
    from_offset: int = 0,
    to_offset: int = ...,
    want: int = ...,
    decompressed_bytes_max: int = ...,
    rows_max: int = ...,
    bytes_max: int = ...,
    microseconds: bool = False,
    verify_crc: bool = True,
    aborted: Iterable[tuple[int, int, int]] = (),
    control: bool = False,
) -> Columns: ...
