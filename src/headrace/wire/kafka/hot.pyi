from collections.abc import Sequence

from typing_extensions import Buffer

TopicKey = str | bytes  # a name, or from Produce 13 and Fetch 13 on an id of 16 bytes

ProducePart = tuple[int, int, int]
ProduceResult = tuple[int, int, int, int, int, str | None, Sequence[int]]
FetchPart = tuple[int, int, int, int]
FetchResult = tuple[int, int, int, int, int, Sequence[tuple[int, int]] | None, Buffer | None]

def parse_produce(
    buffer: Buffer, position: int, end: int, version: int
) -> tuple[str | None, int, int, list[tuple[TopicKey, list[ProducePart]]]]: ...
def produce_response(
    version: int, correlation_id: int, topics: list[tuple[TopicKey, list[ProduceResult]]], throttle_ms: int
) -> bytes: ...
def parse_fetch(
    buffer: Buffer, position: int, end: int, version: int
) -> tuple[
    int,
    int,
    int,
    int,
    int,
    int,
    int,
    list[tuple[TopicKey, list[FetchPart]]],
    list[tuple[TopicKey, list[int]]],
]: ...
def fetch_response(
    version: int,
    correlation_id: int,
    throttle_ms: int,
    error: int,
    session_id: int,
    topics: list[tuple[TopicKey, list[FetchResult]]],
) -> list[bytes | memoryview]: ...
