"""Maintenance jobs on a running broker, locally and on Spark: fewer bytes, the same records."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import HeadraceError, InvalidInput, NotFound
from headrace.log.recovery.inspect import Inspector
from headrace.pipelines.maintenance import Engine, TopicMaintenance, reindex, verify
from headrace.spark.broker import BrokerLink
from headrace.spark.rows import RowDecoder
from tests.listing import listed
from tests.spark.test_listeners import transactional
from tests.spark.world import RunningBroker, numbered, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def records(broker: RunningBroker, topic: str) -> list[tuple[Any, ...]]:
    return [
        (p, m["offset"], m["timestamp"], m["key"], m["value"], json.dumps(m["headers"]))
        for p in broker.ends(topic)
        for m in broker.messages(topic, p)
    ]


def size(broker: RunningBroker, topic: str) -> int:
    return int(sum(log["size_bytes"] for log in broker.ok("GET", f"/topics/{topic}")["logs"]))


@pytest.mark.parametrize("on", ["local", "spark"])
def test_recompressing_changes_no_record_and_no_offset(
    spark: "SparkSession", shared_broker: RunningBroker, on: Engine
) -> None:
    broker, topic = shared_broker, f"recompress-{on}"
    broker.create(topic, 2, segment_size="64KB")
    for part in range(8):
        broker.publish(topic, numbered(200, first=part * 200, size=300))
    before, bytes_before = records(broker, topic), size(broker, topic)
    upkeep = TopicMaintenance(broker.url, on=on, session=spark)
    gained = upkeep.recompress(topic, "zstd")
    assert len(gained.written) >= 4 and all(g.bytes_after < g.bytes_before / 2 for g in gained.written)
    assert records(broker, topic) == before and size(broker, topic) < bytes_before
    frame = spark.read.format("headrace").options(path=broker.path, topic=topic).load()
    assert frame.count() == 1600
    again = upkeep.recompress(topic, "zstd")
    assert again.written == [type(g)(g.bytes_after, g.bytes_after, g.records) for g in gained.written]
    assert not gained.left and not again.left
    with pytest.raises(InvalidInput, match="the codec must be one of"):
        upkeep.recompress(topic, "rar")
    upkeep.link.close()
    assert not listed(broker.data, "staging/*")


def test_rewritten_segments_survive_a_kill_and_a_bad_file_is_refused(tmp_path: Path) -> None:
    broker = RunningBroker(tmp_path).start()
    try:
        broker.create("t", segment_size="64KB")
        for part in range(6):
            broker.publish("t", numbered(200, first=part * 200, size=300))
        before = records(broker, "t")
        upkeep = TopicMaintenance(broker.url, on="local")
        items = upkeep.sealed("t")
        # A file with the batches of another segment, and a truncated one.
        for data in (Path(items[1].segment.path()).read_bytes(), Path(items[0].segment.path()).read_bytes()[:-5]):
            name = "0123456789abcdef" * 2
            (broker.data / "staging").mkdir(exist_ok=True)
            (broker.data / "staging" / f"{name}.staged").write_bytes(data)
            path = ("topics", "t", "partitions", "0", "segments", str(items[0].base))
            with pytest.raises(HeadraceError):
                upkeep.link.send("POST", *path, body={"generation": 0, "staged": name})
        assert records(broker, "t") == before
        upkeep.link.discard(name)
        upkeep.recompress("t", "lz4")
        upkeep.link.close()
        broker.kill()
        broker.start()
        assert records(broker, "t") == before
        broker.publish("t", numbered(10))
        assert broker.count("t") == 1210
    finally:
        broker.close()


@pytest.mark.parametrize("on", ["local", "spark"])
def test_compacting_keeps_the_latest_of_each_key(
    spark: "SparkSession", shared_broker: RunningBroker, on: Engine
) -> None:
    broker, topic = shared_broker, f"compact-{on}"
    broker.create(topic, segment_size="64KB", cleanup_policy="compact")
    for part in range(8):
        broker.publish(topic, numbered(200, first=part * 200, keys=50, size=300))
    latest = {m["key"]: m["value"] for m in broker.messages(topic)}
    upkeep = TopicMaintenance(broker.url, on=on, session=spark)
    sealed_end = max(item.next_offset for item in upkeep.sealed(topic))
    upkeep.compact(topic)
    upkeep.link.close()
    left = broker.messages(topic)
    assert {m["key"]: m["value"] for m in left} == latest
    assert len([m for m in left if m["offset"] < sealed_end]) == 50
    offsets = [m["offset"] for m in left]
    assert offsets == sorted(set(offsets)), "offsets are kept, gaps are allowed"
    frame = spark.read.format("headrace").options(path=broker.path, topic=topic).load()
    assert [r.offset for r in frame.select("offset").orderBy("offset").collect()] == offsets


@pytest.mark.parametrize("when", ["before the work", "during the work", "before the swap"])
def test_a_segment_compacted_by_the_broker_meanwhile_is_skipped(
    spark: "SparkSession", shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The broker merges several segments: survivors found for the old ones must not be applied to the merged one."""
    broker, topic = shared_broker, f"meanwhile-{when.replace(' ', '-')}"
    broker.create(topic, segment_size="64KB", cleanup_policy="compact")
    for part in range(8):  # the last records of the keys are in several sealed segments
        messages = numbered(200, first=part * 200, keys=50, size=300)
        broker.publish(topic, [m | {"key": f"{m['key']}-{part // 2}"} for m in messages])
    broker.ok("POST", f"/topics/{topic}/compact", {})  # they are small now, and will be merged the next time
    for _ in range(2):
        broker.publish(topic, [m | {"key": f"{m['key']}-0"} for m in numbered(200, keys=50, size=300)])
    latest = {m["key"]: m["value"] for m in broker.messages(topic)}
    upkeep = TopicMaintenance(broker.url, on="spark", session=spark)
    sealed = upkeep.sealed(topic)

    def compact_at_the_broker() -> None:
        broker.ok("POST", f"/topics/{topic}/compact", {})
        left = {item.segment.path() for item in upkeep.sealed(topic)}
        assert len(left) < len(sealed)
        old = [path for item in sealed if (path := item.segment.path()) not in left]
        wait_until(lambda: not any(Path(path).exists() for path in old), "files without a lease are not deleted")

    name = {"before the work": "_survivors", "during the work": "_worked", "before the swap": "_path"}[when]
    inner = getattr(upkeep, name)
    done: list[bool] = []

    def once(*given: Any) -> Any:
        if name == "_survivors":
            found = inner(*given)
            compact_at_the_broker()
            return found
        if not done:
            compact_at_the_broker()
            done.append(True)
        return inner(*given)

    monkeypatch.setattr(upkeep, name, once)
    outcome = upkeep.compact(topic)
    upkeep.link.close()
    assert {m["key"]: m["value"] for m in broker.messages(topic)} == latest
    assert outcome.left and all(w.bytes_after == w.bytes_before for w in outcome.written)
    assert len(outcome.left) + len(outcome.written) == len(sealed)
    reasons = ("gone", "has no segment", "one before it was changed")
    assert all(any(reason in said for reason in reasons) for said in outcome.left)
    assert not listed(broker.data, "staging/*")


