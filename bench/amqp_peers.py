"""The brokers that bench.amqp compares, as processes of their own, and the load that is put on them."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pika
from tests.ports import free_port

HERE = Path(__file__).parent
RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"
START_S_MAX = 90.0
RUN_S_MAX = 180.0


class Peer:
    """A broker under test: a process, a port, and the arguments its queues are declared with."""

    def __init__(self, name: str, port: int, pid: int, arguments: dict[str, str]) -> None:
        self.name, self.port, self.pid, self.arguments = name, port, pid, arguments

    def cpu_s(self) -> float:
        """Of all threads, from the scheduler: ticks of 10 ms are too coarse."""
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def rss_mb(self, *, peak: bool = False) -> float:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM" if peak else "VmRSS"):
                return int(line.split()[1]) / 1024
        return 0.0

    @contextlib.contextmanager
    def channel(self) -> Iterator[pika.adapters.blocking_connection.BlockingChannel]:
        connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", self.port))
        yield connection.channel()
        connection.close()

    def declare(self, queue: str, count: int = 1) -> None:
        with self.channel() as channel:
            for name in [queue] if count == 1 else [f"{queue}-{n}" for n in range(count)]:
                channel.queue_declare(name, durable=True, arguments=self.arguments)

    def delete(self, queue: str, count: int = 1) -> None:
        with self.channel() as channel:
            for name in [queue] if count == 1 else [f"{queue}-{n}" for n in range(count)]:
                channel.queue_delete(name)


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"a broker did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.02)


@contextlib.contextmanager
def headrace(folder: str, *options: str, kill: bool = False) -> Iterator[Peer]:
    """One of ours, with the AMQP listener only. `kill` ends it without a word, as kill -9 does."""
    port, log = free_port(), Path(folder) / "headrace.txt"
    command = [
        sys.executable, "-m", "headrace", "serve", "--data-dir", f"{folder}/headrace", "--http", "off", "--kafka",
        "off", "--amqp", f"127.0.0.1:{port}", *options,
    ]  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for_port(port, process, log)
        yield Peer("headrace", port, process.pid, {})
    finally:
        process.kill() if kill else process.terminate()
        process.wait(30)


@contextlib.contextmanager
def rabbitmq(folder: str, *, management_port: int = 0) -> Iterator[tuple[Peer, Peer]]:
    """(classic, quorum): one node, two kinds of queues. With a port for it, its management API as well."""
    port, log = free_port(), Path(folder) / "rabbitmq.txt"
    home = Path(folder) / "rabbitmq"
    home.mkdir(exist_ok=True)
    (home / "enabled_plugins").write_text("[rabbitmq_management]." if management_port else "[].")
    (home / "rabbitmq.conf").write_text(
        f"management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {management_port}\n" if management_port else ""
    )
    environment = {
        **os.environ,
        "HOME": str(home),
        "RABBITMQ_NODENAME": f"headrace-bench-{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(names := free_port()),
        "RABBITMQ_MNESIA_BASE": f"{home}/data",
        "RABBITMQ_LOG_BASE": f"{home}/log",
        "RABBITMQ_PID_FILE": f"{home}/pid",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/enabled_plugins",
        "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq",
        "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
    }
    with log.open("ab") as output:
        process = subprocess.Popen([RABBITMQ], env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        for wanted in filter(None, (port, management_port)):
            wait_for_port(wanted, process, log)
        pid = int((home / "pid").read_text())
        yield (
            Peer("rabbitmq classic", port, pid, {"x-queue-type": "classic"}),
            Peer("rabbitmq quorum", port, pid, {"x-queue-type": "quorum"}),
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
        # Erlang's daemon of names leaves the group of processes, and would stay.
        if epmd := shutil.which("epmd"):
            subprocess.run([epmd, "-port", str(names), "-kill"], stdout=subprocess.DEVNULL, check=False)


@dataclass(frozen=True, slots=True)
class Seen:
    """The line that the load generator prints."""

    seconds: float
    rate: float
    p50_ms: float
    p99_ms: float
    count: int
    least_ms: float
    most_ms: float


class Load:
    """bench/amqp_load.c, compiled: one process of it is one publisher program or one consumer program."""

    def __init__(self, folder: str) -> None:
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            sys.exit("bench.amqp needs a C compiler for its load generator")
        self._program = f"{folder}/amqp_load"
        subprocess.run([compiler, "-O2", "-o", self._program, str(HERE / "amqp_load.c")], check=True)

    def start(
        self, peer: Peer, kind: str, *, count: int = 0, size: int, connections: int = 1, window: int, queues: int = 1,
        rate: int = 0, seconds: float = 0,
    ) -> subprocess.Popen[str]:  # fmt: skip
        numbers = [count, size, connections, window, queues, rate, seconds]
        command = [self._program, kind, "127.0.0.1", str(peer.port), "bench", *map(str, numbers)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def wait(process: subprocess.Popen[str]) -> Seen:
        try:
            out, _ = process.communicate(timeout=RUN_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError("the load generator failed")
        seconds, rate, p50, p99, count, least, most = out.split()
        return Seen(float(seconds), float(rate), float(p50), float(p99), int(count), float(least), float(most))

    def publish(
        self, peer: Peer, count: int, size: int, connections: int = 1, window: int = 5000, *, rate: int = 0
    ) -> Seen:
        started = self.start(peer, "publish", count=count, size=size, connections=connections, window=window, rate=rate)
        return self.wait(started)
