"""A real broker in a process of its own with its Kafka door open, to be used by real clients and killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.ports import free_port

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0


class KafkaBroker:
    """Keeps its port and its data over restarts, as clients expect of a broker."""

    def __init__(self, folder: Path, *options: str, http: bool = False, amqp: bool = False) -> None:
        self.data = folder / "data"
        self._output = folder / "broker.txt"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.http_port = free_port() if http else 0
        self.amqp_port = free_port() if amqp else 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> "KafkaBroker":
        command = [
            sys.executable,
            "-c",
            "import headrace.cli; headrace.cli.main()",
            "serve",
            "--data-dir",
            str(self.data),
        ]
        command += ["--kafka", self.address]
        command += ["--http", f"127.0.0.1:{self.http_port}" if self.http_port else "off"]
        command += ["--amqp", f"127.0.0.1:{self.amqp_port}" if self.amqp_port else "off"]
        with open(self._output, "ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._options], stdout=output, stderr=output, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS_MAX
        for port in filter(None, (self.port, self.http_port, self.amqp_port)):
            while not self._listens(port):
                assert self._process.poll() is None, f"the broker ended:\n{self.said()}"
                assert time.monotonic() < deadline, f"the broker did not start:\n{self.said()}"
                time.sleep(0.01)
        return self

    @staticmethod
    def _listens(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS_MAX)
        self._process = None

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(STOP_SECONDS_MAX)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def said(self) -> str:
        return self._output.read_text(errors="replace")[-6000:]

    def errors(self) -> list[str]:
        """Lines that a broker that works does not print."""
        return [line for line in self.said().splitlines() if " error " in line or "Traceback" in line]
