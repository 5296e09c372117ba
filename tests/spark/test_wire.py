"""Connections that break while a batch is planned or written, without a JVM."""

import pytest
from pyspark.sql.types import StructType

from headrace.client.connection import Connection
from headrace.client.exchange import Response
from headrace.errors import BrokerUnreachable
from headrace.spark.broker import BrokerLink
from headrace.spark.source import HeadraceSource
from tests.spark.proxy import Proxy
from tests.spark.test_size import rows
from tests.spark.world import RunningBroker, numbered


@pytest.mark.parametrize("fault", ["lease:before", "lease:after"])
def test_a_plan_outlives_a_broker_that_goes_before_it_answers(shared_broker: RunningBroker, fault: str) -> None:
    """It is restarted, say. What was leased may be leased again: the one lease takes the place of the other."""
    broker, topic = shared_broker, fault.replace(":", "-")
    broker.create(topic)
    broker.publish(topic, numbered(3))
    with Proxy(broker.port) as proxy:
        proxy.break_next(fault)
        source = HeadraceSource({"bootstrap": proxy.url, "topic": topic})
        reader = source.reader(StructType().add("offset", "long").add("value", "binary"))
        assert rows(reader, list(reader.partitions())) == [(0, "0"), (1, "1"), (2, "2")]
        assert proxy.broken == [fault]


@pytest.mark.parametrize("fault", ["create:before", "create:after"])
def test_a_sink_makes_its_topic_though_nobody_hears_the_answer(shared_broker: RunningBroker, fault: str) -> None:
    topic = fault.replace(":", "-")
    with Proxy(shared_broker.port) as proxy:
        proxy.break_next(fault)
        link = BrokerLink(proxy.url)
        assert link.partitions(topic, create=True) == len(shared_broker.ends(topic))
        link.close()
        assert proxy.broken == [fault]


def test_a_commit_is_waited_for_as_long_as_its_bytes_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker stores a batch of 100 GB for many minutes, and to give up on it makes Spark do all of it again."""
    waited: list[float] = []

    def request(*_: object, wait_s: float = 0.0, **__: object) -> Response:
        waited.append(wait_s)
        return Response(200, {"content-type": "application/json"}, b"{}")

    monkeypatch.setattr(Connection, "request", request)
    part = {"staged": "0" * 32, "topic": "t", "partition": 0, "position": 0}
    link = BrokerLink("http://127.0.0.1:1")
    link.commit("w", 0, [part | {"length": 16 << 20}] * 6400)
    link.commit("w", 1, [])
    assert waited[0] > 3600 and waited[1] == 0


def test_a_large_commit_is_asked_for_again_when_the_broker_went_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the time is over in which a request is repeated by itself."""
    asked: list[int] = []

    def request(*_: object, **__: object) -> Response:
        asked.append(1)
        if len(asked) == 1:
            raise BrokerUnreachable("no broker answers")
        return Response(200, {"content-type": "application/json"}, b'{"records": 7}')

    monkeypatch.setattr(Connection, "request", request)
    part = {"staged": "0" * 32, "topic": "t", "partition": 0, "position": 0, "length": 16 << 20}
    link = BrokerLink("http://127.0.0.1:1")
    assert link.commit("w", 0, [part] * 6400)["records"] == 7
    asked.clear()
    with pytest.raises(BrokerUnreachable):
        link.commit("w", 0, [part])
