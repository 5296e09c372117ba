"""The connections of this listener as the management API and the dashboard show them, built on demand."""

from collections.abc import Iterable
from typing import Any

from headrace.errors import HeadraceError
from headrace.listeners.kafka.connection import Connection


class KafkaClient:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        host, port = connection.peer
        own_host, own_port = connection.local_address
        self._name = f"{_spell(host, port)} -> {_spell(own_host, own_port)}"

    def describe(self) -> dict[str, Any]:
        connection = self._connection
        return {
            "name": self._name,
            "user_provided_name": connection.client_id or None,
            "node": "",
            "type": "network",
            "protocol": "Kafka",
            "user": connection.user,  # empty without a login while the broker is open
            "user_who_performed_action": connection.user,
            "vhost": "/",
            "state": "closed" if connection.is_closed else "running",
            "peer_host": connection.peer[0],
            "peer_port": connection.peer[1],
            "host": connection.local_address[0],
            "port": connection.local_address[1],
            "ssl": connection.has_tls,
            "auth_mechanism": connection.mechanism,
            "connected_at": connection.connected_ms,
            "timeout": 0,
            "frame_max": 0,
            "channel_max": 0,
            "channels": 0,
            "client_properties": {"product": connection.client_id} if connection.client_id else {},
            "recv_oct": connection.received_bytes,
            "recv_cnt": connection.requests,
            "send_oct": connection.sent_bytes,
            "send_cnt": connection.writes,
            "send_pend": 0,
            "reductions": 0,
        }

    def describe_channels(self) -> list[dict[str, Any]]:
        return []

    def describe_consumers(self) -> list[dict[str, Any]]:
        return []

    def close_for(self, reason: str) -> None:
        self._connection.abort(HeadraceError(f"closed by an operator: {reason}"))


def _spell(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def clients(connections: Iterable[Connection]) -> list[KafkaClient]:
    return [KafkaClient(connection) for connection in connections]
