"""A real standby in a process of its own, to be killed."""

import json
import time
from pathlib import Path
from typing import Any, Self

from tests.killable import Killable
from tests.listing import listed

PATIENCE_S = 120.0


class StandbyProcess(Killable):
    """Keeps its folder over restarts."""

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder / "standby.txt")
        self.data = folder / "data"
        self._url = url
        self._begin = 0

    def start(self) -> Self:
        self._begin = self._run("standby", self._url, "--data-dir", str(self.data), "--json")
        return self

    def events(self) -> list[dict[str, Any]]:
        """Of this life."""
        lines = self._output.read_bytes()[self._begin :].split(b"\n")[:-1]
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def wait_in_step(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [event for event in self.events() if event["event"] == "in step"]):
            assert time.monotonic() < deadline, self.said()
            assert self.is_running, self.said()
            time.sleep(0.02)
        return found[-1]


def differences(leader: Path, standby: Path) -> list[str]:
    """Paths whose content is not the same, or that only one of them has, besides what is not sent."""
    from headrace.log.standby.change_feed import LEFT_OUT

    def files(root: Path) -> dict[str, Path]:
        found = {str(path.relative_to(root)): path for path in listed(root, "**/*") if path.is_file()}
        return {name: path for name, path in found.items() if name.partition("/")[0] not in LEFT_OUT}

    def content(path: Path) -> bytes | None:
        try:
            return path.read_bytes()
        except FileNotFoundError:  # removed since it was listed
            return None

    theirs, ours = files(leader), files(standby)
    return sorted(
        name
        for name in theirs.keys() | ours.keys()
        if name not in theirs or name not in ours or content(theirs[name]) != content(ours[name])
    )
