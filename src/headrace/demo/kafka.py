"""A minimal Kafka client for the demo: fetch from an offset, commit and read a group's offset."""

import asyncio
import ssl
import struct
from typing import NamedTuple

from headrace.errors import AccessRefused, BrokerUnreachable
from headrace.record import codec
from headrace.record.types import Record

FETCH, LIST_OFFSETS, OFFSET_COMMIT, OFFSET_FETCH = (1, 4), (2, 1), (8, 2), (9, 1)
EARLIEST = -2
SASL_HANDSHAKE, SASL_AUTHENTICATE = (17, 1), (36, 0)
FETCH_BYTES = 1 << 20
WAIT_MS = 500


class Fetched(NamedTuple):
    error: int
    records: list[Record]


def text(value: str | None) -> bytes:
    if value is None:
        return b"\xff\xff"
    data = value.encode()
    return struct.pack(">h", len(data)) + data


class KafkaClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._correlation = 0

    @classmethod
    async def connect(
        cls, host: str, port: int, login: tuple[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> "KafkaClient":
        """Without a login the broker treats a local client as guest, if that user exists."""
        try:
            client = cls(*await asyncio.open_connection(host, port, ssl=tls))
        except OSError as error:
            raise BrokerUnreachable(f"no Kafka listener at {host}:{port}: {error.strerror or error}") from None
        if login is not None:
            await client._log_in(*login)
        return client

    async def _log_in(self, user: str, password: str) -> None:
        await self._call(SASL_HANDSHAKE, text("PLAIN"))
        token = b"\0" + user.encode() + b"\0" + password.encode()
        answer = await self._call(SASL_AUTHENTICATE, struct.pack(">i", len(token)) + token)
        if struct.unpack_from(">h", answer)[0]:
            await self.close()
            raise AccessRefused(f"the Kafka listener refused the login of {user!r}")

    async def _call(self, api: tuple[int, int], body: bytes) -> bytes:
        self._correlation += 1
        request = struct.pack(">hhi", *api, self._correlation) + text("headrace-demo") + body
        self._writer.write(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        return (await self._reader.readexactly(size))[4:]

    async def fetch(self, topic: str, offset: int) -> Fetched:
        wanted = struct.pack(">iqi", 0, offset, FETCH_BYTES)
        body = struct.pack(">iiiib", -1, WAIT_MS, 1, FETCH_BYTES, 0)
        body += struct.pack(">i", 1) + text(topic) + struct.pack(">i", 1) + wanted
        answer = await self._call(FETCH, body)
        at = 4 + 4
        (size,) = struct.unpack_from(">h", answer, at)
        at += 2 + size + 4
        _, error, _, _, aborted = struct.unpack_from(">ihqqi", answer, at)
        at += 26 + max(0, aborted) * 16
        (size,) = struct.unpack_from(">i", answer, at)
        data = answer[at + 4 : at + 4 + max(0, size)]
        records = codec.records(data, from_offset=offset) if data else []
        return Fetched(error, records)

    async def start(self, topic: str) -> int:
        """The first offset that can be fetched."""
        body = struct.pack(">ii", -1, 1) + text(topic) + struct.pack(">iiq", 1, 0, EARLIEST)
        answer = await self._call(LIST_OFFSETS, body)
        (size,) = struct.unpack_from(">h", answer, 4)
        _, _, _, offset = struct.unpack_from(">ihqq", answer, 4 + 2 + size + 4)
        return int(offset)

    async def committed(self, group: str, topic: str) -> int:
        body = text(group) + struct.pack(">i", 1) + text(topic) + struct.pack(">ii", 1, 0)
        answer = await self._call(OFFSET_FETCH, body)
        (size,) = struct.unpack_from(">h", answer, 4)
        _, offset = struct.unpack_from(">iq", answer, 4 + 2 + size + 4)
        return int(offset)

    async def commit(self, group: str, topic: str, offset: int) -> None:
        body = text(group) + struct.pack(">i", -1) + text("") + struct.pack(">qi", -1, 1) + text(topic)
        body += struct.pack(">iiq", 1, 0, offset) + text("")
        await self._call(OFFSET_COMMIT, body)

    async def close(self) -> None:
        self._writer.close()
