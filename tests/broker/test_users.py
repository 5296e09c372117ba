"""Users and what they may do: RabbitMQ's model, kept through crashes."""

import asyncio
import base64
import hashlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.broker.access import passwords
from headrace.broker.access.permissions import EVERYTHING, Permission, TopicPermission
from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.access.users import GUEST, Users
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.vhosts.policies import Policies, Policy
from headrace.errors import CorruptCatalog, InvalidInput, NotFound
from headrace.log.disk.disk import Disk, RealDisk
from tests.crash.simdisk import SimulatedDisk

OF_TEST12 = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"


@pytest.fixture
def reopen(tmp_path: Path) -> Callable[[], Users]:
    def open_again() -> Users:
        return opened(RealDisk(), str(tmp_path))

    return open_again


def opened(disk: Disk, folder: str) -> Users:
    users = Users(FileCatalog(disk, folder))
    users.first_start(["/"])
    return users


# Users.


def test_a_new_data_folder_has_the_user_guest_with_all_permissions(reopen: Callable[[], Users]) -> None:
    users = reopen()
    assert users.is_open
    guest = users.authenticate("guest", "guest")
    assert guest is not None and guest.is_administrator
    assert ProtectedMode(users, is_enabled=True).refuses_remote_clients
    rights = users.rights("guest", "/")
    assert rights is not None and rights.may_configure("x") and rights.may_write("") and rights.may_read("y")


