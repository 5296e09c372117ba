"""Uploads of a task, without Spark: Arrow batches in, parts for a commit out."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from headrace.errors import BatchTooLarge, BrokerUnreachable, HeadraceError, InvalidInput
from headrace.spark import writer as writing
from headrace.spark.broker import BrokerLink
from headrace.spark.options import write_options
from headrace.spark.writer import StreamWriter, TaskUploads, WriteTask
from tests.spark.world import RunningBroker

if TYPE_CHECKING:
    import pyarrow as pa


@contextmanager
def task(broker: RunningBroker, **options: str) -> Iterator[tuple[WriteTask, TaskUploads, BrokerLink]]:
    link, staged = BrokerLink(broker.url), TaskUploads()
    try:
        yield WriteTask(link, write_options({"bootstrap": broker.url, **options}), staged, 0), staged, link
    finally:
        link.close()


def rows(*columns: tuple[str, "pa.Array"]) -> "pa.RecordBatch":
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([values for _, values in columns], names=[name for name, _ in columns])


def test_rows_that_exceed_one_request_are_stored(shared_broker: RunningBroker) -> None:
    """10,000 rows of 10 KB in one Arrow batch: the broker accepts 64 MB per request."""
    import pyarrow as pa

    broker = shared_broker
    broker.create("large-rows")
    with task(broker, topic="large-rows") as (writer, staged, link):
        writer.add(rows(("value", pa.array([b"x" * 10_000] * 10_000, pa.binary()))))
        writer.upload(everything=True)
        assert {part["staged"] for part in staged.parts} == set(staged.names)
        assert link.commit("large-rows", 0, staged.parts)["records"] == 10_000
        assert link.commit("large-rows", 0, staged.parts)["duplicate"]
    assert broker.ends("large-rows") == {0: (0, 10_000)}


def test_uploads_are_split_between_batches_and_keep_the_order(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa

    monkeypatch.setattr(writing, "STAGE_BYTES", 10_000)
    bodies: list[int] = []
    stage = BrokerLink.stage

    def counted(link: BrokerLink, name: str, batches: bytes | bytearray) -> None:
        bodies.append(len(batches))
        stage(link, name, batches)

    monkeypatch.setattr(BrokerLink, "stage", counted)
    broker = shared_broker
    for topic in ("cut-one", "cut-two"):
        broker.create(topic, 2)
    numbers = range(1_000)
    mixed = rows(
        ("topic", pa.array([f"cut-{'one' if n % 3 else 'two'}" for n in numbers])),
        ("partition", pa.array([n % 2 for n in numbers], pa.int32())),
        ("value", pa.array([f"{n:0100d}" for n in numbers])),
    )
    with task(broker, batchBytes="1KB") as (writer, staged, link):
        writer.add(mixed)
        writer.upload(everything=True)
        link.commit("cut", 0, staged.parts)
    assert len(bodies) == len(staged.names) > 10 and max(bodies) <= 10_000
    places = [(part["staged"], part["topic"], part["partition"]) for part in staged.parts]
    assert max(Counter(places).values()) == 1, "neighbours are one part"
    for topic in ("cut-one", "cut-two"):
        for partition in (0, 1):
            found = [int(message["value"]) for message in broker.messages(topic, partition)]
            assert found == [n for n in numbers if n % 2 == partition and bool(n % 3) == (topic == "cut-one")]


def test_a_row_too_large_for_a_batch_or_journal_entry_is_refused(
    shared_broker: RunningBroker,
) -> None:
    import pyarrow as pa

    broker = shared_broker
    broker.create("huge-row")
    with task(broker, topic="huge-row") as (writer, staged, _):
        with pytest.raises(BatchTooLarge, match=r"17,000,000 bytes is over the limit of 16,777,216"):
            writer.add(rows(("value", pa.array([b"x" * 17_000_000], pa.binary()))))
        assert not staged.names
    with task(broker, topic="huge-row") as (writer, staged, link):
        writer.add(rows(("value", pa.array([b"x" * 9_000_000], pa.binary()))))
        writer.upload(everything=True)
        with pytest.raises(HeadraceError, match=r"a batch of 9,000,\d+ bytes is over the limit of 8,388,608"):
            link.commit("huge-row", 0, staged.parts)
        link.discard(*staged.names)
    assert broker.count("huge-row") == 0
    assert broker.call("GET", "/sinks/huge-row")[0] == 404


def test_discarding_uploads_gives_up_at_the_first_connection_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark aborts a batch whose commit failed because the broker is gone: waiting a minute per upload would take
    hours."""
    asked: list[str] = []

    def discard(_: BrokerLink, name: str) -> None:
        asked.append(name)
        raise BrokerUnreachable("no broker answers")

    monkeypatch.setattr(BrokerLink, "discard", discard)
    writer = StreamWriter(write_options({"bootstrap": "127.0.0.1:1", "topic": "t"}), ["value"])
    writer.abort([TaskUploads(query="q", names=["a", "b"]), TaskUploads(query="q", names=["c"])], 0)
    assert asked == ["a"]


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"x"}])
def test_a_header_without_a_name_is_refused(shared_broker: RunningBroker, header: dict[str, object] | None) -> None:
    import pyarrow as pa

    pair = pa.struct([("key", pa.string()), ("value", pa.binary())])
    named = {"key": "a", "value": None}
    headers = pa.array([[named], None, [named, header]], pa.list_(pair))
    table = rows(("value", pa.array([b"1", b"2", b"3"], pa.binary())), ("headers", headers))
    nameless = pytest.raises(InvalidInput, match="a header that is null")
    with task(shared_broker, topic="nameless-headers") as (one, _, _), nameless:
        one.add(table)
