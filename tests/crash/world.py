"""A shard on a simulated disk with a random workload, and the model of its content.

Segments and journal are tiny, so that a short run rolls, recycles, checkpoints, expires and compacts, and a crash
can hit each of these operations.
"""

from collections.abc import Callable, Sequence
from random import Random

from headrace.clock import ManualClock
from headrace.errors import BatchTooLarge, Conflict, CorruptLog, DiskFull, HeadraceError, LogClosed, Overloaded
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.round import Ticket
from headrace.log.log import Log, LogSpec
from headrace.log.maintenance.compaction import LatestByKey
from headrace.log.maintenance.compactor import Compactor
from headrace.log.maintenance.retention import RetentionLimits, new_start
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.layout import RECORDS_AT
from tests.crash.model import Broken, Found, FoundLog, LogModel, Model
from tests.crash.simdisk import SimulatedDisk

ROOT = "/data"
TABLES = ("t", "sets")
KEYS = tuple(f"k{i}".encode() for i in range(6))
MONOTONIC_START = 1000.0


def fold(value: bytes | None, deltas: Sequence[bytes]) -> bytes:
    """Merge numbers into a set of numbers, stored as text."""
    members = set(value.split(b",")) if value else set()
    return b",".join(sorted(members.union(deltas), key=int))


FOLDS = {"sets": fold}


def storage_settings(rng: Random) -> LogSettings:
    return LogSettings(
        journal_file_bytes=rng.choice((4096, 8192, 32_768, 32_768)),
        journal_files=rng.choice((2, 3)),
        inline_bytes_max=rng.choice((300, 700, 4096, 4096)),
        round_bytes_max=rng.choice((1500, 4096)),
        checkpoint_interval_ms=rng.choice((500, 5000)),
        checkpoint_bytes=rng.choice((2000, 20_000)),
        settle_sync_interval_ms=300,
        disk_reserve=0,
        open_files_max=rng.choice((8, 1000)),
    )


def stream_settings(rng: Random) -> StreamSettings:
    return StreamSettings(
        segment_size=rng.choice((800, 2000, 20_000)),
        index_interval=rng.choice((100, 400)),
        write_mode=rng.choice(("sync", "sync", "sync", "sync-immediate", "async")),
        flush_interval_ms=200,
        flush_bytes=rng.choice((1000, 100_000)),
        retention_ms=rng.choice((-1, 2000)),
        retention_bytes=rng.choice((-1, -1, 3000)),
        cleanup_policy=rng.choice(("delete", "delete", "compact")),
        tombstone_retention_ms=0,
        batch_bytes_max=64 * 1024,
    )


def open_shard(
    disk: SimulatedDisk, settings: LogSettings, specs: list[LogSpec], clock: ManualClock
) -> tuple[Shard, bool]:
    """Return the shard and whether the last stop was clean."""
    shard, report = Shard.open(ROOT, settings, logs=specs, clock=clock, disk=disk, folds=FOLDS)
    shard.pump()  # finishes truncations that a crash interrupted
    if shard.failure is not None:
        raise shard.failure
    return shard, report.clean


def read_everything(shard: Shard, clean: bool = False) -> Found:
    """Read all logs and tables of the shard."""
    logs = {log_id: read_log(log) for log_id, log in shard.logs.items()}
    tables = {(table, key): value for table in TABLES for key, value in shard.state.items(table)}
    return Found(logs, tables, clean)


def read_and_discard(shard: Shard, clean: bool) -> Found:
    """Read all logs and tables of the shard, then discard it."""
    found = read_everything(shard, clean)
    discard(shard)
    return found


def discard(shard: Shard) -> None:
    """Break the reference cycles of a shard, so that thousands of them do not wait for the garbage collector."""
    for part in (*shard.logs.values(), shard.maintenance, shard):
        vars(part).clear()


