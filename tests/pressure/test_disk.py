"""The disk fills up in a real process: publishers are paused before it is full, and go on when there is room."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pressure.running import MB, PATIENCE_S, broker, eventually
from tests.pressure.test_memory import Publisher

SIZE_MB = 96


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("NO MOUNT: a small filesystem needs root and mount(8); the disk alarm is not tested here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_publishers_wait_while_the_disk_is_short_and_readers_do_not(small_disk: Path) -> None:
    flags = ("--disk-free-limit", "40MB", "--disk-reserve", "8MB")
    with broker(small_disk / "data", *flags) as running:
        publisher = Publisher(running, "mine")
        eventually(lambda: publisher.sent > 10, "publishing")
        ballast = small_disk / "ballast"
        ballast.write_bytes(bytes(free_bytes(small_disk) - 30 * MB))
        eventually(lambda: publisher.told, "pika is blocked")
        assert publisher.told[0][0] == "blocked" and "disk" in publisher.told[0][1].method.reason
        status, headers, problem = running.post("other", b"not now")
        assert status == 503 and int(headers["retry-after"]) >= 1 and problem["code"] == "disk_full"
        with running.connect() as connection:
            channel = connection.channel()
            got = 0
            for method, _, _ in channel.consume("mine", auto_ack=True, inactivity_timeout=PATIENCE_S):
                assert method is not None, "readers wait"
                got += 1
                if got == 10:
                    break
            channel.cancel()
        assert got == 10
        # A little more room is not enough: it would be short again in a moment. It takes 50 MB.
        with ballast.open("r+b") as file:
            file.truncate(ballast.stat().st_size - (45 * MB - free_bytes(small_disk)))
        eventually(lambda: running.metric("headrace_disk_free_bytes") > 40 * MB, "a little room")
        assert running.metric('headrace_publishers_paused{reason="disk"}') == 1
        before = publisher.sent
        ballast.unlink()
        eventually(lambda: len(publisher.told) == 2, "pika is unblocked")
        assert publisher.told[1][0] == "unblocked"
        eventually(lambda: publisher.sent > before, "publishing goes on")
        publisher.stop()
        assert running.metric('headrace_pressure_events_total{event="disk_paused"}') == 1, "no flapping"
        assert running.metric("headrace_log_refused_full_total") == 0, "the alarm came before the disk was full"
        assert running.post("other", b"now")[0] == 200


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def test_a_disk_that_the_broker_filled_can_be_opened_after_a_kill(small_disk: Path) -> None:
    """The reserve is small, and no checkpoint is due by size or time: recovery would need more than there is."""
    flags = ["--disk-free-limit", "0", "--disk-reserve", "1MB"]
    flags += ["--checkpoint-bytes", "1GB", "--checkpoint-interval", "1h"]
    confirmed = 0
    with broker(small_disk / "data", *flags) as running:
        while (answer := running.post("mine", b"%d " % confirmed + bytes(900_000)))[0] == 200:
            confirmed += 1
        assert answer[0] == 503 and answer[2]["code"] == "disk_full"
        assert confirmed > 20
        running.process.kill()
        running.process.wait(PATIENCE_S)
    with broker(small_disk / "data", *flags) as running:
        (found,) = json.loads(running.get("/topics/mine")[1])["logs"]
        assert (found["start"], found["end"]) == (0, confirmed)
