from collections.abc import Sequence

from typing_extensions import Buffer

class BinaryRows:
    first: int
    count: int
    def __init__(
        self, offsets: Buffer, data: Buffer | None, validity: Buffer | None, first: int, count: int
    ) -> None: ...

class PartitionedWriter:
    bytes_done: int
    rows: int
    def __init__(
        self,
        partitions: int,
        *,
        timestamp_ms: int,
        batch_bytes: int,
        codec: int = 0,
        bytes_max: int = ...,
        turn: int = 0,
    ) -> None: ...
    def add(
        self,
        keys: BinaryRows | None,
        values: BinaryRows,
        *,
        partitions: Buffer | None = None,
        timestamps: Buffer | None = None,
        headers: Sequence[tuple[bytes, int] | None] | None = None,
    ) -> None: ...
    def take(self, *, all: bool = True) -> list[tuple[int, list[bytearray]]]: ...
