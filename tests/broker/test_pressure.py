"""Back-pressure: its decisions as pure functions of numbers, and the order in which it reclaims memory."""

import logging
import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.pressure import process_memory
from headrace.broker.pressure.pressure import (
    DEPTH,
    DEPTH_STEPS,
    DISK,
    MEMORY,
    MEMORY_STEPS,
    RATES,
    Pressure,
    PressureLimits,
    Usage,
    Verdict,
    judge,
)
from headrace.broker.pressure.process_memory import ProcessMemory
from headrace.config import Config
from headrace.errors import DiskFull, Overloaded

MB = 1 << 20
LIMITS = PressureLimits(memory_bytes=1000 * MB, disk_free_bytes=100 * MB, pending_bytes=200 * MB)
SHARES = st.floats(0, 1.5)


def usage(memory: float = 0.1, *, depth: float = 0.0, free: float = 10.0) -> Usage:
    return Usage(int(memory * 1000 * MB), int(depth * 200 * MB), int(free * 100 * MB))


def follow(*usages: Usage) -> list[Verdict]:
    verdicts, before = [], Verdict()
    for each in usages:
        before = judge(before, each, LIMITS)
        verdicts.append(before)
    return verdicts


def test_an_idle_broker_is_at_full_speed() -> None:
    assert judge(Verdict(), usage(), LIMITS) == Verdict()
    assert Verdict().rate_bytes_s is None


def test_publishers_pause_above_90_percent_and_resume_below_80() -> None:
    alarms = [v.memory_alarm for v in follow(*map(usage, (0.89, 0.90, 0.95, 0.85, 0.80, 0.79, 0.85, 0.89, 0.90)))]
    assert alarms == [False, True, True, True, True, False, False, False, True]


def test_a_short_disk_pauses_until_there_is_a_quarter_more() -> None:
    alarms = [v.disk_alarm for v in follow(*(usage(free=free) for free in (1.0, 0.99, 1.0, 1.24, 1.25, 1.0, 0.5)))]
    assert alarms == [False, True, True, True, False, False, True]


def test_the_reason_of_a_pause_is_named() -> None:
    assert judge(Verdict(), usage(0.95), LIMITS).paused_by == MEMORY
    assert judge(Verdict(), usage(free=0.1), LIMITS).paused_by == DISK
    assert judge(Verdict(), usage(0.95, free=0.1), LIMITS).paused_by == MEMORY
    assert judge(Verdict(), usage(free=0.1), LIMITS).rate_bytes_s == 0


@pytest.mark.parametrize(("steps", "reason"), [(MEMORY_STEPS, MEMORY), (DEPTH_STEPS, DEPTH)])
def test_publishers_are_slowed_step_by_step_before_they_are_paused(steps: tuple[float, ...], reason: str) -> None:
    made = [usage(s) if reason == MEMORY else usage(depth=s) for s in steps]
    verdicts = follow(*made)
    assert [v.level for v in verdicts] == [1, 2, 3, 4, 5]
    assert {v.slowed_by for v in verdicts} == {reason}
    assert [v.rate_bytes_s for v in verdicts] == list(RATES)
    assert not any(v.paused_by for v in verdicts)


def test_data_waiting_for_the_disk_alone_never_raises_an_alarm() -> None:
    assert judge(Verdict(), usage(depth=5.0), LIMITS).paused_by is None


def test_a_step_is_left_only_when_usage_is_clearly_below_it() -> None:
    assert [v.level for v in follow(*map(usage, (0.60, 0.59, 0.58, 0.56, 0.59)))] == [1, 1, 1, 0, 0]


@given(st.floats(0.0, 1.2), st.integers(2, 40))
def test_nothing_flaps_when_usage_trembles_by_two_percent(middle: float, count: int) -> None:
    """Whatever the first two verdicts are, trembling around one value never changes them again."""
    trembling = [usage(max(0.0, middle + (0.01 if turn % 2 else -0.01))) for turn in range(count + 2)]
    verdicts = follow(*trembling)
    assert len(set(verdicts[1:])) == 1


@given(st.lists(st.tuples(SHARES, SHARES, st.floats(0, 3)), min_size=1, max_size=60))
def test_alarms_keep_their_promise_on_every_way_there(path: list[tuple[float, float, float]]) -> None:
    before = Verdict()
    for memory, depth, free in path:
        now = judge(before, usage(memory, depth=depth, free=free), LIMITS)
        share = int(memory * 1000 * MB) / LIMITS.memory_bytes
        if share >= 0.9:
            assert now.memory_alarm
        if share < 0.8:
            assert not now.memory_alarm
        if 0.8 <= share < 0.9:
            assert now.memory_alarm == before.memory_alarm
        assert now.level >= sum(share >= step for step in MEMORY_STEPS)
        assert (now.level > 0) == bool(now.slowed_by)
        before = now


