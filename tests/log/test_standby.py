"""The change feed and the follower without a network: damage, refusals, and files that change during the copy."""

import json
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from random import Random

import pytest

from headrace.clock import SystemClock
from headrace.errors import Conflict
from headrace.log.disk import paths
from headrace.log.disk.disk import RealDisk, write_atomically
from headrace.log.disk.watcher import OpenPaths
from headrace.log.recovery.inspect import Inspector
from headrace.log.shard import Shard
from headrace.log.standby import change_feed as changes_module
from headrace.log.standby import follower
from headrace.log.standby.acks import StandbyAcks
from headrace.log.standby.change_feed import Changes, StandbyFeed
from headrace.log.standby.follower import IncompleteCopy, OutOfStep, Standby, prepare
from headrace.log.standby.frames import BadFrame, FrameReader, Kind, pack

FRAMES = [
    pack(Kind.CREATE, 2, 1, b"a"),
    pack(Kind.WRITE, 3, 0, b"a", b"content"),
    pack(Kind.SYNC, 4, 0, b"a"),
]

NO_BROKERS = [
    pack(Kind.HELLO, 2, data=b"{"),
    pack(Kind.HELLO, 2, data=b"[]"),
    pack(Kind.HELLO, 2, data=b'{"folder": 1}'),
    pack(Kind.HELLO, 2, data=b'{"folder": "\xff"}'),
    pack(Kind.HELLO, 2, data=b"[" * 60_000),
    pack(Kind.LISTING, 1, data=b"1"),
    pack(Kind.LISTING, 1, data=b'{"a": 1}'),
    pack(Kind.LISTING, 1, data=b"[[1]]"),
    pack(Kind.LISTING, 1, data=b'["\xff"]'),
    pack(Kind.LISTING, 1, data=b'["\\ud800/"]'),
    pack(Kind.LISTING, 1, data=b"[" * 1_000_000),
    pack(Kind.IN_STEP, 1),
    pack(Kind.WRITE, 2, 1 << 63, b"a", b"x"),
    pack(Kind.TRUNCATE, 2, 1 << 63, b"a"),
    pack(Kind.ZEROS, 2, 0, b"a", b"\xff\xff\xff\xff"),
    pack(Kind.CHUNK, 1, 0, b"a", bytes((1 << 20) + 1)),
    pack(Kind.CHUNK, 1, 0, b"a" * 300, b"x"),
    pack(99, 1),
]


class Pair:
    """An observed folder and a standby that follows it."""

    folder = "one"

    def __init__(self, folder: Path, queue_bytes_max: int = 1 << 26) -> None:
        self.disk = RealDisk()
        self.root, self.copy = str(folder / "leader"), str(folder / "standby")
        self.disk.mkdir(self.root)
        self.changes = Changes(self.disk, self.disk.names, self.root, lambda: 0.0)
        self.disk.watcher = self.changes
        self.queue_bytes_max = queue_bytes_max
        self.other = RealDisk()
        self.standby = Standby(self.other, self.copy, prepare(self.other, self.copy))
        self.follow()

    def follow(self) -> None:
        self.reader = FrameReader()
        self.feed = StandbyFeed(self.changes, self.standby.kept(), lambda: None, self.queue_bytes_max)
        self.changes.attach(self.feed)
        self.give(pack(Kind.HELLO, self.feed.sent, data=json.dumps({"folder": self.folder}).encode()))

    def give(self, data: bytes) -> None:
        for frame in self.reader.feed(data):
            self.standby.apply(frame)

    def send(self) -> None:
        while (data := self.feed.take()) or self.feed.wants_reading:
            assert self.feed.lost is None
            self.give(data or self.feed.read())

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self.disk, f"{self.root}/{name}", data)

    def read(self, name: str) -> bytes:
        return Path(self.copy, name).read_bytes()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_disk_can_be_pickled_for_other_processes(tmp_path: Path) -> None:
    """Spark sends a disk to its executors."""
    disk = RealDisk()
    disk.open(str(tmp_path / "open here"), create=True)
    there = pickle.loads(pickle.dumps(disk))
    assert there.exists(str(tmp_path)) and there.names is not disk.names


