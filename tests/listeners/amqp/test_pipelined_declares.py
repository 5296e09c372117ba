"""Queue declarations that a client sends without waiting for the answers share their syncs; nothing else changes."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pamqp import commands

from headrace.log.disk.disk import RealDisk
from headrace.wire.amqp.methods import frame
from tests.listeners.amqp.raw import Raw
from tests.listeners.amqp.running import Running

NAMES = [f"q{number}" for number in range(600)]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Running]:
    broker = Running(tmp_path / "data")
    yield broker
    broker.stop()


def declare(name: str, **options: object) -> bytes:
    return frame(1, commands.Queue.Declare, **{"queue": name, "durable": True, **options})


def opened(running: Running) -> Raw:
    return Raw(running.port).open().channel()


def names(running: Running) -> set[str]:
    return set(running.server.broker.vhosts.get("/").queues)


def test_pipelined_declarations_are_answered_in_order_and_survive_a_restart(fresh: Running) -> None:
    with closing(opened(fresh)) as client:
        client.send(b"".join(declare(name, arguments={"x-max-length": 5}) for name in NAMES))
        assert [client.expect(commands.Queue.DeclareOk).queue for _ in NAMES] == NAMES
    fresh.restart()
    assert names(fresh) == set(NAMES)
    with closing(opened(fresh)) as client:  # the same again is no error, and another argument is
        client.send(b"".join(declare(name, arguments={"x-max-length": 5}) for name in NAMES))
        assert [client.expect(commands.Queue.DeclareOk).queue for _ in NAMES] == NAMES
        client.send(declare("q599"))
        assert client.expect(commands.Channel.Close).reply_code == 406


def test_pipelined_declarations_share_their_syncs(fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: Counter[str] = Counter()
    sync_dir = RealDisk.sync_dir

    def counted(disk: RealDisk, path: str, folder: int | None = None) -> None:
        synced[Path(path).name] += 1
        sync_dir(disk, path, folder)

    monkeypatch.setattr(RealDisk, "sync_dir", counted)
    with closing(opened(fresh)) as client:
        client.send(b"".join(map(declare, NAMES)))
        for _ in NAMES:
            client.expect(commands.Queue.DeclareOk)
    assert 0 < synced["queues"] < 100
    assert 0 < synced["streams"] < 100


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (declare("amq.reserved"), 403),
        (declare("bad", arguments={"x-max-length": "many"}), 406),
        (declare("q1", durable=False), 406),
        (declare("gone", passive=True), 404),
    ],
)
def test_no_declaration_behind_a_refused_one_takes_effect(fresh: Running, refused: bytes, code: int) -> None:
    before, after = NAMES[:50], [f"after{number}" for number in range(50)]
    with closing(opened(fresh)) as client:
        client.send(b"".join([*map(declare, before), refused, *map(declare, after)]))
        assert [client.expect(commands.Queue.DeclareOk).queue for _ in before] == before
        assert client.expect(commands.Channel.Close).reply_code == code
    assert names(fresh) == set(before)


def test_methods_between_pipelined_declarations_keep_their_order(fresh: Running) -> None:
    with closing(opened(fresh)) as client:
        delete = frame(1, commands.Queue.Delete, queue="q3")
        temporary = declare("temporary", exclusive=True)
        client.send(b"".join([*map(declare, NAMES[:20]), delete, temporary, *map(declare, NAMES[:20])]))
        for name in NAMES[:20]:
            assert client.expect(commands.Queue.DeclareOk).queue == name
        client.expect(commands.Queue.DeleteOk)
        for name in ["temporary", *NAMES[:20]]:
            assert client.expect(commands.Queue.DeclareOk).queue == name
        assert names(fresh) == {"temporary", *NAMES[:20]}


def test_the_queue_declared_last_is_the_one_without_a_name(fresh: Running) -> None:
    with closing(opened(fresh)) as client:
        quiet = b"".join(declare(name, nowait=True) for name in NAMES[:50])
        client.send(quiet + frame(1, commands.Queue.Declare, queue="", passive=True))
        assert client.expect(commands.Queue.DeclareOk).queue == NAMES[49]


def test_a_frame_that_is_broken_behind_pipelined_declarations_closes_the_connection(fresh: Running) -> None:
    broken = bytearray(declare("broken"))
    broken[-1] = 0
    with closing(opened(fresh)) as client:
        client.send(b"".join([*map(declare, NAMES[:20]), broken]))
        for name in NAMES[:20]:
            assert client.expect(commands.Queue.DeclareOk).queue == name
        assert client.expect(commands.Connection.Close).reply_code == 501
    assert names(fresh) == set(NAMES[:20])
