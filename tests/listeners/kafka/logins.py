"""Users for tests of the Kafka listener, and logging in as one with bytes."""

from types import SimpleNamespace

from headrace.broker.access.permissions import EVERYTHING, Permission
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World

PASSWORD = "secret"
MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


async def add(world: World, name: str, *, tags: str = "", permission: Permission | None = EVERYTHING) -> None:
    await world.broker.users.put_user(name, password=PASSWORD, tags=tags)
    if permission is not None:
        await world.broker.users.set_permission("/", name, permission)


async def allow(world: World, name: str, **patterns: str) -> None:
    permission = Permission(**{"configure": "", "write": "", "read": "", **patterns})
    await world.broker.users.set_permission("/", name, permission)


def token(name: str, password: str = PASSWORD) -> bytes:
    return b"\0" + name.encode() + b"\0" + password.encode()


async def try_login(client: Client, sent: bytes, *, handshake: int = 1, version: int = 2) -> SimpleNamespace:
    answer = await client.call(Api.SASL_HANDSHAKE, handshake, mechanism="PLAIN")
    assert (answer.error_code, answer.mechanisms) == (0, MECHANISMS)
    return await client.call(Api.SASL_AUTHENTICATE, version, auth_bytes=sent)


async def logged_in(world: World, name: str) -> Client:
    client = await world.client()
    answer = await try_login(client, token(name))
    assert (answer.error_code, answer.error_message, answer.auth_bytes) == (0, None, b"")
    return client
