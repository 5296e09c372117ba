"""Spark at a broker with users: `bootstrap` carries who it is, and the rights hold."""

from typing import TYPE_CHECKING

import pytest

from headrace.client.management import Management
from tests.spark.world import RunningBroker, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PASSWORD = "spark's own"


def test_source_and_sink_log_in_with_the_address_and_keep_to_their_rights(
    spark: "SparkSession", broker: RunningBroker
) -> None:
    for topic in ("in", "out", "other"):
        broker.create(topic)
    broker.publish("in", numbered(50))
    with Management(broker.url) as client:
        client.call("PUT", "users", "spark", body={"password": PASSWORD, "tags": ""})
        rights = {"configure": "", "write": "^out$", "read": "^in$"}
        client.call("PUT", "permissions", "/", "spark", body=rights)
        client.call("DELETE", "users", "guest")
    url = broker.url.replace("http://", "http://spark:spark%27s%20own@")
    rows = spark.read.format("headrace").options(bootstrap=url, topic="in").load()
    assert rows.count() == 50
    rows.select("key", "value").write.format("headrace").mode("append").options(bootstrap=url, topic="out").save()
    with pytest.raises(Exception, match="no right to read 'other'") as refused:
        spark.read.format("headrace").options(bootstrap=url, topic="other").load().count()
    assert "spark%27s" not in str(refused.value) and PASSWORD not in str(refused.value)
    assert PASSWORD not in broker.said() and "spark%27s" not in broker.said()