async def test_a_removed_guest_user_does_not_return_after_a_restart(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.remove_user(GUEST)
    again = reopen()
    assert again.users() == []
    assert again.permissions() == {}
    assert not again.is_open
    assert again.authenticate("guest", "guest") is None


async def test_users_and_permissions_survive_a_restart_with_all_fields(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("ann", password="s3cret", tags=["monitoring", "administrator"], limits={"max-channels": 5})
    await users.set_permission("/", "ann", Permission(configure="^a", write="^b", read="^c"))
    await users.set_topic_permission("/", "ann", "amq.topic", TopicPermission(write="^w", read="^r"))
    again = reopen()
    assert again.users() == users.users()
    assert again.permissions() == users.permissions()
    assert again.topic_permissions() == {("/", "ann", "amq.topic"): TopicPermission(write="^w", read="^r")}
    assert again.authenticate("ann", "s3cret") == again.user("ann")
    assert again.user("ann").limits == {"max-channels": 5}


async def test_every_change_is_in_the_log_and_no_password_or_hash(
    reopen: Callable[[], Users], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    users = reopen()
    await users.put_user("ann", password="s3cret", tags=["management"])
    await users.put_user("ann", password_hash=OF_TEST12)
    await users.set_permission("/", "ann", EVERYTHING)
    await users.set_topic_permission("/", "ann", "t", TopicPermission(write="^a", read=""))
    await users.clear_topic_permission("/", "ann")
    await users.clear_permission("/", "ann")
    await users.remove_user("ann")
    said = [record.getMessage() for record in caplog.records if record.name == "headrace.users"]
    assert len(said) == 7 and all("'ann'" in line for line in said)
    assert "s3cret" not in caplog.text and OF_TEST12 not in caplog.text


async def test_a_change_keeps_the_fields_that_it_does_not_name(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("ann", password="one", tags=["management"])
    await users.put_user("ann", password="two")
    assert users.user("ann").tags == ("management",)
    assert users.authenticate("ann", "one") is None
    await users.put_user("ann", tags=[])
    assert users.authenticate("ann", "two") is not None


@pytest.mark.parametrize("name", ["", "x" * 256, "ä" * 128, "line\nbreak", "nul\0"])
async def test_names_that_cannot_be_are_refused(reopen: Callable[[], Users], name: str) -> None:
    with pytest.raises(InvalidInput, match="name of a user"):
        await reopen().put_user(name, password="x")


async def test_removing_a_user_removes_its_permissions_and_notifies_listeners(reopen: Callable[[], Users]) -> None:
    users = reopen()
    gone: list[str] = []
    users.on_removed(gone.append)
    await users.put_user("ann", password="x")
    await users.set_permission("/", "ann", EVERYTHING)
    await users.set_topic_permission("/", "ann", "t", TopicPermission(write="", read=""))
    await users.remove_user("ann")
    assert gone == ["ann"]
    await users.put_user("ann", password="y")
    assert users.rights("ann", "/") is None
    assert users.topic_permissions() == {}
    with pytest.raises(NotFound):
        await users.remove_user("bob")


async def test_deleting_a_vhost_removes_its_permissions(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("ann", password="x")
    await users.vhost_made("test", "ann")
    assert users.rights("ann", "test") is not None
    assert users.rights("guest", "test") is not None
    await users.vhost_removed("test")
    assert users.rights("ann", "test") is None
    assert list(users.permissions()) == [("/", "guest")]


async def test_guest_gets_no_new_vhost_once_its_password_is_changed(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user(GUEST, password="other")
    await users.vhost_made("test", None)
    assert users.rights(GUEST, "test") is None


async def test_the_broker_is_open_only_while_guest_is_all_there_is(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("ann", password="x")
    assert not users.is_open
    await users.remove_user("ann")
    assert users.is_open
    await users.put_user(GUEST, password="other")
    assert not users.is_open


async def test_the_version_grows_with_every_change(reopen: Callable[[], Users]) -> None:
    users = reopen()
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: users.put_user("ann", password="x"),
        lambda: users.set_permission("/", "ann", EVERYTHING),
        lambda: users.set_topic_permission("/", "ann", "t", TopicPermission(write="", read="")),
        lambda: users.clear_topic_permission("/", "ann"),
        lambda: users.clear_permission("/", "ann"),
        lambda: users.remove_user("ann"),
    ]
    for change in changes:
        before = users.version
        await change()
        assert users.version > before


# Passwords.


async def test_a_hash_of_rabbitmq_is_taken_as_it_is(reopen: Callable[[], Users]) -> None:
    """The one of RabbitMQ's documentation on passwords: it is of test12."""
    users = reopen()
    await users.put_user("ann", password_hash=OF_TEST12)
    assert users.authenticate("ann", "test12") is not None
    assert users.authenticate("ann", "test13") is None
    assert users.user("ann").password_hash == OF_TEST12


async def test_a_sha512_hash_is_taken_as_well(reopen: Callable[[], Users]) -> None:
    users = reopen()
    stored = base64.b64encode(b"salt" + hashlib.sha512("saltpaßwort".encode()).digest()).decode()
    await users.put_user("ann", password_hash=stored, hashing_algorithm=passwords.SHA512)
    assert users.authenticate("ann", "paßwort") is not None
    assert users.authenticate("ann", "passwort") is None


async def test_a_login_without_a_password_is_refused(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("ann")
    await users.put_user("bob", password_hash="")
    await users.put_user("eve", password_hash=passwords.hash_password(""))  # one may come out of a RabbitMQ
    for name in ("ann", "bob", "eve", "nobody"):
        assert users.authenticate(name, "") is None
        assert users.authenticate(name, "x") is None
    assert users.authenticate("guest", "") is None
    with pytest.raises(InvalidInput, match="must not be empty"):
        await users.put_user("ann", password="")


@pytest.mark.parametrize(
    ("stored", "algorithm", "words"),
    [
        ("not base64!", passwords.SHA256, "base64"),
        ("c2hvcnQ=", passwords.SHA256, "36 bytes"),
        (OF_TEST12, passwords.SHA512, "68 bytes"),
        ("", "rabbit_password_hashing_md5", "md5"),
    ],
)
async def test_malformed_password_hashes_are_refused(
    reopen: Callable[[], Users], stored: str, algorithm: str, words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        await reopen().put_user("ann", password_hash=stored, hashing_algorithm=algorithm)


def test_an_unknown_user_costs_a_hash_as_a_known_one_does(
    reopen: Callable[[], Users], monkeypatch: pytest.MonkeyPatch
) -> None:
    users = reopen()
    hashed: list[str] = []
    inner = passwords._digest

    def counted(algorithm: str, salt: bytes, password: str) -> bytes:
        hashed.append(algorithm)
        return inner(algorithm, salt, password)

    monkeypatch.setattr(passwords, "_digest", counted)
    users.authenticate("guest", "wrong")
    known, hashed = hashed, []
    users.authenticate("nobody", "wrong")
    assert known == [passwords.SHA256] == hashed


def test_two_hashes_of_one_password_differ() -> None:
    assert passwords.hash_password("x") != passwords.hash_password("x")


# Rights.


async def test_patterns_are_searched_in_the_name(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("ann", password="x")
    assert users.rights("ann", "/") is None
    await users.set_permission("/", "ann", Permission(configure="", write="^amq\\.default$", read="orders"))
    rights = users.rights("ann", "/")
    assert rights is not None
    assert not rights.may_configure("x")
    assert rights.may_write("") and not rights.may_write("amq.topic")
    assert rights.may_read("new-orders-2") and not rights.may_read("other")
    await users.clear_permission("/", "ann")
    assert users.rights("ann", "/") is None
    with pytest.raises(NotFound):
        await users.clear_permission("/", "ann")


async def test_topic_rules_narrow_the_exchange_they_name_and_no_other(reopen: Callable[[], Users]) -> None:
    users = reopen()
    await users.put_user("a.b", password="x")
    await users.set_permission("/", "a.b", EVERYTHING)
    rule = TopicPermission(write=r"^{username}\.", read="^{vhost}$")
    await users.set_topic_permission("/", "a.b", "amq.topic", rule)
    rights = users.rights("a.b", "/")
    assert rights is not None
    assert rights.may_write_topic("amq.topic", "a.b.temperature")
    assert not rights.may_write_topic("amq.topic", "axb.temperature")
    assert rights.may_write_topic("other", "anything")
    assert rights.may_read_topic("amq.topic", "/") and not rights.may_read_topic("amq.topic", "x")


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "(?<=a)b", "((a{100}){100}){100}", r"\pL{300}", "x" * 10_000])
async def test_patterns_that_re2_refuses_are_named(reopen: Callable[[], Users], pattern: str) -> None:
    users = reopen()
    await users.put_user("ann", password="x")
    with pytest.raises(InvalidInput, match="write pattern"):
        await users.set_permission("/", "ann", Permission(configure="", write=pattern, read=""))
    with pytest.raises(InvalidInput, match="read pattern"):
        await users.set_topic_permission("/", "ann", "t", TopicPermission(write="", read=pattern))
    assert ("/", "ann") not in users.permissions()


async def test_permissions_for_an_unknown_user_are_refused(reopen: Callable[[], Users]) -> None:
    users = reopen()
    with pytest.raises(NotFound):
        await users.set_permission("/", "ann", EVERYTHING)
    with pytest.raises(NotFound):
        await users.set_topic_permission("/", "ann", "t", TopicPermission(write="", read=""))


# Crashes, damage and clients that go away.


class Waiting(FileCatalog):
    """A catalog whose disk takes its time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(RealDisk(), str(folder))
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def put(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(60)
        super().put(*arguments)

    def remove(self, *arguments: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(60)
        super().remove(*arguments)


async def cancelled(catalog: Waiting, change: Coroutine[Any, Any, Any]) -> None:
    """A change whose client goes away while the disk is at work, and the time until the disk is done."""
    catalog.reached.clear()
    catalog.go_on.clear()
    task = asyncio.ensure_future(change)
    await asyncio.get_running_loop().run_in_executor(None, catalog.reached.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    catalog.go_on.set()


async def test_a_hash_that_follows_another_password_keeps_none_of_its_keys_for_scram(tmp_path: Path) -> None:
    catalog = Waiting(tmp_path)
    users = Users(catalog)
    before = await users.put_user("ann", password="old")
    catalog.go_on.clear()
    catalog.reached.clear()
    first = asyncio.ensure_future(users.put_user("ann", password="new"))
    await asyncio.get_running_loop().run_in_executor(None, catalog.reached.wait, 60)
    second = asyncio.ensure_future(users.put_user("ann", password_hash=before.password_hash))
    for _ in range(3):
        await asyncio.sleep(0)  # it waits for its turn
    catalog.go_on.set()
    await asyncio.gather(first, second)
    assert users.authenticate("ann", "old") is not None
    assert users.user("ann").scram == {}, "those of the new one would still let in"
    users.close()


async def test_a_change_whose_client_disconnects_is_applied_in_memory_and_on_disk(tmp_path: Path) -> None:
    catalog = Waiting(tmp_path)
    users = Users(catalog)
    users.first_start(["/"])
    await cancelled(catalog, users.put_user("ann", password="x"))
    await users.set_permission("/", "ann", EVERYTHING)  # comes after it, so it is done when this is
    await cancelled(catalog, users.remove_user("ann"))
    await users.put_user("bob")
    assert [user.name for user in users.users()] == ["bob", "guest"]
    assert users.authenticate("ann", "x") is None and users.rights("ann", "/") is None
    again = Users(FileCatalog(RealDisk(), str(tmp_path)))
    assert again.users() == users.users() and again.permissions() == users.permissions()
    for each in (users, again):
        each.close()


async def test_a_policy_whose_client_disconnects_is_applied_in_memory_and_on_disk(tmp_path: Path) -> None:
    catalog = Waiting(tmp_path)
    policies = Policies(catalog)
    for name in ("one", "two"):
        policy = Policy(vhost="/", name=name, pattern="", definition={"max-length": 1})
        await (cancelled(catalog, policies.put(policy)) if name == "one" else policies.put(policy))
    assert [found.name for found in policies.list()] == ["one", "two"]
    policies.close()


def test_a_crash_at_any_call_leaves_the_old_or_the_new_and_never_more_rights() -> None:
    """A power cut before every disk call loses no confirmed change, and a removal in progress never grants a user
    additional permissions."""
    rng = Random(7)
    disk = SimulatedDisk()
    disk.mkdir("/data")
    disk.sync_dir("/")
    answered: set[str] = set()
    removed: set[str] = set()
    states = 0

    def cut(_kind: str, _path: str) -> None:
        nonlocal states
        for mode in ("lost", "kept", "prefix", "mixed"):
            states += 1
            users = Users(FileCatalog(disk.power_cut(rng, mode), "/data"))
            names = {user.name for user in users.users()}
            assert answered <= names, mode
            assert not removed & names, mode
            owners = {user for _, user in users.permissions()}
            assert owners <= names | {GUEST}, mode  # guest's come before guest
            if GUEST in answered or not answered:
                assert GUEST not in names or ("/", GUEST) in users.permissions(), mode
            users.close()

    async def work() -> None:
        users = Users(FileCatalog(disk, "/data"))
        disk.before = cut
        users.first_start(["/"])
        answered.add(GUEST)
        for name in ("ann", "bob"):
            await users.put_user(name, password="x")
            answered.add(name)
            await users.set_permission("/", name, EVERYTHING)
            await users.set_topic_permission("/", name, "t", TopicPermission(write="a", read="b"))
        answered.discard("ann")
        await users.remove_user("ann")
        removed.add("ann")
        answered.discard(GUEST)
        await users.remove_user(GUEST)
        removed.add(GUEST)
        await users.put_user("eve", password="x")
        users.close()

    asyncio.run(work())
    assert states > 100


@pytest.mark.parametrize(
    ("kind", "identity", "document"),
    [
        ("users", ("ann",), {"tags": "administrator"}),
        ("users", ("ann",), {"password_hash": "nonsense!"}),
        ("users", ("ann", "bob"), {}),
        ("permissions", ("/", "ann"), {"configure": "", "write": ""}),
        ("permissions", ("ann",), {"configure": "", "write": "", "read": ""}),
        ("topic_permissions", ("/", "ann"), {"write": "", "read": ""}),
    ],
)
def test_a_document_that_describes_no_such_thing_is_an_error_with_its_place(
    tmp_path: Path, kind: str, identity: tuple[str, ...], document: dict[str, Any]
) -> None:
    """The checksum is valid, for example after an edit by hand. A later login must not crash on it."""
    FileCatalog(RealDisk(), str(tmp_path)).put(kind, identity, document)
    with pytest.raises(CorruptCatalog, match=f"catalog/{kind}/.*log repair"):
        Users(FileCatalog(RealDisk(), str(tmp_path)))
