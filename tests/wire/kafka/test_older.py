"""Versions that kio lacks, byte by byte as the protocol guide defines them."""

from typing import Any

import pytest

from headrace.wire.kafka.apis import VERSIONS, Api
from headrace.wire.kafka.codec import decode, encode_body
from headrace.wire.kafka.older import OLDER
from headrace.wire.kafka.schema import request_struct, response_struct

TIMEOUT = b"\0\0\3\xe8"
ONE = b"\0\0\0\1"
NONE = b"\0\0\0\0"
TOPIC = b"\0\1t"
NEW_TOPIC = TOPIC + b"\0\0\0\2" + b"\0\1" + NONE + NONE  # partitions, replicas, assignments, configs


def test_offset_commit_1_has_a_timestamp_per_partition() -> None:
    partition = b"\0\0\0\5" + b"\0\0\0\0\0\0\0\7" + b"\xff" * 8 + b"\0\4note"
    body = b"\0\1g" + b"\0\0\0\3" + b"\0\1m" + ONE + TOPIC + ONE + partition
    request = decode(request_struct(Api.OFFSET_COMMIT, 1), body)
    assert (request.group_id, request.generation_id_or_member_epoch, request.member_id) == ("g", 3, "m")
    [asked] = request.topics[0].partitions
    assert (asked.partition_index, asked.committed_offset, asked.committed_metadata) == (5, 7, "note")
    assert asked.committed_leader_epoch == -1, "as in later versions"


def test_list_offsets_0_has_max_num_offsets() -> None:
    partition = b"\0\0\0\5" + b"\xff" * 7 + b"\xfe" + ONE
    request = decode(request_struct(Api.LIST_OFFSETS, 0), b"\xff\xff\xff\xff" + ONE + TOPIC + ONE + partition)
    [asked] = request.topics[0].partitions
    assert (request.replica_id, asked.partition_index, asked.timestamp, asked.max_num_offsets) == (-1, 5, -2, 1)
    assert request.isolation_level == 0


@pytest.mark.parametrize(("version", "rest", "only_checked"), [(0, b"", False), (1, b"\1", True)])
def test_requests_that_create_topics(version: int, rest: bytes, only_checked: bool) -> None:
    request = decode(request_struct(Api.CREATE_TOPICS, version), ONE + NEW_TOPIC + TIMEOUT + rest)
    assert (request.topics[0].name, request.topics[0].num_partitions, request.timeout) == ("t", 2, 1000)
    assert request.validate_only is only_checked


CREATED = {"throttle_time": 9, "topics": [{"name": "t", "error_code": 36, "error_message": "no", "num_partitions": 2}]}
OFFSET = {"partition_index": 5, "timestamp": 1, "offset": 7, "old_style_offsets": [7]}
CONFIG = {"name": "c", "value": "v", "read_only": True, "is_default": True, "config_source": 5, "synonyms": []}
DESCRIBED = {"throttle_time": 9, "results": [{"resource_type": 2, "resource_name": "t", "configs": [CONFIG]}]}


@pytest.mark.parametrize(
    ("api", "version", "values", "expected"),
    [
        (
            Api.LIST_OFFSETS,
            0,
            {"throttle_time": 9, "topics": [{"name": "t", "partitions": [OFFSET]}]},
            ONE + TOPIC + ONE + b"\0\0\0\5" + b"\0\0" + ONE + b"\0\0\0\0\0\0\0\7",
        ),
        (Api.CREATE_TOPICS, 0, CREATED, ONE + TOPIC + b"\0\x24"),
        (Api.CREATE_TOPICS, 1, CREATED, ONE + TOPIC + b"\0\x24" + b"\0\2no"),
        (Api.DELETE_TOPICS, 0, {"throttle_time": 9, "responses": [{"name": "t"}]}, ONE + TOPIC + b"\0\0"),
        (
            Api.DESCRIBE_CONFIGS,
            0,
            DESCRIBED,
            b"\0\0\0\x09" + ONE + b"\0\0\xff\xff\2" + TOPIC + ONE + b"\0\1c" + b"\0\1v" + b"\1\1\0",
        ),
    ],
)
def test_responses(api: Api, version: int, values: dict[str, Any], expected: bytes) -> None:
    assert encode_body(response_struct(api, version), values) == expected


def test_all_versions_below_kios_oldest_are_defined_here() -> None:
    for api_key, version in OLDER:
        assert VERSIONS[Api(api_key)].lowest <= version < OLDER[api_key, version].version
