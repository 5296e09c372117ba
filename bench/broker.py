"""One of our brokers in a process of its own, for benchmarks that look at it from outside."""

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

LISTENERS = ("http", "amqp", "kafka")
STOP_S_MAX = 90.0


class Broker:
    """With the listeners that are named, on ports that were free. Stopped at the end of a `with`."""

    def __init__(self, folder: str | Path, *options: str, listeners: Collection[str] = LISTENERS) -> None:
        command = [sys.executable, "-m", "headrace", "serve", "--data-dir", str(folder), *options]
        for listener in LISTENERS:
            command += [f"--{listener}", "localhost:0" if listener in listeners else "off"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if line.startswith("ready"):
                break
        found = re.findall(r"^(http|amqp|kafka)\s+(?:\w+://)?([^\s/]+)", said, re.M)
        self.addresses: dict[str, str] = dict(found)  # host:port
        if set(self.addresses) != set(listeners):
            self.stop()
            raise RuntimeError(f"the broker did not start:\n{said}")

    @property
    def url(self) -> str:
        return f"http://{self.addresses['http']}"

    def port(self, listener: str) -> int:
        return int(self.addresses[listener].rpartition(":")[2])

    @property
    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Of the threads there are: exact, where /proc/PID/stat counts ticks."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=STOP_S_MAX)

    def __enter__(self) -> "Broker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
