"""SASL/SCRAM at the Kafka listener, with bytes; real clients log in with it in tests/interop/kafka/test_users.py."""

import base64
import hashlib
import logging
import struct
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from headrace.broker.access import scram_keys
from headrace.broker.access.users import GUEST
from headrace.broker.vhosts.definitions import export, import_
from headrace.errors import InvalidInput
from headrace.listeners.kafka.auth import login
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.logins import PASSWORD, add, logged_in
from tests.listeners.kafka.world import Client, Closed, World, world_at

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOTH = [scram_keys.SHA256, scram_keys.SHA512]
NUMBERS = {scram_keys.SHA256: 1, scram_keys.SHA512: 2}
HEADER = "n,,"
NONCE = "fyko+d2lbbFgONRv9qkxdawL"


async def prepare(world: World) -> None:
    await world.topic("t")
    await add(world, "ann")
    await add(world, "a,b=c")
    await add(world, "root", tags="administrator")
    await world.broker.users.remove_user(GUEST)


@pytest.fixture(autouse=True)
def no_bug(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(login, "FAILURE_DELAY_S", 0.0)
    yield
    assert [one.getMessage() for one in caplog.get_records("call") if one.levelno >= logging.ERROR] == []


class Login:
    """The client side of RFC 5802, with options to send wrong values."""

    def __init__(self, name: str, password: str = PASSWORD, mechanism: str = scram_keys.SHA256) -> None:
        self.mechanism, self._password = mechanism, password
        self._bare = f"n={name.replace('=', '=3D').replace(',', '=2C')},r={NONCE}"
        self._signature = b""

    @property
    def first(self) -> bytes:
        return f"{HEADER}{self._bare}".encode()

    def final(self, answer: bytes, *, header: str = HEADER, nonce: str | None = None) -> bytes:
        said = dict(part.split("=", 1) for part in answer.decode().split(","))
        salt = base64.b64decode(said["s"])
        hash_name = scram_keys.HASHES[self.mechanism]
        salted = hashlib.pbkdf2_hmac(hash_name, self._password.encode(), salt, int(said["i"]))
        channel = base64.b64encode(header.encode()).decode()
        bare = f"c={channel},r={said['r'] if nonce is None else nonce}"
        message = f"{self._bare},{answer.decode()},{bare}".encode()
        client_key = scram_keys.digest(self.mechanism, salted, b"Client Key")
        signature = scram_keys.digest(self.mechanism, hashlib.new(hash_name, client_key).digest(), message)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        server_key = scram_keys.digest(self.mechanism, salted, b"Server Key")
        self._signature = base64.b64encode(scram_keys.digest(self.mechanism, server_key, message))
        return bare.encode() + b",p=" + base64.b64encode(proof)

    def believes(self, answer: bytes) -> bool:
        return answer == b"v=" + self._signature


async def begin(client: Client, one: Login) -> bytes:
    answer = await client.call(Api.SASL_HANDSHAKE, 1, mechanism=one.mechanism)
    assert answer.error_code == 0
    first = await send(client, one.first)
    assert (first.error_code, first.error_message) == (0, None)
    return bytes(first.auth_bytes)


async def send(client: Client, token: bytes) -> SimpleNamespace:
    return await client.call(Api.SASL_AUTHENTICATE, 2, auth_bytes=token)


async def is_let_in(client: Client, one: Login) -> bool:
    answer = await send(client, one.final(await begin(client, one)))
    if answer.error_code:
        assert answer.error_code == Code.SASL_AUTHENTICATION_FAILED
        assert "invalid credentials with SASL mechanism SCRAM-SHA-" in answer.error_message
        assert await client.is_closed()
        return False
    assert one.believes(answer.auth_bytes), "the client can verify the broker"
    return bool((await client.call(Api.METADATA, 9, topics=None)).topics[0].name == "t")


async def test_the_example_of_rfc_7677() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", salt, 4096)
    keys = scram_keys.of_salted(scram_keys.SHA256, salted, salt, 4096)
    nonce = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    said = b"n=user,r=rOprNGfwEbeRWgbNEkqO," + nonce + b",s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096,c=biws," + nonce
    assert scram_keys.proves(
        scram_keys.SHA256, keys, said, base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    )
    assert not scram_keys.proves(scram_keys.SHA256, keys, said + b"x", bytes(32))
    signature = base64.b64encode(scram_keys.digest(scram_keys.SHA256, keys.server_key, said))
    assert signature == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


@pytest.mark.parametrize("mechanism", BOTH)
@pytest.mark.parametrize("name", ["ann", "a,b=c"])
async def test_the_right_password_logs_in_and_the_connection_shows_its_mechanism(
    world: World, mechanism: str, name: str
) -> None:
    client = await world.client()
    assert await is_let_in(client, Login(name, mechanism=mechanism))
    shown = [(one.describe()["user"], one.describe()["auth_mechanism"]) for one in world.broker.clients.all()]
    assert (name, mechanism) in shown


async def test_raw_tokens_of_old_clients_are_accepted(world: World) -> None:
    client, one = await world.client(), Login("ann")
    await client.call(Api.SASL_HANDSHAKE, 0, mechanism=one.mechanism)
    client.send_bytes(struct.pack(">i", len(one.first)) + one.first)
    final = one.final(await client.receive())
    client.send_bytes(struct.pack(">i", len(final)) + final)
    assert one.believes(await client.receive())
    assert (await client.call(Api.METADATA, 9, topics=None)).topics[0].name == "t"


@pytest.mark.parametrize("mechanism", BOTH)
async def test_a_wrong_password_is_refused_and_not_logged(
    world: World, mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not await is_let_in(await world.client(), Login("ann", "guessed", mechanism))
    assert "user 'ann' - invalid credentials" in caplog.text
    assert "guessed" not in caplog.text


async def test_an_unknown_user_gets_a_constant_salt_and_is_refused_last(world: World) -> None:
    salts = set()
    for _ in range(2):
        client, one = await world.client(), Login("nobody")
        answer = await begin(client, one)
        salts.add(answer.split(b",")[1])
        assert answer.endswith(b",i=4096")
        assert (await send(client, one.final(answer))).error_code == Code.SASL_AUTHENTICATION_FAILED
    [salt] = salts
    assert len(salt) == len((await begin(await world.client(), Login("ann"))).split(b",")[1])


@pytest.mark.parametrize(
    "token",
    [
        b"",
        b"\0ann\0secret",
        b"n,,n=ann",
        b"n,,n=,r=abc",
        b"n,,n=ann,r=",
        b"n,,n=a=zz,r=abc",
        b"y,,n=ann,r=abc",
        b"p=tls-unique,,n=ann,r=abc",
        b"n,a=bob,n=ann,r=abc",
        b"n,,n=ann,r=abc,tokenauth=true",
        b"n,,n=ann,r=a\0b",
        b"\xff" * 5000,
    ],
)
async def test_an_invalid_first_message_is_refused(world: World, token: bytes) -> None:
    client = await world.client()
    await client.call(Api.SASL_HANDSHAKE, 1, mechanism=scram_keys.SHA256)
    assert (await send(client, token)).error_code == Code.SASL_AUTHENTICATION_FAILED
    assert await client.is_closed()


@pytest.mark.parametrize(
    "lie",
    [{"nonce": NONCE}, {"nonce": "other"}, {"header": "y,,"}, {"header": ""}],
    ids=["half a nonce", "another nonce", "another header", "no header"],
)
async def test_a_final_message_of_another_login_is_refused(world: World, lie: dict[str, str]) -> None:
    client, one = await world.client(), Login("ann")
    answer = await begin(client, one)
    assert (await send(client, one.final(answer, **lie))).error_code == Code.SASL_AUTHENTICATION_FAILED
    assert await client.is_closed()


@pytest.mark.parametrize("cut", [0, 10, -1])
async def test_a_truncated_final_message_is_refused(world: World, cut: int) -> None:
    client, one = await world.client(), Login("ann")
    final = one.final(await begin(client, one))
    assert (await send(client, final[:cut])).error_code == Code.SASL_AUTHENTICATION_FAILED
    assert await client.is_closed()


async def test_a_replayed_login_is_refused(world: World) -> None:
    one = Login("ann")
    final = one.final(await begin(await world.client(), one))
    client = await world.client()
    await begin(client, one)
    assert (await send(client, final)).error_code == Code.SASL_AUTHENTICATION_FAILED


async def test_no_other_request_is_served_between_the_two_messages(world: World) -> None:
    client = await world.client()
    await begin(client, Login("ann"))
    with pytest.raises(Closed):
        await client.call(Api.METADATA, 9, topics=None)


async def test_a_login_fails_if_the_password_changes_meanwhile(world: World) -> None:
    users = world.broker.users
    await users.put_user("eve", password="old")
    client, one = await world.client(), Login("eve", "old")
    answer = await begin(client, one)
    await users.put_user("eve", password="new")
    assert (await send(client, one.final(answer))).error_code == Code.SASL_AUTHENTICATION_FAILED


async def test_a_new_password_hash_ends_scram_and_the_same_hash_does_not(world: World) -> None:
    users = world.broker.users
    made = await users.put_user("kim", password="old")
    await users.put_user("kim", password_hash=made.password_hash, tags="management")
    assert users.scram_keys("kim", scram_keys.SHA256) == made.scram[scram_keys.SHA256]
    other = await users.put_user("lee", password="other")
    await users.put_user("kim", password_hash=other.password_hash)
    assert users.user("kim").scram == {}
    await users.put_user("lee", password_hash="")
    assert users.user("lee").scram == {}, "no password matches an empty hash"


async def test_scram_keys_are_exported_in_definitions_and_survive_a_restart(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    exported = [user for user in (await export(world.broker))["users"] if user["name"] == "ann"]
    folder = tmp_path_factory.mktemp("other")
    async with world_at(folder) as other:
        short = {scram_keys.SHA512: exported[0]["scram"][scram_keys.SHA256]}
        wrongs: list[object] = [
            {"SCRAM-SHA-1": short[scram_keys.SHA512]},
            {scram_keys.SHA256: {"salt": "x"}},
            [],
            short,
        ]
        for wrong in wrongs:
            with pytest.raises(InvalidInput, match="SCRAM"):
                await import_(other.broker, {"users": [{**exported[0], "scram": wrong}]})
        await import_(other.broker, {"users": exported})
    async with world_at(folder) as again:
        await again.broker.users.remove_user(GUEST)
        client, one = await again.client(), Login("ann")
        assert one.believes((await send(client, one.final(await begin(client, one)))).auth_bytes)


# As Kafka's tools set them.


def upsertion(name: str, password: str, mechanism: str = scram_keys.SHA256, **changes: object) -> dict[str, object]:
    salt = b"salt of a client"
    salted = hashlib.pbkdf2_hmac(scram_keys.HASHES[mechanism], password.encode(), salt, 4096)
    number = NUMBERS[mechanism]
    fields = {"name": name, "mechanism": number, "iterations": 4096, "salt": salt, "salted_password": salted}
    return {**fields, **changes}


async def alter(
    client: Client, *upsertions: dict[str, object], delete: tuple[tuple[str, int], ...] = ()
) -> list[tuple[str, int]]:
    deletions = [{"name": name, "mechanism": mechanism} for name, mechanism in delete]
    answer = await client.call(Api.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=deletions, upsertions=list(upsertions))
    return [(one.user, one.error_code) for one in answer.results]


async def described(client: Client, *names: str) -> list[tuple[str, int, list[tuple[int, int]]]]:
    users = [{"name": name} for name in names] or None
    answer = await client.call(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users=users)
    infos = {one.user: [(info.mechanism, info.iterations) for info in one.credential_infos] for one in answer.results}
    return [(one.user, one.error_code, infos[one.user]) for one in answer.results]


async def test_a_user_created_with_one_mechanism_can_log_in_until_it_is_deleted(world: World) -> None:
    root = await logged_in(world, "root")
    assert await alter(root, upsertion("sam", "s3cret", scram_keys.SHA512)) == [("sam", 0)]
    assert await described(root, "sam") == [("sam", 0, [(2, 4096)])]
    assert ("ann", 0, [(1, 4096), (2, 4096)]) in await described(root)
    assert not await is_let_in(await world.client(), Login("sam", "s3cret"))
    client, one = await world.client(), Login("sam", "s3cret", scram_keys.SHA512)
    assert one.believes((await send(client, one.final(await begin(client, one)))).auth_bytes)
    assert world.broker.users.authenticate("sam", "s3cret") is None, "the broker does not know the password"
    assert await alter(root, delete=(("sam", 2),)) == [("sam", 0)]
    assert not await is_let_in(await world.client(), Login("sam", "s3cret", scram_keys.SHA512))
    assert await described(root, "sam") == [("sam", Code.RESOURCE_NOT_FOUND, [])]
    await world.broker.users.remove_user("sam")


async def test_invalid_credentials_get_kafkas_codes_and_change_nothing(world: World) -> None:
    root, before = await logged_in(world, "root"), world.broker.users.users()
    assert await alter(root, upsertion("", "x")) == [("", Code.UNACCEPTABLE_CREDENTIAL)]
    assert await alter(root, upsertion("u", "x", iterations=4095)) == [("u", Code.UNACCEPTABLE_CREDENTIAL)]
    assert await alter(root, upsertion("u", "x", iterations=16385)) == [("u", Code.UNACCEPTABLE_CREDENTIAL)]
    assert await alter(root, upsertion("u", "x", salt=b"")) == [("u", Code.UNACCEPTABLE_CREDENTIAL)]
    assert await alter(root, {**upsertion("u", "x"), "mechanism": 3}) == [("u", Code.UNSUPPORTED_SASL_MECHANISM)]
    assert await alter(root, upsertion("u", "x"), upsertion("u", "y")) == [("u", Code.DUPLICATE_RESOURCE)]
    assert await alter(root, upsertion("ann", "x"), delete=(("ann", 1),)) == [("ann", Code.DUPLICATE_RESOURCE)]
    assert await alter(root, delete=(("u", 1),)) == [("u", Code.RESOURCE_NOT_FOUND)]
    assert await alter(root, upsertion("u" * 300, "x")) == [("u" * 300, Code.INVALID_REQUEST)]
    assert await described(root, "ann", "ann") == [("ann", Code.DUPLICATE_RESOURCE, [])]
    assert world.broker.users.users() == before


async def test_only_an_administrator_can_set_passwords(world: World) -> None:
    ann = await logged_in(world, "ann")
    assert await alter(ann, upsertion("root", "mine now")) == [("root", Code.CLUSTER_AUTHORIZATION_FAILED)]
    answer = await ann.call(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users=None)
    assert (answer.error_code, answer.results) == (Code.CLUSTER_AUTHORIZATION_FAILED, [])


async def test_the_first_user_of_an_open_broker_must_be_created_on_its_machine(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_at(tmp_path_factory.mktemp("open"), protected_mode=False) as opened:
        client = await opened.client()
        await client.call(Api.API_VERSIONS, 3)
        [connection] = opened.listener.connections
        with monkeypatch.context() as far:
            far.setattr(connection, "peer", ("192.0.2.7", 1234))
            assert await alter(client, upsertion("mallory", "x")) == [("mallory", Code.CLUSTER_AUTHORIZATION_FAILED)]
            assert not opened.broker.users.has("mallory")
        assert await alter(client, upsertion("ann", "x")) == [("ann", 0)]
