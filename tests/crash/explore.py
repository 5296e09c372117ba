"""Runs a world and checks, before every call that changes the disk, the disks that a crash could leave.

Each of them is opened, read from start to end and compared with the promises (L1 to L5, L7, L10; docs/testing.md).
Recovery depends only on the disk, so equal disks are opened once; the promises differ, so every state is checked.
Some of the opened disks are also crashed again during recovery (L5), crashed right after it (L7), opened without
derived files (L9), or written to and crashed once more.
"""

import traceback
from dataclasses import dataclass
from random import Random

from headrace.errors import HeadraceError
from headrace.log.commit.round import Ticket
from headrace.log.shard import Shard
from tests.crash.model import Broken, Found, Model, differences
from tests.crash.simdisk import SimulatedDisk
from tests.crash.world import World, discard, open_shard, read_and_discard, read_everything

DERIVED = (".index", ".timeindex", "/slots")


@dataclass(slots=True)
class Stats:
    """`states`: checked crashes. `opened`: distinct disks among them. `nested`: crashes during a recovery."""

    states: int = 0
    opened: int = 0
    nested: int = 0
    lives: int = 0
    steps: int = 0
    operations: int = 0

    def add(self, other: "Stats") -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Effort:
    """How many crash states to check. The shares refer to the disks that are opened."""

    variants: int = 6  # power cuts per operation, at most
    nested_share: float = 0.01
    nested_variants: int = 2
    after_recovery_share: float = 0.15
    derived_share: float = 0.03
    continue_share: float = 0.03


