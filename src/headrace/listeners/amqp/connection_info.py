"""The AMQP connections, channels and consumers as the management API shows them, with RabbitMQ's field names.
The descriptions are made on request."""

from collections.abc import Iterable
from typing import Any

from headrace.listeners.amqp.channel import Channel
from headrace.listeners.amqp.connection import Connection
from headrace.listeners.amqp.consumer import AmqpConsumer
from headrace.listeners.amqp.methods.connection import HandshakeStage
from headrace.wire.amqp.protocol import CONNECTION_FORCED

STATES = {HandshakeStage.RUNNING: "running", HandshakeStage.CLOSING: "closing", HandshakeStage.CLOSED: "closed"}


class AmqpClient:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        peer = connection.transport.peer or ("", 0)
        own = connection.transport.own_address or ("", 0)
        self._peer, self._own = peer[:2], own[:2]
        self._name = f"{_address_text(*self._peer)} -> {_address_text(*self._own)}"

    @property
    def _vhost(self) -> str:
        session = self._connection.session
        return session.vhost.name if session is not None else ""

    def describe(self) -> dict[str, Any]:
        connection = self._connection
        properties, counts = connection.client_properties, connection.transport.counts
        return {
            "name": self._name,
            "user_provided_name": properties.get("connection_name"),
            "node": "",
            "type": "network",
            "protocol": "AMQP 0-9-1",
            "user": connection.user,
            "user_who_performed_action": connection.user,
            "vhost": self._vhost,
            "state": "blocked" if connection.transport.is_held else STATES.get(connection.stage, "starting"),
            "peer_host": self._peer[0],
            "peer_port": self._peer[1],
            "host": self._own[0],
            "port": self._own[1],
            "ssl": connection.transport.has_tls,
            "auth_mechanism": "PLAIN",
            "connected_at": connection.connected_ms,
            "timeout": connection.transport.heartbeat_s,
            "frame_max": connection.frame_max,
            "channel_max": connection.channel_max,
            "channels": len(connection.channels),
            "client_properties": properties,
            "recv_oct": counts.received_bytes,
            "recv_cnt": counts.reads,
            "send_oct": counts.sent_bytes,
            "send_cnt": counts.writes,
            "send_pend": connection.transport.output_bytes,
            "reductions": 0,
        }

    def describe_channels(self) -> list[dict[str, Any]]:
        return [self._channel(channel) for channel in list(self._connection.channels.values())]

    def _details(self, channel: Channel) -> dict[str, Any]:
        return {
            "name": f"{self._name} ({channel.number})",
            "number": channel.number,
            "connection_name": self._name,
            "peer_host": self._peer[0],
            "peer_port": self._peer[1],
            "node": "",
            "user": self._connection.user,
        }

    def _channel(self, channel: Channel) -> dict[str, Any]:
        confirms = channel.confirms
        return {
            **self._details(channel),
            "vhost": self._vhost,
            "state": "running" if channel.is_flowing else "flow",
            "confirm": confirms is not None,
            "transactional": channel.tx is not None,
            "consumer_count": len(channel.consumers),
            "messages_unacknowledged": channel.state.tags.unacked,
            "messages_unconfirmed": max(0, channel.state.sequence - confirms.last_answered) if confirms else 0,
            "messages_uncommitted": len(channel.tx.publishes) if channel.tx is not None else 0,
            "acks_uncommitted": 0,
            "pending_raft_commands": 0,
            "prefetch_count": channel.prefetch,
            "global_prefetch_count": channel.prefetch_global,
            "reductions": 0,
            "message_stats": _message_stats(channel),
            "connection_details": {
                "name": self._name,
                "peer_host": self._peer[0],
                "peer_port": self._peer[1],
            },
        }

    def describe_consumers(self) -> list[dict[str, Any]]:
        return [
            self._consumer(channel, consumer)
            for channel in list(self._connection.channels.values())
            for consumer in list(channel.consumers.values())
        ]

    def _consumer(self, channel: Channel, consumer: AmqpConsumer) -> dict[str, Any]:
        return {
            "consumer_tag": consumer.tag,
            "queue": {"name": consumer.queue.name, "vhost": consumer.queue.vhost.name},
            "channel_details": self._details(channel),
            "ack_required": not consumer.no_ack,
            "exclusive": consumer.exclusive,
            "prefetch_count": consumer.prefetch,
            "priority": consumer.priority,
            "active": consumer.is_active,
            "activity_status": "up" if consumer.is_active else "waiting",
            "consumer_timeout": consumer.queue.policy.consumer_timeout_ms or 0,
            "in_flight": consumer.in_flight,
            "arguments": consumer.arguments,
        }

    def close_for(self, reason: str) -> None:
        self._connection.close(CONNECTION_FORCED, f"CONNECTION_FORCED - {reason}")


def _message_stats(channel: Channel) -> dict[str, int]:
    counts, state = channel.counts, channel.state
    return {
        "publish": state.messages,
        "confirm": counts.confirm,
        "return_unroutable": counts.returned,
        "drop_unroutable": counts.dropped + state.dropped,
        "deliver": counts.deliver,
        "deliver_no_ack": counts.deliver_no_ack,
        "get": counts.get,
        "get_no_ack": counts.get_no_ack,
        "get_empty": counts.get_empty,
        "deliver_get": counts.deliver + counts.deliver_no_ack + counts.get + counts.get_no_ack,
        "redeliver": counts.redeliver,
        "ack": counts.ack,
    }


def _address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def clients(connections: Iterable[Connection]) -> list[AmqpClient]:
    return [AmqpClient(connection) for connection in connections if connection.stage is not HandshakeStage.HEADER]
