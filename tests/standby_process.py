"""A real standby in a process of its own, to be killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

PATIENCE_S = 120.0


class StandbyProcess:
    """Keeps its folder over restarts."""

    def __init__(self, folder: Path, url: str) -> None:
        self.data = folder / "data"
        self._url = url
        folder.mkdir(exist_ok=True)
        self._output = folder / "standby.txt"
        self._begin = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        self._begin = self._output.stat().st_size if self._output.exists() else 0
        command = [sys.executable, "-m", "headrace", "standby", self._url, "--data-dir", str(self.data), "--json"]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        return self

    def events(self) -> list[dict[str, Any]]:
        """Of this life."""
        lines = self._output.read_bytes()[self._begin :].split(b"\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def wait_in_step(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [event for event in self.events() if event["event"] == "in step"]):
            assert time.monotonic() < deadline, self.said()
            assert self._process is not None and self._process.poll() is None, self.said()
            time.sleep(0.02)
        return found[-1]

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        self._process = None

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(PATIENCE_S)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def said(self) -> str:
        return self._output.read_text(errors="replace")[-4000:]


def differences(leader: Path, standby: Path) -> list[str]:
    """Paths whose content is not the same, or that only one of them has, besides what is not sent."""
    from headrace.log.changes import LEFT_OUT

    def files(root: Path) -> dict[str, Path]:
        found = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
        return {name: path for name, path in found.items() if name.partition("/")[0] not in LEFT_OUT}

    theirs, ours = files(leader), files(standby)
    return sorted(
        name
        for name in theirs.keys() | ours.keys()
        if name not in theirs or name not in ours or theirs[name].read_bytes() != ours[name].read_bytes()
    )
