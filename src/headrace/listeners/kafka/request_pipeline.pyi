import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self

from headrace.broker.access.users import Users
from headrace.listeners.kafka.auth.gate import LoginStage
from headrace.listeners.kafka.connection import Connection
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.dispatch import Handler
from headrace.listeners.kafka.sendfile import FileSending, Piece
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.frames import FrameReader

LISTENER_BYTES_WAITING_MAX: int

class Request:
    """Made only by a RequestPipeline."""

    connection: Connection
    buffer: bytearray
    client_id: str
    api: Api
    pieces: Sequence[Piece]
    size: int
    position: int
    version: int
    correlation_id: int
    answered: bool
    @property
    def body(self) -> memoryview: ...
    def answer(self, pieces: Sequence[Piece]) -> None: ...
    def reply(self, values: dict[str, Any]) -> None: ...
    def fail(self, error: BaseException) -> None: ...

class PipelineGroup:
    def __new__(
        cls,
        context: KafkaContext,
        users: Users,
        handlers: dict[Api, Handler],
        answer_in_task: Handler,
        take_raw_token: Callable[[KafkaContext, Connection, bytes], None],
    ) -> Self: ...
    @property
    def context(self) -> KafkaContext: ...
    @property
    def heavy(self) -> int: ...

class RequestPipeline:
    _is_narrow: bool
    _is_over: bool
    _throttled: asyncio.TimerHandle | None
    _transport: asyncio.Transport
    _files: FileSending | None
    is_closed: bool
    login: LoginStage
    admitted_at: int
    client_id: str
    def __new__(cls, group: PipelineGroup, *others: object) -> Self: ...
    @property
    def _frames(self) -> FrameReader: ...
    @property
    def _waiting(self) -> list[Request]: ...
    @property
    def _waiting_bytes(self) -> int: ...
    @property
    def _answer_bytes(self) -> int: ...
    @property
    def _holds(self) -> set[str]: ...
    @property
    def _reading_paused(self) -> bool: ...
    @property
    def requests(self) -> int: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def writes(self) -> int: ...
    def get_buffer(self, sizehint: int) -> memoryview: ...
    def buffer_updated(self, count: int) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
    def _limit_requests(self, bytes_max: int) -> None: ...
    def _forget_requests(self) -> None: ...
    def _flush(self) -> None: ...
    def _pause_or_resume(self) -> None: ...
