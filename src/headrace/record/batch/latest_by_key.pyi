from array import array

from headrace.record.types import BatchInfo, Buffer

class LatestOffsets:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def learn(self, buf: Buffer, info: BatchInfo, *, decompressed_bytes_max: int = ...) -> None: ...
    def take(self, other: LatestOffsets) -> None: ...
    def apart(self) -> LatestOffsets: ...

def keep_latest(
    buf: Buffer,
    info: BatchInfo,
    latest: LatestOffsets,
    *,
    start: int,
    until: int,
    tombstones: bool,
    decompressed_bytes_max: int = ...,
) -> tuple[array[int], bool]: ...
def keep_listed(
    buf: Buffer,
    info: BatchInfo,
    offsets: array[int],
    *,
    until: int,
    tombstones: bool,
    decompressed_bytes_max: int = ...,
) -> tuple[array[int], bool]: ...
