"""Request and response bodies of the native HTTP API, as types.

Handlers decode requests into the Structs and return the TypedDicts; /openapi.json generates its component schemas from
both, so docstrings and `Meta` descriptions here are read by API users. Messages are in `headrace.wire.http.messages`.
"""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from headrace.broker.sinks.read_leases import SEGMENTS_MAX
from headrace.broker.streams.cursors import FOREVER
from headrace.broker.streams.streams import TOPIC_NAME
from headrace.listeners.http.server.requests import RequestBody
from headrace.wire.http.messages import OFFSET_MAX, PARTITION_MAX, Offset, PartitionNumber, ReadMessage, TimestampMs

RECEIVE_MAX = 1_000
VISIBILITY_MS_MAX = 12 * 3600 * 1000
CURSOR_AGE_MS_MAX = 100 * 366 * 24 * 3600 * 1000
LEASE_MS_MAX = 24 * 3600 * 1000
LEASE_SEGMENTS_MAX = SEGMENTS_MAX
HOLDER_CHARS_MAX = 100
STANDBY_NAME_CHARS_MAX = 100

# Bounds in extra_json_schema are only documented here: the handlers check them and report them with their own code.
Count = Annotated[int, Meta(ge=0, le=OFFSET_MAX, extra_json_schema={"format": "int64"})]
PartitionCount = Annotated[int, Meta(ge=1)]
NewPartitionCount = Annotated[int, Meta(ge=1, le=PARTITION_MAX)]
StreamKind = Literal["topic", "queue"]
StandbyName = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": STANDBY_NAME_CHARS_MAX})]
StreamConfig = Annotated[dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/Config"})]


# Topics


class PublishedMessage(TypedDict):
    """Where a published message was stored."""

    partition: PartitionNumber
    offset: Offset


class Published(TypedDict):
    """Partition and offset of every published message, in the order of the request."""

    messages: list[PublishedMessage]


class Page(TypedDict):
    """Messages of one partition, and the offset to read next."""

    messages: list[ReadMessage]
    next_offset: Offset


class KeyPage(TypedDict):
    """Last messages of a range of keys, and the percent-encoded key to continue from; null after the last page."""

    messages: list[ReadMessage]
    next: str | None


# Queues


VisibilityMs = Annotated[
    int,
    Meta(
        ge=0,
        le=VISIBILITY_MS_MAX,
        description="Milliseconds until a message without an ack returns to the queue, from now on.",
    ),
]


class ReceiveRequest(RequestBody):
    """How many messages to take from a queue, and for how long."""

    EXAMPLE = '{"count": 10, "wait_ms": 5000, "visibility_timeout_ms": 30000}'

    count: Annotated[int, Meta(ge=1, le=RECEIVE_MAX, description="At most this many messages.")] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=VISIBILITY_MS_MAX, description="How long to wait for the first message.")] = 0
    visibility_timeout_ms: VisibilityMs = 30_000


ReceiptNames = Annotated[list[str], Meta(min_length=1, max_length=RECEIVE_MAX)]


class Receipt(RequestBody):
    """Receipts of messages to remove from the queue."""

    EXAMPLE = '{"receipts": ["mFAV9Jj9ZqKdS8Y3iXQb8A"]}'

    receipts: ReceiptNames


class Settlement(RequestBody):
    """Receipts of messages that were not processed."""

    EXAMPLE = '{"receipts": ["mFAV9Jj9ZqKdS8Y3iXQb8A"], "requeue": false}'

    receipts: ReceiptNames
    requeue: Annotated[bool, Meta(description="Return the messages to the queue; false dead-letters them.")] = True


class Extension(RequestBody):
    """Receipts of messages that need more time."""

    EXAMPLE = '{"receipts": ["mFAV9Jj9ZqKdS8Y3iXQb8A"], "visibility_timeout_ms": 60000}'

    receipts: ReceiptNames
    visibility_timeout_ms: VisibilityMs


