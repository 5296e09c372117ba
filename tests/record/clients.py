"""The record layers of kafka-python and aiokafka, imported so that their own warnings do not fail the tests."""

import warnings

with warnings.catch_warnings():
    # kafka-python loads its schemas with a call that is deprecated since Python 3.11.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import codec as kafka_codec
    from kafka.partitioner.default import murmur2 as kafka_murmur2
    from kafka.record.default_records import DefaultRecordBatch as KafkaBatch
    from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

from aiokafka.record._crecords.default_records import DefaultRecordBatch as AioCBatch
from aiokafka.record._crecords.default_records import DefaultRecordBatchBuilder as AioCBuilder
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy as AioBuilder
from aiokafka.record.default_records import _DefaultRecordBatchPy as AioBatch

BUILDERS = {"kafka-python": KafkaBuilder, "aiokafka": AioBuilder, "aiokafka in C": AioCBuilder}
PARSERS = {"kafka-python": KafkaBatch, "aiokafka": AioBatch, "aiokafka in C": AioCBatch}

__all__ = ["BUILDERS", "PARSERS", "kafka_codec", "kafka_murmur2"]