# The manager, with a process whose memory the test decides.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def now_ms(self) -> int:
        return int(self.now * 1000)


class Memory(ProcessMemory):
    def __init__(self, rss_bytes: int) -> None:
        self.rss = rss_bytes
        self.looks = 0

    def rss_bytes(self) -> int:
        self.looks += 1
        return self.rss

    def close(self) -> None: ...


class Reclaimable:
    def __init__(self, name: str, held: int, memory: Memory, patience_s: float = 0.0) -> None:
        self.name, self.held, self.patience_s = name, held, patience_s
        self._memory = memory
        self.asked: list[int] = []

    def held_bytes(self) -> int:
        return self.held

    def shed(self, wanted_bytes: int) -> int:
        self.asked.append(wanted_bytes)
        freed = min(self.held, wanted_bytes)
        self.held -= freed
        self._memory.rss -= freed
        return freed


class World:
    def __init__(self, rss: int = 100 * MB, **config: Any) -> None:
        self.clock, self.memory = Clock(), Memory(rss)
        self.free = 10_000 * MB
        counters = SimpleNamespace(bytes_written=0, bytes_read=0)
        self.shard = cast(Any, SimpleNamespace(pending_bytes=0, counters=counters))
        self.disk: Any = SimpleNamespace(free_bytes=lambda path: self.free)
        settings = Config(memory_limit=1000 * MB, disk_free_limit=100 * MB, **config)
        self.pressure = Pressure(self.shard, settings, self.clock, self.disk, self.memory)

    def holder(self, name: str, held: int, patience_s: float = 0.0) -> Reclaimable:
        holder = Reclaimable(name, held, self.memory, patience_s)
        self.pressure.add_holder(holder)
        return holder

    def step(self, seconds: float = 0.05) -> None:
        self.clock.now += seconds
        self.pressure.count_received(1)
        self.pressure.tick()


async def test_an_idle_broker_checks_its_memory_once_a_second() -> None:
    world = World()

    def looks(ticks: int) -> int:
        before = world.memory.looks
        for _ in range(ticks):
            world.clock.now += 0.0625
            world.pressure.tick()
        return world.memory.looks - before

    assert looks(160) == 10, "ten seconds"
    world.pressure.count_received(1)
    assert looks(1) == 1, "something came"
    world.memory.rss = 950 * MB  # used by readers, which are not counted
    assert looks(16) >= 1 and world.pressure.verdict.memory_alarm
    assert looks(160) == 160, "an alarm is looked at until it is over"
    await world.pressure.close()


async def test_the_largest_memory_holders_are_asked_first_and_only_for_what_is_needed() -> None:
    world = World()
    small, large, middle = (world.holder(n, held * MB) for n, held in (("s", 50), ("l", 90), ("m", 60)))
    world.memory.rss = 900 * MB
    world.step()
    assert [len(h.asked) for h in (large, middle, small)] == [1, 1, 0]
    assert large.asked == [150 * MB] and middle.asked == [60 * MB]
    assert world.pressure.shed_bytes == {"s": 0, "l": 90 * MB, "m": 60 * MB}
    world.memory.rss = 799 * MB
    world.step()
    assert world.pressure.verdict.paused_by is None
    await world.pressure.close()