class Explorer:
    def __init__(self, world: World, effort: Effort) -> None:
        self.world = world
        self.effort = effort
        self.stats = Stats()
        self.rng = Random(world.seed + 1)
        self._seen: dict[tuple[int, tuple[int, ...]], Found | str] = {}
        self._at = ""

    def attach(self) -> None:
        self.world.disk.before = self._before

    def _before(self, kind: str, path: str) -> None:
        if self.world.alarm is not None:
            return
        self.stats.operations += 1
        self._at = f"{kind} {path}"
        try:
            self.crash_here()
        except Broken as broken:
            self.world.alarm = broken

    def crash_here(self) -> None:
        world = self.world
        world.observe()
        disk = world.disk
        unsynced_count = disk.unsynced_count
        if unsynced_count == 0:
            self._check_image(disk.power_cut(self.rng, "lost"), "lost")
            return
        self._check_image(disk.kill(), "kill")
        self._check_image(disk.power_cut(self.rng, "lost"), "lost")
        for _ in range(min(self.effort.variants, 2 * unsynced_count)):
            mode = self.rng.choice(("kept", "prefix", "mixed", "mixed", "mixed"))
            self._check_image(disk.power_cut(self.rng, mode), mode)

    def pick(self) -> tuple[SimulatedDisk, bool]:
        """Choose a crash to continue from: (disk, whether power was cut)."""
        mode = self.rng.choice(("kill", "lost", "kept", "prefix", "mixed", "mixed"))
        disk = self.world.disk
        return (disk.kill(), False) if mode == "kill" else (disk.power_cut(self.rng, mode), True)

    # Checking one disk.

    def _check_image(self, image: SimulatedDisk, mode: str, depth: int = 0, *, power_cut: bool = False) -> None:
        self.stats.states += 1
        self.stats.nested += depth > 0
        power_cut = power_cut or mode != "kill"
        model = self.world.model
        key = image.key(), tuple(model.logs)
        found = self._seen.get(key)
        if found is None:
            found = self._open(image, mode, depth, power_cut)
            self._seen[key] = found
        if isinstance(found, str):
            raise Broken(found)
        try:
            model.check(found, power_cut=power_cut)
        except Broken as broken:
            raise Broken(f"{broken} [{mode} before {self._at}, depth {depth}]") from None

    def _open(self, image: SimulatedDisk, mode: str, depth: int, power_cut: bool) -> Found | str:
        self.stats.opened += 1
        effort, rng, world = self.effort, self.rng, self.world
        nested = depth < 2 and rng.random() < effort.nested_share
        spare = image.kill() if rng.random() < effort.derived_share else None
        inner: list[Broken] = []  # raised later: inside a disk call it would be handled as a disk failure
        if nested:
            image.before = lambda kind, path: self._crash_during_recovery(image, kind, depth, power_cut, inner)
        try:
            shard, clean = open_shard(image, world.settings, world.model.specs(), world.clock)
        except (HeadraceError, OSError, AssertionError) as error:
            if isinstance(error, Broken):
                raise
            where = f"[{mode} before {self._at}, depth {depth}]"
            return f"L5 cannot be opened: {error!r} {where}\n{_trace(error)}"
        image.before = None
        if inner:
            raise inner[0]
        found = read_and_discard(shard, clean)
        if rng.random() < effort.after_recovery_share:
            self._crash_after_recovery(image, found)
        if spare is not None:
            self._open_without_derived(spare, found)
        if rng.random() < effort.continue_share:
            self._continue_and_crash(image, found, power_cut)
        return found

    def _crash_during_recovery(
        self, image: SimulatedDisk, kind: str, depth: int, power_cut: bool, inner: list[Broken]
    ) -> None:
        if inner:
            return
        outer, self._at = self._at, f"{self._at} > {kind} in recovery"
        for _ in range(self.effort.nested_variants):
            mode = self.rng.choice(("kill", "lost", "prefix", "mixed"))
            sub = image.kill() if mode == "kill" else image.power_cut(self.rng, mode)
            try:
                self._check_image(sub, mode, depth + 1, power_cut=power_cut)
            except Broken as broken:
                inner.append(broken)
                break
        self._at = outer

    def _reopen(self, image: SimulatedDisk) -> tuple[Shard, bool]:
        world = self.world
        try:
            return open_shard(image, world.settings, world.model.specs(), world.clock)
        except (HeadraceError, OSError) as error:
            where = f"[before {self._at}]"
            raise Broken(f"L5 cannot be opened again: {error!r} {where}\n{_trace(error)}") from error

    def _crash_after_recovery(self, image: SimulatedDisk, found: Found) -> None:
        """A second power cut does not remove anything that the recovered shard serves."""
        for mode in ("lost", "mixed"):
            self.stats.states += 1
            again = read_and_discard(*self._reopen(image.power_cut(self.rng, mode)))
            for difference in differences(found, again):
                raise Broken(f"L7 served after recovery, missing after a power cut: {difference} [before {self._at}]")
            for log_id, log in found.logs.items():
                if again.logs[log_id].epoch <= log.epoch:
                    raise Broken(f"L5 log {log_id} is still in epoch {log.epoch} [before {self._at}]")

    def _open_without_derived(self, image: SimulatedDisk, found: Found) -> None:
        self.stats.states += 1
        for path in list(image.files()):
            if path.endswith(DERIVED):
                image.remove(path)
        image.name_changes = [change for change in image.name_changes if not f"/{change.name}".endswith(DERIVED)]
        again = read_and_discard(*self._reopen(image))
        for difference in differences(found, again):
            raise Broken(f"L9 differs without indexes and slots: {difference} [before {self._at}]")

    def _continue_and_crash(self, image: SimulatedDisk, found: Found, power_cut: bool) -> None:
        """Write to every log, crash, check; stop cleanly, check again."""
        world = self.world
        disk = image.power_cut(self.rng, "kept")
        shard, clean = self._reopen(disk)
        read_everything(shard, clean)
        appended: dict[int, tuple[bytes, Ticket]] = {}
        for log_id, log in shard.logs.items():
            raw, _ = world.batches(1, (30, 800), self.rng)
            buffer = bytearray(raw)
            appended[log_id] = raw, log.append(buffer)
        shard.pump()
        images = [disk.power_cut(self.rng, "lost"), disk.kill()]
        discard(shard)
        for image in images:
            self.stats.states += 1
            again, clean = self._reopen(image)
            after = read_everything(again, clean)
            for log_id, (raw, ticket) in appended.items():
                self._check_appended(found, after, log_id, raw, ticket)
            again.close()
            self.stats.states += 1
            last = read_and_discard(*self._reopen(image.power_cut(self.rng, "lost")))
            discard(again)
            if not last.clean:
                raise Broken(f"L5 a clean stop was treated as a crash [before {self._at}]")
            for difference in differences(after, last):
                raise Broken(f"L1 changed by a clean stop: {difference} [before {self._at}]")

    def _check_appended(self, found: Found, after: Found, log_id: int, raw: bytes, ticket: Ticket) -> None:
        before, now = found.logs[log_id], after.logs[log_id]
        where = f"[before {self._at}]"
        if not ticket.done or ticket.error is not None:
            raise Broken(f"L8 an append after recovery was not confirmed: {ticket.error} {where}")
        if ticket.base_offset != before.end:
            raise Broken(f"L3 log {log_id} ended at {before.end} but continued at {ticket.base_offset} {where}")
        if self.world.model.logs[log_id].is_async and now.end == before.end:
            return
        if now.end != ticket.next_offset or not now.data.startswith(before.data):
            raise Broken(f"L1 log {log_id} ended at {ticket.next_offset}, now at {now.end} {where}")
        if now.data[-len(raw) + 16 :] != raw[16:]:  # base offset and epoch are patched
            raise Broken(f"L4 log {log_id} differs from the confirmed bytes {where}")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-3:])


def explore(
    seed: int, *, lives: int = 3, steps: int = 40, effort: Effort | None = None, states_max: int = 1 << 60
) -> Stats:
    """Explore one seed: several lives of one data folder, each ended by a crash. Raises Broken.

    `states_max` ends the exploration early; it does not change the states before that.
    """
    world = World(seed)
    explorer = Explorer(world, effort or Effort())
    world.disk.mkdir("/data")
    world.disk.sync_dir("/")
    explorer.attach()
    world.open()
    for life in range(lives):
        explorer.stats.lives += 1
        for _ in range(steps):
            explorer.stats.steps += 1
            world.step()
            if world.failed is not None:
                raise Broken(f"L8 failed without a fault: {world.failed!r}\n{_trace(world.failed)}")
            explorer.attach()
            if explorer.stats.states >= states_max:
                return explorer.stats
        explorer._at = f"the end of life {life}"
        explorer.crash_here()
        if life + 1 < lives:
            image, power_cut = explorer.pick()
            world.continue_from(image, power_cut=power_cut)
            explorer.attach()
    return explorer.stats


__all__ = ["Broken", "Effort", "Explorer", "Model", "Stats", "explore"]
