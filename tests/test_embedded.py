"""headrace.Log: the log without a server."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import headrace
from headrace.errors import CorruptLog, DataFolderLocked, InvalidInput, LogClosed, OffsetOutOfRange, StorageError
from headrace.log import shard as shard_module
from headrace.log.disk.disk import RealDisk
from headrace.log.read.cold_reads import Loads, ReadWaits
from headrace.record.types import Record
from tests.cli.running import serving

# Small journal files: pre-writing the usual 64 MB each is for brokers, not for a test. And nothing goes by its age:
# records that say they are of 1970 would, as soon as the log keeps house by itself.
SMALL = {"journal_file_size": "1MB", "journal_files": 2, "retention_ms": -1}


def open_log(path: Path, **settings: object) -> headrace.Log:
    return headrace.Log(path, **{**SMALL, **settings})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[headrace.Log]:
    with open_log(tmp_path / "log") as opened:
        yield opened


def test_what_was_appended_can_be_read(log: headrace.Log) -> None:
    assert log.latest_offset is None
    assert log.append("first", key="k", headers=[("h", b"v")], timestamp=5) == 0
    assert log.append(None, key=b"k") == 1
    first, second = log.read(0)
    assert first == headrace.Record(0, 5, b"k", b"first", (("h", b"v"),))
    assert (second.offset, second.key, second.value) == (1, b"k", None)
    assert (log.start_offset, log.latest_offset, log.end_offset) == (0, 1, 2)
    assert log.read(2) == []
    assert [r.offset for r in log.read(0, limit=1)] == [0]


def test_many_records_are_one_batch_with_offsets_in_a_row(log: headrace.Log) -> None:
    log.append("x")
    assert log.append_many([("a", "1"), ("b", b"2"), (None, None)]) == range(1, 4)
    assert log.append_many([]) == range(0)
    assert [record.value for record in log] == [b"x", b"1", b"2", None]


def test_reopening_finds_everything_and_says_how_it_was_closed(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.append_many([(None, str(n)) for n in range(100)])
    with open_log(tmp_path) as log:
        assert log.recovery.clean
        assert [record.value for record in log] == [str(n).encode() for n in range(100)]
        assert log.append("more") == 100


def test_a_killed_process_loses_nothing_that_append_returned_for(tmp_path: Path) -> None:
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


def test_a_subscriber_gets_what_is_there_and_what_comes(log: headrace.Log) -> None:
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
def test_closing_wakes_a_subscriber_that_waits(tmp_path: Path, what: str) -> None:
    log = open_log(tmp_path)
    subscription = log.subscribe()
    reader = threading.Thread(target=lambda: list(subscription))
    reader.start()
    (subscription if what == "subscription" else log).close()
    reader.join(30)
    assert not reader.is_alive()
    log.close()


def test_a_log_that_is_closed_when_a_subscriber_is_about_to_wait_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log(tmp_path)
    wait_or = log.wait_or

    def late(offset: int, stop: threading.Event, timeout_s: float | None) -> bool:
        log.close()
        return wait_or(offset, stop, timeout_s)

    monkeypatch.setattr(log, "wait_or", late)
    assert list(log.subscribe()) == []


def test_who_comes_just_after_the_end_of_a_log_is_told_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    """They had seen that it was open, and their work lay behind the last that its thread did."""
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


def test_a_subscriber_whose_wait_is_the_last_thing_a_log_does_is_woken(tmp_path: Path) -> None:
    """That its log is closed is said behind the end of the log's thread."""
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


def test_a_subscription_gives_up_when_its_time_is_over(log: headrace.Log) -> None:
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


def test_an_offset_nobody_has_is_refused(log: headrace.Log) -> None:
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


def test_the_folder_of_a_broker_is_not_taken_for_a_log(tmp_path: Path) -> None:
    """The first topic was: it was read, appended to, and cleaned up by the settings of the log."""
    with serving(tmp_path / "data") as broker, headrace.Producer("orders", broker.url) as producer:
        producer.publish("x")
    with pytest.raises(InvalidInput, match="the folder of a broker"):
        open_log(tmp_path / "data")


