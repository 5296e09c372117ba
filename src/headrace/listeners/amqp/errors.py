"""Maps the broker's errors to AMQP reply codes: one table, most specific errors first."""

from headrace.errors import (
    AccessRefused,
    ArgumentMismatch,
    BatchTooLarge,
    Conflict,
    ExclusiveUse,
    HeadraceError,
    InUse,
    InvalidInput,
    LimitReached,
    NotFound,
    NotSupported,
    Overloaded,
    ResourceLocked,
    StorageError,
    VirtualHostNotFound,
)
from headrace.wire.amqp import protocol
from headrace.wire.amqp.protocol import REPLY_NAMES, ProtocolError

REPLY_CODES: dict[type[HeadraceError], int] = {
    VirtualHostNotFound: protocol.NOT_ALLOWED,
    ExclusiveUse: protocol.ACCESS_REFUSED,
    AccessRefused: protocol.ACCESS_REFUSED,
    NotFound: protocol.NOT_FOUND,
    ResourceLocked: protocol.RESOURCE_LOCKED,
    InUse: protocol.PRECONDITION_FAILED,
    ArgumentMismatch: protocol.PRECONDITION_FAILED,
    BatchTooLarge: protocol.CONTENT_TOO_LARGE,
    Conflict: protocol.PRECONDITION_FAILED,
    InvalidInput: protocol.PRECONDITION_FAILED,
    NotSupported: protocol.NOT_IMPLEMENTED,
    LimitReached: protocol.RESOURCE_ERROR,
    Overloaded: protocol.RESOURCE_ERROR,
    StorageError: protocol.INTERNAL_ERROR,
}
# These codes close the connection, all others only the channel.
HARD = frozenset(
    {
        protocol.CONNECTION_FORCED,
        protocol.INVALID_PATH,
        protocol.FRAME_ERROR,
        protocol.SYNTAX_ERROR,
        protocol.COMMAND_INVALID,
        protocol.CHANNEL_ERROR,
        protocol.UNEXPECTED_FRAME,
        protocol.RESOURCE_ERROR,
        protocol.NOT_ALLOWED,
        protocol.NOT_IMPLEMENTED,
        protocol.INTERNAL_ERROR,
    }
)


class ChannelError(HeadraceError):
    """A client error found by the listener. The code decides whether it closes the channel or the connection."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def reply(error: HeadraceError) -> tuple[int, str]:
    """(reply code, reply text) in RabbitMQ's format."""
    if isinstance(error, ChannelError | ProtocolError):
        code = error.code
    else:
        code = next((c for kind, c in REPLY_CODES.items() if isinstance(error, kind)), protocol.INTERNAL_ERROR)
    return code, f"{REPLY_NAMES[code]} - {error}"