async def test_the_allocator_is_trimmed_once_after_a_busy_period(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr("headrace.broker.pressure.pressure.trim_allocator", lambda: trims.append(1))
    world = World()

    async def pass_time(moved: int) -> int:
        world.shard.counters.bytes_read += moved
        world.step(11.0)
        if world.pressure._trim is not None:
            await world.pressure._trim
        return len(trims)

    # idle; at work; at work; hardly anything any more; idle for long; a little; at work again; idle again
    moved = (0, 50 * MB, 50 * MB, 1 * MB, 0, 2 * MB, 50 * MB, 0)
    assert [await pass_time(size) for size in moved] == [0, 0, 0, 1, 1, 1, 1, 2]
    await world.pressure.close()


FAULTS = """
import resource
from headrace.allocator import keep_freed_memory
keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        buffers = [bytearray(1 << 20) for _ in range(20)]
        del buffers
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.process
def test_buffers_are_used_again_and_not_fetched_from_the_system_each_time() -> None:
    if "glibc" not in platform.libc_ver():
        pytest.skip("only glibc can be told to keep freed memory")
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < (200 << 20) // resource.getpagesize() / 10, "of 200 MB in buffers"


async def test_connections_are_closed_only_when_an_alarm_lasts() -> None:
    world = World()
    clients = world.holder("clients", 500 * MB, patience_s=5.0)
    world.memory.rss = 950 * MB
    for _ in range(80):
        world.step()
    assert clients.asked == []
    for _ in range(40):
        world.step()
    assert clients.asked
    assert world.pressure.verdict.paused_by is None
    await world.pressure.close()


async def test_an_alarm_that_returns_at_once_skips_the_grace_period() -> None:
    world = World()
    clients = world.holder("clients", 5000 * MB, patience_s=5.0)
    world.memory.rss = 950 * MB
    for _ in range(110):
        world.step()
    assert len(clients.asked) == 1 and world.pressure.verdict.paused_by is None
    world.memory.rss = 950 * MB
    world.step()
    assert len(clients.asked) == 2
    for _ in range(300):
        world.step()
    world.memory.rss = 950 * MB
    world.step()
    assert len(clients.asked) == 2, "a new alarm"
    await world.pressure.close()


async def test_memory_is_checked_during_a_burst_before_the_next_tick() -> None:
    world = World()
    changes: list[str | None] = []
    world.pressure.on_change(lambda verdict: changes.append(verdict.paused_by))
    world.memory.rss = 950 * MB
    world.pressure.count_received(1 * MB)
    assert changes == []
    world.pressure.count_received(20 * MB)
    assert changes == ["memory"]
    assert world.pressure.events["memory_paused"] == 1
    await world.pressure.close()


async def test_refused_publishers_get_a_retry_time() -> None:
    world = World()
    world.pressure.check()
    world.free = 50 * MB
    world.step(1.1)
    with pytest.raises(DiskFull, match="50 MB free, 125 MB needed"):
        world.pressure.check()
    world.memory.rss = 990 * MB
    world.step()
    with pytest.raises(Overloaded, match="990 MB of 1000MB") as refused:
        world.pressure.check()
    assert refused.value.retry_after_s > 0
    world.memory.rss, world.free, world.shard.pending_bytes = 100 * MB, 10_000 * MB, 900 * MB
    world.step(1.1)
    with pytest.raises(Overloaded, match="waiting for the disk"):
        world.pressure.check()
    await world.pressure.close()


async def test_small_messages_are_hardly_held_for_large_ones() -> None:
    world = World()
    assert world.pressure.delay_s(10 * MB) == 0.0
    world.memory.rss = 850 * MB  # the last step: 32 MB a second
    world.step()
    for _ in range(10):
        large = world.pressure.delay_s(8 * MB)
    assert large == 1.0
    assert world.pressure.delay_s(100) < 0.001
    await world.pressure.close()


async def test_the_time_publishers_were_paused_is_counted() -> None:
    world = World()
    world.memory.rss = 950 * MB
    world.step()
    world.clock.now += 3
    assert world.pressure.paused_s == pytest.approx(3)
    world.memory.rss = 500 * MB
    world.step()
    world.clock.now += 100
    assert world.pressure.paused_s == pytest.approx(3.05)
    await world.pressure.close()


async def test_a_memory_limit_below_an_empty_broker_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await World(rss=900 * MB).pressure.close()
    assert "is too small" in caplog.text


# The machine.


class Files:
    """A disk with a few files of the kernel."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = list(files.items())

    def open(self, path: str, **_: bool) -> int:
        for number, (name, _text) in enumerate(self._files):
            if name == path:
                return number
        raise FileNotFoundError(path)

    def pread(self, file: int, size: int, position: int) -> bytes:
        return self._files[file][1].encode()

    def close(self, file: int) -> None: ...


V1 = "/sys/fs/cgroup/memory"
V2 = "/sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "found_mb"),
    [
        ({"/proc/self/cgroup": "4:memory:/a/b\n", f"{V1}/a/b/memory.limit_in_bytes": f"{300 * MB}\n"}, 300),
        ({"/proc/self/cgroup": "4:memory:/a/b\n", f"{V1}/a/memory.limit_in_bytes": f"{200 * MB}\n"}, 200),
        ({"/proc/self/cgroup": "4:memory:/docker/x\n", f"{V1}/memory.limit_in_bytes": f"{100 * MB}\n"}, 100),
        ({"/proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "max\n", f"{V2}/memory.max": f"{64 * MB}\n"}, 64),
    ],
)
def test_the_limit_of_a_container_is_found(files: dict[str, str], found_mb: int) -> None:
    disk: Any = Files(files)
    assert process_memory.memory_bytes(disk) == found_mb * MB


def test_without_a_cgroup_limit_the_memory_of_the_machine_is_used() -> None:
    disk: Any = Files({"/proc/self/cgroup": "4:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712\n"})
    total = process_memory.memory_bytes(disk)
    assert total == process_memory.memory_bytes(Files({}))  # type: ignore[arg-type]
    assert process_memory.memory_limit(0) <= min(2 << 30, total * 0.4)
    assert process_memory.memory_limit(5 * MB) == 5 * MB


def test_the_resident_memory_is_the_kernels_figure() -> None:
    memory = ProcessMemory()
    said = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    assert abs(memory.rss_bytes() - int(said.split()[1]) * 1024) < 8 * MB
    memory.close()