def test_compacting_on_spark_and_locally_keep_the_same_records(spark: "SparkSession", tmp_path: Path) -> None:
    """Expired tombstones are removed; records of open transactions and pinned records are kept."""
    broker = RunningBroker(tmp_path, "--retention-interval", "1h", listeners=("http", "kafka")).start()
    try:
        left = {}
        for on in ("local", "spark"):
            for topic in ("open", "pinned"):
                broker.create(name := f"{topic}-{on}", segment_size="64KB", tombstone_retention="0s")
                broker.publish(
                    name, [{"key": "gone", "value": "x"}, {"key": "gone", "value": None}, {"value": "keyless"}]
                )
                # Only now, because a compacted topic refuses records without a key; earlier ones stay.
                broker.ok("PATCH", f"/topics/{name}", {"config": {"cleanup_policy": "compact"}})
                for part in range(3):
                    broker.publish(name, numbered(200, first=part * 200, keys=50, size=300))
            pin = {"topic": f"pinned-{on}", "partitions": [{"partition": 0, "offset": 300}], "pin": True}
            broker.ok("PUT", f"/cursors/job-{on}", pin | {"max_age_ms": 3_600_000})
            producer = transactional(broker, on)
            producer.begin_transaction()
            producer.produce(f"open-{on}", "x", key="k1")
            producer.flush(60)
            for topic in ("open", "pinned"):
                for part in range(3, 6):
                    broker.publish(f"{topic}-{on}", numbered(200, first=part * 200, keys=50, size=300))
            upkeep = TopicMaintenance(broker.url, on=on, session=spark)
            for topic in ("open", "pinned"):
                upkeep.compact(f"{topic}-{on}")
            upkeep.link.close()
            producer.commit_transaction(60)
            left[on] = [[m["offset"] for m in broker.messages(f"{topic}-{on}")] for topic in ("open", "pinned")]
        for topic, here, there in zip(("open", "pinned"), left["local"], left["spark"], strict=True):
            assert here == there, topic
            assert here[:2] == [1, 2] and 400 < len(here) < 1200, "the tombstone, the keyless record and the end stay"
            for on in left:
                broker.ok("POST", f"/topics/{topic}-{on}/compact", {})
                assert broker.messages(f"{topic}-{on}")[0]["offset"] == 2, "the time of the tombstone is over"
    finally:
        broker.close()