class ReceivedMessage(TypedDict):
    """A message of a queue. It is in flight until its receipt is settled or its visibility timeout has passed."""

    receipt: str
    redelivered: bool
    exchange: str
    routing_key: str
    timestamp: TimestampMs
    properties: dict[str, Any]
    value: str
    encoding: NotRequired[dict[Literal["value"], Literal["base64"]]]


class ReceivedMessages(TypedDict):
    """Messages of a queue; none if there were none in time."""

    messages: list[ReceivedMessage]


class Settled(TypedDict):
    """How many receipts were settled, and which were not: expired, settled before, or of another queue."""

    done: Count
    unknown: list[str]


class PartitionOffsets(TypedDict):
    """Start and end offset of a partition."""

    partition: PartitionNumber
    start: Offset
    end: Offset


class Offsets(TypedDict):
    """Start and end offset of every partition of a topic."""

    topic: str
    partitions: list[PartitionOffsets]


class Summary(TypedDict):
    """A topic or queue in a list."""

    name: str
    kind: StreamKind
    partitions: PartitionCount


class Topics(TypedDict):
    """All topics and queues, by name."""

    topics: list[Summary]


class PartitionSize(TypedDict):
    """Offsets and size of a partition."""

    partition: PartitionNumber
    start: Offset
    end: Offset
    size_bytes: Count
    segments: Count


class Topic(TypedDict):
    """A topic with its effective settings, its own settings and the size of its partitions."""

    name: str
    kind: StreamKind
    partitions: PartitionCount
    created: TimestampMs
    config: Annotated[dict[str, str], Meta(description="Effective settings.")]
    overrides: Annotated[dict[str, str], Meta(description="Settings that differ from the broker's defaults.")]
    logs: list[PartitionSize]


class NewTopic(RequestBody):
    """A topic to create. The broker's defaults apply to everything but the name."""

    EXAMPLE = '{"name": "orders", "partitions": 3, "config": {"retention_time": "7d"}}'

    name: Annotated[str, Meta(extra_json_schema={"pattern": f"^{TOPIC_NAME.pattern}$", "not": {"enum": [".", ".."]}})]
    partitions: NewPartitionCount | None = None
    config: StreamConfig | None = None


class TopicChange(RequestBody):
    """Changes of a topic: more partitions, or settings. null as a setting restores the broker's default."""

    EXAMPLE = '{"partitions": 6, "config": {"retention_time": "7d"}}'

    partitions: NewPartitionCount | None = None
    config: StreamConfig | None = None


# Cursors


class CursorPosition(TypedDict):
    """Position of a cursor in a partition; lag is the number of offsets from there to the partition's end."""

    partition: PartitionNumber
    offset: Offset
    start: Offset
    end: Offset
    lag: Count


class CursorTopic(TypedDict):
    """Positions of a cursor in one topic."""

    topic: str
    partitions: list[CursorPosition]


class Cursor(TypedDict):
    """A named reading position with its lag. A pinned cursor keeps retention from deleting unread messages."""

    name: str
    pin: bool
    max_age_ms: Annotated[int, Meta(ge=FOREVER)]
    updated: TimestampMs
    lag: Count
    topics: list[CursorTopic]


class Cursors(TypedDict):
    """All cursors, by name."""

    cursors: list[Cursor]


class NewCursorPosition(RequestBody):
    """New position of a cursor in a partition."""

    partition: PartitionNumber
    offset: Offset


class CursorChange(RequestBody):
    """New positions of a cursor in one topic."""

    EXAMPLE = '{"topic": "orders", "partitions": [{"partition": 0, "offset": 42}], "pin": true}'

    topic: str
    partitions: Annotated[list[NewCursorPosition], Meta(min_length=1)]
    pin: Annotated[
        bool | None, Meta(description="Whether the cursor keeps retention from deleting unread messages.")
    ] = None
    max_age_ms: Annotated[
        Annotated[int, Meta(ge=FOREVER, le=CURSOR_AGE_MS_MAX)] | None,
        Meta(description="The cursor is deleted when it has not moved for this long; -1 means never."),
    ] = None