def test_frames_do_not_depend_on_how_bytes_arrive() -> None:
    whole = b"".join(FRAMES)
    expected = list(FrameReader().feed(whole))
    assert [frame.path for frame in expected] == ["a", "a", "a"]
    for cut in range(len(whole)):
        reader = FrameReader()
        assert [*reader.feed(whole[:cut]), *reader.feed(whole[cut:])] == expected


def test_a_frame_with_any_byte_changed_is_refused_or_awaits_more() -> None:
    whole = FRAMES[1]
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        try:
            assert not list(FrameReader().feed(bytes(damaged)))
        except BadFrame:
            continue


@pytest.mark.parametrize("frame", NO_BROKERS, ids=range(len(NO_BROKERS)))
def test_an_invalid_frame_raises_bad_frame(pair: Pair, frame: bytes) -> None:
    with pytest.raises(BadFrame):
        pair.give(frame)


@pytest.mark.parametrize("kind", [*Kind, 99])
def test_a_declared_length_is_checked_before_the_bytes_arrive(kind: int) -> None:
    most = 1 << 28 if kind == Kind.LISTING else 1 << 20
    with pytest.raises(BadFrame):
        list(FrameReader().feed(pack(kind, 1)[:-4] + (most + 1).to_bytes(4, "little")))


def test_arbitrary_frames_of_a_leader_cause_no_other_error_than_bad_frame(pair: Pair) -> None:
    pair.send()
    random = Random(7)
    names = ["", "a", "b", "a/c", "a/c/d", "b/e", "..", "/", "lock", "standby", "\0", "x" * 300, "tiers/f"]
    refused = 0
    for _ in range(3000):
        kind, path = random.choice([*Kind, 99]), random.choice(names).encode()
        data = random.choice([b"", b"x", b"\1\0\0\0", random.choice(names).encode(), json.dumps(names[1:6]).encode()])
        number = random.choice([0, 1, 1 << 20, 1 << 50, (1 << 64) - 1])
        sequence = pair.standby.position + (kind >= Kind.CREATE)
        try:
            pair.give(pack(kind, sequence, number, path, data))
        except BadFrame:
            refused += 1
            pair.reader = FrameReader()
    assert 0 < refused < 3000
    assert sorted(os.listdir(Path(pair.copy).parent)) == ["leader", "standby"]
    pair.follow()
    pair.send()
    assert pair.standby.is_in_step and json.loads(pair.read(paths.STANDBY))["state"] == follower.IN_STEP


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", "a//b", "a\0b", paths.LOCK, paths.STANDBY])
def test_a_path_outside_of_the_folder_is_refused(pair: Pair, path: str) -> None:
    with pytest.raises(BadFrame):
        pair.give(pack(Kind.BEGIN, 1, 0, path.encode()))


def test_a_gap_in_the_changes_is_noticed(pair: Pair) -> None:
    pair.send()
    with pytest.raises(OutOfStep, match="was expected"):
        pair.give(pack(Kind.CREATE, pair.standby.position + 2, 1, b"a"))


def test_a_change_to_a_missing_file_marks_the_folder_as_copying(pair: Pair) -> None:
    pair.send()
    assert follower.state_of(pair.other, pair.copy) == follower.IN_STEP
    with pytest.raises(OutOfStep):
        pair.give(pack(Kind.WRITE, pair.standby.position + 1, 0, b"nowhere", b"x"))
    assert follower.state_of(pair.other, pair.copy) == follower.COPYING


def test_a_file_renamed_during_the_copy_arrives_under_its_last_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "PIECE_BYTES", 4)
    pair.disk.watcher = None
    pair.disk.mkdir(f"{pair.root}/logs")
    pair.write("logs/a", b"0123456789")
    pair.disk.watcher = pair.changes
    pair.give(pair.feed.read())  # the listing
    pair.give(pair.feed.read())  # a piece
    pair.disk.rename(f"{pair.root}/logs", f"{pair.root}/gone")
    pair.disk.rename(f"{pair.root}/gone/a", f"{pair.root}/gone/b")
    pair.send()
    assert pair.read("gone/b") == b"0123456789"
    assert not Path(pair.copy, "logs").exists()


