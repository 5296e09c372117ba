from collections.abc import Iterable

from headrace.record.types import Buffer

# Header names are str (UTF-8 on the wire) or raw bytes.
HeaderPairs = Iterable[tuple[str | bytes, Buffer | None]]

class BatchWriter:
    def __init__(self, timestamp_ms: int, capacity: int = ..., *, bytes_max: int = ...) -> None: ...
    timestamp_ms: int
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...
    def append(
        self, key: Buffer | None, value: Buffer | None, headers: HeaderPairs = (), timestamp_ms: int = -1
    ) -> None: ...
    def finish(
        self,
        codec: int = 0,
        *,
        producer_id: int = -1,
        producer_epoch: int = -1,
        base_sequence: int = -1,
        transactional: bool = False,
        control: bool = False,
    ) -> bytearray: ...
    def discard(self) -> None: ...

def build(
    records: Iterable[tuple[Buffer | None, Buffer | None, HeaderPairs, int]],
    *,
    codec: int = 0,
    timestamp_ms: int = -1,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    control: bool = False,
) -> bytearray: ...
def encode_headers(headers: HeaderPairs) -> tuple[bytes, int]: ...