def test_a_log_stays_with_the_process_that_opened_it(tmp_path: Path) -> None:
    """A child has no thread for it and waited for ever; and its copy of the lock outlived the log."""
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


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(LogClosed):
        log.append("x")
    with pytest.raises(LogClosed):
        log.read(0)


def test_settings_are_as_people_write_them(tmp_path: Path) -> None:
    with open_log(tmp_path, compression="zstd", segment_size="64KB") as log:
        log.append_many([(None, "x" * 1000)] * 100)
        assert len(list(log)) == 100
    with pytest.raises(InvalidInput, match=r"segment_size \(from an argument\)"):
        open_log(tmp_path, segment_size="big")


def test_housekeeping_removes_what_is_past_its_time(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_size="4KB", retention_bytes="8KB") as log:
        for _ in range(100):
            log.append("x" * 400)
        log.maintain()
        assert log.start_offset > 0
        assert [record.offset for record in log] == list(range(log.start_offset, 100))


def test_a_log_that_was_compacted_is_not_rewritten_again_for_nothing(tmp_path: Path) -> None:
    """It was, every `retention_interval`, all of it."""
    with open_log(tmp_path, segment_size="4KB", cleanup_policy="compact") as log:
        for n in range(100):
            log.append("x" * 400, key=f"k{n % 7}")
        log.maintain()

        def begun() -> set[int]:
            log._kept_at = -1e9
            log._tick()
            return set(log._shard.maintenance.busy)

        assert not log._on_owner(begun)
        for n in range(100):
            log.append("x" * 400, key=f"k{n % 7}")
        assert log._on_owner(begun), "for enough that is new"


def test_housekeeping_that_was_asked_for_says_what_failed(tmp_path: Path) -> None:
    with open_log(tmp_path, segment_size="4KB", cleanup_policy="compact") as log:
        for n in range(100):
            log.append("x" * 400, key=f"k{n % 7}")
        damaged = min(tmp_path.glob("logs/*/*.log"))
        data = bytearray(damaged.read_bytes())
        data[500] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(CorruptLog):
            log.maintain()


def test_a_log_whose_upkeep_fails_can_be_closed(tmp_path: Path) -> None:
    """The thread that the log belongs to ended with it, and everybody waited for ever."""
    log = open_log(tmp_path / "log")
    looked = threading.Event()

    def look() -> None:
        looked.set()
        raise OSError("no look at the folder")

    log._owner.tick = look
    assert looked.wait(60)
    assert ended(log.close)


def test_a_log_whose_folder_is_gone_takes_nothing_and_can_be_closed(tmp_path: Path) -> None:
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
    """On a thread of its own: what waits for ever must not stop the others."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            outcome.append(None)
        except BaseException as error:  # noqa: BLE001 - raised by whoever asked
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    if outcome and outcome[0] is not None:
        raise outcome[0]
    return bool(outcome)


def test_records_are_the_same_when_they_are_archived_and_when_they_are_back(tmp_path: Path) -> None:
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


def test_a_read_that_waits_for_the_disk_keeps_no_append_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_whoever_waits_for_the_disk_when_the_log_is_closed_is_told(
    log: headrace.Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop leaves out the reads that were not begun; of so many threads some waited for ever."""
    loader = log._shard.loader
    asked = threading.Event()
    monkeypatch.setattr(loader, "submit", lambda job, done: asked.set())  # and left out

    def read() -> None:
        raise ReadWaits(Loads(loader), "what lies on the disk", lambda: None)

    closing = threading.Thread(target=lambda: asked.wait(60) and log.close(), daemon=True)
    closing.start()
    with pytest.raises(LogClosed):
        assert ended(lambda: log._when_loaded(read))
    closing.join(60)  # or it would go on in a folder that is removed with this test
    assert not closing.is_alive()


def test_a_compaction_that_a_close_broke_off_is_no_failure(log: headrace.Log, caplog: pytest.LogCaptureFixture) -> None:
    log._kept_house(LogClosed("the broker is stopping"))
    log._kept_house(StorageError("the disk is broken"))
    assert [record.getMessage() for record in caplog.records] == ["housekeeping failed: the disk is broken"]
