"""A program of ours in a process of its own, to be killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

STOP_SECONDS_MAX = 60.0


class Killable:
    """What it says goes to one file, life after life."""

    program: tuple[str, ...] = ("headrace",)  # a module, and the arguments that come before all others

    def __init__(self, output: Path) -> None:
        self._output = output
        output.touch()
        self._process: subprocess.Popen[bytes] | None = None

    def _run(self, *arguments: str) -> int:
        """Where in the output it begins to speak."""
        begin = self._output.stat().st_size
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self.program, *arguments], stdout=output, stderr=output, start_new_session=True
            )
        return begin

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS_MAX)
        self._process = None

    def stop(self, patience_s: float = STOP_SECONDS_MAX) -> int:
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(patience_s)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def said(self) -> str:
        return self._output.read_text(errors="replace")[-6000:]
