"""The session of an AMQP connection: the vhost that connection.open chose and the rights of the user in it."""

from typing import Any

from headrace.broker.vhosts.vhost import VirtualHost
from headrace.listeners.amqp.access import Access


class Session:
    """From connection.open until the connection ends. Owns the exclusive queues that the connection declares."""

    __slots__ = ("__weakref__", "_capabilities", "access", "frame_max", "is_closed", "user", "vhost")

    def __init__(
        self, vhost: VirtualHost, access: Access, user: str, frame_max: int, capabilities: dict[str, Any]
    ) -> None:
        self.vhost = vhost
        self.access = access
        self.user = user
        self.frame_max = frame_max
        self.is_closed = False
        self._capabilities = capabilities

    def supports(self, capability: str) -> bool:
        """Whether the client announced this capability in connection.start-ok."""
        return self._capabilities.get(capability) is True

    def close(self) -> None:
        """Deletes the exclusive queues. May be called again."""
        self.is_closed = True
        self.vhost.connection_closed(self)
