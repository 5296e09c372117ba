"""Users and rights in definitions, both ways."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.access.permissions import Permission, TopicPermission
from headrace.broker.broker import Broker
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.vhosts import definitions
from headrace.config import Config
from headrace.errors import InvalidInput
from headrace.log.disk.disk import RealDisk
from headrace.log.settings import LogSettings

OF_TEST12 = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"  # of RabbitMQ's documentation
ANN = {
    "name": "ann",
    "password_hash": OF_TEST12,
    "hashing_algorithm": "rabbit_password_hashing_sha256",
    "tags": ["administrator"],
    "limits": {"max-connections": 3},
}
RIGHT = {"user": "ann", "vhost": "team", "configure": "^a", "write": "", "read": ".*"}
RULE = {"user": "ann", "vhost": "team", "exchange": "amq.topic", "write": "^{username}", "read": "x"}
DOCUMENT = {"vhosts": [{"name": "team"}], "users": [ANN], "permissions": [RIGHT], "topic_permissions": [RULE]}

SMALL = LogSettings(journal_file_bytes=1 << 20)  # quick to make
Open = Callable[[str], Awaitable[Broker]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    brokers: list[Broker] = []

    async def open_(name: str) -> Broker:
        brokers.append(await Broker.open(Config(data_dir=str(tmp_path / name), log=SMALL)))
        return brokers[-1]

    yield open_
    for broker in brokers:
        await broker.close()


async def test_users_come_with_their_passwords_and_rights(opened: Open) -> None:
    broker = await opened("one")
    await definitions.import_(broker, DOCUMENT)
    users = broker.users
    assert users.authenticate("ann", "test12") is not None
    assert users.user("ann").tags == ("administrator",) and users.user("ann").limits == {"max-connections": 3}
    assert users.permissions()["team", "ann"] == Permission(configure="^a", write="", read=".*")
    assert users.topic_permissions()["team", "ann", "amq.topic"] == TopicPermission(write="^{username}", read="x")


async def test_exporting_imported_definitions_returns_them_and_they_can_be_imported_again(opened: Open) -> None:
    one, other = await opened("one"), await opened("other")
    await definitions.import_(one, DOCUMENT)
    exported = await definitions.export(one)
    assert ANN in exported["users"] and RIGHT in exported["permissions"] and RULE in exported["topic_permissions"]
    await definitions.import_(other, exported)
    again = await definitions.export(other)
    for kind in ("users", "permissions", "topic_permissions"):
        assert again[kind] == exported[kind]
    assert other.users.authenticate("guest", "guest") is not None, "its hash came along"


@pytest.mark.parametrize("tags", ["administrator,monitoring", ["administrator", "monitoring"]])
async def test_tags_are_a_list_or_text_as_older_versions_of_rabbitmq_write_them(opened: Open, tags: Any) -> None:
    broker = await opened("one")
    await definitions.import_(broker, {"users": [{**ANN, "tags": tags}]})
    assert broker.users.user("ann").tags == ("administrator", "monitoring")


async def test_a_hash_without_the_name_of_its_algorithm_is_sha256(opened: Open) -> None:
    broker = await opened("one")
    await definitions.import_(broker, {"users": [{"name": "ann", "password_hash": OF_TEST12, "tags": ""}]})
    assert broker.users.authenticate("ann", "test12") is not None


async def test_guest_of_a_version_that_knew_no_users_keeps_its_password(opened: Open) -> None:
    """The export had an empty hash without an algorithm; after importing it, no user could log in."""
    broker = await opened("one")
    old = {"name": "guest", "password_hash": "", "hashing_algorithm": "", "tags": ["administrator"], "limits": {}}
    await definitions.import_(broker, {"users": [old]})
    assert broker.users.is_open
    await definitions.import_(broker, {"users": [{**old, "hashing_algorithm": ANN["hashing_algorithm"]}]})
    assert broker.users.authenticate("guest", "guest") is None, "in RabbitMQ an empty hash disables the login"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"users": [{**ANN, "password_hash": "nonsense!"}]}, "'ann'.*base64"),
        ({"users": [{**ANN, "hashing_algorithm": "rabbit_password_hashing_md5"}]}, "'ann'.*md5"),
        ({"users": [{**ANN, "tags": 7}]}, "tags"),
        ({"users": [{**ANN, "limits": []}, {**ANN, "limits": [1]}]}, "limits"),
        ({"users": [{"tags": "", "password": "secret"}]}, "no name"),
        ({"permissions": [{**RIGHT, "user": "nobody"}]}, "'nobody', who does not exist"),
        ({"permissions": [{**RIGHT, "write": "("}]}, "write pattern"),
        ({"permissions": [{**RIGHT, "read": None}]}, "no read"),
        ({"topic_permissions": [{**RULE, "exchange": 1}]}, "no exchange"),
        ({"topic_permissions": [{**RULE, "read": "["}]}, "read pattern"),
    ],
)
async def test_a_document_that_makes_no_sense_changes_nothing(opened: Open, change: Any, words: str) -> None:
    broker = await opened("one")
    before = await definitions.export(broker)
    with pytest.raises(InvalidInput, match=words) as refused:
        await definitions.import_(broker, {**DOCUMENT, **change})
    assert "secret" not in str(refused.value)
    assert await definitions.export(broker) == before


async def test_an_import_into_one_vhost_leaves_users_alone(opened: Open) -> None:
    broker = await opened("one")
    await definitions.import_(broker, DOCUMENT, vhost="/")
    assert [user.name for user in broker.users.users()] == ["guest"]


async def test_a_new_vhost_of_a_document_is_open_to_the_guest_of_a_new_broker(opened: Open) -> None:
    broker = await opened("one")
    await definitions.import_(broker, {"queues": [{"name": "q", "vhost": "elsewhere"}]})
    assert broker.users.rights("guest", "elsewhere") is not None


async def test_a_folder_of_a_version_without_users_gets_guest_with_rights_in_every_vhost(
    opened: Open, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    FileCatalog(RealDisk(), str(tmp_path / "old")).put("vhosts", ("team",), {})
    users = (await opened("old")).users
    assert users.is_open
    assert list(users.permissions()) == [("/", "guest"), ("team", "guest")]
