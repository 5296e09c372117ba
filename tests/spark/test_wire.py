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
def test_planning_survives_a_restart_of_the_broker(shared_broker: RunningBroker, fault: str) -> None:
    """The broker restarts before it responds. Repeating the lease request is safe: the lease replaces itself."""
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
def test_a_sink_creates_its_topic_even_if_the_response_is_lost(shared_broker: RunningBroker, fault: str) -> None:
    topic = fault.replace(":", "-")
    with Proxy(shared_broker.port) as proxy:
        proxy.break_next(fault)
        link = BrokerLink(proxy.url)
        assert link.partitions(topic, create=True) == len(shared_broker.ends(topic))
        link.close()
        assert proxy.broken == [fault]


def test_the_timeout_of_a_commit_grows_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing a batch of 100 GB takes many minutes, and giving up makes Spark repeat all of it."""
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


def test_a_large_commit_is_repeated_after_the_broker_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the connection's own retries are used up."""
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
