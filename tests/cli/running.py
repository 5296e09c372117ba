"""Runs the `headrace` command in child processes."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-m", "headrace"]
# Small journal files, because pre-writing files of the default size takes longer than a test.
SMALL = ["--journal-file-size", "1MB", "--journal-files", "2"]
ONLY_HTTP = ["--http", "localhost:0", "--amqp", "off", "--kafka", "off"]
PATIENCE_S = 60


def environment(**extra: str) -> dict[str, str]:
    """The environment without the machine's HEADRACE_* variables. Enables faulthandler dumps for `stop`."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    return ours | {"PYTHONFAULTHANDLER": "1"} | extra


@contextmanager
def closed_terminals(action: signal.Handlers) -> Iterator[None]:
    """Sets the SIGHUP disposition that child processes inherit: SIG_IGN as under nohup, or SIG_DFL."""
    before = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def headrace(
    *arguments: str, stdin: bytes = b"", cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        env=environment(**env),
        cwd=cwd,
        timeout=PATIENCE_S,
        check=False,
    )


class Started:
    """A long-running command whose output is read line by line."""

    def __init__(self, arguments: Sequence[str], *, cwd: Path | None = None, **env: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(**env),
            cwd=cwd,
            text=True,
        )
        self.lines: list[str] = []
        self._errors: list[str] = []
        self._listener = threading.Thread(target=self._listen_to_errors)
        self._listener.start()

    def _listen_to_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    def until(self, pattern: str) -> re.Match[str]:
        """Reads lines until one matches; fails with the output if none does."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"no line like {pattern!r} in {self.lines}; stderr: {self.errors}")

    @property
    def errors(self) -> str:
        self._listener.join(PATIENCE_S)
        return "".join(self._errors)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code. `lines` then has all output."""
        assert self.process.stdout is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        patience = threading.Timer(PATIENCE_S, self.process.send_signal, [signal.SIGABRT])
        patience.start()
        self.lines.extend(self.process.stdout)
        code = self.process.wait(PATIENCE_S)
        patience.cancel()
        assert code != -signal.SIGABRT, f"it did not end after signal {number}: {self.errors}"
        self._listener.join(PATIENCE_S)
        self.process.stdout.close()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return code


class Broker(Started):
    """`headrace serve` on a free port. Ready once constructed."""

    def __init__(self, data_dir: Path, *flags: str, cwd: Path | None = None, **env: str) -> None:
        arguments = ["serve", "--data-dir", str(data_dir), *ONLY_HTTP, *SMALL, *flags]
        super().__init__(arguments, cwd=cwd, **env)
        try:
            self.url = self.until(r"^http\s+(http://\S+)")[1]
            self.until(r"^ready")
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return headrace(*arguments, stdin=stdin, HEADRACE_URL=self.url)

    def said(self, *arguments: str, stdin: bytes = b"") -> str:
        """Runs a command that must succeed and returns its output."""
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


@contextmanager
def serving(data_dir: Path, *flags: str, cwd: Path | None = None, **env: str) -> Iterator[Broker]:
    broker = Broker(data_dir, *flags, cwd=cwd, **env)
    try:
        yield broker
    finally:
        broker.stop()