# Bulk reading


class PartitionLog(TypedDict):
    """Identity, epoch, offsets and size of a partition's log. Bulk readers read up to `stable_end`."""

    partition: PartitionNumber
    log: Count
    epoch: Count
    start: Offset
    end: Offset
    stable_end: Offset
    durable_end: Offset
    held_from: Annotated[int | None, Meta(description="Compaction does not touch records from this offset on.")]
    size_bytes: Count


class Logs(TypedDict):
    """The logs of a topic, one for each partition."""

    topic: str
    partitions: list[PartitionLog]


class SegmentName(RequestBody):
    """One generation of a segment: the id of its log, its first offset, and how often it was rewritten."""

    log: Count
    segment: Offset
    generation: Count


class OffsetRange(RequestBody):
    """Offsets of a partition, from start up to but not including end."""

    topic: str
    partition: PartitionNumber
    start: Offset
    end: Offset


class Lease(RequestBody):
    """Segments or offsets to keep readable for a while. A later lease of the same holder replaces this one."""

    EXAMPLE = (
        '{"slices": [{"log": 1, "segment": 0, "generation": 0}], "for_ms": 60000, "holder": "job-7"} or '
        '{"ranges": [{"topic": "orders", "partition": 0, "start": 0, "end": 42}], "for_ms": 60000, "holder": "job-7"}'
    )

    for_ms: Annotated[int, Meta(ge=1, le=LEASE_MS_MAX)]
    slices: (
        Annotated[list[SegmentName], Meta(extra_json_schema={"maxItems": LEASE_SEGMENTS_MAX})] | msgspec.UnsetType
    ) = msgspec.UNSET
    ranges: (
        Annotated[list[OffsetRange], Meta(extra_json_schema={"maxItems": LEASE_SEGMENTS_MAX})] | msgspec.UnsetType
    ) = msgspec.UNSET
    holder: (
        Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": HOLDER_CHARS_MAX})] | msgspec.UnsetType
    ) = msgspec.UNSET


class MissingSegment(TypedDict):
    """A segment that no longer exists in this generation."""

    log: Count
    segment: Offset
    generation: Count


class PlannedSegment(TypedDict):
    """Holds the offsets from `segment` up to but not including `next_offset`."""

    segment: Offset
    generation: Count
    next_offset: Offset


class PlannedRange(TypedDict):
    """The segments that hold one of the requested ranges."""

    segments: list[PlannedSegment]


class Leased(TypedDict):
    """When the lease expires, and either the missing segments or the segments of each range."""

    until: TimestampMs
    gone: NotRequired[list[MissingSegment]]
    ranges: NotRequired[list[PlannedRange]]


# Segments


class SegmentSizes(TypedDict):
    """Bytes and records before and after segments were rewritten."""

    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int


class CompactedPartition(SegmentSizes):
    """The effect of compaction on a partition."""

    partition: PartitionNumber


class Compacted(TypedDict):
    """The effect of compaction on every partition."""

    partitions: list[CompactedPartition]


class SegmentReplacement(RequestBody):
    """The uploaded file that replaces a segment, and the generation it was made from."""

    EXAMPLE = '{"generation": 0, "staged": "0123456789abcdef0123456789abcdef"}'

    generation: Count
    staged: str


class SegmentArchive(RequestBody):
    """The generation of the segment that the Parquet file was made from."""

    EXAMPLE = '{"generation": 0}'

    generation: Count


# Exactly-once sinks


class Staged(TypedDict):
    """Size of a stored upload."""

    bytes: Count
    records: Count


class SinkPart(RequestBody):
    """A range of bytes of an upload, and the partition that its batches are appended to."""

    staged: str
    topic: str
    partition: PartitionNumber
    position: Count
    length: Annotated[int, Meta(ge=1, le=OFFSET_MAX, extra_json_schema={"format": "int64"})]


