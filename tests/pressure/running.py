"""A real broker in a process of its own, in a control group if asked, and what it takes."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pika

PATIENCE_S = 60.0
MB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup/memory")


class BrokerProcess:
    def __init__(self, folder: Path, *flags: str, group: Path | None = None) -> None:
        command = [
            sys.executable, "-m", "headrace", "serve", "--data-dir", str(folder), "--amqp", "127.0.0.1:0",
            "--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0", "--journal-file-size", "8MB", "--journal-files", "2",
            *flags,
        ]  # fmt: skip
        if group is not None:
            # Joined by the shell before it becomes the broker, so that nothing of the broker is counted elsewhere.
            command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.pid = self.process.pid
        self.errors: list[str] = []
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        said = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said += line
            if line.startswith("ready"):
                break
        else:
            self.process.wait(PATIENCE_S)
            raise AssertionError(said + "".join(self.errors))
        self.amqp, self.kafka, self.http = (
            int(match[1])
            for listener in ("amqp", "kafka", "http")
            if (match := re.search(rf"{listener} .*?:(\d+)", said))
        )

    def _listen(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def connect(self, **options: Any) -> pika.BlockingConnection:
        # Clients connect while the broker is short of a resource, for which pika's default of ten seconds is too short.
        usual = {"socket_timeout": PATIENCE_S, "stack_timeout": PATIENCE_S}
        return pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.amqp, **{**usual, **options}))

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=PATIENCE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def metric(self, name: str) -> float:
        """Of a series, with its labels as Prometheus writes them."""
        _, text = self.get("/metrics")
        for line in text.decode().splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    def post(self, topic: str, body: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
        url = f"http://127.0.0.1:{self.http}/topics/{topic}/messages"
        request = urllib.request.Request(url, body, {"content-type": "text/plain"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, dict(answer.headers), json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, json.loads(error.read())

    @property
    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    @property
    def peak_bytes(self) -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self) -> int:
        assert self.process.stdout is not None and self.process.stderr is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.stdout.read()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(PATIENCE_S)
        self._listener.join(PATIENCE_S)
        self.process.stdout.close()
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def broker(folder: Path, *flags: str, group: Path | None = None) -> Iterator[BrokerProcess]:
    running = BrokerProcess(folder, *flags, group=group)
    try:
        yield running
    finally:
        running.stop()


def eventually(true: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := true()):
        assert time.monotonic() < deadline, f"did not happen: {what}"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def memory_group(size_bytes: int) -> Iterator[Path | None]:
    """A control group with that much memory; None where none can be made."""
    group = CGROUPS / f"headrace-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(size_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


def oom_kills(group: Path) -> int:
    found = re.search(r"oom_kill (\d+)", (group / "memory.oom_control").read_text())
    return int(found[1]) if found else 0
