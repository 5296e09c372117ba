"""A minimal AMQP client for the demo and `headrace bench`: declare, publish with confirms, consume, ack, reject."""

import asyncio
import ssl
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from pamqp import commands
from pamqp.base import Frame

from headrace.errors import AccessRefused, BrokerUnreachable, Conflict, HeadraceError
from headrace.record.amqp.properties import encode_properties
from headrace.wire.amqp.methods import content_frames, decode, frame
from headrace.wire.amqp.protocol import FRAME_METHOD, PROTOCOL_HEADER

FRAME_MAX = 131_072
HEARTBEAT = 8
CHANNEL = 1
_HEAD = struct.Struct(">BHI")
_BODY = struct.Struct(">HHQ")


class Delivery(NamedTuple):
    tag: int
    routing_key: str
    body: bytes


class AmqpClient:
    """One connection with one channel. A background task reads deliveries, confirms and replies."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self.confirmed = 0
        self.published = 0
        self._progress = asyncio.Event()
        self._answers: asyncio.Queue[Frame | None] = asyncio.Queue()  # None: the connection has ended
        self._end: HeadraceError = BrokerUnreachable("the AMQP listener closed the connection")
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls, host: str, port: int, name: str, login: tuple[str, str] | None, tls: ssl.SSLContext | None = None
    ) -> "AmqpClient":
        """Without a login it connects as guest, because AMQP requires one."""
        user, password = login or ("guest", "guest")
        try:
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        except OSError as error:
            raise BrokerUnreachable(f"no AMQP listener at {host}:{port}: {error.strerror or error}") from None
        client = cls(reader, writer)
        writer.write(PROTOCOL_HEADER)
        await client._method()  # start
        properties = {"product": "headrace demo", "connection_name": name, "capabilities": {"basic.nack": True}}
        client._send(
            0,
            commands.Connection.StartOk,
            client_properties=properties,
            mechanism="PLAIN",
            response=f"\0{user}\0{password}",
            locale="en_US",
        )
        if isinstance(refused := await client._method(), commands.Connection.Close):
            raise AccessRefused(
                f"the AMQP listener at {host}:{port} refused the login of {user!r}: {refused.reply_text}"
            )
        client._send(0, commands.Connection.TuneOk, channel_max=1, frame_max=FRAME_MAX, heartbeat=0)
        client._send(0, commands.Connection.Open, virtual_host="/")
        await client._method()
        client._send(CHANNEL, commands.Channel.Open)
        await client._method()
        client._pump = asyncio.create_task(client._read())
        return client

    def _send(self, channel: int, method: type[Frame], **arguments: Any) -> None:
        self._writer.write(frame(channel, method, **arguments))

    async def call(self, method: type[Frame], **arguments: Any) -> Frame:
        """Sends a method and returns the reply."""
        self._send(CHANNEL, method, **arguments)
        answer = await self._answers.get()
        if answer is None:
            self._answers.put_nowait(None)
            raise self._end
        return answer

    async def publish(self, exchange: str, key: str, body: bytes, properties: Mapping[str, Any]) -> None:
        self.published += 1
        self._writer.write(
            content_frames(
                CHANNEL,
                commands.Basic.Publish,
                encode_properties({"delivery_mode": 2, **properties}),
                body,
                FRAME_MAX,
                exchange=exchange,
                routing_key=key,
            )
        )
        await self._writer.drain()

    async def wait_for_confirms(self, unconfirmed_max: int) -> None:
        while self.published - self.confirmed > unconfirmed_max and self._pump is not None and not self._pump.done():
            self._progress.clear()
            await self._progress.wait()

    def ack(self, tag: int) -> None:
        self._send(CHANNEL, commands.Basic.Ack, delivery_tag=tag, multiple=False)

    def reject(self, tag: int) -> None:
        self._send(CHANNEL, commands.Basic.Reject, delivery_tag=tag, requeue=False)

    async def closed(self) -> None:
        """Returns when the connection has ended."""
        if self._pump is not None:
            await asyncio.wait({self._pump})

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        if not self._writer.is_closing():
            self._send(0, commands.Connection.Close, reply_code=200, reply_text="", class_id=0, method_id=0)
            self._writer.close()

    # Receiving.

    async def _frame(self) -> tuple[int, bytes]:
        kind, _, size = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
        payload = await self._reader.readexactly(size + 1)
        return kind, payload[:-1]

    async def _method(self) -> Frame:
        while True:
            kind, payload = await self._frame()
            if kind == FRAME_METHOD:
                class_id, method_id = struct.unpack_from(">HH", payload)
                return decode(class_id, method_id, payload[4:])

    async def _read(self) -> None:
        try:
            while True:
                method: Any = await self._method()
                if isinstance(method, commands.Basic.Deliver):
                    self.deliveries.put_nowait(await self._delivery(method))
                elif isinstance(method, commands.Basic.Ack | commands.Basic.Nack):
                    last = method.delivery_tag or 0
                    self.confirmed = max(self.confirmed, last)
                    self._progress.set()
                elif isinstance(method, commands.Connection.Close | commands.Channel.Close):
                    self._end = Conflict(f"the AMQP listener refused: {method.reply_text}")
                    return
                else:
                    self._answers.put_nowait(method)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self._progress.set()
            self._answers.put_nowait(None)

    async def _delivery(self, method: Any) -> Delivery:
        _, header = await self._frame()
        size = _BODY.unpack_from(header)[2]
        body = b""
        while len(body) < size:
            body += (await self._frame())[1]
        return Delivery(method.delivery_tag, method.routing_key, body)