class SinkCommit(RequestBody):
    """The parts of one batch, which are stored together or not at all."""

    EXAMPLE = '{"parts": [{"staged": "...", "topic": "orders", "partition": 0, "position": 0, "length": 1024}]}'

    parts: list[SinkPart]


class StoredPart(TypedDict):
    """Offsets of a stored part: from base_offset up to but not including next_offset."""

    topic: str
    partition: PartitionNumber
    base_offset: Offset
    next_offset: Offset


class SinkBatch(TypedDict):
    """The last batch that a writer has committed."""

    batch: Count
    records: Count
    updated: TimestampMs
    stored: list[StoredPart]


class SinkOutcome(SinkBatch):
    """A committed batch; `duplicate` says that an earlier request had committed it already."""

    duplicate: bool


class Writer(SinkBatch):
    """A writer of the sink ledger and its last batch."""

    writer: str


class Writers(TypedDict):
    """All writers of the sink ledger, by name."""

    writers: list[Writer]


# Pipelines


class PipelineReport(RequestBody):
    """State of a pipeline, as the pipeline reports it."""

    EXAMPLE = '{"state": "running", "details": {"lag": 0}}'

    state: Annotated[str, Meta(extra_json_schema={"enum": ["starting", "running", "stopped", "failed"]})]
    details: dict[str, Any]


class Pipeline(TypedDict):
    """The last report of a pipeline. A running pipeline that stops reporting is `lost`."""

    name: str
    state: Annotated[str, Meta(extra_json_schema={"enum": ["starting", "running", "stopped", "failed", "lost"]})]
    started: TimestampMs
    updated: TimestampMs
    stop_requested: bool
    details: dict[str, Any]


class Pipelines(TypedDict):
    """All pipelines, by name."""

    pipelines: list[Pipeline]


# Standbys


class Standby(TypedDict):
    """A connected standby: progress of its copy, and how far it is behind."""

    id: str
    name: str
    address: str
    state: Annotated[str, Meta(extra_json_schema={"enum": ["copying", "in step"]})]
    copied_bytes: Count
    copy_bytes: Count
    bytes_behind: Count
    seconds_behind: float
    silent_seconds: float


class Standbys(TypedDict):
    """All connected standbys, and whether changes are waiting for their confirmation."""

    standby_confirms: Count
    in_step: Count
    waiting: bool
    standbys: list[Standby]


class StandbyHello(RequestBody):
    """Introduces a standby: its name, the id of its copy, and size and checksum of the files it already has."""

    EXAMPLE = '{"name": "rack-2", "copy": "id", "format": 1, "kept": {"path": [4096, 305419896]}}'

    name: StandbyName
    copy: StandbyName
    format: Annotated[Any, Meta(extra_json_schema={"type": "integer", "minimum": 0, "maximum": OFFSET_MAX})]
    kept: dict[str, tuple[Count, Count]]


class StandbyPosition(RequestBody):
    """The last change that a standby has on disk; 0 while it copies."""

    EXAMPLE = '{"position": 1}'

    position: Count


# Health and status


class Live(TypedDict):
    """The process responds."""

    status: Literal["ok"]
    live: Annotated[bool, Meta(extra_json_schema={"const": True})]


class Health(TypedDict):
    """Whether the broker accepts messages, and the reason when it does not."""

    status: Literal["ok", "unavailable"]
    live: bool
    ready: bool
    reason: NotRequired[str]


class SettingInForce(TypedDict):
    """A setting, its default, and where its value comes from."""

    name: str
    value: str
    default: str
    origin: str


class Status(TypedDict):
    """Version, health, addresses, sizes and settings of the broker, and the report of its last recovery."""

    version: str
    pid: Count
    started: TimestampMs
    uptime_ms: int
    ready: bool
    reason: str | None
    data_dir: str
    tier_dir: str
    archived_segments: Count
    archived_bytes: Count
    listeners: dict[str, list[str]]
    tls: list[str]
    topics: Count
    partitions: Count
    cursors: Count
    standbys: Standbys
    recovery: dict[str, Any]
    settings: list[SettingInForce]
