"""Request versions that Kafka 4 dropped and clients of 2021 still use.

librdkafka up to 1.7 finds the start and end of a log with ListOffsets 0, and reads nothing without it. Sarama commits
offsets with OffsetCommit 1 and by default describes configs with version 0. kafka-go creates and deletes topics with
version 0.

kio lacks these versions, so each is described by its difference from the oldest version that kio has.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.wire.kafka.apis import Api


class Difference(NamedTuple):
    version: int  # the version that it is compared to
    without: tuple[str, ...]  # struct.field
    after: Mapping[str, tuple[str, str, Any]] = MappingProxyType({})  # struct.field -> next field: name, kind, type


OLDER: dict[tuple[int, int], Difference] = {
    (Api.LIST_OFFSETS, 0): Difference(
        1,
        without=("ListOffsetsPartitionResponse.timestamp", "ListOffsetsPartitionResponse.offset"),
        after={
            "ListOffsetsPartition.timestamp": ("max_num_offsets", "int32", int),
            "ListOffsetsPartitionResponse.error_code": ("old_style_offsets", "int64", tuple[int, ...]),
        },
    ),
    (Api.OFFSET_COMMIT, 1): Difference(
        2,
        without=("OffsetCommitRequest.retention_time",),
        after={"OffsetCommitRequestPartition.committed_offset": ("commit_timestamp", "int64", int)},
    ),
    (Api.CREATE_TOPICS, 1): Difference(2, without=("CreateTopicsResponse.throttle_time",)),
    (Api.CREATE_TOPICS, 0): Difference(
        2,
        without=(
            "CreateTopicsRequest.validate_only",
            "CreateTopicsResponse.throttle_time",
            "CreatableTopicResult.error_message",
        ),
    ),
    (Api.DELETE_TOPICS, 0): Difference(1, without=("DeleteTopicsResponse.throttle_time",)),
    (Api.DESCRIBE_CONFIGS, 0): Difference(
        1,
        without=(
            "DescribeConfigsRequest.include_synonyms",
            "DescribeConfigsResourceResult.config_source",
            "DescribeConfigsResourceResult.synonyms",
        ),
        after={"DescribeConfigsResourceResult.read_only": ("is_default", "bool", bool)},
    ),
}
