"""A world whose disk is watched, with a standby beside it on a disk of its own.

The standby is crashed instead of the broker: whatever was promised must be found in its folder. What is told is sent
and made at once, so that at any moment every change that the broker knows of has reached the standby.
"""

from random import Random

from headrace.log.disk.watcher import DiskObserver, OpenPaths
from headrace.log.standby.change_feed import LEFT_OUT, Changes, StandbyFeed
from headrace.log.standby.follower import IncompleteCopy, Standby, check_whole, prepare
from headrace.log.standby.frames import Frame, FrameReader, Kind, pack
from tests.crash.explore import Broken, Effort, Explorer, Stats
from tests.crash.simdisk import SimulatedDisk
from tests.crash.world import ROOT, World


class WatchedDisk(SimulatedDisk):
    """Tells of its changes as RealDisk does."""

    def __init__(self) -> None:
        super().__init__()
        self.names = OpenPaths()
        self.watcher: DiskObserver | None = None

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, readonly: bool = False) -> int:
        file = super().open(path, create=create, exclusive=exclusive, readonly=readonly)
        if not readonly:
            self.names.opened(file, path)
        if create and self.watcher:
            self.watcher.created(path, exclusive=exclusive)
        return file

    def close(self, file: int) -> None:
        self.names.closed(file)
        super().close(file)

    def pwrite(self, file, buffers, position):
        try:
            written = super().pwrite(file, buffers, position)
        except OSError:
            if self.watcher:
                self.watcher.broke_off(file, sum(map(len, buffers)), position)
            raise
        if self.watcher:
            self.watcher.wrote(file, buffers, position)
        return written

    def sync(self, file: int) -> None:
        super().sync(file)
        if self.watcher:
            self.watcher.synced(file)

    def sync_filesystem(self, file: int) -> None:
        super().sync_filesystem(file)
        if self.watcher:
            self.watcher.synced_filesystem()

    def truncate(self, file: int, size: int) -> None:
        super().truncate(file, size)
        if self.watcher:
            self.watcher.truncated(file, size)

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.names.renamed(source, target)
        if self.watcher:
            self.watcher.renamed(source, target)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.names.removed(path)
        if self.watcher:
            self.watcher.removed(path)

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        if self.watcher:
            self.watcher.made_folder(path)

    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        if self.watcher:
            self.watcher.removed_folder(path)

    def sync_dir(self, path: str, folder: int | None = None) -> None:
        super().sync_dir(path, folder)
        if self.watcher:
            self.watcher.synced_folder(path)


class AmqpTransport:
    """The way from a broker's disk to a standby's."""

    def __init__(self, disk: WatchedDisk, root: str = ROOT, standby_disk: SimulatedDisk | None = None) -> None:
        self.changes = Changes(disk, disk.names, root, lambda: 0.0)
        disk.watcher = self.changes
        self.disk = standby_disk or SimulatedDisk()
        self.standby = Standby(self.disk, root, prepare(self.disk, root))
        self.reader = FrameReader()
        self.sent: list[Frame] = []
        self.attach()

    def attach(self) -> None:
        self.feed = StandbyFeed(self.changes, self.standby.kept(), lambda: None)
        self.changes.attach(self.feed)
        self.give(pack(Kind.HELLO, self.feed.sent, data=b'{"folder": "f"}'))

    def give(self, data: bytes) -> None:
        for frame in self.reader.feed(data):
            self.sent.append(frame)
            self.standby.apply(frame)

    def send(self, pieces: int = 1 << 30, bytes_max: int = 1 << 30) -> None:
        """All that waits, and some of the copy."""
        while data := self.feed.take(bytes_max):
            self.give(data)
        while pieces and self.feed.wants_reading:
            pieces -= 1
            self.give(self.feed.read())
            while data := self.feed.take(bytes_max):
                self.give(data)

    def differences(self) -> list[str]:
        assert self.feed.lost is None
        theirs, ours = files_of(self.changes.disk, self.changes.root), files_of(self.disk, self.changes.root)
        return sorted(path for path in theirs.keys() | ours.keys() if theirs.get(path) != ours.get(path))


def files_of(disk: SimulatedDisk, root: str) -> dict[str, bytes]:
    inside = {path[len(root) + 1 :]: data for path, data in disk.files().items() if path.startswith(root + "/")}
    return {path: data for path, data in inside.items() if path.partition("/")[0] not in LEFT_OUT}


class StandbyExplorer(Explorer):
    """Crashes the standby after every change that it was sent."""

    def __init__(self, world: World, effort: Effort) -> None:
        super().__init__(world, effort)
        self.link: AmqpTransport | None = None
        self.copy_pieces = 0  # of the copy that go out with each change

    def attach(self) -> None:
        """Nothing before a call: what counts is told after it."""

    def begin(self) -> None:
        link = self.link = AmqpTransport(self.world.disk)
        put = link.feed.put

        def told(item) -> None:
            put(item)
            if self.world.alarm is None:
                self._told(str(item))

        link.feed.put = told  # type: ignore[method-assign]

    def _told(self, what: str) -> None:
        assert self.link is not None
        self.stats.operations += 1
        self._at = what[:200]
        try:
            self.link.send(self.rng.choice((0, 0, 1)))
            if self.link.standby.is_in_step:
                self.crash_here()
            else:
                self._must_refuse()
        except Broken as broken:
            self.world.alarm = broken

    def _must_refuse(self) -> None:
        try:
            check_whole(self.link.disk, ROOT)
        except IncompleteCopy:
            return
        raise Broken("an unfinished copy is taken for a whole one")

    def crash_here(self) -> None:
        self.world.observe()
        assert self.link is not None
        disk = self.link.disk
        self._judge(disk.kill(), "kill")
        self._judge(disk.power_cut(self.rng, "lost"), "lost")
        for _ in range(self.effort.variants):
            mode = self.rng.choice(("kept", "prefix", "mixed", "mixed"))
            self._judge(disk.power_cut(self.rng, mode), mode)


class RoomyStops(World):
    """A broker whose disk is full does not stop cleanly: it has room by then."""

    def restart(self) -> None:
        self.disk.capacity = 1 << 50
        for _ in range(3):
            self.clock.advance(1.0)
            self.shard.tick()
            self.settle()
        super().restart()


def explore_standby(
    seed: int, *, steps: int = 60, effort: Effort | None = None, states_max: int = 1 << 60, short_of_room: bool = False
) -> Stats:
    """A broker at work, a standby that comes at some time; Broken when its folder lacks what was promised.
    `short_of_room`: now and then the broker's disk is full in the middle of a write."""
    world = RoomyStops(seed) if short_of_room else World(seed)
    rng = Random(seed + 2)
    world.disk = WatchedDisk()
    world.disk.mkdir(ROOT)
    world.disk.sync_dir("/")
    explorer = StandbyExplorer(world, effort or Effort(variants=2, nested_share=0.0))
    world.open()
    begins = rng.randrange(steps // 2)
    for step in range(steps):
        if step == begins:
            explorer.begin()
        if short_of_room and step > begins:
            world.disk.capacity = rng.choice((1 << 50, world.disk.used + rng.randrange(2000)))
        explorer.stats.steps += 1
        world.step()
        if world.failed is not None:
            raise Broken(f"L8 failed without a fault: {world.failed!r}")
        if explorer.stats.states >= states_max:
            break
    assert explorer.link is not None
    world.disk.capacity = 1 << 50
    explorer.link.send()
    if explorer.link.differences():
        raise Broken(f"seed {seed}: these differ in the end: {explorer.link.differences()}")
    return explorer.stats
