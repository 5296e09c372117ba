"""Runs a world and, before every call that changes the disk, looks at the disks a crash could leave.

Each of them is opened, read from start to end and compared with what was promised (L1 to L5, L7, L10).
Recovery is a function of the disk, so equal disks are opened once; what was promised differs, so every state
is judged. Of those that are opened, some are also crashed again inside their recovery (L5), cut right after
it (L7), opened without anything derived (L9), and written to and cut once more.
"""

import traceback
from dataclasses import dataclass
from random import Random

from headrace.errors import HeadraceError
from headrace.log.commit.round import Ticket
from headrace.log.shard import Shard
from tests.crash.model import Broken, Found, Model, same
from tests.crash.simdisk import SimulatedDisk
from tests.crash.world import World, look, look_at_last, open_shard, take_apart

DERIVED = (".index", ".timeindex", "/slots")


@dataclass(slots=True)
class Stats:
    """`states`: crashes judged. `opened`: different disks among them. `nested`: crashes inside a recovery."""

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
    """How hard to look. The shares are of the disks that are opened."""

    variants: int = 6  # power cuts per operation, at most
    nested_share: float = 0.01
    nested_variants: int = 2
    again_share: float = 0.15
    derived_share: float = 0.03
    life_share: float = 0.03


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
        unsettled = disk.unsettled
        if unsettled == 0:
            self._judge(disk.power_cut(self.rng, "lost"), "lost")
            return
        self._judge(disk.kill(), "kill")
        self._judge(disk.power_cut(self.rng, "lost"), "lost")
        for _ in range(min(self.effort.variants, 2 * unsettled)):
            mode = self.rng.choice(("kept", "prefix", "mixed", "mixed", "mixed"))
            self._judge(disk.power_cut(self.rng, mode), mode)

    def pick(self) -> tuple[SimulatedDisk, bool]:
        """A crash to live on from: (disk, whether power was cut)."""
        mode = self.rng.choice(("kill", "lost", "kept", "prefix", "mixed", "mixed"))
        disk = self.world.disk
        return (disk.kill(), False) if mode == "kill" else (disk.power_cut(self.rng, mode), True)

    # Judging one disk.

    def _judge(self, image: SimulatedDisk, mode: str, depth: int = 0, *, power_cut: bool = False) -> None:
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
        inner: list[Broken] = []  # raised at once, it would look like a failure of the disk
        if nested:
            image.before = lambda kind, path: self._crash_inside(image, kind, depth, power_cut, inner)
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
        found = look_at_last(shard, clean)
        if rng.random() < effort.again_share:
            self._cut_again(image, found)
        if spare is not None:
            self._without_derived(spare, found)
        if rng.random() < effort.life_share:
            self._live_on(image, found, power_cut)
        return found

    def _crash_inside(self, image: SimulatedDisk, kind: str, depth: int, power_cut: bool, inner: list[Broken]) -> None:
        if inner:
            return
        outer, self._at = self._at, f"{self._at} > {kind} in recovery"
        for _ in range(self.effort.nested_variants):
            mode = self.rng.choice(("kill", "lost", "prefix", "mixed"))
            sub = image.kill() if mode == "kill" else image.power_cut(self.rng, mode)
            try:
                self._judge(sub, mode, depth + 1, power_cut=power_cut)
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

    def _cut_again(self, image: SimulatedDisk, found: Found) -> None:
        """What a recovered shard serves, a second power cut does not take back."""
        for mode in ("lost", "mixed"):
            self.stats.states += 1
            again = look_at_last(*self._reopen(image.power_cut(self.rng, mode)))
            for difference in same(found, again):
                raise Broken(f"L7 served after recovery, gone after a cut: {difference} [before {self._at}]")
            for log_id, log in found.logs.items():
                if again.logs[log_id].epoch <= log.epoch:
                    raise Broken(f"L5 log {log_id} is still in epoch {log.epoch} [before {self._at}]")

    def _without_derived(self, image: SimulatedDisk, found: Found) -> None:
        self.stats.states += 1
        for path in list(image.files()):
            if path.endswith(DERIVED):
                image.remove(path)
        image.name_changes = [change for change in image.name_changes if not f"/{change.name}".endswith(DERIVED)]
        again = look_at_last(*self._reopen(image))
        for difference in same(found, again):
            raise Broken(f"L9 differs without indexes and slots: {difference} [before {self._at}]")

    def _live_on(self, image: SimulatedDisk, found: Found, power_cut: bool) -> None:
        """Write to every log, cut the power, look; stop cleanly, look again."""
        world = self.world
        disk = image.power_cut(self.rng, "kept")
        shard, clean = self._reopen(disk)
        look(shard, clean)
        added: dict[int, tuple[bytes, Ticket]] = {}
        for log_id, log in shard.logs.items():
            raw, _ = world.batches(1, (30, 800), self.rng)
            buffer = bytearray(raw)
            added[log_id] = raw, log.append(buffer)
        shard.pump()
        images = [disk.power_cut(self.rng, "lost"), disk.kill()]
        take_apart(shard)
        for image in images:
            self.stats.states += 1
            again, clean = self._reopen(image)
            after = look(again, clean)
            for log_id, (raw, ticket) in added.items():
                self._check_added(found, after, log_id, raw, ticket)
            again.close()
            self.stats.states += 1
            last = look_at_last(*self._reopen(image.power_cut(self.rng, "lost")))
            take_apart(again)
            if not last.clean:
                raise Broken(f"L5 a clean stop was taken for a crash [before {self._at}]")
            for difference in same(after, last):
                raise Broken(f"L1 changed by a clean stop: {difference} [before {self._at}]")

    def _check_added(self, found: Found, after: Found, log_id: int, raw: bytes, ticket: Ticket) -> None:
        before, now = found.logs[log_id], after.logs[log_id]
        where = f"[before {self._at}]"
        if not ticket.done or ticket.error is not None:
            raise Broken(f"L8 an append after recovery was not confirmed: {ticket.error} {where}")
        if ticket.base_offset != before.end:
            raise Broken(f"L3 log {log_id} ended at {before.end} and went on at {ticket.base_offset} {where}")
        if self.world.model.logs[log_id].is_async and now.end == before.end:
            return
        if now.end != ticket.next_offset or not now.data.startswith(before.data):
            raise Broken(f"L1 log {log_id} ended at {ticket.next_offset}, now at {now.end} {where}")
        if now.data[-len(raw) + 16 :] != raw[16:]:  # base offset and epoch are patched
            raise Broken(f"L4 log {log_id} holds other bytes than were confirmed {where}")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-3:])


def explore(
    seed: int, *, lives: int = 3, steps: int = 40, effort: Effort | None = None, states_max: int = 1 << 60
) -> Stats:
    """One seed: several lives of one data folder, each ended by a crash. Raises Broken.

    `states_max` only ends it early: what is found up to there does not depend on it.
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
            world.go_on_from(image, power_cut=power_cut)
            explorer.attach()
    return explorer.stats


__all__ = ["Broken", "Effort", "Explorer", "Model", "Stats", "explore"]
