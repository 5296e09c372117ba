"""The state files are rewritten now and then, and an interrupted rewrite must lose nothing."""

import errno
from random import Random

import pytest

from headrace.log.state import store
from tests.crash.simdisk import Fault, SimulatedDisk
from tests.log.helpers import Bench

ROOT = "/data"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(store, "_REWRITE_BYTES_MIN", 2000)
    disk = SimulatedDisk()
    bench = Bench(ROOT, disk)
    bench.open()
    return bench


def put(bench: Bench, **values: bytes | None) -> None:
    group = bench.shard.group()
    for name, value in values.items():
        if value is None:
            group.delete("t", name.encode())
        else:
            group.put("t", name.encode(), value)
    ticket = group.commit()
    bench.shard.pump()
    assert ticket.done and ticket.error is None, ticket.error


def checkpoint(bench: Bench) -> BaseException | None:
    told: list[BaseException | None] = []
    bench.shard.checkpoint(told.append)
    bench.shard.pump()
    return told[0]


def outgrown(bench: Bench) -> None:
    """So much was changed that the next checkpoint writes everything anew."""
    put(bench, kept=b"1", gone=b"1")
    while not bench.shard.state.needs_rewrite:
        put(bench, changes=b"x" * 300)
        assert checkpoint(bench) is None


def after_a_power_cut(bench: Bench, mode: str) -> dict[bytes, bytes]:
    assert isinstance(bench.disk, SimulatedDisk)
    found = Bench(ROOT, bench.disk.power_cut(Random(1), mode))
    return dict(found.open().state.items("t"))


def test_a_key_deleted_before_a_rewrite_without_room_stays_deleted(bench: Bench) -> None:
    """By the time there is room the state may have grown, and nothing is written anew: the old file still has it."""
    outgrown(bench)
    put(bench, gone=None)
    bench.simulated.arm(Fault("create", 1, errno.ENOSPC, within="/state/"))
    assert checkpoint(bench) is not None
    bench.simulated.disarm()
    put(bench, more=b"y" * 3000)
    assert not bench.shard.state.needs_rewrite
    assert checkpoint(bench) is None
    assert b"gone" not in after_a_power_cut(bench, "lost")


@pytest.mark.parametrize("mode", ["kept", "lost"])
@pytest.mark.parametrize(
    ("kind", "nth", "error"),
    [
        ("create", 1, errno.EMFILE),
        ("create", 2, errno.EMFILE),
        ("sync_dir", 1, errno.EMFILE),
        ("listdir", 1, errno.EMFILE),
        ("rename", 1, errno.ENOSPC),
        ("rename", 2, errno.ENOSPC),
    ],
)
def test_a_rewrite_interrupted_at_any_call_is_retried_and_loses_nothing(
    bench: Bench, kind: str, nth: int, error: int, mode: str
) -> None:
    """Even if the new files had their names: values appended to the old files afterwards would not be found."""
    outgrown(bench)
    bench.simulated.arm(Fault(kind, nth, error, within="/state"))
    checkpoint(bench)
    bench.simulated.disarm()
    assert bench.shard.failure is None
    put(bench, more=b"y" * 3000)
    for number in range(200):  # the journal's files are used again
        put(bench, last=b"%d" % number + b"z" * 1000)
    assert checkpoint(bench) is None
    put(bench, last=b"end")
    found = after_a_power_cut(bench, mode)
    assert found == dict(bench.shard.state.items("t")) and found[b"last"] == b"end"
