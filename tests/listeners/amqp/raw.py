"""A client that sends arbitrary bytes and reads frames, to test malformed input."""

import socket
import struct
from typing import Any

from pamqp import commands
from pamqp.base import Frame

from headrace.wire.amqp.methods import decode, frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER

TIMEOUT_S = 60.0


class Closed(Exception):
    """The broker closed the connection."""


class Raw:
    """A connection to the broker. Most methods return the client, so that calls can be chained."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self._data = b""

    def send(self, data: bytes) -> "Raw":
        self.socket.sendall(data)
        return self

    def method(self, channel: int, method: type[Frame], **values: Any) -> "Raw":
        return self.send(frame(channel, method, **values))

    def take(self, count: int) -> bytes:
        while len(self._data) < count:
            try:
                more = self.socket.recv(65536)
            except ConnectionResetError:
                more = b""
            if not more:
                raise Closed(self._data)
            self._data += more
        found, self._data = self._data[:count], self._data[count:]
        return found

    def frame(self) -> tuple[int, int, bytes]:
        kind, channel, size = struct.unpack(">BHI", self.take(7))
        payload = self.take(size)
        assert self.take(1) == b"\xce"
        return kind, channel, payload

    def expect(self, method: type[Frame]) -> Any:
        """Read the next method, skipping heartbeats, and check its type."""
        while True:
            kind, _, payload = self.frame()
            if kind != 8:
                break
        class_id, method_id = struct.unpack(">HH", payload[:4])
        found = decode(class_id, method_id, payload[4:])
        assert isinstance(found, method), found
        return found

    def is_closed(self) -> bool:
        try:
            while True:
                self.take(1)
        except Closed:
            return True

    def start(self) -> Any:
        self.send(PROTOCOL_HEADER)
        return self.expect(commands.Connection.Start)

    def log_in(self, user: str = "guest", password: str = "guest") -> "Raw":
        response = f"\0{user}\0{password}".encode()
        capabilities = {"capabilities": {"authentication_failure_close": True, "consumer_cancel_notify": True}}
        return self.method(
            0, commands.Connection.StartOk, client_properties=capabilities, mechanism="PLAIN", response=response,
            locale="en_US",
        )  # fmt: skip

    def open(self, *, frame_max: int = 131_072, channel_max: int = 2047, heartbeat: int = 0) -> "Raw":
        self.start()
        self.log_in()
        self.expect(commands.Connection.Tune)
        self.method(0, commands.Connection.TuneOk, channel_max=channel_max, frame_max=frame_max, heartbeat=heartbeat)
        self.method(0, commands.Connection.Open, virtual_host="/")
        self.expect(commands.Connection.OpenOk)
        return self

    def channel(self, number: int = 1) -> "Raw":
        self.method(number, commands.Channel.Open)
        self.expect(commands.Channel.OpenOk)
        return self

    def close(self) -> None:
        self.socket.close()


def raw_frame(kind: int, channel: int, payload: bytes, end: bytes = b"\xce") -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + end


def content_header(body_size: int, properties: bytes = b"\0\0", class_id: int = 60) -> bytes:
    return struct.pack(">HHQ", class_id, 0, body_size) + properties
