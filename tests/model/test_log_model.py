"""The log against a list: whatever is done to it, in whatever order, it answers as a plain model would."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.clock import ManualClock
from headrace.errors import Conflict, OffsetOutOfRange
from headrace.log.log import LogSpec
from headrace.log.settings import LogSettings, StreamSettings
from headrace.log.shard import Shard
from headrace.record import codec
from tests.crash.simdisk import SimulatedDisk

ROOT = "/data"
SETTINGS = LogSettings(
    journal_file_bytes=8192, journal_files=2, inline_bytes_max=500, round_bytes_max=2000, checkpoint_bytes=8000,
    checkpoint_interval_ms=1000, disk_reserve=0, open_files_max=8,
)  # fmt: skip
KEYS = (b"a", b"b", b"c")
LOGS = {
    1: StreamSettings(segment_size=600, index_interval=100, retention_ms=-1),
    2: StreamSettings(segment_size=5000, index_interval=300, retention_ms=-1, write_mode="async"),
}


class LogMachine(RuleBasedStateMachine):
    """Offsets in the model are positions in a list; what was removed in front stays as None."""

    @initialize()
    def begin(self) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.specs = [LogSpec(log_id, f"log{log_id}", stream) for log_id, stream in LOGS.items()]
        self.records: dict[int, list[tuple[bytes, bytes, int]]] = {log_id: [] for log_id in LOGS}
        self.starts = dict.fromkeys(LOGS, 0)
        self.table: dict[bytes, bytes] = {}
        self.number = 0
        self.open()

    def open(self) -> None:
        self.shard, self.report = Shard.open(ROOT, SETTINGS, logs=self.specs, clock=self.clock, disk=self.disk)
        self.shard.pump()

    def batch(self, count: int, size: int) -> tuple[bytearray, list[tuple[bytes, bytes, int]]]:
        made = []
        for _ in range(count):
            self.number += 1
            made.append((KEYS[self.number % 3], b"%d" % self.number + b"." * size, self.clock.now_ms()))
        return codec.build([(key, value, (), time) for key, value, time in made]), made

    @rule(log_id=st.sampled_from(list(LOGS)), count=st.integers(1, 5), size=st.sampled_from([0, 50, 700, 3000]))
    def append(self, log_id: int, count: int, size: int) -> None:
        data, made = self.batch(count, size)
        ticket = self.shard.logs[log_id].append(data)
        self.shard.pump()
        assert ticket.done and ticket.error is None
        assert ticket.base_offset == len(self.records[log_id])
        self.records[log_id] += made
        assert ticket.next_offset == len(self.records[log_id])

    @rule(counts=st.lists(st.sampled_from(list(LOGS)), min_size=1, max_size=6))
    def append_in_one_round(self, counts: list[int]) -> None:
        tickets = []
        for log_id in counts:
            data, made = self.batch(1, 20)
            tickets.append((self.shard.logs[log_id].append(data), len(self.records[log_id])))
            self.records[log_id] += made
        self.shard.pump()
        assert all(t.done and t.error is None and t.base_offset == offset for t, offset in tickets)

    @rule(key=st.sampled_from(KEYS), delete=st.booleans())
    def append_to_both_and_put(self, key: bytes, delete: bool) -> None:
        data, made = self.batch(1, 30)
        group = self.shard.group()
        for log_id, log in self.shard.logs.items():
            group.append(log, data)
            self.records[log_id] += made
        self.number += 1
        if delete:
            group.delete("t", key)
            self.table.pop(key, None)
        else:
            group.put("t", key, b"%d" % self.number)
            self.table[key] = b"%d" % self.number
        ticket = group.commit()
        self.shard.pump()
        assert ticket.done and ticket.error is None

    @rule(log_id=st.sampled_from(list(LOGS)), share=st.floats(0, 1))
    def delete_before(self, log_id: int, share: float) -> None:
        start, end = self.starts[log_id], len(self.records[log_id])
        offset = start + int((end - start) * share)
        self.shard.maintenance.starts.delete_before(self.shard.logs[log_id], offset)
        self.shard.pump()
        self.starts[log_id] = offset

    @rule(log_id=st.sampled_from(list(LOGS)), share=st.floats(0, 1))
    def truncate(self, log_id: int, share: float) -> None:
        start, end = self.starts[log_id], len(self.records[log_id])
        offset = start + int((end - start) * share)
        errors: list[BaseException | None] = []
        try:
            self.shard.maintenance.truncations.truncate(self.shard.logs[log_id], offset, errors.append)
        except Conflict:
            return
        self.shard.pump()
        assert errors == [None]
        del self.records[log_id][offset:]

    @rule(seconds=st.sampled_from([0.05, 0.5, 5.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.shard.tick()
        self.shard.pump()

    @rule()
    def checkpoint(self) -> None:
        self.shard.checkpoint()
        self.shard.pump()

    @rule()
    def stop_and_start(self) -> None:
        self.shard.close()
        self.open()
        assert self.report.clean

    @rule()
    def die_and_start(self) -> None:
        """A kill: nothing confirmed is lost, not even by the async log."""
        self.disk = self.disk.kill()
        self.open()

    @rule(log_id=st.sampled_from(list(LOGS)), share=st.floats(0, 1), max_bytes=st.sampled_from([1, 200, 100_000]))
    def read_from_anywhere(self, log_id: int, share: float, max_bytes: int) -> None:
        log, records, start = self.shard.logs[log_id], self.records[log_id], self.starts[log_id]
        offset = start + int((len(records) - start) * share)
        chunk = log.read(offset, max_bytes)
        if offset == len(records):
            assert len(chunk.data) == 0 and chunk.next_offset == offset
            return
        found = codec.records(chunk.data, verify_crc=True)
        assert found[0].offset <= offset < chunk.next_offset == found[-1].offset + 1
        for record in found:
            assert (record.key, record.value, record.timestamp) == records[record.offset]

    @rule(log_id=st.sampled_from(list(LOGS)), beyond=st.integers(1, 3))
    def read_outside(self, log_id: int, beyond: int) -> None:
        log = self.shard.logs[log_id]
        for offset in (self.starts[log_id] - beyond, len(self.records[log_id]) + beyond):
            try:
                log.read(offset)
            except OffsetOutOfRange:
                continue
            raise AssertionError(f"offset {offset} was answered")

    @rule(log_id=st.sampled_from(list(LOGS)), share=st.floats(0, 1.1))
    def find_by_time(self, log_id: int, share: float) -> None:
        log, records, start = self.shard.logs[log_id], self.records[log_id], self.starts[log_id]
        first = records[start][2] if start < len(records) else self.clock.now_ms()
        wanted = first + int((self.clock.now_ms() - first) * share)
        expected = next(((o, r[2]) for o, r in enumerate(records) if o >= start and r[2] >= wanted), None)
        assert log.offset_for_timestamp(wanted) == expected

    @rule(log_id=st.sampled_from(list(LOGS)), split=st.sampled_from([1, 500, 100_000]))
    def read_by_slices(self, log_id: int, split: int) -> None:
        log, records, start = self.shard.logs[log_id], self.records[log_id], self.starts[log_id]
        found = {}
        for piece in log.slices(start, len(records), split):
            for record in codec.records(log.read_slice(piece)):
                if start <= record.offset < len(records):
                    found[record.offset] = (record.key, record.value, record.timestamp)
        assert found == {offset: records[offset] for offset in range(start, len(records))}

    @precondition(lambda self: hasattr(self, "shard"))
    @invariant()
    def ends_and_state_agree(self) -> None:
        assert self.shard.failure is None
        for log_id, log in self.shard.logs.items():
            assert log.start_offset == self.starts[log_id]
            assert log.visible_end == len(self.records[log_id])
            assert log.durable_end <= log.visible_end
        assert dict(self.shard.state.items("t")) == self.table

    def teardown(self) -> None:
        if hasattr(self, "shard"):
            for log_id, log in self.shard.logs.items():
                found, offset = [], log.start_offset
                while offset < log.visible_end:
                    chunk = log.read(offset)
                    found += [r for r in codec.records(chunk.data) if r.offset >= log.start_offset]
                    offset = chunk.next_offset
                assert [(r.key, r.value, r.timestamp) for r in found] == self.records[log_id][self.starts[log_id] :]


LogMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTheLogAnswersAsAListWould = LogMachine.TestCase
