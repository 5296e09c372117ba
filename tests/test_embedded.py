"""headrace.Log, the embedded log."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.errors import CorruptLog, DataFolderLocked, InvalidInput, LogClosed, OffsetOutOfRange, StorageError
from headrace.log import shard as shard_module
from headrace.log.disk.disk import RealDisk
from headrace.log.read.cold_reads import Loads, ReadWaits
from headrace.record.types import Record
from tests.cli.running import serving

# Small journal files, because pre-writing 64 MB each takes too long. No retention by age, because periodic maintenance
# would delete the records with timestamps in 1970.
SMALL: dict[str, Any] = {"journal_file_size": "1MB", "journal_files": 2, "retention_ms": -1}


def open_log(path: Path, **settings: Any) -> headrace.Log:
    return headrace.Log(path, **{**SMALL, **settings})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[headrace.Log]:
    with open_log(tmp_path / "log") as opened:
        yield opened


def test_appended_records_can_be_read(log: headrace.Log) -> None:
    latest = log.latest_offset
    assert latest is None
    assert log.append("first", key="k", headers=[("h", b"v")], timestamp=5) == 0
    assert log.append(None, key=b"k") == 1
    first, second = log.read(0)
    assert first == headrace.Record(0, 5, b"k", b"first", (("h", b"v"),))
    assert (second.offset, second.key, second.value) == (1, b"k", None)
    assert (log.start_offset, log.latest_offset, log.end_offset) == (0, 1, 2)
    assert log.read(2) == []
    assert [r.offset for r in log.read(0, limit=1)] == [0]


def test_append_many_stores_one_batch_with_consecutive_offsets(log: headrace.Log) -> None:
    log.append("x")
    assert log.append_many([("a", "1"), ("b", b"2"), (None, None)]) == range(1, 4)
    assert log.append_many([]) == range(0)
    assert [record.value for record in log] == [b"x", b"1", b"2", None]


def test_reopening_finds_all_records_and_reports_the_last_stop(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([(None, str(n)) for n in range(100)])
    with open_log(tmp_path) as log:
        assert log.recovery.clean
        assert [record.value for record in log] == [str(n).encode() for n in range(100)]
        assert log.append("more") == 100


def test_records_that_append_returned_survive_a_kill(tmp_path: Path) -> None:
    program = (
        "import headrace, os, sys\n"
        f"log = headrace.Log({str(tmp_path)!r}, journal_file_size='1MB', journal_files=2)\n"
        "for n in range(50): log.append(str(n))\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    with open_log(tmp_path) as log:
        assert not log.recovery.clean
        assert [record.value for record in log] == [str(n).encode() for n in range(50)]


def test_a_subscriber_receives_existing_and_new_records(log: headrace.Log) -> None:
    log.append("there")
    got: list[headrace.Record] = []
    enough = threading.Event()

    def follow() -> None:
        with log.subscribe(0) as records:
            for record in records:
                got.append(record)
                if len(got) == 3:
                    enough.set()
                    return

    reader = threading.Thread(target=follow)
    reader.start()
    log.append("came")
    log.append("later")
    assert enough.wait(30)
    reader.join()
    assert [record.value for record in got] == [b"there", b"came", b"later"]


@pytest.mark.parametrize("what", ["subscription", "log"])
def test_closing_wakes_a_waiting_subscriber(tmp_path: Path, what: str) -> None:
    log = open_log(tmp_path)
    subscription = log.subscribe()
    reader = threading.Thread(target=lambda: list(subscription))
    reader.start()
    (subscription if what == "subscription" else log).close()
    reader.join(30)
    assert not reader.is_alive()
    log.close()


def test_closing_the_log_ends_a_subscriber_that_is_about_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    wait_or = log.wait_or

    def late(offset: int, stop: threading.Event, timeout_s: float | None) -> bool:
        log.close()
        return wait_or(offset, stop, timeout_s)

    monkeypatch.setattr(log, "wait_or", late)
    assert list(log.subscribe()) == []


def test_a_call_just_after_close_raises_instead_of_hanging(tmp_path: Path) -> None:
    """Regression: callers that saw an open log queued work after the thread's last item, and waited for ever."""
    log = open_log(tmp_path)
    log.close()
    told: list[BaseException] = []

    def come() -> None:
        try:
            log._owner.call(lambda: None)
        except LogClosed as error:
            told.append(error)

    late = threading.Thread(target=come, daemon=True)
    late.start()
    late.join(30)
    assert told


