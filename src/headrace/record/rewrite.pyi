from collections.abc import Callable, Iterable

from headrace.record.types import BatchInfo, Buffer

def filter_batch(
    buf: Buffer,
    info: BatchInfo,
    keep: Callable[[int], bool] | Iterable[int],
    *,
    decompressed_bytes_max: int = ...,
) -> bytearray | None: ...