def test_a_file_renamed_between_two_chunks_is_not_replaced_by_the_partial_old_file(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "PIECE_BYTES", 4)
    pair.disk.watcher = None
    pair.disk.mkdir(f"{pair.root}/logs")
    path = f"{pair.root}/logs/a"
    file = pair.disk.open(path + ".tmp", create=True)
    pair.disk.pwrite(file, [b"0123456789"], 0)
    pair.disk.watcher = pair.changes
    pair.give(pair.feed.read())  # the listing
    pair.disk.pwrite(file, [b"end"], 10)
    pair.give(pair.feed.take())  # makes the file there, with nothing before its end
    pair.disk.rename(path + ".tmp", path)
    pair.disk.rename(f"{pair.root}/logs", f"{pair.root}/gone")
    pair.give(pair.feed.read())  # before the renames are taken
    pair.send()
    pair.disk.close(file)
    assert pair.read("gone/a") == b"0123456789end"


def test_a_file_of_another_process_is_sent_when_it_is_renamed_into_place(pair: Pair) -> None:
    pair.send()
    pair.disk.mkdir(f"{pair.root}/logs")
    os.mkdir(f"{pair.root}/{paths.STAGING}")
    content = os.urandom(3 << 20)
    Path(pair.root, paths.STAGING, "x").write_bytes(content)
    pair.disk.rename(f"{pair.root}/{paths.STAGING}/x", f"{pair.root}/logs/segment")
    pair.disk.unlink(f"{pair.root}/logs/segment")  # before it was sent
    pair.write("logs/next", b"next")
    pair.send()
    assert pair.read("logs/next") == b"next"
    assert not Path(pair.copy, "logs", "segment").exists()


