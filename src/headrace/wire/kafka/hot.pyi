from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

TopicKey = str | bytes  # a name, or from Produce 13 and Fetch 13 on an id of 16 bytes

ProducePart = tuple[int, int, int]
ProduceResult = tuple[int, int, int, int, int, str | None, Sequence[int]]
Records = Any  # a buffer, or a FileRange of the broker, which this layer only passes on
FetchPart = tuple[int, int, int, int]

class FetchRequest:
    @property
    def replica_id(self) -> int: ...
    @property
    def max_wait_ms(self) -> int: ...
    @property
    def min_bytes(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def isolation(self) -> int: ...
    @property
    def session_id(self) -> int: ...
    @property
    def session_epoch(self) -> int: ...
    @property
    def topics(self) -> list[tuple[TopicKey, list[FetchPart]]]: ...
    @property
    def forgotten(self) -> list[tuple[TopicKey, list[int]]]: ...

class FetchResult:
    def __init__(
        self,
        partition: int,
        error: int,
        high_watermark: int = -1,
        last_stable: int = -1,
        log_start: int = -1,
        aborted: Sequence[tuple[int, int]] | None = None,
        records: Records | None = None,
    ) -> None: ...
    @property
    def partition(self) -> int: ...
    @property
    def error(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def last_stable(self) -> int: ...
    @property
    def log_start(self) -> int: ...
    @property
    def aborted(self) -> Sequence[tuple[int, int]] | None: ...
    @property
    def records(self) -> Records | None: ...

def parse_produce(
    buffer: Buffer, position: int, end: int, version: int
) -> tuple[str | None, int, int, list[tuple[TopicKey, list[ProducePart]]]]: ...
def produce_response(
    version: int, correlation_id: int, topics: list[tuple[TopicKey, list[ProduceResult]]], throttle_ms: int
) -> bytes: ...
def parse_fetch(buffer: Buffer, position: int, end: int, version: int) -> FetchRequest: ...
def fetch_response(
    version: int,
    correlation_id: int,
    throttle_ms: int,
    error: int,
    session_id: int,
    topics: list[tuple[TopicKey, list[FetchResult]]],
) -> list[Any]: ...