def test_a_wait_queued_just_before_close_is_woken(tmp_path: Path) -> None:
    """Closing the shard wakes waiters with work that is posted after the thread's end marker."""
    log = open_log(tmp_path)
    owner, stop = log._owner, threading.Event()
    pause = threading.Event()

    def wait_at_the_end() -> None:
        for _ in range(6000):
            if owner._ended:
                break
            pause.wait(0.01)
        log._log.wait(0, stop.set)

    closing = log._shard.join
    log._shard.join = lambda: (closing(), owner.post(wait_at_the_end))  # type: ignore[assignment,method-assign,func-returns-value]
    log.close()
    assert stop.is_set()


def test_a_subscription_returns_on_timeout(log: headrace.Log) -> None:
    subscription = log.subscribe()
    assert subscription.get(0.01) == []
    log.append("x")
    assert [record.offset for record in subscription.get(30)] == [0]
    assert subscription.offset == 1


def test_threads_may_append_at_the_same_time(log: headrace.Log) -> None:
    offsets: list[int] = []

    def write() -> None:
        for _ in range(20):
            offsets.append(log.append("x"))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(offsets) == list(range(80))


def test_records_are_found_by_time(log: headrace.Log) -> None:
    for timestamp in (1000, 2000, 3000):
        log.append("x", timestamp=timestamp)
    assert [log.offset_at(t) for t in (0, 1000, 1500, 3000, 3001)] == [0, 0, 1, 2, 3]


def test_an_offset_out_of_range_is_refused(log: headrace.Log) -> None:
    log.append("x")
    with pytest.raises(OffsetOutOfRange):
        log.read(2)
    with pytest.raises(OffsetOutOfRange):
        log.read(-1)
    with pytest.raises(InvalidInput):
        log.read(0, limit=0)


def test_the_folder_belongs_to_one_log(tmp_path: Path) -> None:
    with open_log(tmp_path), pytest.raises(DataFolderLocked):
        open_log(tmp_path)
    open_log(tmp_path).close()


def test_the_data_folder_of_a_broker_is_refused(tmp_path: Path) -> None:
    """Regression: the broker's first topic was opened, appended to, and cleaned up with the log's settings."""
    with serving(tmp_path / "data") as broker, headrace.Producer("orders", broker.url) as producer:
        producer.publish("x")
    with pytest.raises(InvalidInput, match="the data folder of a broker"):
        open_log(tmp_path / "data")


def test_a_forked_child_cannot_use_the_log(tmp_path: Path) -> None:
    """Regression: a child without the owner thread waited for ever, and its copy of the lock outlived the log."""
    script = """
import os, signal, sys
import headrace
from headrace.errors import LogClosed

settings = {"journal_file_size": "1MB", "journal_files": 2}
said, say = os.pipe()
left, leave = os.pipe()
log = headrace.Log(sys.argv[1], **settings)
log.append("before")
if os.fork() == 0:
    signal.alarm(50)
    os.close(leave)
    try:
        log.append("by the child")
    except LogClosed as error:
        log.close()
        os.write(say, str(error).encode())
    os.read(left, 1)
    os._exit(0)
os.close(say)
assert b"forked" in os.read(said, 1000)
log.append("after")
log.close()
with headrace.Log(sys.argv[1], **settings) as log:
    assert [record.value for record in log] == [b"before", b"after"] and log.recovery.clean
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_a_closed_log_raises(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(LogClosed):
        log.append("x")
    with pytest.raises(LogClosed):
        log.read(0)


def test_settings_accept_units_and_names(tmp_path: Path) -> None:
    with open_log(tmp_path, compression="zstd", segment_size="64KB") as log:
        log.append_many([(None, "x" * 1000)] * 100)
        assert len(list(log)) == 100
    with pytest.raises(InvalidInput, match=r"segment_size \(from an argument\)"):
        open_log(tmp_path, segment_size="big")


def test_periodic_maintenance_applies_retention(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_size="4KB", retention_bytes="8KB") as log:
        for _ in range(100):
            log.append("x" * 400)
        log.maintain()
        assert log.start_offset > 0
        assert [record.offset for record in log] == list(range(log.start_offset, 100))


def test_a_compacted_log_is_not_compacted_again_without_new_records(tmp_path: Path) -> None:
    """Regression: the whole log was rewritten every `retention_interval`."""
    with open_log(tmp_path, segment_size="4KB", cleanup_policy="compact") as log:
        for n in range(100):
            log.append("x" * 400, key=f"k{n % 7}")
        log.maintain()

        def begun() -> set[int]:
            log._maintained_at = -1e9
            log._tick()
            return set(log._shard.maintenance.busy)

        assert not log._on_owner(begun)
        for n in range(100):
            log.append("x" * 400, key=f"k{n % 7}")
        assert log._on_owner(begun), "for enough that is new"


def test_maintain_raises_the_error_of_a_failed_task(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_size="4KB", cleanup_policy="compact") as log:
        for n in range(100):
            log.append("x" * 400, key=f"k{n % 7}")
        damaged = min(tmp_path.glob("logs/*/*.log"))
        data = bytearray(damaged.read_bytes())
        data[500] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(CorruptLog):
            log.maintain()


def test_a_log_whose_maintenance_fails_can_be_closed(tmp_path: Path) -> None:
    """Regression: the error ended the owner thread, and all callers waited for ever."""
    log = open_log(tmp_path / "log")
    looked = threading.Event()

    def look() -> None:
        looked.set()
        raise OSError("no look at the folder")

    log._owner.tick = look
    assert looked.wait(60)
    assert ended(log.close)


def test_a_log_whose_folder_is_deleted_refuses_appends_and_can_be_closed(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    shutil.rmtree(tmp_path / "log")

    def append_until_refused() -> None:
        with pytest.raises(StorageError):
            while True:
                log.append("x")

    def close() -> None:
        with pytest.raises(StorageError):
            log.close()

    assert ended(append_until_refused) and ended(close)


def ended(work: Callable[[], object]) -> bool:
    """Runs in a thread, so that a call that hangs does not block the test."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            outcome.append(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the test
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if outcome and outcome[0] is not None:
        raise outcome[0]
    return bool(outcome)