@pytest.mark.parametrize("on", ["local", "spark"])
def test_indexes_are_rebuilt_here_and_on_spark(spark: "SparkSession", tmp_path: Path, on: Engine) -> None:
    broker = RunningBroker(tmp_path).start()
    try:
        broker.create("t", segment_size="64KB")
        for part in range(4):
            broker.publish("t", numbered(200, first=part * 200, size=300))
        with pytest.raises(HeadraceError):
            reindex(broker.path, None, on=on, session=spark)  # a broker is running on the folder
        broker.stop()
        sealed = [p.with_suffix(".index") for p in sorted(listed(broker.data, "logs/*-t/*.seal"))]
        right = [p.read_bytes() for p in sealed]
        assert len(sealed) >= 3
        for path in sealed:
            path.write_bytes(b"\x07" * 64)
        assert reindex(broker.path, None, on=on, session=spark) == len(sealed)
        assert [p.read_bytes() for p in sealed] == right
    finally:
        broker.close()


def test_verifying_on_spark_and_locally_find_the_same_problems(spark: "SparkSession", tmp_path: Path) -> None:
    broker = RunningBroker(tmp_path).start()
    try:
        broker.create("sound", 3, segment_size="64KB")
        broker.create("hurt", segment_size="64KB")
        for part in range(4):
            broker.publish("sound", numbered(300, first=part * 300, size=300))
            broker.publish("hurt", numbered(200, first=part * 200, size=300))
    finally:
        broker.stop()
    damaged = min(listed(broker.data, "logs/*-hurt/*.log"))
    raw = bytearray(damaged.read_bytes())
    raw[5000] ^= 1
    damaged.write_bytes(raw)
    ids = [int(p.name.partition("-")[0]) for p in listed(broker.data, "logs/*")]
    spark.sparkContext.setJobGroup("verifying", "")
    here, there = verify(broker.path, ids, on="local"), verify(broker.path, ids, on="spark", session=spark)
    jobs = spark.sparkContext.statusTracker()

    def stages() -> list[Any]:
        """Spark's listeners are notified some time after a job has ended."""
        found = [jobs.getJobInfo(job) for job in jobs.getJobIdsForGroup("verifying")]
        return [jobs.getStageInfo(stage) for job in found if job is not None for stage in job.stageIds]

    wait_until(lambda: stages() and None not in stages(), "nothing is known of the job")
    [stage] = stages()
    assert stage.numTasks == there.segments > len(ids)
    assert here == there and here.logs == 4 and not here.is_sound
    assert all(str(damaged) in problem for problem in there.problems)
    # Delete a segment: its neighbours are not adjacent, which neither shows by itself.
    gone = sorted(listed(broker.data, "logs/*-hurt/*.log"))[2]
    for file in listed(gone.parent, f"{gone.stem}.*"):
        file.unlink()
    parted = verify(broker.path, ids, on="spark", session=spark)
    assert len(parted.problems) == 2 and "was expected" in parted.problems[1]
    inspector = Inspector(broker.path)
    assert parted == inspector.verify(set(ids)) and parted.segments > len(ids)
    inspector.close()


@pytest.mark.parametrize("on", ["local", "spark"])
def test_a_replay_copies_records_with_all_fields_once(
    spark: "SparkSession", shared_broker: RunningBroker, on: Engine
) -> None:
    broker, past, again = shared_broker, f"past-{on}", f"again-{on}"
    broker.create(past, 2)
    broker.publish(past, ({"key": f"k{n}", "value": str(n), "headers": {"n": str(n)}} for n in range(300)))
    upkeep = TopicMaintenance(broker.url, on=on, session=spark)
    assert upkeep.replay(past, again, write_id=f"once-{on}") == 300
    upkeep.replay(past, again, write_id=f"once-{on}")
    assert upkeep.replay(past, f"tail-{on}", start=f'{{"{past}": {{"0": -1}}}}') == broker.ends(past)[1][1]
    upkeep.link.close()
    strip = [(m[3:], m[2]) for m in records(broker, past)]
    assert sorted((m[3:], m[2]) for m in records(broker, again)) == sorted(strip)
    with pytest.raises(InvalidInput, match="itself"):
        upkeep.replay(past, past)


