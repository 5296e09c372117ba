"""Spark with a broker that has users: `bootstrap` contains the login, and permissions apply."""

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from headrace.client.management import Management
from headrace.errors import CorruptLog
from headrace.record import codec
from headrace.spark.access import ReadTask
from headrace.spark.broker import BrokerLink
from headrace.spark.broker_access import BrokerAccess
from headrace.spark.offsets import Partition
from headrace.spark.rows import RowDecoder
from tests.spark.world import RunningBroker, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PASSWORD = "spark's own"


def test_source_and_sink_log_in_and_respect_permissions(spark: "SparkSession", broker: RunningBroker) -> None:
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
    with pytest.raises(Exception, match="no read permission for 'other'") as refused:
        spark.read.format("headrace").options(bootstrap=url, topic="other").load().count()
    assert "spark%27s" not in str(refused.value) and PASSWORD not in str(refused.value)
    assert PASSWORD not in broker.said() and "spark%27s" not in broker.said()


def test_the_error_for_a_damaged_batch_does_not_contain_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes into logs and into the pipeline's last_error, which all users can see."""
    damaged = codec.build([(None, b"x", (), 1)])
    damaged[-1] ^= 1
    monkeypatch.setattr(BrokerLink, "batches", lambda *_, **__: (bytes(damaged), 1))
    access = BrokerAccess("http://spark:secret@broker:15672", committed=True, fail_on_data_loss=True)
    rows = RowDecoder(access, ["value"], verify_crc=True, committed=True)
    with pytest.raises(CorruptLog, match=r"spark:\*\*\*@broker") as reported:
        list(rows.read(ReadTask(Partition("orders", 0), 1, 0, 1), pa.schema([("value", pa.binary())])))
    assert "secret" not in str(reported.value)
