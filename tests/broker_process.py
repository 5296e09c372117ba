"""A real broker in a process of its own, to be used by real clients and killed."""

import time
from pathlib import Path
from typing import Self

from tests.killable import Killable
from tests.ports import free_port

START_SECONDS_MAX = 60.0
TRIES = 5
LISTENERS = ("http", "amqp", "kafka")


class BrokerProcess(Killable):
    """Keeps its ports and its data over restarts, as clients expect of a broker. Only the named listeners are open."""

    def __init__(self, folder: Path, *options: str, listeners: tuple[str, ...], host: str = "127.0.0.1") -> None:
        super().__init__(folder / "broker.txt")
        self.data = folder / "data"
        self._options = options
        self._host = host
        self._was_up = False
        self.ports = {listener: free_port() for listener in listeners}

    def start(self) -> Self:
        for _ in range(TRIES):
            if self._is_ready(self._launch()):
                self._was_up = True
                return self
            # Another process took the port before it was bound. A restart must keep its own ports.
            if self._was_up or "is in use by another program" not in self.said():
                break
            self.ports = {listener: free_port() for listener in self.ports}
        raise AssertionError(f"the broker did not start:\n{self.said()}")

    def _launch(self) -> int:
        """Where in the output it begins to speak."""
        command = ["serve", "--data-dir", str(self.data)]
        command += ["--journal-file-size", "8MB"]  # quick to make
        for listener in LISTENERS:
            command += [f"--{listener}", f"{self._host}:{self.ports[listener]}" if listener in self.ports else "off"]
        return self._run(*command, *self._options)

    def _is_ready(self, since: int) -> bool:
        deadline = time.monotonic() + START_SECONDS_MAX
        while self.is_running and time.monotonic() < deadline:
            if b"\nready\n" in self._output.read_bytes()[since:]:
                return True
            time.sleep(0.01)
        return False
