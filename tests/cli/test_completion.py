"""The output of `headrace completion`, in each shell."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.running import environment, headrace

PATIENCE_S = 60.0


@pytest.fixture
def with_headrace(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which `headrace` is on the PATH, as after an installation."""
    program = tmp_path / "bin" / "headrace"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m headrace "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    yield environment(PATH=path, HOME=str(tmp_path), XDG_CONFIG_HOME=str(tmp_path), TERM="dumb")


def script_of(shell: str, folder: Path) -> Path:
    script = folder / f"headrace.{shell}"
    script.write_bytes(headrace("completion", shell).stdout)
    return script


def test_bash_completes_commands(with_headrace: dict[str, str], tmp_path: Path) -> None:
    script = script_of("bash", tmp_path)
    words = "COMP_WORDS=(headrace queue p); COMP_CWORD=2; _headrace_completion headrace; echo ${COMPREPLY[@]}"
    ask = f"source {script}; {words}"
    done = subprocess.run(["bash", "-c", ask], env=with_headrace, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["peek", "purge"]


@pytest.mark.peer
@pytest.mark.skipif(shutil.which("fish") is None, reason="SKIPPED FOR WANT OF fish: its completions")
def test_fish_completes_commands_with_their_descriptions(with_headrace: dict[str, str], tmp_path: Path) -> None:
    script = script_of("fish", tmp_path)
    subprocess.run(["fish", "--no-execute", str(script)], env=with_headrace, check=True)

    def offered(line: str) -> dict[str, str]:
        ask = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
        done = subprocess.run(ask, env=with_headrace, capture_output=True, text=True, check=True)
        return dict(one.partition("\t")[::2] for one in done.stdout.splitlines())

    assert offered("headrace queue p").keys() == {"peek", "purge"}
    assert "," in offered("headrace que")["queue"], "a comma does not end what is said of a command"
    assert "--vhost" in offered("headrace queue ls --")


@pytest.mark.peer
@pytest.mark.skipif(shutil.which("zsh") is None, reason="SKIPPED FOR WANT OF zsh: its completions")
def test_zsh_completes_a_command_at_the_tab_key(with_headrace: dict[str, str], tmp_path: Path) -> None:
    """Runs zsh in a pseudo-terminal, because only a terminal has a line to complete."""
    script = script_of("zsh", tmp_path)
    subprocess.run(["zsh", "--no-exec", str(script)], env=with_headrace, check=True)
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], env=with_headrace, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        os.write(ours, f"autoload -Uz compinit; compinit -u -D; source {script}; print loa''ded\n".encode())
        read_until(ours, "loaded\r\n")
        os.write(ours, b"print -r -- headrace queue pu\t:\n")
        assert "headrace queue pu:" in read_until(ours, "pu:\r\n"), "only our own command is completed"
        os.write(ours, b"headrace queue pu\t")
        read_until(ours, "rge ")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def read_until(terminal: int, wanted: str) -> str:
    seen, deadline = "", time.monotonic() + PATIENCE_S
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} did not come: {seen!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
