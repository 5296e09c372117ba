"""A real broker in a process of its own, to be used by real clients and killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from tests.ports import free_port

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
TRIES = 5
DOORS = ("http", "amqp", "kafka")


class BrokerProcess:
    """Keeps its ports and its data over restarts, as clients expect of a broker. Only the named doors are open."""

    def __init__(self, folder: Path, *options: str, doors: tuple[str, ...]) -> None:
        self.data = folder / "data"
        self._output = folder / "broker.txt"
        self._output.touch()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._was_up = False
        self.ports = {door: free_port() for door in doors}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        for _ in range(TRIES):
            if self._is_ready(self._launch()):
                self._was_up = True
                return self
            # Somebody took a port between the asking and the listening; a restart must keep its own.
            if self._was_up or "is in use by another program" not in self.said():
                break
            self.ports = {door: free_port() for door in self.ports}
        raise AssertionError(f"the broker did not start:\n{self.said()}")

    def _launch(self) -> int:
        """Where in the output it begins to speak."""
        command = [sys.executable, "-m", "headrace", "serve", "--data-dir", str(self.data)]
        command += ["--journal-file-size", "8MB"]  # quick to make
        for door in DOORS:
            command += [f"--{door}", f"127.0.0.1:{self.ports[door]}" if door in self.ports else "off"]
        begin = self._output.stat().st_size
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._options], stdout=output, stderr=output, start_new_session=True
            )
        return begin

    def _is_ready(self, since: int) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS_MAX
        while self._process.poll() is None and time.monotonic() < deadline:
            if b"\nready\n" in self._output.read_bytes()[since:]:
                return True
            time.sleep(0.01)
        return False

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