def test_a_file_of_another_process_is_synced_before_it_is_renamed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that it replaces is removed next, so a power cut could lose both."""
    pair.send()
    pair.disk.mkdir(f"{pair.root}/logs")
    os.mkdir(f"{pair.root}/{paths.STAGING}")
    Path(pair.root, paths.STAGING, "x").write_bytes(b"content")
    pair.disk.rename(f"{pair.root}/{paths.STAGING}/x", f"{pair.root}/logs/segment")
    synced: list[bytes] = []
    monkeypatch.setattr(pair.other, "sync", lambda file: synced.append(os.pread(file, 100, 0)))
    pair.send()
    assert synced == [b"content"] and pair.read("logs/segment") == b"content"


def test_removing_a_folder_removes_copied_files_of_another_process(pair: Pair) -> None:
    folder = f"{pair.root}/{paths.TIERS}/1-t"
    pair.disk.mkdir(folder)
    Path(folder, "x.parquet.tmp").write_bytes(b"part")
    pair.send()
    assert pair.read(f"{paths.TIERS}/1-t/x.parquet.tmp") == b"part"
    Path(folder, "x.parquet.tmp").unlink()
    pair.disk.rmdir(folder)
    pair.send()
    assert not Path(pair.copy, paths.TIERS, "1-t").exists()


def test_a_data_folder_may_be_a_mount_point(tmp_path: Path) -> None:
    for side in ("leader", "standby"):
        (tmp_path / side / "lost+found" / side).mkdir(parents=True)
    pair = Pair(tmp_path)
    pair.write("a", b"x")
    pair.send()
    assert pair.read("a") == b"x"
    assert os.listdir(f"{pair.copy}/lost+found") == ["standby"], "each filesystem has its own"


def test_writes_to_a_removed_file_are_not_sent(pair: Pair) -> None:
    pair.send()
    path = f"{pair.root}/a"
    file = pair.disk.open(path, create=True, exclusive=True)
    pair.disk.unlink(path)
    pair.disk.pwrite(file, [b"lost"], 0)
    pair.write("a", b"new")
    pair.disk.close(file)
    pair.send()
    assert pair.read("a") == b"new"


def test_bytes_patched_after_the_write_are_sent_as_they_were_written(pair: Pair) -> None:
    pair.send()
    file = pair.disk.open(f"{pair.root}/a", create=True)
    shared = bytearray(b"first")
    pair.disk.pwrite(file, [shared], 0)
    shared[:] = b"other"
    pair.disk.close(file)
    pair.send()
    assert pair.read("a") == b"first"


def test_a_standby_that_is_too_slow_is_dropped_and_its_memory_is_freed(tmp_path: Path) -> None:
    pair = Pair(tmp_path, queue_bytes_max=10_000)
    pair.send()
    for number in range(10, 30):
        pair.write("a", b"%d" % number * 500)
    assert pair.feed.lost is not None and "too slow" in pair.feed.lost
    assert pair.feed.take() == b"" and pair.feed.bytes_behind <= 10_000
    pair.feed.leave()
    pair.follow()
    pair.send()
    assert pair.standby.is_in_step and pair.read("a") == b"29" * 500


def test_changes_sent_during_the_copy_take_no_memory(pair: Pair) -> None:
    """A standby confirms nothing before it is in step, which may take hours."""
    for number in range(20):
        pair.write("a", b"%d" % number)
        pair.give(pair.feed.take())
    assert len(pair.feed._marks) == 1
    assert pair.feed.bytes_behind > 0
    pair.send()
    pair.feed.confirm(pair.standby.position)
    assert not pair.feed._marks and pair.feed.bytes_behind == 0


def test_a_returning_standby_is_not_sent_files_it_has(pair: Pair) -> None:
    pair.disk.mkdir(f"{pair.root}/logs")
    sealed, same_name = os.urandom(2_000_000), os.urandom(1_000_000)
    for name, data in (("a", sealed), ("b", same_name)):
        pair.write(f"logs/{name}.log", data)
        pair.write(f"logs/{name}.seal", b"seal")
    pair.write("active.log", b"active")
    pair.send()
    pair.feed.leave()
    pair.write("logs/b.log", same_name[::-1])
    pair.write("logs/c", b"new")
    pair.follow()
    assert pair.standby.copied_bytes == 0
    pair.send()
    assert pair.read("logs/a.log") == sealed and pair.read("logs/b.log") == same_name[::-1]
    assert pair.read("logs/c") == b"new"
    assert pair.standby.copied_bytes < 1_100_000


def test_an_unfinished_copy_cannot_be_opened(pair: Pair) -> None:
    pair.disk.mkdir(f"{pair.root}/logs")
    pair.give(pair.feed.read())
    pair.standby.close()
    with pytest.raises(IncompleteCopy, match="headrace standby"):
        Shard.open(pair.copy, clock=SystemClock())
    with pytest.raises(IncompleteCopy):
        Inspector(pair.copy)


def test_a_folder_that_was_served_is_only_overwritten_on_request(pair: Pair) -> None:
    shard, _ = Shard.open(f"{pair.root}/x", clock=SystemClock())
    shard.close()
    with pytest.raises(Conflict, match="--overwrite"):
        prepare(pair.other, f"{pair.root}/x")
    pair.send()
    pair.standby.close()
    pair.other.close(prepare(pair.other, pair.copy))  # a standby's own may go on
    shard, _ = Shard.open(pair.copy, clock=SystemClock())
    shard.close()
    with pytest.raises(Conflict, match="has served it since"):
        prepare(pair.other, pair.copy)
    pair.other.close(prepare(pair.other, pair.copy, overwrite=True))


def test_a_folder_is_not_overwritten_through_a_link(tmp_path: Path) -> None:
    disk, root, elsewhere = RealDisk(), tmp_path / "standby", tmp_path / "elsewhere"
    for folder in (root / "logs", elsewhere):
        folder.mkdir(parents=True)
    (elsewhere / "precious").write_text("x")
    (root / "to a file").symlink_to(elsewhere / "precious")
    (root / "to nothing").symlink_to(tmp_path / "nowhere")
    disk.close(prepare(disk, str(root), overwrite=True))
    (root / "logs" / "link").symlink_to(elsewhere)
    with pytest.raises(Conflict, match="logs/link is a symbolic link"):
        prepare(disk, str(root), overwrite=True)
    root_by_link = tmp_path / "data"
    root_by_link.symlink_to(elsewhere)
    disk.close(prepare(disk, str(root_by_link), overwrite=True))


def test_a_leader_with_another_folder_does_not_replace_the_copy(pair: Pair) -> None:
    """For example after forgetting --data-dir: the standby would be emptied."""
    pair.write("a", b"all there is")
    pair.send()
    pair.feed.leave()
    pair.folder = "another"
    with pytest.raises(Conflict, match="--overwrite"):
        pair.follow()
    assert pair.read("a") == b"all there is"
    assert follower.state_of(pair.other, pair.copy) == follower.IN_STEP
    pair.standby.close()
    pair.standby = Standby(pair.other, pair.copy, prepare(pair.other, pair.copy), overwrite=True)
    pair.follow()
    pair.send()
    assert pair.standby.is_in_step


def test_copies_of_a_folder_share_its_id(pair: Pair) -> None:
    pair.send()
    name = follower.folder_id(pair.disk, pair.root)
    pair.send()
    assert follower.folder_id(pair.other, pair.copy) == name == follower.folder_id(pair.disk, pair.root)


def test_a_marker_that_cannot_be_read_counts_as_unfinished(pair: Pair) -> None:
    pair.send()
    Path(pair.copy, paths.STANDBY).write_bytes(json.dumps(["?"]).encode())
    assert follower.state_of(pair.other, pair.copy) == follower.COPYING


def test_a_confirm_waits_for_the_required_number_of_standbys(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    confirms = StandbyAcks(pair.changes, 2)
    other = StandbyFeed(pair.changes, {}, lambda: None)
    pair.changes.attach(other)
    told: list[int] = []
    confirms.then(lambda: told.append(0))
    pair.write("a", b"x")
    confirms.then(lambda: told.append(1))
    waiting = threading.Thread(target=confirms.wait, daemon=True)
    waiting.start()
    while not confirms._threads:  # it has chosen the change it waits for, which is not the next one
        time.sleep(0.001)
    pair.write("a", b"y")
    confirms.then(lambda: told.append(2))
    first = pair.changes.sequence
    assert told == [0]
    pair.feed.confirm(first)
    confirms.count()
    assert told == [0], "one is not two"
    other.confirm(first - 1)
    confirms.count()
    assert told == [0, 1]
    waiting.join(60)
    assert not waiting.is_alive()
    other.leave()
    pair.write("a", b"z")
    confirms.then(lambda: told.append(3))
    confirms.end()
    assert told == [0, 1, 2, 3]


def test_zeros_are_sent_as_a_count(pair: Pair) -> None:
    """New journal files consist of zeros, which must not overflow a queue of a few megabytes."""
    pair.disk.watcher = None
    pair.write("before", bytes(3 << 20))
    pair.disk.watcher = pair.changes
    pair.send()
    pair.write("after", bytes(3 << 20) + b"end")
    assert pair.feed.bytes_behind < 10_000
    pair.send()
    assert pair.read("before") == bytes(3 << 20) and pair.read("after") == bytes(3 << 20) + b"end"


def test_unsynced_writes_wait_for_standbys_too(pair: Pair) -> None:
    pair.feed.leave()
    file = pair.disk.open(f"{pair.root}/a", create=True)
    confirms = StandbyAcks(pair.changes, 1)
    pair.disk.pwrite(file, [b"x"], 0)
    pair.disk.close(file)
    told: list[bool] = []
    confirms.then(lambda: told.append(True))
    assert not told, "confirms must wait for a standby, and none is attached"


def test_a_forked_child_can_close_the_folder_lock_whatever_other_threads_held(tmp_path: Path) -> None:
    disk = RealDisk()
    lock = disk.lock(f"{tmp_path}/lock")
    had, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with disk.names.lock:
            had.set()
            may_end.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    assert had.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # it would wait for ever
        disk.close(lock)
        os._exit(0)
    may_end.set()
    holding.join()
    disk.close(lock)
    assert os.waitpid(child, 0)[1] == 0


def test_an_open_file_is_reported_under_its_last_name() -> None:
    names = OpenPaths()
    for file, path in ((3, "/d/a"), (4, "/d/a"), (5, "/d/b"), (6, "/e/c")):
        names.opened(file, path)
    names.renamed("/d/a", "/d/b")
    assert [names.path(file) for file in (3, 4, 5, 6)] == ["/d/b", "/d/b", None, "/e/c"]
    names.renamed("/d", "/f")
    assert names.path(3) == "/f/b"
    names.closed(3)
    names.removed("/f/b")
    assert names.path(3) is None and names.path(4) is None
    names.opened(3, "/f/b")
    names.closed(5)
    names.closed(4)
    assert names.path(3) == "/f/b"
    names.closed(3)
    names.closed(6)
    assert not names._paths and not names._folders
