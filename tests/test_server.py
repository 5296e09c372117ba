"""The whole server in a child process: start, output, signals, and stop."""

import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS_MAX = 60
RUN = """
import sys, msgspec
from headrace import server
from headrace.config import Config
from headrace.errors import HeadraceError
try:
    sys.exit(server.run(msgspec.json.decode(sys.argv[1], type=Config)))
except HeadraceError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""
ENDLESS_RECOVERY = """
import time
from headrace.log.recovery import recovery
def recover_for_long(*_):
    print("recovering", flush=True)
    time.sleep(3600)
recovery._make_durable = recover_for_long
"""


class Process:
    def __init__(self, folder: Path, first: str = "", **settings: Any) -> None:
        config = {"data_dir": str(folder), "http": {"host": "localhost", "port": 0}, "amqp": None, "kafka": None}
        config["log"] = {"journal_file_bytes": 8 << 20}
        self._process = subprocess.Popen(
            [sys.executable, "-c", first + RUN, json.dumps({**config, **settings})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.said: list[str] = []

    def wait_until_ready(self) -> None:
        self.wait_until_said("ready")
        match = re.search(r"http +http://127\.0\.0\.1:(\d+)", "\n".join(self.said))
        self.port = int(match[1]) if match else 0

    def wait_until_said(self, start: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(line.rstrip("\n"))
            if line.startswith(start):
                return
        raise AssertionError("\n".join(self.said) + self.wait()[1])

    def request(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_MAX)
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"content-type": "application/json"})
            return json.loads(connection.getresponse().read() or "null")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        out, err = self._process.communicate(timeout=SECONDS_MAX)
        self.said += out.splitlines()
        return self._process.returncode, err

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        with contextlib.suppress(ValueError):
            self._process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(folder: Path = tmp_path / "data", *, ready: bool = True, **settings: Any) -> Process:
        started.append(Process(folder, **settings))
        if ready:
            started[-1].wait_until_ready()
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_prints_its_addresses_then_ready_and_stops_cleanly(start: Any, number: int) -> None:
    process = start()
    assert len(process.said) <= 12
    assert any(line.startswith("http ") for line in process.said)
    assert process.said[-1].startswith("ready")
    process.request("POST", "/topics/t/messages", {"value": "kept"})
    process.signal(number)
    code, err = process.wait()
    assert (code, err) == (0, "")
    again = start()
    assert any(line.startswith("clean stop: 1 log;") for line in again.said), again.said
    [message] = again.request("GET", "/topics/t/messages")["messages"]
    assert message["value"] == "kept"


def test_confirmed_messages_survive_a_kill(start: Any) -> None:
    process = start()
    places = []
    for i in range(20):
        answer = process.request("POST", "/topics/t/messages", [{"value": f"{i}.{j}"} for j in range(5)])
        places += [place["offset"] for place in answer["messages"]]
    process.signal(signal.SIGKILL)
    process.wait()
    again = start()
    assert any("unclean stop" in line for line in again.said)
    messages = again.request("GET", "/topics/t/messages")["messages"]
    assert [m["offset"] for m in messages] == places == list(range(100))
    assert [m["value"] for m in messages] == [f"{i}.{j}" for i in range(20) for j in range(5)]
    assert again.request("GET", "/status")["recovery"]["clean"] is False


def test_a_signal_ends_a_long_recovery_and_the_next_start_recovers_again(start: Any) -> None:
    process = start()
    process.request("POST", "/topics/t/messages", {"value": "kept"})
    process.signal(signal.SIGKILL)
    process.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        recovering = start(ready=False, first=ENDLESS_RECOVERY)
        recovering.wait_until_said("recovering")
        recovering.signal(number)
        assert recovering.wait() == (0, "")
        assert recovering.said[-1].startswith("stopped before it was ready")
    again = start()
    assert any("unclean stop" in line for line in again.said), again.said
    [message] = again.request("GET", "/topics/t/messages")["messages"]
    assert message["value"] == "kept"


def test_a_request_in_progress_gets_its_response_before_the_stop(start: Any) -> None:
    process = start()
    with socket.create_connection(("127.0.0.1", process.port), timeout=SECONDS_MAX) as sock:
        sock.sendall(b"POST /topics/t/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhel")
        wait_for_tasks(process)
        process.signal(signal.SIGTERM)
        while refused(process.port) is False:
            time.sleep(0.01)
        sock.sendall(b"lo")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200 OK")
    assert process.wait()[0] == 0


def wait_for_tasks(process: Process) -> None:
    while "http" not in process.request("GET", "/status")["listeners"]:
        pass


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_second_broker_on_the_same_folder_is_refused(start: Any) -> None:
    first = start()
    second = start(ready=False)
    code, err = second.wait()
    assert code != 0
    assert "in use by another broker" in err and str(first.pid) in err
    assert err.count("\n") == 1


def test_a_port_in_use_is_reported_in_one_line(start: Any, tmp_path: Path) -> None:
    first = start()
    second = start(tmp_path / "other", ready=False, http={"host": "localhost", "port": first.port})
    code, err = second.wait()
    assert code != 0
    assert f"port {first.port} on localhost is in use" in err and "--http" in err
    assert err.count("\n") == 1


def test_an_unreadable_folder_is_reported_in_one_line(start: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    code, err = start(tmp_path / "file" / "data", ready=False).wait()
    assert code != 0 and "cannot be opened" in err and err.count("\n") == 1


def test_every_listener_is_named_at_the_start(start: Any) -> None:
    process = start(kafka={"host": "localhost", "port": 0}, amqp={"host": "localhost", "port": 0})
    for listener in ("amqp", "kafka"):
        assert any(line.startswith(listener) for line in process.said)
    process.signal(signal.SIGTERM)
    assert process.wait()[0] == 0


def test_an_idle_broker_is_small(start: Any) -> None:
    process = start()
    status = Path(f"/proc/{process.pid}/status").read_text()
    resident_kb = int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
    assert resident_kb < 80 * 1024


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_limit(start: Any) -> None:
    process = start()
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    soft, hard = re.search(r"Max open files\s+(\d+)\s+(\d+)", limits).groups()  # type: ignore[union-attr]
    assert soft == hard


def test_other_users_cannot_read_the_files(start: Any, tmp_path: Path) -> None:
    process = start()
    process.request("POST", "/topics/t/messages", {"value": "secret"})
    for folder, _, files in os.walk(tmp_path / "data"):
        assert os.stat(folder).st_mode & 0o077 == 0, folder
        for file in files:
            assert os.stat(os.path.join(folder, file)).st_mode & 0o077 == 0, file


def test_names_cannot_forge_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    from headrace.config import Config
    from headrace.server import set_up_logging

    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        for form in ("text", "json"):
            set_up_logging(Config(log_format=form))
            logging.getLogger("headrace.test").warning("topic %r and %s", "a\nb", "c\r\n2026 error: forged")
    finally:
        root.handlers[:], root.level = before
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1])["level"] == "warning"


def test_hostile_bodies_are_refused_and_memory_stays_flat(start: Any) -> None:
    process = start()
    size = 20 << 20
    hostile = [
        b"[" * size,
        b'{"value":[' + b"[]," * (size // 3) + b"[]]}",
        b"[" + b'{"value":0},' * (size // 12) + b'{"value":0}]',
        b"\n" * size,
        b'{"value":"' + b"x" * size + b'"}',
        gzip.compress(b"\0" * (10 * size), 1),
    ]
    for body in hostile * 2:
        kind = "gzip" if body[:2] == b"\x1f\x8b" else "identity"
        connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=SECONDS_MAX)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "content-encoding": kind}
            connection.request("POST", "/topics/t/messages", body, headers)
            assert connection.getresponse().status in {400, 413}
    peak_kb = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1])  # type: ignore[index]
    assert peak_kb < 450 * 1024
    assert process.request("GET", "/topics")["topics"] == []


def test_a_broker_that_uses_no_schemas_does_not_load_the_schema_registry() -> None:
    """The registry has no dependency to leave out, so it is optional in this way: it costs nothing until it is used."""
    listeners = ", ".join(f"headrace.listeners.{name}.listener" for name in ("amqp", "kafka", "http"))
    code = f"import sys, headrace.server, {listeners}; print([m for m in sys.modules if 'headrace.schemas' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
