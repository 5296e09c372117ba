"""`headrace user`, on a running broker and on the data folder of a stopped one."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from headrace.cli import app
from tests.cli.running import COMMAND, PATIENCE_S, Broker, environment, headrace, serving

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of a stopped broker."""
    folder = tmp_path_factory.mktemp("stopped") / "data"
    with serving(folder):
        pass
    return folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("running") / "data") as broker:
        yield broker


@pytest.fixture(params=["running", "stopped"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs `headrace user` on both kinds of store, which must behave alike."""
    if request.param == "running":
        broker: Broker = request.getfixturevalue("running")
        return broker.run
    folder = request.getfixturevalue("stopped")

    def offline(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        return in_process(*arguments, "--data-dir", str(folder), stdin=stdin)

    return offline


def in_process(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    """Runs the command in this process, which saves a second per command."""
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    before, sys.stdin = sys.stdin, io.StringIO(stdin.decode())
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = app.run(arguments)
    finally:
        sys.stdin = before
    said, complained = (stream.detach().getvalue() for stream in (out, err))
    return subprocess.CompletedProcess(arguments, code, said, complained)


def said(run: Run, *arguments: str, stdin: bytes = b"") -> str:
    done = run(*arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout.decode()


def test_a_user_is_added_changed_and_removed(run: Run) -> None:
    said(run, "user", "add", "ann", "--password-stdin", "-t", "monitoring", stdin=b"s3cret\n")
    assert "ann\tmonitoring\n" in said(run, "user", "ls")
    again = run("user", "add", "ann", "--password", "other")
    assert again.returncode == 5 and b"already exists" in again.stderr
    said(run, "user", "passwd", "ann", "--password-stdin", stdin=b"other\n")
    said(run, "user", "tags", "ann", "administrator", "impersonator")
    assert {"name": "ann", "tags": ["administrator", "impersonator"]} in json.loads(said(run, "user", "ls", "--json"))[
        "users"
    ]
    asked = run("user", "rm", "ann")
    assert asked.returncode == 2 and b"--yes" in asked.stderr
    assert json.loads(said(run, "user", "rm", "ann", "--yes", "--json")) == {"removed": ["ann"]}
    assert "ann" not in said(run, "user", "ls")
    for verb in (("rm", "ann", "--yes"), ("passwd", "ann", "--password", "x"), ("tags", "ann")):
        assert run("user", *verb).returncode == 4, verb


def test_permissions_are_granted_listed_and_revoked(run: Run) -> None:
    said(run, "user", "add", "bob", "--password", "x")
    said(run, "user", "grant", "bob", "^c", "^w", "^r")
    said(run, "user", "grant-topic", "bob", "amq.topic", "^tw", "^tr")
    said(run, "user", "grant-topic", "bob", "other", "^x", "")
    assert said(run, "user", "rights", "bob").splitlines() == [
        "bob\t/\t\t^c\t^w\t^r",
        "bob\t/\tamq.topic\t\t^tw\t^tr",
        "bob\t/\tother\t\t^x\t",
    ]
    said(run, "user", "revoke-topic", "bob", "other")
    assert "other" not in said(run, "user", "rights", "bob")
    said(run, "user", "revoke-topic", "bob")
    said(run, "user", "revoke", "bob")
    assert said(run, "user", "rights", "bob") == ""
    wrong = run("user", "grant", "bob", "(", "", "")
    assert wrong.returncode == 2 and b"configure pattern" in wrong.stderr and b"Traceback" not in wrong.stderr
    assert run("user", "grant", "nobody", "", "", "").returncode in (2, 4)
    nowhere = run("user", "grant", "bob", "", "", "", "--vhost", "nowhere")
    assert nowhere.returncode == 4 and b"nowhere" in nowhere.stderr
    said(run, "user", "rm", "bob", "--yes")


def test_the_spellings_of_rabbitmqctl_do_the_same(run: Run) -> None:
    said(run, "add_user", "eve", "s3cret")
    said(run, "set_user_tags", "eve", "management")
    said(run, "set_permissions", "-p", "/", "eve", ".*", ".*", ".*")
    said(run, "change_password", "eve", "other")
    assert "eve\tmanagement" in said(run, "list_users")
    assert "eve\t/\t\t.*\t.*\t.*" in said(run, "list_permissions")
    said(run, "clear_permissions", "-p", "/", "eve")
    said(run, "delete_user", "eve", "--yes")


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ((), b"", "no password given"),
        (("--password-stdin",), b"\n", "must not be empty"),
        (("--password-stdin", "--password", "x"), b"x\n", "once"),
        (("one", "--password", "two"), b"", "once"),
    ],
)
def test_a_password_is_given_once_and_not_empty(
    stopped: Path, arguments: tuple[str, ...], stdin: bytes, words: str
) -> None:
    done = in_process("user", "add", "someone", *arguments, "--data-dir", str(stopped), stdin=stdin)
    assert done.returncode == 2 and words in done.stderr.decode()


def test_the_password_prompt_asks_twice_without_echo(stopped: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "user", "add", "typist", "--data-dir", str(stopped)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    for prompt in (b"Password: ", b"Repeat for confirmation: "):
        while not shown.endswith(prompt):
            shown += os.read(ours, 1000)
        os.write(ours, b"typed-by-hand\n")
    assert process.wait(PATIENCE_S) == 0
    try:
        while more := os.read(ours, 1000):
            shown += more
    except OSError:
        pass  # the other end is closed
    os.close(ours)
    assert b"typed-by-hand" not in shown
    assert b"typist" in in_process("user", "ls", "--data-dir", str(stopped)).stdout


def test_users_in_the_folder_of_a_running_broker_cannot_be_changed(running: Broker, tmp_path: Path) -> None:
    folder = Path(json.loads(running.said("status", "--json"))["data_dir"])
    done = headrace("user", "ls", "--data-dir", str(folder))
    assert done.returncode == 8 and b"in use by another broker" in done.stderr
    nothing = headrace("user", "ls", "--data-dir", str(tmp_path))
    assert nothing.returncode == 4 and b"not the data folder of a broker" in nothing.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_lost_password_is_replaced_through_the_data_folder(tmp_path: Path) -> None:
    """Without any user, no login is possible, but the owner of the files can add one."""
    folder = tmp_path / "data"
    with serving(folder):
        pass
    for arguments in (
        ("user", "rm", "guest", "--yes"),
        ("user", "add", "owner", "--password", "mine", "-t", "administrator"),
        ("user", "grant", "owner", ".*", ".*", ".*"),
    ):
        done = in_process(*arguments, "--data-dir", str(folder))
        assert done.returncode == 0, done.stderr
    with serving(folder) as broker:
        refused = broker.run("user", "ls")
        assert refused.returncode == 1 and b"http://USER:PASSWORD@HOST:PORT" in refused.stderr
        let_in = headrace("user", "ls", HEADRACE_URL=broker.url.replace("://", "://owner:mine@"))
        assert let_in.stdout == b"owner\tadministrator\n", let_in.stderr
