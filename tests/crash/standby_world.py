"""A world whose disk is observed, and a standby with its own disk.

The standby is crashed instead of the broker, and its folder must hold everything that was promised. Every change is
sent and applied at once, so that the standby always has all changes that the broker knows of.
"""

from collections.abc import Sequence
from random import Random

from headrace.log.disk.watcher import DiskObserver, OpenPaths
from headrace.log.standby.change_feed import LEFT_OUT, Change, Changes, FileContent, StandbyFeed
from headrace.log.standby.follower import IncompleteCopy, Standby, check_whole, prepare
from headrace.log.standby.frames import Frame, FrameReader, Kind, pack
from tests.crash.explore import Broken, Effort, Explorer, Stats
from tests.crash.simdisk import SimulatedDisk
from tests.crash.world import ROOT, World


class WatchedDisk(SimulatedDisk):
    """Notifies its observer of changes, as RealDisk does."""

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

    def pwrite(self, file: int, buffers: Sequence[bytes | bytearray | memoryview], position: int) -> int:
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


class StandbyLink:
    """Connects the disk of a broker to the disk of a standby."""

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
        self.deliver(pack(Kind.HELLO, self.feed.sent, data=b'{"folder": "f"}'))

    def deliver(self, data: bytes) -> None:
        for frame in self.reader.feed(data):
            self.sent.append(frame)
            self.standby.apply(frame)

    def send(self, pieces: int = 1 << 30, bytes_max: int = 1 << 30) -> None:
        """Send all pending changes and some pieces of the initial copy."""
        while data := self.feed.take(bytes_max):
            self.deliver(data)
        while pieces and self.feed.wants_reading:
            pieces -= 1
            self.deliver(self.feed.read())
            while data := self.feed.take(bytes_max):
                self.deliver(data)

    def differences(self) -> list[str]:
        assert self.feed.lost is None
        assert isinstance(self.changes.disk, SimulatedDisk)
        leader, standby = files_of(self.changes.disk, self.changes.root), files_of(self.disk, self.changes.root)
        return sorted(path for path in leader.keys() | standby.keys() if leader.get(path) != standby.get(path))


def files_of(disk: SimulatedDisk, root: str) -> dict[str, bytes]:
    inside = {path[len(root) + 1 :]: data for path, data in disk.files().items() if path.startswith(root + "/")}
    return {path: data for path, data in inside.items() if path.partition("/")[0] not in LEFT_OUT}


class StandbyExplorer(Explorer):
    """Crashes the standby after every change that was sent to it."""

    def __init__(self, world: World, effort: Effort) -> None:
        super().__init__(world, effort)
        self.link: StandbyLink | None = None
        self.copy_pieces = 0  # pieces of the initial copy that are sent with each change

    def attach(self) -> None:
        """Nothing to do: states are checked after a change is sent, not before a disk call."""

    def begin(self) -> None:
        assert isinstance(self.world.disk, WatchedDisk)
        link = self.link = StandbyLink(self.world.disk)
        put = link.feed.put

        def put_and_check(item: Change | FileContent) -> None:
            put(item)
            if self.world.alarm is None:
                self._check_after(str(item))

        link.feed.put = put_and_check  # type: ignore[method-assign]  # to observe each change

    def _check_after(self, what: str) -> None:
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
        assert self.link is not None
        try:
            check_whole(self.link.disk, ROOT)
        except IncompleteCopy:
            return
        raise Broken("an unfinished copy is accepted as complete")

    def crash_here(self) -> None:
        self.world.observe()
        assert self.link is not None
        disk = self.link.disk
        self._check_image(disk.kill(), "kill")
        self._check_image(disk.power_cut(self.rng, "lost"), "lost")
        for _ in range(self.effort.variants):
            mode = self.rng.choice(("kept", "prefix", "mixed", "mixed"))
            self._check_image(disk.power_cut(self.rng, mode), mode)


class WorldWithSpaceToStop(World):
    """Frees disk space before every restart, because a broker on a full disk cannot stop cleanly."""

    def restart(self) -> None:
        self.disk.capacity = 1 << 50
        for _ in range(3):
            self.clock.advance(1.0)
            self.shard.tick()
            self.settle()
        super().restart()


def explore_standby(
    seed: int, *, steps: int = 60, effort: Effort | None = None, states_max: int = 1 << 60, with_full_disk: bool = False
) -> Stats:
    """Run a broker and attach a standby at some step. Raises Broken if the standby's folder lacks something promised.

    `with_full_disk`: at times the disk of the broker is full in the middle of a write.
    """
    world = WorldWithSpaceToStop(seed) if with_full_disk else World(seed)
    rng = Random(seed + 2)
    world.disk = WatchedDisk()
    world.disk.mkdir(ROOT)
    world.disk.sync_dir("/")
    explorer = StandbyExplorer(world, effort or Effort(variants=2, nested_share=0.0))
    world.open()
    start_step = rng.randrange(steps // 2)
    for step in range(steps):
        if step == start_step:
            explorer.begin()
        if with_full_disk and step > start_step:
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
        raise Broken(f"seed {seed}: these files differ at the end: {explorer.link.differences()}")
    return explorer.stats
