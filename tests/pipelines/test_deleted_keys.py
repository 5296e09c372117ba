"""Compaction on Spark must not bring back deleted keys, whichever segments it skips."""

from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import Conflict
from headrace.pipelines.maintenance import TopicMaintenance
from tests.listing import listed
from tests.spark.world import RunningBroker, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def roll(broker: RunningBroker, topic: str) -> None:
    """Publishes more than a segment of other keys, so that earlier records are in sealed segments."""
    for part in range(2):
        broker.publish(topic, numbered(200, first=part * 200, keys=400, size=300))


def described(broker: RunningBroker, topic: str) -> list[Any]:
    """Values of the key, in order."""
    return [m["value"] for m in broker.messages(topic) if m["key"] == "doomed"]


def prepare(broker: RunningBroker, topic: str) -> None:
    broker.create(topic, segment_size="64KB", cleanup_policy="compact", tombstone_retention="0s")
    broker.publish(topic, iter([{"key": "doomed", "value": "once"}]))
    roll(broker, topic)


def delete(broker: RunningBroker, topic: str) -> None:
    broker.publish(topic, iter([{"key": "doomed", "value": None}]))
    roll(broker, topic)


def test_a_tombstone_is_kept_while_its_records_are_archived(
    spark: "SparkSession", shared_broker: RunningBroker
) -> None:
    broker, topic = shared_broker, "doomed-and-archived"
    prepare(broker, topic)
    upkeep = TopicMaintenance(broker.url, on="spark", session=spark)
    assert upkeep.tier(topic).written
    delete(broker, topic)
    upkeep.compact(topic)
    assert described(broker, topic) == ["once", None]
    upkeep.restore(topic)
    upkeep.compact(topic)
    assert described(broker, topic) == [None], "its time begins when that is gone"
    upkeep.compact(topic)
    assert described(broker, topic) == []
    upkeep.link.close()


def test_a_tombstone_is_kept_while_its_records_could_not_be_removed(
    spark: "SparkSession", shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, topic = shared_broker, "doomed-and-left"
    prepare(broker, topic)
    delete(broker, topic)
    upkeep = TopicMaintenance(broker.url, on="spark", session=spark)
    send = upkeep.link.send

    def refuse_the_first(method: str, *path: str, body: Any) -> Any:
        if path[-1] == "0":
            raise Conflict("segment 0 is being rewritten already: try again")
        return send(method, *path, body=body)

    with monkeypatch.context() as patched:
        patched.setattr(upkeep.link, "send", refuse_the_first)
        outcome = upkeep.compact(topic)
    assert len(outcome.left) > 1 and described(broker, topic) == ["once", None]
    assert not listed(broker.data, "staging/*")
    assert not upkeep.compact(topic).left
    assert described(broker, topic) == [None]
    assert not upkeep.compact(topic).left
    assert described(broker, topic) == []
    upkeep.link.close()


def test_a_segment_is_rewritten_once_to_set_its_delete_horizon(
    spark: "SparkSession", shared_broker: RunningBroker
) -> None:
    """The rewrite gains nothing else. Without it tombstones would stay for ever; repeating it would rewrite at every
    run."""
    broker, topic = shared_broker, "doomed-in-a-day"
    broker.create(topic, segment_size="64KB", cleanup_policy="compact", tombstone_retention="1d")
    delete(broker, topic)
    upkeep = TopicMaintenance(broker.url, on="spark", session=spark)
    for _ in range(2):
        upkeep.compact(topic)
        assert [item.generation for item in upkeep.sealed(topic)] == [1, *[0] * (len(upkeep.sealed(topic)) - 1)]
        assert described(broker, topic) == [None]
    upkeep.link.close()