def test_an_invalid_start_of_a_replay_is_reported_as_start(shared_broker: RunningBroker) -> None:
    shared_broker.create("begun")
    upkeep = TopicMaintenance(shared_broker.url, on="local")
    with pytest.raises(InvalidInput, match=r"^start: must be earliest, latest or JSON"):
        upkeep.replay("begun", "again", start="5")
    with pytest.raises(InvalidInput, match=r"^start: topic .* has no partition 7"):
        upkeep.replay("begun", "again", start='{"begun": {"7": 1}}')
    with pytest.raises(NotFound, match="topic 'nowhere' does not exist"):
        upkeep.replay("nowhere", "again")
    upkeep.link.close()


def test_a_replay_copies_the_records_at_its_start_despite_compaction(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the replay, compaction removes a key's old record, and its new one is after the planned end: without
    links to the files, the copy had neither."""
    broker = shared_broker
    broker.create("moving", segment_size="64KB", cleanup_policy="compact")
    for part in range(8):
        broker.publish("moving", numbered(200, first=part * 200, keys=1600, size=300))
    inner, held = RowDecoder.read, _held(broker)
    done: list[object] = []

    def read(rows: RowDecoder, *given: Any) -> Any:
        if not done:
            for part in range(8):
                broker.publish("moving", numbered(200, first=part * 200, keys=1600, size=300))
            done.append(broker.ok("POST", "/topics/moving/compact", {}))
        return inner(rows, *given)

    monkeypatch.setattr(RowDecoder, "read", read)
    upkeep = TopicMaintenance(broker.url, on="local")
    assert upkeep.replay("moving", "moved") == 1600
    upkeep.link.close()
    assert {m["key"] for m in broker.messages("moved")} == {f"k{n}" for n in range(1600)}
    assert not _held(broker) - held


def _held(broker: RunningBroker) -> set[Path]:
    return set(listed(broker.data, "held/*"))


def test_a_replay_that_fails_leaves_no_uploads(shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = shared_broker
    broker.create("unlucky")
    broker.publish("unlucky", numbered(200))
    held = _held(broker)

    def refuse(link: BrokerLink, *given: Any) -> Any:
        assert listed(broker.data, "staging/*.staged")
        raise HeadraceError("no such luck")

    monkeypatch.setattr(BrokerLink, "commit", refuse)
    upkeep = TopicMaintenance(broker.url, on="local")
    with pytest.raises(HeadraceError, match="no such luck"):
        upkeep.replay("unlucky", "lucky")
    upkeep.link.close()
    assert not listed(broker.data, "staging/*.staged") and not _held(broker) - held


def test_a_replay_with_a_used_id_reports_what_was_stored(shared_broker: RunningBroker) -> None:
    """Regression: a replay of another topic under a used id copied nothing but reported 200 records."""
    broker = shared_broker
    for topic, count in (("named.a", 3), ("named.b", 200)):
        broker.create(topic)
        broker.publish(topic, numbered(count))
    upkeep = TopicMaintenance(broker.url, on="local")
    assert upkeep.replay("named.a", "named.out", write_id="taken") == 3
    assert upkeep.replay("named.b", "named.out", write_id="taken") == 3
    upkeep.link.close()
    assert broker.count("named.out") == 3


def test_verifying_during_a_compaction_finds_no_damage(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments rewritten or deleted since the listing are not reported as damaged."""
    broker, listed = shared_broker, Inspector.logs
    broker.create("restless", segment_size="64KB", cleanup_policy="compact")
    for part in range(8):
        broker.publish("restless", numbered(200, first=part * 200, keys=50, size=300))
    [log] = broker.ok("GET", "/topics/restless/log")["partitions"]

    def compact_behind(inspector: Inspector) -> Any:
        found = listed(inspector)
        broker.ok("POST", "/topics/restless/compact", {})
        [facts] = [facts for facts in found if facts.id == log["log"]]
        wait_until(lambda: not Path(facts.segments[0].path()).exists(), "the old segments stay")
        return found

    monkeypatch.setattr(Inspector, "logs", compact_behind)
    report = verify(broker.path, [log["log"]], on="local")
    assert report.is_sound, report.problems
    assert report.records > 0