def read_log(log: Log) -> FoundLog:
    parts = []
    offset = log.start_offset
    damage = ""
    try:
        while offset < log.visible_end:
            chunk = log.read(offset, 1 << 16)
            if chunk.next_offset <= offset:
                raise Broken(f"L3 log {log.id} returned next offset {chunk.next_offset} for a read at {offset}")
            parts.append(chunk.data)
            offset = chunk.next_offset
    except CorruptLog as error:
        damage = str(error)
    if log.damage is not None:
        damage = str(log.damage)
    return FoundLog(log.start_offset, log.visible_end, b"".join(parts), log.epoch, damage)


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.clock = ManualClock()
        self.clock.advance(MONOTONIC_START)
        self.settings = storage_settings(self.rng)
        self.model = Model(fold)
        self.disk = SimulatedDisk()
        self.disk.sync_each_max = self.rng.choice((2, 64))
        self.shard: Shard
        self.failed: HeadraceError | None = None
        self.refused = 0
        self.faulty = False  # disk calls fail on purpose, so a stop may fail
        self.alarm: BaseException | None = None  # found by the explorer during a disk call of the shard
        self.done: list[str] = []  # the steps so far, for debugging
        self._payloads = 0

    # Opening.

    def open(self, disk: SimulatedDisk | None = None) -> None:
        if disk is not None:
            self.disk = disk
        self.shard, _ = open_shard(self.disk, self.settings, self.model.specs(), self.clock)
        self.failed = None
        for log_id, log in self.model.logs.items():
            log.epoch = self.shard.logs[log_id].epoch

    def continue_from(self, disk: SimulatedDisk, *, power_cut: bool) -> None:
        """After a crash: open the disk that was left, check it and continue with it."""
        self.disk = disk
        disk.before = None
        self.shard, clean = open_shard(disk, self.settings, self.model.specs(), self.clock)
        found = read_everything(self.shard, clean)
        self.model.settle(found, self.model.check(found, power_cut=power_cut))
        self.failed = None

    def observe(self) -> None:
        """Promise everything that is readable now (L7)."""
        for log_id, model in self.model.logs.items():
            log = self.shard.logs.get(log_id)
            if log is not None and model.former is None:
                model.promise.visible_end = max(model.promise.visible_end, log.visible_end)
                model.promise.durable_end = max(model.promise.durable_end, log.durable_end)

    # One step.

    def step(self) -> None:
        kinds = list(ACTIONS)
        kind = self.rng.choices(kinds, [ACTIONS[k] for k in kinds])[0]
        self.done.append(kind)
        try:
            getattr(self, kind)()
        except HeadraceError as error:
            if not isinstance(error, DiskFull | BatchTooLarge | Overloaded) and self.shard.failure is None:
                raise
            self.refused += 1
        if self.alarm is not None:
            raise self.alarm

    def settle(self) -> None:
        """Complete all pending work."""
        self.shard.pump()
        if self.alarm is not None:
            raise self.alarm

    # Writing.

    def create(self) -> None:
        if len(self.model.logs) >= 5:
            return
        log_id = self.shard.next_log_id()
        if log_id in self.model.ids_given:
            raise Broken(f"L3 log id {log_id} was assigned twice")
        self.model.ids_given.add(log_id)
        spec = LogSpec(log_id, f"log{log_id}", stream_settings(self.rng))
        log = self.shard.create_log(spec)
        self.model.logs[log_id] = LogModel(spec, epoch=log.epoch)

    def append_small(self) -> None:
        self._append(self.rng.choice((1, 1, 2)), (0, 20, 60))

    def append_large(self) -> None:
        self._append(self.rng.choice((1, 3)), (700, 1200, 3000))

    def _append(self, batches: int, sizes: tuple[int, ...]) -> None:
        log = self._some_log()
        if log is None:
            return
        parts = [self.batches(1, sizes) for _ in range(batches)]
        unit = self.model.new_unit()
        ticket = self.shard.logs[log.spec.id].append(bytearray(b"".join(raw for raw, _ in parts)))
        for raw, count in parts:  # each batch is atomic, several in one append are not
            self.model.stage_append(log.spec.id, raw, count, unit, atomic=False)
        self._follow(ticket, unit, lazy=log.is_async, log_id=log.spec.id, payload=parts[-1][0])

    def batches(self, number: int, sizes: tuple[int, ...], rng: Random | None = None) -> tuple[bytes, int]:
        rng = rng or self.rng
        raw, total = b"", 0
        for _ in range(number):
            records = []
            for _ in range(rng.choice((1, 1, 2, 5))):
                self._payloads += 1
                value = f"{self.seed}/{self._payloads}:".encode().ljust(rng.choice(sizes) + 8, b".")
                key = rng.choice(KEYS)
                records.append((key, None if rng.random() < 0.1 else value, (), self.clock.now_ms()))
            raw += codec.build(records)
            total += len(records)
        return raw, total

    def group(self) -> None:
        """Append to several logs and change state in one atomic group."""
        rng = self.rng
        logs = rng.sample(list(self.model.logs.values()), min(len(self.model.logs), rng.choice((1, 2, 3))))
        group = self.shard.group()
        unit = self.model.new_unit()
        staged = []
        shared = self.batches(1, (0, 40)) if rng.random() < 0.5 else None
        buffer = bytearray(shared[0]) if shared else None
        for log in logs:
            raw, count = shared or self.batches(1, (0, 40, 300))
            group.append(self.shard.logs[log.spec.id], buffer if buffer is not None else bytearray(raw))
            staged.append((log.spec.id, raw, count))
        changes = self._changes(group, unit)
        ticket = group.commit()
        for log_id, raw, count in staged:
            self.model.stage_append(log_id, raw, count, unit)
        for key, value in changes.items():
            self.model.stage_change(key, value, unit, lazy=False)
        log_id, raw, _ = staged[-1] if staged else (0, b"", 0)
        self._follow(ticket, unit, lazy=False, log_id=log_id, payload=raw)

    def change_state(self) -> None:
        group = self.shard.group()
        unit = self.model.new_unit()
        changes = self._changes(group, unit)
        lazy = self.rng.random() < 0.6
        ticket = group.commit(lazy=lazy)
        for key, value in changes.items():
            self.model.stage_change(key, value, unit, lazy=lazy)
        self._follow(ticket, unit, lazy=lazy)

    def _changes(self, group: AtomicGroup, unit: int) -> dict[tuple[str, bytes], bytes | None]:
        rng = self.rng
        changes: dict[tuple[str, bytes], bytes | None] = {}
        for name in rng.sample(KEYS, rng.choice((1, 2))):
            dice = rng.random()
            if dice < 0.45:
                changes["t", name] = b"%d" % unit
                group.put("t", name, b"%d" % unit)
            elif dice < 0.55:
                changes["t", name] = None
                group.delete("t", name)
            elif dice < 0.95:
                changes["sets", name] = b"%d" % unit
                group.merge("sets", name, b"%d" % unit)
            else:
                changes["sets", name] = None
                group.delete("sets", name)
        return changes

    def _follow(self, ticket: Ticket, unit: int, *, lazy: bool, log_id: int = 0, payload: bytes = b"") -> None:
        def resolved(ticket: Ticket) -> None:
            if ticket.error is None:
                self.model.confirm(unit, lazy=lazy)
                if not lazy and log_id in self.model.logs:
                    self._check_synced(payload)
            elif isinstance(ticket.error, DiskFull | LogClosed):
                self.refused += 1
                self.model.refuse(unit)
            else:
                self.failed = ticket.error

        ticket.add_callback(resolved)

    def _check_synced(self, payload: bytes) -> None:
        """L1: when an append is confirmed, its bytes and the path of their file are synced."""
        why = self.disk.unsynced(payload[RECORDS_AT:])
        if why is not None and self.alarm is None:
            self.alarm = Broken(f"L1 confirmed too early: {why}")

    def _some_log(self) -> LogModel | None:
        logs = list(self.model.logs.values())
        return self.rng.choice(logs) if logs else None

    # Background work.

    def pump_some(self) -> None:
        """Run a part of the pending work, so that more is staged while a round is in flight."""
        shard = self.shard
        for _ in range(self.rng.choice((1, 2, 4))):
            if shard._deferred:
                shard._deferred.popleft()()
            elif not self.rng.choice(shard._inline).pump():
                return

    def pump_all(self) -> None:
        self.shard.pump()

    def tick(self) -> None:
        self.clock.advance(self.rng.choice((0.05, 0.3, 1.0)))
        self.shard.tick()

    def checkpoint(self) -> None:
        self.shard.checkpoints.run()

    # Maintenance of logs.

    def expire(self) -> None:
        """Move the start of a log to a random offset up to its end."""
        log = self._some_log()
        if log is None or log.former is not None:
            return
        real_log = self.shard.logs[log.spec.id]
        offset = self.rng.randint(real_log.start_offset, real_log.visible_end)
        log.start_max = max(log.start_max, offset)

        def moved(ticket: Ticket) -> None:
            if ticket.error is None:
                log.start = max(log.start, offset)
            elif not isinstance(ticket.error, DiskFull | LogClosed):
                self.failed = ticket.error

        self.shard.maintenance.starts.delete_before(real_log, offset).add_callback(moved)

    def retain(self) -> None:
        """Apply retention by age and size. It may only remove records beyond the limits (L10)."""
        log = self._some_log()
        if log is None or log.former is not None:
            return
        real_log = self.shard.logs[log.spec.id]
        now_ms = self.clock.now_ms()
        limit = new_start(
            real_log.segments,
            RetentionLimits.of(real_log.settings, ()),
            real_log.start_offset,
            real_log.visible_end,
            now_ms,
        )
        self._check_retention(log, limit, now_ms)
        log.start_max = max(log.start_max, limit)
        ticket = self.shard.maintenance.starts.apply_retention(real_log, now_ms)
        if ticket is not None:
            ticket.add_callback(lambda t: None if t.error else setattr(log, "start", max(log.start, limit)))

    @staticmethod
    def _check_retention(log: LogModel, start: int, now_ms: int) -> None:
        settings = log.spec.settings
        gone = [r for r in log.records() if log.start <= r.offset < start]
        young = settings.retention_ms < 0 or any(now_ms - r.timestamp < settings.retention_ms for r in gone)
        if gone and young and settings.retention_bytes < 0:
            raise Broken(f"L10 retention removed {gone[0].offset} to {start - 1}, which were not too old")

    def compact(self) -> None:
        log = self._some_log()
        if log is None or log.former is not None or log.spec.settings.cleanup_policy != "compact":
            return
        real_log = self.shard.logs[log.spec.id]
        log.compaction_starts(real_log.visible_end)

        def compacted(_result: object, error: BaseException | None) -> None:
            if error is not None and not self.faulty and not isinstance(error, LogClosed | Conflict):
                self.alarm = self.alarm or Broken(f"L10 compaction failed: {error!r}")

        if self.seed % 2:
            self._compact_in_passes()
        self.shard.maintenance.compact(real_log, compacted)

    def _compact_in_passes(self) -> None:
        """Each pass includes the records that were appended before it starts."""
        compactor = self.shard.maintenance.compactor
        begin_pass = Compactor._latest_by_key

        def start_pass(log: Log) -> LatestByKey:
            self.model.logs[log.id].compaction_starts(log.visible_end)
            return begin_pass(compactor, log)

        compactor.keys_max = 2
        compactor._latest_by_key = start_pass  # type: ignore[method-assign]  # to observe each pass

    def truncate(self) -> None:
        """Truncate a log to a boundary between batches. No other work on it is pending meanwhile."""
        self.settle()
        log = self._some_log()
        if log is None or self.shard.failure is not None or self.shard.is_full:
            return
        real_log = self.shard.logs[log.spec.id]
        ends = log.ends()
        choices = [k for k, end in enumerate(ends) if real_log.start_offset <= end <= real_log.visible_end]
        if not choices or ends[-1] != real_log.visible_end:
            return
        count = self.rng.choice(choices)
        log.former, log.former_least = list(log.pieces), log.promised(power_cut=True)
        del log.pieces[count:]
        log.promise.pieces = count
        log.promise.visible_end = ends[count]
        log.promise.durable_end = min(log.promise.durable_end, ends[count])

        def truncated(error: BaseException | None) -> None:
            if error is None:
                log.former = None
                log.promise.durable_end = ends[count]
                log.forget_compaction_from(ends[count])
            elif isinstance(error, DiskFull) and log.former is not None:
                log.pieces, log.former = log.former, None
                log.promise.pieces = len(log.pieces)
            elif not self.faulty:
                self.alarm = self.alarm or Broken(f"L8 truncation failed: {error!r}")

        self.shard.maintenance.truncations.truncate(real_log, ends[count], truncated)
        self.settle()

    def delete(self) -> None:
        if len(self.model.logs) < 3:
            return
        log_id = self.rng.choice(list(self.model.logs))
        del self.model.logs[log_id]  # the catalog is changed first
        self.shard.delete_log(log_id)

    def read(self) -> None:
        """Check that readers see what was written, and nothing that is not durable yet (L4, L7)."""
        if self.shard.failure is not None:
            read_everything(self.shard)  # may report damage, because a failed sync may have dropped records
            return
        self.observe()
        self.model.check(read_everything(self.shard, clean=True), power_cut=False)

    def restart(self) -> None:
        """Stop cleanly and start again."""
        self.shard.close()
        if self.alarm is not None:
            raise self.alarm
        self.shard, clean = open_shard(self.disk, self.settings, self.model.specs(), self.clock)
        if not clean and not self.faulty:
            raise Broken("L5 a clean stop was treated as a crash")
        found = read_everything(self.shard, clean)
        self.model.settle(found, self.model.check(found, power_cut=False))


ACTIONS: dict[str, int] = {
    "create": 5,
    "append_small": 30,
    "append_large": 8,
    "group": 15,
    "change_state": 10,
    "pump_some": 25,
    "pump_all": 12,
    "tick": 10,
    "checkpoint": 3,
    "read": 3,
    "restart": 1,
    "expire": 2,
    "retain": 2,
    "compact": 3,
    "truncate": 1,
    "delete": 1,
}

Action = Callable[[], None]
