"""What a client may call things."""

from headrace.listeners.amqp.errors import ChannelError
from headrace.wire.amqp.protocol import PRECONDITION_FAILED


def check_name(name: str) -> str:
    """Any UTF-8 text (the decoder has seen to that) without a NUL, which would end it for half of the tools."""
    if "\0" in name:
        raise ChannelError(PRECONDITION_FAILED, "a name cannot hold a NUL character")
    # RabbitMQ drops line breaks from names, so that they cannot forge lines of its log.
    return name.replace("\r", "").replace("\n", "")
