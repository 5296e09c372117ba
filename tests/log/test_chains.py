"""I/O chains: run on this thread, on the I/O thread, and by the executor that serializes them with jobs."""

import asyncio
import errno
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.clock import SystemClock
from headrace.errors import StorageFailed
from headrace.log.commit import committer
from headrace.log.commit.committer import CHAIN_LOGS_MAX
from headrace.log.commit.plan import InlinePlan, Plan
from headrace.log.commit.round import Round
from headrace.log.disk.disk import RealDisk, run_one_by_one
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.io_chain import IoThread, Step, SyncFailure, run, sync
from headrace.log.disk.workers import InlineWorker, SerialExecutor
from headrace.log.log import LogSpec
from headrace.log.settings import LogSettings, StreamSettings, WriteModeName
from headrace.log.shard import Shard
from tests.log.helpers import Bench, batch


def wait_for(engine: IoThread) -> None:
    """Not with `select`, which takes no file that the system numbers 1024 or more."""
    watch = select.poll()
    watch.register(engine.fileno(), select.POLLIN)
    assert watch.poll(60_000), "it ends"


def in_engine(steps: list[Step], failure: SyncFailure) -> tuple[int, int, float]:
    engine = IoThread(failure)
    try:
        engine.start(steps)
        wait_for(engine)
        result = engine.collect()
        assert result is not None
        return result
    finally:
        engine.close()


def by_disk(steps: list[Step], failure: SyncFailure) -> tuple[int, int, float]:
    done, error, sync_s = run_one_by_one(RealDisk(), steps, failure)
    return done, error.errno or 0 if error else 0, sync_s


Runner = Callable[[list[Step], SyncFailure], tuple[int, int, float]]


@pytest.fixture(params=[run, in_engine, by_disk], ids=["here", "engine", "one by one"])
def runner(request: pytest.FixtureRequest) -> Runner:
    chosen: Runner = request.param
    return chosen


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def test_every_step_is_carried_out_in_order(runner: Runner, file: int) -> None:
    pieces = [bytes([n % 256]) * (n % 7) for n in range(1500)]  # more than one call takes, empty ones among them
    steps = [Step(file, [b"old"], 0), Step(file, pieces, 1), Step(file, None), Step(file, (bytearray(b"new"),), 0)]
    assert runner(steps, SyncFailure())[:2] == (4, 0)
    assert os.pread(file, 10_000, 0) == b"new" + b"".join(pieces)[2:]


def test_the_first_error_ends_the_chain(runner: Runner, file: int) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        steps = [Step(file, [b"first"], 0), Step(full, [b"no room"], 0), Step(file, [b"never"], 0)]
        assert runner(steps, SyncFailure())[:2] == (1, errno.ENOSPC)
        assert os.pread(file, 100, 0) == b"first"
    finally:
        os.close(full)


def test_a_failed_sync_ends_the_chain(runner: Runner, file: int) -> None:
    reader, writer = os.pipe()  # has nothing to sync
    try:
        steps = [Step(file, [b"a"], 0), Step(writer, None), Step(file, [b"b"], 0)]
        assert runner(steps, SyncFailure())[:2] == (1, errno.EINVAL)
        assert os.pread(file, 100, 0) == b"a"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_sync_that_fails_in_another_thread_ends_the_chain(runner: Runner, file: int) -> None:
    """A sync that succeeds after the failure may have written nothing. The slot written after it would vouch for the
    records, and the next start would take their absence for damage."""
    failure = SyncFailure()
    failure.note(errno.EIO)
    steps = [Step(file, [b"a"], 0), Step(file, None), Step(file, [b"b"], 0)]
    assert runner(steps, failure)[:2] == (1, errno.EIO)
    assert os.pread(file, 100, 0) == b"a"


SHORT = """
import os, resource, sys
from headrace.log.disk.io_chain import SyncFailure, run
from headrace.log.disk.io_chain import Step
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
print(run([Step(file, [b"a" * 700, b"b" * 700], 0)], SyncFailure())[:2], os.fstat(file).st_size)
"""


@pytest.mark.process
def test_a_short_write_is_completed_or_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHORT, str(tmp_path / "file")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"(0, {errno.EFBIG}) 1000\n"


