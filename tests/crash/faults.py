"""Runs a workload with one disk fault and checks it: clean errors, no confirm after a failure, nothing lost.

The workload runs once without a fault to count its disk calls, and then once for each call, which fails.
"""

import errno
from collections import Counter
from random import Random

from headrace.errors import HeadraceError, StorageError
from headrace.log.shard import Shard
from tests.crash.model import Broken, Found, differences
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.crash.world import World, discard, open_shard, read_and_discard, read_everything

WRITES = ("create", "pwrite", "truncate", "sync", "sync_dir", "rename", "unlink", "mkdir", "rmdir")
READS = ("open", "pread", "listdir")

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
    """Count the disk calls of the workload without a fault, by kind."""
    world = new_world(seed)
    world.disk.calls.clear()
    world.open()
    for _ in range(steps):
        world.step()
    world.shard.close()
    return world.disk.calls


class Trial:
    """One run of a seed with one fault. Raises Broken."""

    def __init__(self, seed: int, steps: int, fault: Fault) -> None:
        self.world = new_world(seed)
        self.steps = steps
        self.fault = fault
        self.rng = Random(seed)
        self.outcome = "unharmed"

    def run(self) -> str:
        """Return the outcome: refused (to open), failed (the shard stopped), healed or unharmed."""
        world = self.world
        world.faulty = True
        world.disk.arm(self.fault)
        try:
            world.open()
        except (HeadraceError, OSError):
            self.outcome = "refused"  # no client was served and nothing was confirmed
        else:
            self._work()
        world.disk.disarm()
        self._crash()
        if hasattr(world, "shard"):
            discard(world.shard)
        return self.outcome

    def _work(self) -> None:
        world = self.world
        for _ in range(self.steps):
            try:
                world.step()
            except StorageError:
                pass
            except OSError as error:
                if world.done[-1] == "restart":  # opening may raise the error of the operating system
                    self.outcome = "refused"
                    return
                raise Broken(f"L8 not a clean error: {error!r} after {world.done[-1]}") from error
            if world.shard.is_closed:
                return  # a restart step failed; the crash comes next
            if world.shard.failure is not None:
                self.outcome = "failed"
                self._stays_stopped()
                return
        world.disk.disarm()
        self._heal()

    def _stays_stopped(self) -> None:
        """After a failure nothing is confirmed, even if later calls succeed. Reads still work."""
        world = self.world
        # A rename that fails with ENOSPC is the last step of a truncation, which can no longer be refused cleanly.
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
        """After the fault is gone, every log accepts appends again without a restart."""
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
        world.model.check(read_everything(world.shard, clean=True), power_cut=False)

    def _crash(self) -> None:
        world = self.world
        world.disk.before = None
        # A failed read writes nothing, so a crash leaves the same disk as without the fault.
        modes = ("kill", "mixed") if self.fault.kind in READS else ("kill", "lost", "mixed")
        for mode in modes:
            image = world.disk.kill() if mode == "kill" else world.disk.power_cut(self.rng, mode)
            found = self._open(image, mode)
            # Like a power cut, a failed sync may drop async appends and lazy changes from the page cache.
            dropped = self.fault.kind == "sync" and self.fault.outcome == "dropped"
            world.model.check(found, power_cut=dropped or mode != "kill")
            again = self._open(image.power_cut(self.rng, "lost"), f"{mode}, recovered, lost")
            for difference in differences(found, again):
                raise Broken(f"L7 served after {mode} and recovery, missing after a power cut: {difference}")

    def _open(self, image: SimulatedDisk, mode: str) -> Found:
        world = self.world
        image.capacity = 1 << 50
        try:
            shard, clean = open_shard(image, world.settings, world.model.specs(), world.clock)
        except (HeadraceError, OSError) as error:
            raise Broken(f"L5 cannot be opened after the fault and {mode}: {error!r}") from error
        return read_and_discard(shard, clean)


__all__ = ["READS", "WRITES", "Shard", "Trial", "calls_of", "variants"]
