from collections.abc import Callable, Iterable

from headrace.record.types import BatchInfo, Buffer

def filter_batch(
    buf: Buffer,
    info: BatchInfo,
    keep: Callable[[int], bool] | Iterable[int],
    *,
    delete_horizon_ms: int | None = None,
    decompressed_bytes_max: int = ...,
) -> bytearray | None: ...
