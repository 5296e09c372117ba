"""GET /metrics: the counters as they stand, in Prometheus' format. Nothing is counted through its library.

/metrics has a bounded number of series whatever the number of topics; /metrics/detailed has one per
partition and cursor, up to a cap, and says how many it left out.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.broker import Broker
from headrace.broker.cooperative import YieldEvery
from headrace.broker.metrics.counters import ListenerStats
from headrace.broker.standbys import Standbys
from headrace.listeners.http.metrics import rabbitmq_and_kafka_names
from headrace.listeners.http.metrics.pressure import pressure_metrics
from headrace.listeners.http.native.status import archived_segments
from headrace.listeners.http.server.context import HttpContext, Pieces
from headrace.listeners.http.server.requests import Query
from headrace.version import __version__

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SAMPLES_AT_ONCE = 64
REST_AFTER = 64  # streams, queues or cursors that are looked at in one go
SERIES_MAX = 1_000  # partitions, and again cursors, that /metrics/detailed names

LOG_HELP = {
    "bytes_written": "Bytes of record batches written",
    "records_written": "Records written",
    "bytes_read": "Bytes of record batches read",
    "records_read": "Records read",
    "cold_reads": "Reads that were not in memory and were done off the event loop",
    "tier_reads": "Row groups of archived segments unpacked for a read",
    "rounds": "Rounds: journal entries, each of everything that came in during the sync before",
    "syncs": "Calls that made data stable on disk",
    "checkpoints": "Checkpoints: journal synced into the segments",
    "segments_created": "Segments begun",
    "segments_deleted": "Segments removed by retention, compaction or deletion",
    "index_lookups": "Searches in an offset index",
    "indexes_rebuilt": "Indexes made again from their data",
    "crc_failures": "Batches that failed their checksum when read",
    "refused_full": "Appends refused because the disk is full",
    "sync_s": "Seconds that the syncs of one round took",
    "round_records": "Records per round",
}
PIPELINE_HELP = {
    "lag": "Records its sources have and it has not read",
    "rows_per_second": "Records it processes a second",
    "rows_total": "Records since it was started",
    "batch_ms": "Milliseconds its last batch took",
}
LISTENER_HELP = {
    "connections_total": "Connections accepted",
    "messages_in": "Messages published",
    "messages_out": "Messages delivered",
    "bytes_in": "Bytes of bodies published",
    "bytes_out": "Bytes of answers with messages",
}


async def metrics(site: HttpContext, request: Request) -> Response:
    Query(request)
    return await _exposition(aggregate(site.broker))


async def detailed(site: HttpContext, request: Request) -> Response:
    Query(request)
    return await _exposition(per_object(site.broker))


async def _exposition(families: "Iterable[Metric | None]") -> Response:
    """Written a few samples at a time. None among the families is a place to rest: others get the loop."""
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4  # late: an unscraped broker needs none of it

    turns = YieldEvery()
    pieces: list[bytes] = []
    for family in families:
        if family is not None:
            for at in range(0, max(1, len(family.samples)), SAMPLES_AT_ONCE):
                pieces.append(_text_of(family, at))
                await turns.rest()
        await turns.rest()
    return Pieces(pieces, {}, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _text_of(family: "Metric", at: int) -> bytes:
    """Some samples of a family, with its description before the first."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.metrics_core import Metric

    piece = Metric(family.name, family.documentation, family.type, family.unit)
    piece.samples = family.samples[at : at + SAMPLES_AT_ONCE]

    class Now(CollectorRegistry):
        def collect(self) -> "Iterator[Metric]":
            return iter((piece,))

    text = generate_latest(Now(auto_describe=False))
    while at and text.startswith(b"# "):
        text = text[text.index(b"\n") + 1 :]
    return text


