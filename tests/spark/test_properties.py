"""The AMQP columns of the source, without a JVM."""

import pyarrow as pa
import pytest

from headrace.record import codec
from headrace.record.amqp.properties import encode_properties
from headrace.record.layout import AMQP_PROPERTIES_HEADER
from headrace.spark.access import ReadTask
from headrace.spark.broker import BrokerLink
from headrace.spark.broker_access import BrokerAccess
from headrace.spark.offsets import Partition
from headrace.spark.rows import RowDecoder


def test_corrupt_properties_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kafka client may write any bytes under that header, which must not stop a stream."""
    fine = encode_properties({"content_type": "text/plain"})
    brought = [((AMQP_PROPERTIES_HEADER, raw),) for raw in (fine, b"", b"\xff\xff\xff\xff", fine[:-1])]
    data = bytes(codec.build([(None, b"x", headers, 1) for headers in (*brought, ())]))
    monkeypatch.setattr(BrokerLink, "batches", lambda *_, **__: (data, 5))
    access = BrokerAccess("http://broker:15672", committed=True, fail_on_data_loss=True)
    rows = RowDecoder(access, ["properties"], verify_crc=True, committed=True)
    schema = pa.schema([("properties", pa.map_(pa.string(), pa.string()))])
    [found] = rows.read(ReadTask(Partition("orders", 0), 1, 0, 5), schema)
    assert found.column(0).to_pylist() == [[("content_type", "text/plain")], None, None, None, None]
