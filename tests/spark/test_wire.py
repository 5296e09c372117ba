"""Connections that break while a batch is planned or written, without a JVM."""

import pytest
from pyspark.sql.types import StructType

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