def aggregate(broker: Broker) -> "Iterator[Metric | None]":
    from prometheus_client.metrics_core import CounterMetricFamily
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    shard, stats = broker.shard, broker.stats
    build = Gauge("headrace_build_info", "The version that runs", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    partitions = size = segments = 0
    for number, stream in enumerate(broker.streams):
        for partition in stream.partitions:
            partitions += 1
            size += partition.log.size_bytes
            segments += len(partition.log.segments)
        if number % REST_AFTER == 0:
            yield None
    archived = archived_segments(broker)
    uptime_s = (broker.clock.now_ms() - stats.started_ms) / 1000
    for name, text, value in (
        ("headrace_ready", "1 when messages are taken", float(broker.why_not_ready() is None)),
        ("headrace_uptime_seconds", "Seconds since the start", uptime_s),
        ("headrace_topics", "Streams, topics and queues", len(broker.streams)),
        ("headrace_partitions", "Partitions of all streams", partitions),
        ("headrace_cursors", "Named cursors", len(broker.cursors)),
        ("headrace_pipelines", "Pipelines that ever reported", len(broker.pipelines)),
        ("headrace_sink_writers", "Writers in the ledger of exactly-once sinks", len(broker.ledger.lines())),
        ("headrace_log_size_bytes", "Bytes of all segments", size),
        ("headrace_log_segments", "Segments of all logs", segments),
        ("headrace_log_archived_segments", "Segments in the tier", len(archived)),
        ("headrace_log_archived_bytes", "Bytes of the segments in the tier", sum(archived)),
        ("headrace_log_pending_bytes", "Bytes that wait for the disk", shard.pending_bytes),
        ("headrace_log_failed", "1 after a failed write or sync", float(shard.failure is not None)),
        ("headrace_disk_free_bytes", "Free bytes on the data folder's disk", _free_bytes(broker)),
    ):
        yield Gauge(name, text, value=value)
    yield from pressure_metrics(broker.pressure)
    yield from _standbys(broker.standbys)
    yield from _process()
    yield from _of_struct(shard.counters, "headrace_log_", LOG_HELP)
    yield CounterMetricFamily("headrace_log_journal_bytes", "Bytes written to the journal", shard.journal.bytes_written)
    yield _histogram("headrace_loop_stall_seconds", "Times the event loop came back late", stats.loop_stall_s)
    yield _histogram("headrace_gc_pause_seconds", "Times Python's garbage collection took", stats.gc_pause_s)
    yield from _listeners(stats.listeners)
    if stats.certificate_expires_s is not None:
        name, text = (
            "headrace_tls_certificate_expiry_timestamp_seconds",
            "When the certificate of the listeners expires",
        )
        yield Gauge(name, text, value=stats.certificate_expires_s())
    yield from rabbitmq_and_kafka_names.aggregate(broker)


def _standbys(standbys: Standbys) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    feeds = [follower.feed for follower in standbys]
    states = Gauge("headrace_standbys", "Standbys that are connected", labels=["state"])
    states.add_metric(["in_step"], standbys.in_step)
    states.add_metric(["copying"], len(feeds) - standbys.in_step)
    yield states
    behind_bytes = max((feed.bytes_behind for feed in feeds), default=0)
    behind_s = max((feed.seconds_behind for feed in feeds), default=0.0)
    waiting = standbys.confirms is not None and standbys.confirms.is_waiting
    yield Gauge("headrace_standby_confirms", "Standbys that must have a change", value=standbys.wanted)
    yield Gauge("headrace_standby_waiting", "1 while a change waits for standbys", value=float(waiting))
    yield Gauge("headrace_standby_behind_bytes", "Of the standby that is furthest behind", value=behind_bytes)
    yield Gauge("headrace_standby_behind_seconds", "Of the standby that is furthest behind", value=behind_s)
    yield CounterMetricFamily("headrace_standbys_lost", "Standbys that left, or were sent away", value=standbys.lost)


def _free_bytes(broker: Broker) -> float:
    try:
        return broker.disk.free_bytes(broker.config.data_dir)
    except OSError:
        return float("nan")


def _process() -> "Iterable[Metric]":
    from prometheus_client import ProcessCollector

    return ProcessCollector(registry=None).collect()


def _of_struct(counters: Any, prefix: str, texts: dict[str, str]) -> "Iterator[Metric]":
    """Every counter there is, also one that was added after this was written."""
    from prometheus_client.metrics_core import CounterMetricFamily

    for field in dataclasses.fields(counters):
        value = getattr(counters, field.name)
        text = texts.get(field.name, field.name.replace("_", " "))
        if isinstance(value, int | float):
            yield CounterMetricFamily(prefix + field.name, text, value=value)
        elif hasattr(value, "bounds"):
            name = field.name.removesuffix("_s") + ("_seconds" if field.name.endswith("_s") else "")
            yield _histogram(prefix + name, text, value)


def _histogram(name: str, text: str, histogram: Any) -> "Metric":
    from prometheus_client.metrics_core import HistogramMetricFamily

    buckets: list[tuple[str, float]] = []
    running = 0
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        running += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), running))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


