"""Records the first run: a real `headrace serve --demo` in a real terminal, for docs/.

    python tools/record.py                  # writes docs/first-run.cast and docs/images/first-run.svg

The .cast is asciinema's format, version 2 (`asciinema play docs/first-run.cast`). The SVG shows the same lines in
the order and at the pace they came, without a script: browsers and forges play it. What was typed is in the recording,
too: the commands that the greeting offers are really run. Ports and the data folder are those of everybody's first
run; the folder's place is shown as ~/headrace.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
CAST = ROOT / "docs" / "first-run.cast"
SVG = ROOT / "docs" / "images" / "first-run.svg"
WIDTH, HEIGHT = 118, 28
SHOWN_AS = "~/headrace"
PATIENCE_S = 60.0
WATCHED_S = 8.0  # of the demo, after the greeting
PROMPT = "$ "
TYPING_S = 0.035
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
Event = tuple[float, str]
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
  aria-label="A terminal: headrace serve --demo, from the first line to the clean stop">
<style>
text {{ font: 11.6px ui-monospace, "SF Mono", Menlo, Consolas, monospace; fill: #d7e3ea; white-space: pre;
  animation: come 0.01s both; }}
text.c {{ fill: #8fd3e3; font-weight: 600; }}
text.n {{ fill: #7d919d; }}
text.r {{ fill: #6fd6ac; font-weight: 600; }}
@keyframes come {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="100%" height="100%" rx="10" fill="#101a21"/>
<g fill="#3a4a55"><circle cx="22" cy="20" r="5"/><circle cx="40" cy="20" r="5"/><circle cx="58" cy="20" r="5"/></g>
{lines}
</svg>
"""


class Terminal:
    """What a terminal shows, with the time of every piece."""

    def __init__(self, folder: Path) -> None:
        self._began = time.monotonic()
        self._folder = folder
        self.events: list[Event] = []

    def show(self, text: str) -> None:
        place = str(self._folder)
        self.events.append((time.monotonic() - self._began, text.replace(place, SHOWN_AS)))

    def type(self, command: str) -> None:
        self.show(PROMPT)
        for character in command:
            time.sleep(TYPING_S)
            self.show(character)
        self.show("\r\n")

    def run(self, command: list[str], typed: str, until: str | None = None) -> "subprocess.Popen[bytes]":
        """Shows the output until a line matches, or until the command is over."""
        self.type(typed)
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, cwd=self._folder, start_new_session=True
        )
        os.close(slave)
        self._master, self._process = master, process
        self.follow(until)
        return process

    def follow(self, until: str | None = None, seconds: float = PATIENCE_S) -> None:
        said = ""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    piece = os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    return
                self.show(piece)
                said += piece
                if until is not None and re.search(until, said, re.M):
                    return
            elif self._process.poll() is not None:
                return
        if until is not None:
            raise SystemExit(f"nothing like {until!r} came in {seconds:g} s, but: {said}")


def record() -> list[Event]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "headrace"
        folder.mkdir()
        terminal = Terminal(folder)
        python = [sys.executable, "-m", "headrace"]
        broker = terminal.run([*python, "serve", "--demo"], "headrace serve --demo", r"^ready\r?\n")
        try:
            serving = terminal._master
            greeting = "".join(text for _, text in terminal.events)
            terminal.show("# in another terminal\r\n")
            for name in ("publish", "read"):
                found = re.search(rf"^{name}\s+(curl .+?)\r?$", greeting, re.M)
                assert found is not None, greeting
                time.sleep(1.0)
                terminal.run(["sh", "-c", f"{found[1]} -sS"], found[1])
                terminal.show("\r\n")
            time.sleep(WATCHED_S)
            terminal.run([*python, "queue", "ls"], "headrace queue ls")
            terminal.run([*python, "dlq", "ls"], "headrace dlq ls")
            terminal._master, terminal._process = serving, broker
            terminal.show("# Ctrl-C in the first\r\n")
            os.killpg(broker.pid, signal.SIGINT)
            terminal.follow(seconds=PATIENCE_S)
        finally:
            if broker.poll() is None:
                broker.terminate()
            if broker.wait(60) != 0:
                raise SystemExit(f"the broker ended with {broker.returncode}")
        return terminal.events


def cast(events: list[Event]) -> str:
    header = {"version": 2, "width": WIDTH, "height": HEIGHT, "title": "Headrace: the first run"}
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in events)]
    return "\n".join(lines) + "\n"


def lines_of(events: list[Event]) -> list[Event]:
    """(when it was whole, the line as plain text)."""
    found: list[Event] = []
    line = ""
    for at, text in events:
        for character in CONTROL.sub("", text):
            if character == "\n":
                found.append((at, line))
                line = ""
            else:
                line += character
    found = [(at, line) for at, line in found if line.strip()]
    return [*found, (events[-1][0], line)] if line else found


def svg(events: list[Event]) -> str:
    lines: list[Event] = []
    for at, line in lines_of(events):
        pieces = [line[begin : begin + WIDTH] for begin in range(0, len(line), WIDTH)] or [""]
        lines += [(at, piece) for piece in pieces]
    while lines and not lines[-1][1].strip():
        lines.pop()
    height, step, lead = 17.0, 8.05, 40
    full_w, full_h = WIDTH * step / 1.15 + 40, len(lines) * height + lead + 20
    body = []
    for number, (at, line) in enumerate(lines):
        kind = {"$": "c", "#": "n"}.get(line[:1], "r" if line == "ready" else "t")
        place = f'class="{kind}" x="20" y="{lead + (number + 1) * height:.0f}" style="animation-delay:{at:.2f}s"'
        body.append(f"<text {place}>{escape(line, quote=False)}</text>")
    return FRAME.format(width=round(full_w), height=round(full_h), lines="\n".join(body))


def main() -> None:
    options = argparse.ArgumentParser(description="Record the first run for docs/.")
    options.add_argument("--again", action="store_true", help="draw docs/first-run.cast again instead of recording")
    if not options.parse_args().again:
        CAST.write_text(cast(record()))
    events = [(at, text) for at, _, text in map(json.loads, CAST.read_text().splitlines()[1:])]
    SVG.write_text(svg(events))
    print(f"{len(lines_of(events))} lines in {events[-1][0]:.1f} s")


if __name__ == "__main__":
    main()