@pytest.mark.parametrize("thread", ["engine", "here", "keeper"])
def test_a_failed_sync_is_visible_to_all_threads_before_it_is_reported(thread: str) -> None:
    """If several threads sync a file at once, the kernel reports a failure to one of them only."""
    reader, writer = os.pipe()  # has nothing to sync
    files = FileCache(RealDisk(), 8)
    engine = IoThread(files.sync_failure)
    try:
        files.check()
        if thread == "engine":
            engine.start([Step(writer, None)])
            wait_for(engine)  # not collected yet
        elif thread == "here":
            run([Step(writer, None)], files.sync_failure)
        else:
            with pytest.raises(OSError, match="Invalid argument"):
                sync(writer, files.sync_failure)
        with pytest.raises(OSError, match="an earlier sync failed"):
            files.check()
    finally:
        engine.close()
        os.close(reader)
        os.close(writer)


def test_buffers_are_held_until_the_chain_has_ended(file: int) -> None:
    engine = IoThread(SyncFailure())
    buffer = bytearray(b"a" * 1000)
    engine.start([Step(file, [buffer], 0)])
    with pytest.raises(BufferError):
        buffer.extend(b"b" * 100_000)
    wait_for(engine)
    engine.collect()
    buffer.extend(b"b")
    engine.close()


def test_an_io_thread_can_be_closed_twice_and_while_it_works(file: int) -> None:
    engine = IoThread(SyncFailure())
    engine.start([Step(file, [b"x" * 100_000], n * 100_000) for n in range(100)])
    engine.close()
    engine.close()
    assert os.fstat(file).st_size == 10_000_000, "what was begun is finished"


def test_jobs_and_chains_run_in_the_order_of_their_submission(file: int) -> None:
    worker = InlineWorker()
    executor = SerialExecutor(worker, RealDisk(), SyncFailure())
    seen: list[str] = []

    def note(name: str) -> Callable[[object, BaseException | None], None]:
        return lambda _result, _error: seen.append(name)

    def chain() -> None:
        seen.append("chain begins")
        executor.run([Step(file, [b"c"], 0)], ended)

    def ended(_ran: object, _error: BaseException | None) -> None:
        seen.append("chain ends")
        executor.release_turn()

    executor.submit(lambda: seen.append("first works"), note("first is done"))
    executor.take_turn(chain)
    executor.submit(lambda: seen.append("last works"), note("last is done"))
    while worker.pump():
        pass
    assert seen == ["first works", "first is done", "chain begins", "chain ends", "last works", "last is done"]


def test_closing_a_serial_executor_finishes_the_waiting_jobs() -> None:
    worker = InlineWorker()
    executor = SerialExecutor(worker, RealDisk(), SyncFailure())
    seen: list[int] = []
    for number in range(3):
        executor.submit(lambda number=number: seen.append(number), lambda _result, _error: None)  # type: ignore[misc]
    executor.close()
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("step", ["plan", "finish"])
def test_a_bug_in_a_round_stops_the_log_and_leaves_no_waiter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    shard = bench.open()
    bench.append(1, [b"first"])  # makes the segment: the next one is a chain

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    class Broken(InlinePlan):
        finish = broken  # type: ignore[assignment]

    if step == "plan":
        monkeypatch.setattr(shard.committer, "plan", broken)
    else:
        monkeypatch.setattr(committer, "InlinePlan", Broken)
    ticket = shard.log(1).append(batch([b"second"]))
    shard.pump()
    assert isinstance(ticket.error, StorageFailed) and "a bug" in str(ticket.error)
    told: list[BaseException | None] = []
    shard.worker.submit(lambda: None, lambda _result, error: told.append(error))
    shard.pump()
    assert told == [None], "the executor is free again"