def test_records_are_unchanged_by_archiving_and_restoring(tmp_path: Path) -> None:
    with headrace.Log(tmp_path, segment_size="4KB", retention_ms=-1) as log:
        for n in range(100):
            log.append(f"value {n} " * 10, key=f"k{n % 7}", headers=[("n", b"%d" % n)], timestamp=1000 + n)
        before = list(log)
        assert log.tier() >= 3 and log.tier() == 0
        assert list(log) == before and log.offset_at(1050) == 50 and log.verify().is_sound
    with headrace.Log(tmp_path, segment_size="4KB", retention_ms=-1) as log:
        assert log.recovery.clean and list(log) == before
        assert log.read(50, limit=1) == [before[50]]
        assert log.restore() >= 3 and log.restore() == 0
        assert list(log) == before and log.verify().is_sound
    assert not list(tmp_path.rglob("*.parquet")) and not list(tmp_path.rglob("*.tmp"))


def test_verifying_finds_a_flipped_bit(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([(None, "x" * 100)] * 10)
        sound = log.verify()
        assert (sound.problems, sound.records) == ([], 10)
        (segment,) = (tmp_path / "logs").glob("*/*.log")
        data = bytearray(segment.read_bytes())
        data[200] ^= 1
        segment.write_bytes(data)
        assert not log.verify().is_sound


def test_a_cold_read_does_not_delay_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = threading.Event(), threading.Event()

    class Slow(RealDisk):
        def _is_cold(self, file: int) -> bool:
            return not answers.is_set() and os.readlink(f"/proc/self/fd/{file}").endswith(".log")

        def pread_cached(self, file: int, size: int, position: int) -> bytes | None:
            return None if self._is_cold(file) else super().pread_cached(file, size, position)

        def pread(self, file: int, size: int, position: int) -> bytes:
            if self._is_cold(file):
                asked.set()
                assert answers.wait(60)
            return super().pread(file, size, position)

    monkeypatch.setattr(shard_module, "RealDisk", Slow)
    found: list[list[Record]] = []
    with open_log(tmp_path) as log:
        log.append("on disk")
        reader = threading.Thread(target=lambda: found.append(log.read(0, limit=1)))
        reader.start()
        assert asked.wait(60)
        assert log.append("meanwhile") == 1
        assert not found
        answers.set()
        reader.join()
    assert [record.value for record in found[0]] == [b"on disk"]


def test_a_cold_read_raises_when_the_log_is_closed(log: headrace.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: closing drops reads that have not started, and some of their callers waited for ever."""
    loader = log._shard.loader
    asked = threading.Event()
    monkeypatch.setattr(loader, "submit", lambda job, done: asked.set())  # and drops it

    def read() -> None:
        raise ReadWaits(Loads(loader), "what lies on the disk", lambda: None)

    def close() -> None:
        if asked.wait(60):
            log.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    with pytest.raises(LogClosed):
        assert ended(lambda: log._when_loaded(read))
    closing.join(60)  # otherwise it would run on in a folder that the test removes
    assert not closing.is_alive()


def test_a_compaction_interrupted_by_close_is_not_logged(log: headrace.Log, caplog: pytest.LogCaptureFixture) -> None:
    log._log_failure(LogClosed("the broker is stopping"))
    log._log_failure(StorageError("the disk is broken"))
    assert [record.getMessage() for record in caplog.records] == ["periodic maintenance failed: the disk is broken"]
