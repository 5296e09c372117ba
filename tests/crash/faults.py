"""One fault, a whole workload, and the judgement: clean errors, no confirm after a failure, nothing lost.

"Fail the Nth call, for all N": the workload is run once to count its calls, then once for each of them.
"""

import errno
from collections import Counter
from random import Random

from headrace.errors import HeadraceError, StorageError
from headrace.log.shard import Shard
from tests.crash.model import Broken, same
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.crash.world import World, look, look_at_last, open_shard, take_apart

WRITES = ("create", "pwrite", "truncate", "sync", "sync_dir", "rename", "unlink", "mkdir", "rmdir")
READS = ("open", "pread", "listdir")
NO_ROOM = ("create", "pwrite", "mkdir", "rename")  # what a full disk answers with ENOSPC

EIO = [Fault("", 0, errno.EIO)]
VARIANTS: dict[str, list[Fault]] = {
    "pwrite": [
        Fault("", 0, errno.EIO, share=0.5),
        Fault("", 0, errno.ENOSPC),
        Fault("", 0, errno.ENOSPC, share=0.5),
        Fault("", 0, errno.ENOSPC, share=0.5, forever=True),
    ],
    "sync": [
        Fault("", 0, errno.EIO, outcome="cached"),
        Fault("", 0, errno.EIO, outcome="dropped"),
        Fault("", 0, errno.EIO, outcome="written"),
    ],
    "create": [*EIO, Fault("", 0, errno.ENOSPC), Fault("", 0, errno.EMFILE)],
    "open": [*EIO, Fault("", 0, errno.EMFILE)],
    "mkdir": [*EIO, Fault("", 0, errno.ENOSPC)],
    "rename": [*EIO, Fault("", 0, errno.ENOSPC)],
}


def variants(kind: str) -> list[Fault]:
    return VARIANTS.get(kind, EIO)


def new_world(seed: int) -> World:
    world = World(seed)
    world.disk.mkdir("/data")
    world.disk.sync_dir("/")
    return world


def calls_of(seed: int, steps: int) -> Counter[str]:
    """How often the workload uses each call when nothing fails."""
    world = new_world(seed)
    world.disk.calls.clear()
    world.open()
    for _ in range(steps):
        world.step()
    world.shard.close()
    return world.disk.calls


class Trial:
    """One run of a seed with one fault in it. Raises Broken."""

    def __init__(self, seed: int, steps: int, fault: Fault) -> None:
        self.world = new_world(seed)
        self.steps = steps
        self.fault = fault
        self.rng = Random(seed)
        self.outcome = "unharmed"

    def run(self) -> str:
        """What came of it: refused (to open), failed (and stopped), healed or unharmed."""
        world = self.world
        world.faulty = True
        world.disk.arm(self.fault)
        try:
            world.open()
        except (HeadraceError, OSError):
            self.outcome = "refused"  # nobody was served, nothing was confirmed
        else:
            self._work()
        world.disk.disarm()
        self._crash()
        if hasattr(world, "shard"):
            take_apart(world.shard)
        return self.outcome

    def _work(self) -> None:
        world = self.world
        for _ in range(self.steps):
            try:
                world.step()
            except StorageError:
                pass
            except OSError as error:
                if world.done[-1] == "restart":  # opening may say it with the system's own error
                    self.outcome = "refused"
                    return
                raise Broken(f"L8 not a clean error: {error!r} after {world.done[-1]}") from error
            if world.shard.is_closed:
                return  # the restart among the steps failed; the crash comes next
            if world.shard.failure is not None:
                self.outcome = "failed"
                self._stays_stopped()
                return
        world.disk.disarm()
        self._heal()

    def _stays_stopped(self) -> None:
        """After a failure nothing is confirmed any more, whatever later calls answer; reading goes on."""
        world = self.world
        # A rename that finds no room is the last step of a truncation: too late for a clean no.
        if self.fault.error == errno.ENOSPC and self.fault.kind not in ("sync", "rename"):
            raise Broken(f"L8 a full disk stopped the shard: {world.shard.failure!r}")
        world.disk.disarm()
        before = sum(log.promise.pieces for log in world.model.logs.values())
        for _ in range(10):
            try:
                world.step()
            except HeadraceError:
                pass
            if world.shard.is_closed:
                return
        world.clock.advance(60)
        world.shard.tick()
        world.shard.pump()
        if sum(log.promise.pieces for log in world.model.logs.values()) > before:
            raise Broken("L8 confirmed after a failed write or sync")

    def _heal(self) -> None:
        """The fault is gone: without a restart, every log takes appends again."""
        world = self.world
        for _ in range(3):
            world.clock.advance(60)
            world.shard.tick()
            world.shard.pump()
        if world.alarm is not None:
            raise world.alarm
        if world.shard.failure is not None:
            self.outcome = "failed"
            return
        self.outcome = "healed" if world.refused else "unharmed"
        for log in world.shard.logs.values():
            raw, count = world.batches(1, (10,))
            unit = world.model.new_unit()
            ticket = log.append(bytearray(raw))
            world.model.stage_append(log.id, raw, count, unit)
            world._follow(ticket, unit, lazy=not log.write_mode.syncs_before_confirm)
            world.shard.pump()
            if not ticket.done or ticket.error is not None:
                raise Broken(f"L8 log {log.id} was not healed: {ticket.error!r}")
        world.observe()
        world.model.check(look(world.shard, clean=True), power_cut=False)

    def _crash(self) -> None:
        world = self.world
        world.disk.before = None
        # A read that failed wrote nothing: what a crash finds then is what it finds without a fault.
        modes = ("kill", "mixed") if self.fault.kind in READS else ("kill", "lost", "mixed")
        for mode in modes:
            image = world.disk.kill() if mode == "kill" else world.disk.power_cut(self.rng, mode)
            found = self._open(image, mode)
            # A failed sync may drop what async logs and lazy changes had in the page cache: as a cut would.
            dropped = self.fault.kind == "sync" and self.fault.outcome == "dropped"
            world.model.check(found, power_cut=dropped or mode != "kill")
            again = self._open(image.power_cut(self.rng, "lost"), f"{mode}, recovered, lost")
            for difference in same(found, again):
                raise Broken(f"L7 served after {mode} and recovery, gone after a cut: {difference}")

    def _open(self, image: SimulatedDisk, mode: str):
        world = self.world
        image.capacity = 1 << 50
        try:
            shard, clean = open_shard(image, world.settings, world.model.specs(), world.clock)
        except (HeadraceError, OSError) as error:
            raise Broken(f"L5 cannot be opened after the fault and {mode}: {error!r}") from error
        return look_at_last(shard, clean)


__all__ = ["READS", "WRITES", "Shard", "Trial", "calls_of", "variants"]
