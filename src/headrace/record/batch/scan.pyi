from headrace.record.types import BatchInfo, Buffer

def scan(buf: Buffer, start: int = 0, end: int | None = None, *, verify_crc: bool = True) -> list[BatchInfo]: ...
def valid_until(
    buf: Buffer, start: int = 0, end: int | None = None, expected_offset: int = -1, *, dense: bool = False
) -> tuple[int, int, int, int, str | None]: ...
def epochs_until(buf: Buffer, end: int, lowest: int, highest: int) -> tuple[int, int, int]: ...
def first_compressed(buf: Buffer) -> int: ...
def validate(
    buf: Buffer,
    *,
    batch_bytes_max: int = ...,
    decompressed_bytes_max: int = ...,
    records_max: int = ...,
    headers_max: int = ...,
    deep: bool = True,
    repair: bool = False,
    keyed: bool = False,
    lowest_timestamp: int = ...,
    highest_timestamp: int = ...,
) -> list[BatchInfo]: ...
def patch(buf: bytearray | memoryview, position: int, base_offset: int, leader_epoch: int) -> None: ...
def patch_run(buf: bytearray | memoryview, start: int, end: int, base_offset: int, leader_epoch: int) -> int: ...

# (first position, end position, next offset). If the buffer truncates the first wanted batch, both positions are equal
# and the third number is minus the number of bytes needed from there.
def trim(
    buf: Buffer,
    start: int,
    end: int | None,
    from_offset: int,
    to_offset: int,
    bytes_max: int = ...,
    expected: int = ...,
    dense: bool = ...,
    verify_crc: bool = ...,
) -> tuple[int, int, int]: ...
