"""An AMQP client made of a socket and bytes: fast enough to fill a broker, and rude where a library is polite."""

import socket
import struct
from typing import Any

from pamqp import commands, frame, header
from pamqp.base import Frame

END = b"\xce"
PATIENCE_S = 60.0


def method(channel: int, value: Frame) -> bytes:
    return frame.marshal(value, channel)


def content(body: bytes, channel: int = 1, persistent: bool = True, frame_max: int = 131072) -> bytes:
    properties = commands.Basic.Properties(delivery_mode=2 if persistent else 1)
    data = frame.marshal(header.ContentHeader(0, len(body), properties), channel)
    step = frame_max - 8
    for at in range(0, len(body), step):
        piece = body[at : at + step]
        data += struct.pack(">BHI", 3, channel, len(piece)) + piece + END
    return data


def publish(queue: str, body: bytes, channel: int = 1) -> bytes:
    return method(channel, commands.Basic.Publish(exchange="", routing_key=queue)) + content(body, channel)


class RawClient:
    """Reads only when asked to. `receive_bytes` keeps the kernel from taking what the test does not read."""

    def __init__(
        self, port: int, *, heartbeat: int = 0, receive_bytes: int | None = None, channel: bool = True
    ) -> None:
        self.socket = socket.socket()
        if receive_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(PATIENCE_S)
        self._buffer = b""
        try:
            self._open(port, heartbeat, channel)
        except BaseException:
            self.socket.close()
            raise

    def _open(self, port: int, heartbeat: int, channel: bool) -> None:
        self.socket.connect(("127.0.0.1", port))
        self.send(b"AMQP\x00\x00\x09\x01")
        self.expect(commands.Connection.Start)
        self.send(method(0, commands.Connection.StartOk({}, "PLAIN", "\0guest\0guest", "en_US")))
        tune = self.expect(commands.Connection.Tune)
        self.send(method(0, commands.Connection.TuneOk(tune.channel_max, tune.frame_max, heartbeat)))
        self.call(commands.Connection.Open("/"), commands.Connection.OpenOk, channel=0)
        if channel:
            self.open_channel(1)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_channel(self, number: int) -> None:
        self.call(commands.Channel.Open(), commands.Channel.OpenOk, channel=number)

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def call(self, value: Frame, answer: type[Frame], channel: int = 1) -> Any:
        self.send(method(channel, value))
        return self.expect(answer)

    def expect(self, kind: type[Frame]) -> Any:
        """The next method of that kind; deliveries and heartbeats on the way are thrown away."""
        while True:
            found = self.next_frame()
            if isinstance(found, kind):
                return found
            assert not isinstance(found, commands.Connection.Close | commands.Channel.Close), found

    def next_frame(self) -> Any:
        while True:
            if len(self._buffer) >= 7:
                size = int.from_bytes(self._buffer[3:7], "big") + 8
                if len(self._buffer) >= size:
                    data, self._buffer = self._buffer[:size], self._buffer[size:]
                    return frame.unmarshal(data)[2]
            more = self.socket.recv(1 << 16)
            if not more:
                raise ConnectionError("the broker hung up")
            self._buffer += more

    def declare(self, queue: str, *, durable: bool = True, exclusive: bool = False) -> None:
        value = commands.Queue.Declare(queue=queue, durable=durable, exclusive=exclusive)
        self.call(value, commands.Queue.DeclareOk)

    def depth(self, queue: str) -> int:
        """Also a barrier: what this connection published before is stored."""
        value = commands.Queue.Declare(queue=queue, passive=True)
        return int(self.call(value, commands.Queue.DeclareOk).message_count)

    def consume(self, queue: str, *, no_ack: bool = False) -> None:
        self.call(commands.Basic.Consume(queue=queue, no_ack=no_ack), commands.Basic.ConsumeOk)

    def close(self) -> None:
        self.socket.close()
