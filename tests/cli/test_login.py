"""Login of commands: credentials in the URL, and never in output."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from headrace.broker.access.permissions import EVERYTHING
from headrace.client.exchange import Endpoint, login_of, parse_url, without_password
from headrace.config import Address
from headrace.errors import AccessRefused, InvalidInput
from headrace.spark.broker import BrokerLink
from headrace.spark.options import read_options, write_options
from tests.cli.running import headrace
from tests.listeners.api.conftest import Served

PASSWORD = "p@ss/word:of % ann"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    live = Served(tmp_path_factory.mktemp("data"), amqp=Address("localhost", 0))
    users = live.broker.users
    live.call(users.put_user("ann", password=PASSWORD, tags=["administrator"]))
    live.call(users.set_permission("/", "ann", EVERYTHING))
    live.call(users.put_user("plain", password=PASSWORD))
    live.call(users.remove_user("guest"))
    yield live
    live.stop()


def url_of(live: Served, user: str, password: str = PASSWORD) -> str:
    return live.base.replace("http://", f"http://{user}:{quote(password, safe='')}@")


def run(live: Served, user: str, *arguments: str, password: str = PASSWORD) -> subprocess.CompletedProcess[bytes]:
    return headrace(*arguments, stdin=b"hello\n", HEADRACE_URL=url_of(live, user, password))


def test_every_kind_of_command_logs_in(guarded: Served) -> None:
    for arguments in (
        ("topic", "create", "logged"),
        ("pub", "logged"),
        ("sub", "logged", "-c", "1", "-o", "beginning"),
        ("queue", "ls"),
        ("status",),
        ("definitions", "export"),
        ("bench", "--messages", "10"),
    ):
        done = run(guarded, "ann", *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
    assert headrace("topic", "ls", "--url", url_of(guarded, "ann")).returncode == 0


def test_a_refused_login_is_reported_without_the_password(guarded: Served) -> None:
    for user, password, reason in (
        ("ann", "not-the-secret", b"Login failed"),
        ("plain", PASSWORD, b"no access to virtual host"),
    ):
        done = run(guarded, user, "topic", "ls", password=password)
        assert done.returncode != 0 and reason in done.stderr
        for secret in (password, quote(password, safe="")):
            assert secret.encode() not in done.stdout + done.stderr
    done = run(guarded, "ann", "bench", "--messages", "1", password=PASSWORD)
    assert done.returncode == 0, done.stderr


def test_a_url_is_shown_without_its_password() -> None:
    assert without_password("http://ann:se@cret@h:1/x") == "http://ann:***@h:1/x"
    assert without_password("ann:secret@h") == "ann:***@h"
    assert without_password("http://h:1") == "http://h:1"
    assert login_of("http://ann:p%40@h:1") == ("ann", "p@") and login_of("h:1") is None
    endpoint = parse_url("http://ann:secret@h:1")
    assert isinstance(endpoint, Endpoint) and "secret" not in f"{endpoint} {endpoint!r}"
    for url in ("http://ann:secret@h:99999", "amqp://ann:secret@h"):
        with pytest.raises(InvalidInput, match="not the address") as refused:
            parse_url(url)
        assert "secret" not in str(refused.value)


def test_spark_logs_in_by_its_bootstrap_option(guarded: Served) -> None:
    """The HTTP requests of the Spark source and sink, without a JVM; tests/spark covers the rest."""
    for password, refused in ((PASSWORD, False), ("wrong", True)):
        link = BrokerLink(url_of(guarded, "ann", password))
        with pytest.raises(AccessRefused, match="Login failed") if refused else contextlib.nullcontext():
            assert isinstance(link.topics(), list)
        link.close()
    given = {"bootstrap": "http://a:secret@h", "topic": "t"}
    assert "secret" not in repr([read_options(given), write_options(given)])


def test_a_remote_data_folder_is_reported_without_the_password(guarded: Served, tmp_path: Path) -> None:
    from headrace.errors import NotFound
    from headrace.pipelines.maintenance import TopicMaintenance

    (Path(guarded.config.data_dir) / "slots").rename(tmp_path / "slots")
    try:
        with pytest.raises(NotFound, match="not on this machine") as refused:
            TopicMaintenance(url_of(guarded, "ann"))
    finally:
        (tmp_path / "slots").rename(Path(guarded.config.data_dir) / "slots")
    assert "word" not in str(refused.value)