def _listeners(listeners: dict[str, ListenerStats]) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    open_now = GaugeMetricFamily("headrace_listener_connections", "Open connections", labels=["listener"])
    for listener, stats in listeners.items():
        open_now.add_metric([listener], stats.connections)
    yield open_now
    for field, text in LISTENER_HELP.items():
        family = CounterMetricFamily(f"headrace_listener_{field.removesuffix('_total')}", text, labels=["listener"])
        for listener, stats in listeners.items():
            family.add_metric([listener], getattr(stats, field))
        yield family
    events = CounterMetricFamily(
        "headrace_listener_events", "Answers by status and other events", labels=["listener", "event"]
    )
    for listener, stats in listeners.items():
        for event, count in sorted(stats.events.items()):
            events.add_metric([listener, event], count)
    yield events


def per_object(broker: Broker) -> "Iterator[Metric | None]":
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    yield from rabbitmq_and_kafka_names.per_object(broker)
    labels = ["vhost", "topic", "partition"]
    start = Gauge("headrace_partition_start_offset", "First offset that can be read", labels=labels)
    end = Gauge("headrace_partition_end_offset", "First offset not yet durable", labels=labels)
    size = Gauge("headrace_partition_size_bytes", "Bytes of its segments", labels=labels)
    named = left_out = 0
    streams = broker.streams.list(None)
    yield None
    for number, stream in enumerate(streams):
        if number % REST_AFTER == 0:
            yield None
        for partition in stream.partitions:
            if named == SERIES_MAX:
                left_out += 1
                continue
            named += 1
            values = [stream.vhost, stream.name, str(partition.number)]
            start.add_metric(values, partition.start_offset)
            end.add_metric(values, partition.durable_end)
            size.add_metric(values, partition.log.size_bytes)
    yield from (start, end, size)
    lag = Gauge("headrace_cursor_lag", "Messages a cursor has not read yet", labels=["cursor", "topic"])
    cursors = broker.cursors.names()
    for number, name in enumerate(cursors[:SERIES_MAX]):
        if number % REST_AFTER == 0:
            yield None
        lags: dict[str, int] = {}
        for position in broker.cursors.positions(name):
            lags[position.stream.name] = lags.get(position.stream.name, 0) + position.lag
        for topic, value in lags.items():
            lag.add_metric([name, topic], value)
    yield lag
    yield from _pipelines(broker)
    left_out += max(0, len(cursors) - SERIES_MAX)
    yield Gauge("headrace_metrics_left_out", "Partitions and cursors over the cap", value=left_out)


def _pipelines(broker: Broker) -> "Iterator[Metric]":
    """What each pipeline last said of itself, as far as it said it in numbers."""
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    up = Gauge("headrace_pipeline_up", "1 while a pipeline runs and reports", labels=["pipeline"])
    numbers = {
        name: Gauge(f"headrace_pipeline_{name}", text, labels=["pipeline"]) for name, text in PIPELINE_HELP.items()
    }
    now_ms = broker.clock.now_ms()
    for name in broker.pipelines.names()[:SERIES_MAX]:
        report = broker.pipelines.get(name)
        up.add_metric([name], float(report.as_seen(now_ms) == "running"))
        for field, family in numbers.items():
            value = report.details.get(field)
            if isinstance(value, int | float) and not isinstance(value, bool):
                family.add_metric([name], value)
    yield up
    yield from numbers.values()