def test_a_chain_that_cannot_start_stops_the_log_and_leaves_no_waiter(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = bench.open()
    bench.append(1, [b"first"])

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(shard.worker, "run", no_memory)
    ticket = shard.log(1).append(batch([b"second"]))
    shard.pump()
    assert isinstance(ticket.error, StorageFailed)
    told: list[BaseException | None] = []
    shard.worker.submit(lambda: None, lambda _result, error: told.append(error))
    shard.pump()
    assert told == [None], "the executor is free again"


def test_a_large_round_does_not_postpone_the_sync_of_settles(bench: Bench) -> None:
    """The round bypasses the journal, and used to report that everything before it was synced."""
    shard = bench.open()
    for size in (1, 10_000, 10_000):  # the names are durable: large rounds are chains
        bench.append(1, [bytes(size)])
    settle = shard.group()
    settle.put("settles", b"queue", b"1")
    settle.commit(lazy=True)
    shard.pump()
    assert shard.journal.is_unsynced
    bench.append(1, [bytes(10_000)])
    assert not shard.journal.is_unsynced or shard.scheduler.has_unsynced_changes


@pytest.mark.parametrize(("logs", "is_chain"), [(CHAIN_LOGS_MAX, True), (CHAIN_LOGS_MAX + 1, False)])
def test_a_round_of_very_many_logs_is_not_planned_on_the_owner_thread(bench: Bench, logs: int, is_chain: bool) -> None:
    shard = bench.open(*range(1, logs + 1), settings=LogSettings(open_files_max=1000))
    plan, planned = shard.committer.plan, []

    def watched(batch: Round) -> Plan | None:
        planned.append(plan(batch))
        return planned[-1]

    for _ in range(2):  # the first one makes the segments
        tickets = [log.append(batch([b"a"])) for log in shard.logs.values()]
        shard.committer.plan = watched  # type: ignore[method-assign]
        shard.pump()
        assert all(ticket.done and ticket.error is None for ticket in tickets)
    assert [bool(made) for made in planned] == [False, is_chain]


@pytest.mark.parametrize(
    ("size", "write_mode"),
    [(10, "sync"), (300_000, "sync"), (10, "async")],
    ids=["through the journal", "past the journal", "past the journal and synced later"],
)
def test_rounds_use_the_io_thread_if_a_loop_can_watch_it(tmp_path: Path, size: int, write_mode: WriteModeName) -> None:
    """They also leave the same files as a round of the worker."""

    async def append(watched: bool) -> bytes:
        loop = asyncio.get_running_loop()
        folder = tmp_path / str(watched)
        used: list[int] = []

        def watch(file: int, call: Callable[[], object] | None) -> None:
            if call is None:
                loop.remove_reader(file)
            else:
                loop.add_reader(file, lambda: used.append(1) or call())  # type: ignore[func-returns-value]

        shard, _ = Shard.open(
            str(folder),
            LogSettings(),
            logs=[LogSpec(1, "log", StreamSettings(write_mode=write_mode))],
            clock=SystemClock(),
            post=loop.call_soon_threadsafe,
            defer=loop.call_soon,
            watch=watch if watched else None,
            make_future=loop.create_future,
        )
        for number in range(20):
            await shard.log(1).append(batch([b"%d" % number * size]))
        assert len(used) >= 15 * watched and bool(used) == watched
        assert shard.log(1).visible_end == 20
        closed = loop.create_future()
        shard.close(closed.set_result)
        assert await closed is None
        await loop.run_in_executor(None, shard.join)
        [data] = folder.glob("logs/*/*.log")
        return data.read_bytes()

    assert asyncio.run(append(True)) == asyncio.run(append(False))


class WatchedDisk(RealDisk):
    def __init__(self) -> None:
        super().__init__()
        self.written_back: list[int] = []  # how large the segment was

    def start_writing_back(self, file: int) -> None:
        super().start_writing_back(file)
        self.written_back.append(os.fstat(file).st_size)


def test_segments_are_written_back_as_they_grow_not_all_at_a_checkpoint(tmp_path: Path) -> None:
    """Or the checkpoint's syncs keep the disk from those of the rounds for as long as that takes."""
    disk = WatchedDisk()
    bench = Bench(tmp_path, disk)
    shard = bench.open(settings=LogSettings())
    while sum(disk.written_back) < 20_000_000:
        bench.append(1, [bytes(10_000)])
        assert shard.counters.bytes_written < 100_000_000, "it never happens"
    assert shard.counters.checkpoints == 0
    asked = disk.written_back
    assert len(asked) >= 3 and sorted(asked) == asked, "again and again, while the segment grows"


def test_rounds_that_were_synced_in_their_segments_are_not_written_back_again(tmp_path: Path) -> None:
    disk = WatchedDisk()
    bench = Bench(tmp_path, disk)
    shard = bench.open(settings=LogSettings())
    for _ in range(50):
        bench.append(1, [bytes(100_000)])
    assert shard.counters.bytes_written > 5_000_000 and disk.written_back == []
