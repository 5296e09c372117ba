"""Who is there, as PLAIN and AMQPLAIN say it."""

from collections.abc import Callable

from headrace.errors import InvalidInput
from headrace.record.amqp.properties import decode_table


def plain(response: bytes) -> tuple[str, str] | None:
    """(user, password) of a PLAIN response. Nobody acts as somebody else here, so whoever asks for that is refused."""
    parts = response.split(b"\0")
    if len(parts) != 3 or parts[0] not in (b"", parts[1]):
        return None
    # RabbitMQ hashes a password as the bytes it came in; escapes keep those that are no UTF-8.
    return parts[1].decode("utf-8", "replace"), parts[2].decode("utf-8", "surrogateescape")


def amqplain(response: bytes) -> tuple[str, str] | None:
    try:
        table = decode_table(len(response).to_bytes(4, "big") + response)
    except InvalidInput:
        return None
    user, password = table.get("LOGIN"), table.get("PASSWORD")
    return (user, password) if isinstance(user, str) and isinstance(password, str) else None


MECHANISMS: dict[str, Callable[[bytes], tuple[str, str] | None]] = {"PLAIN": plain, "AMQPLAIN": amqplain}
