"""`headrace standby`: its output, and what it refuses."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from headrace.cli.data_folder.standby import Following, Stop, _detail, event_printer
from headrace.client.connection import Connection
from headrace.client.exchange import Response, parse_url
from headrace.log.disk import paths
from headrace.log.disk.disk import RealDisk
from headrace.log.standby.follower import COPYING, Standby, prepare
from headrace.log.standby.frames import BadFrame, Frame, Kind
from tests.broker_process import BrokerProcess
from tests.cli.running import ONLY_HTTP, SMALL, Broker, Started, headrace, serving
from tests.standby_process import StandbyProcess

PATIENCE_S = 20.0  # less than the time after which the client gives a request up


def test_a_standby_reports_its_state_and_takes_over(broker: Broker, tmp_path: Path) -> None:
    folder = str(tmp_path / "standby")
    broker.said("pub", "orders", "first")
    standby = Started(["standby", broker.url, "--data-dir", folder, "--name", "second"])
    standby.until(r"^copying the data folder of http://")
    standby.until(r"^in step; copied [\d,]+ bytes")
    assert "standby_second" in broker.said("status")
    assert headrace("serve", "--data-dir", folder, *ONLY_HTTP).returncode == 8, "the standby has it"
    assert standby.stop() == 0
    assert standby.lines[-1].startswith("stopped; in step up to change ")
    promoted = Started(["serve", "--data-dir", folder, *ONLY_HTTP, *SMALL])
    promoted.until("^ready")
    assert promoted.stop() == 0
    assert "was a standby's copy" in promoted.errors
    assert "first" in headrace("log", "dump", "orders", "--data-dir", folder).stdout.decode()
    refused = headrace("standby", broker.url, "--data-dir", folder)
    assert refused.returncode == 5 and b"--overwrite" in refused.stderr
    again = Started(["standby", broker.url, "--data-dir", folder, "--overwrite", "--json"])
    again.until('"event":"in step"')
    assert again.stop() == 0
    assert json.loads(again.lines[-1])["in_step"] is True


def test_stopping_the_leader_and_taking_over_loses_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "standby")
    with serving(tmp_path / "leader") as leader:
        standby = Started(["standby", leader.url, "--data-dir", folder])
        standby.until("^in step")
        for number in range(3):
            leader.said("pub", f"t{number}", stdin=b"x" * 1000 + b"\n" + b"y" * 1000 + b"\n")
    standby.until("ended the stream")
    assert standby.stop() == 0
    promoted = Started(["serve", "--data-dir", folder, *ONLY_HTTP, *SMALL])
    promoted.until("^ready")
    assert promoted.stop() == 0
    for number in range(3):
        assert headrace("log", "dump", f"t{number}", "--data-dir", folder).stdout.count(b"yyyy") >= 1


def unread_bytes(port: int) -> int:
    """Bytes that clients sent to a port of this machine and that its process has not read."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if int(row[1].partition(":")[2], 16) == port)


def test_a_standby_stops_while_it_waits_for_a_frozen_leader(tmp_path: Path) -> None:
    """The leader never responds. Before, the standby waited for the end of its request, which takes half a minute."""
    folder = tmp_path / "leader"
    folder.mkdir()
    leader = BrokerProcess(folder, listeners=("http",)).start()
    standby = StandbyProcess(tmp_path / "standby", f"http://127.0.0.1:{leader.ports['http']}").start()
    try:
        standby.wait_in_step()
        os.kill(leader.pid, signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE_S
        while not unread_bytes(leader.ports["http"]):  # a confirmation, whose response will not come
            assert time.monotonic() < deadline, standby.said()
            time.sleep(0.02)
        assert standby.stop(PATIENCE_S) == 0
        assert standby.events()[-1]["event"] == "stopped" and standby.events()[-1]["in_step"] is True
    finally:
        os.kill(leader.pid, signal.SIGCONT)
        standby.close()
        leader.close()


@pytest.mark.parametrize(
    ("hello", "words"),
    [(None, "is not HELLO"), (b'{"folder": "one"}', "is not HELLO"), (b"[]", "does not say who it is")],
)
def test_nothing_is_copied_from_a_leader_without_a_valid_hello(tmp_path: Path, hello: bytes | None, words: str) -> None:
    disk, root = RealDisk(), str(tmp_path / "standby")
    standby = Standby(disk, root, prepare(disk, root))
    following = Following(
        Connection(parse_url("http://leader")), standby, "it", event_printer(False), Stop.__new__(Stop)
    )
    with pytest.raises(BadFrame, match=words):
        if hello is not None:
            following._apply(Frame(Kind.HELLO, 1, 0, "", hello))
        following._apply(Frame(Kind.CHUNK, 1, 0, "a", b"x"))
    assert not (tmp_path / "standby" / "a").exists()
    standby.close()


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_refusal_without_detail_is_reported_by_its_status(body: bytes) -> None:
    assert _detail(Response(503, {}, body)) == "status 503"


def test_an_unfinished_copy_is_not_served(tmp_path: Path) -> None:
    (tmp_path / paths.STANDBY).write_text(json.dumps({"state": COPYING}))
    for command in (["serve", *ONLY_HTTP], ["log", "ls"]):
        refused = headrace(*command, "--data-dir", str(tmp_path))
        assert refused.returncode == 6 and b"unfinished copy" in refused.stderr, refused.stderr


def test_a_standby_whose_login_is_refused_exits_with_an_error(broker: Broker, tmp_path: Path) -> None:
    url = broker.url.replace("http://", "http://nobody:wrong@")
    refused = headrace("standby", url, "--data-dir", str(tmp_path / "standby"))
    assert refused.returncode == 1 and b"wrong" not in refused.stderr, refused.stderr
