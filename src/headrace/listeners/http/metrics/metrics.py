"""GET /metrics and /metrics/detailed in Prometheus' text format, from the broker's own counters at scrape time.

/metrics has a bounded number of series, independent of the number of topics. /metrics/detailed has series per queue,
partition and cursor up to a limit, and reports how many it omitted.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.broker import Broker
from headrace.broker.cooperative import YieldEvery
from headrace.broker.metrics.counters import Histogram, ListenerStats
from headrace.broker.standbys import Standbys
from headrace.listeners.http.metrics import rabbitmq_and_kafka_names
from headrace.listeners.http.metrics.pressure import pressure_metrics
from headrace.listeners.http.native.status import archived_segments
from headrace.listeners.http.server.context import HttpContext, PiecewiseResponse
from headrace.listeners.http.server.requests import Query
from headrace.version import __version__

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

SAMPLES_AT_ONCE = 64
OBJECTS_AT_ONCE = 64  # streams, queues or cursors per event-loop iteration
SERIES_MAX = 1_000  # of partitions, and the same of cursors, in /metrics/detailed

LOG_HELP = {
    "bytes_written": "Bytes of record batches written",
    "records_written": "Records written",
    "bytes_read": "Bytes of record batches read",
    "records_read": "Records read",
    "cold_reads": "Reads from disk, done in a thread because the data was not in the page cache",
    "tier_reads": "Row groups of archived segments decompressed for a read",
    "rounds": "Commit rounds: one journal entry for everything that arrived during the previous sync",
    "syncs": "Syncs to disk",
    "checkpoints": "Checkpoints: segments synced and the journal recycled",
    "segments_created": "Segments created",
    "segments_deleted": "Segments deleted by retention, compaction or deletion",
    "index_lookups": "Lookups in an offset index",
    "indexes_rebuilt": "Indexes rebuilt from their segments",
    "crc_failures": "Batches that failed their checksum when read",
    "refused_full": "Appends refused because the disk is full",
    "sync_s": "Duration of the syncs of a round",
    "round_records": "Records per round",
}
PIPELINE_HELP = {
    "lag": "Records in its sources that it has not read",
    "rows_per_second": "Records processed per second",
    "rows_total": "Records processed since it started",
    "batch_ms": "Duration of the last batch in milliseconds",
}
LISTENER_HELP = {
    "connections_total": "Connections accepted",
    "messages_in": "Messages published",
    "messages_out": "Messages delivered",
    "bytes_in": "Bytes of published message bodies",
    "bytes_out": "Bytes of responses with messages",
}


async def metrics(context: HttpContext, request: Request) -> Response:
    Query(request)
    return await _exposition(aggregate(context.broker))


async def detailed(context: HttpContext, request: Request) -> Response:
    Query(request)
    return await _exposition(per_object(context.broker))


async def _exposition(families: "Iterable[Metric | None]") -> Response:
    """Encodes a few samples per event-loop iteration. None among the families is a place to yield to the event loop."""
    from prometheus_client.exposition import (
        CONTENT_TYPE_PLAIN_0_0_4,  # imported late: a broker that is never scraped does not need it
    )

    yielding = YieldEvery()
    pieces: list[bytes] = []
    for family in families:
        if family is not None:
            for at in range(0, max(1, len(family.samples)), SAMPLES_AT_ONCE):
                pieces.append(_text_of(family, at))
                await yielding.maybe_yield()
        await yielding.maybe_yield()
    return PiecewiseResponse(pieces, {}, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _text_of(family: "Metric", at: int) -> bytes:
    """Some samples of a family; its HELP and TYPE lines come before the first sample."""
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

    storage, stats = broker.storage, broker.stats
    build = Gauge("headrace_build_info", "1; the label version is the running version", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    partitions = size = segments = 0
    for number, stream in enumerate(broker.streams):
        for partition in stream.partitions:
            partitions += 1
            size += partition.size_bytes
            segments += partition.segment_count
        if number % OBJECTS_AT_ONCE == 0:
            yield None
    archived = archived_segments(broker)
    uptime_s = (broker.clock.now_ms() - stats.started_ms) / 1000
    for name, text, value in (
        ("headrace_ready", "1 while the broker accepts messages", float(broker.why_not_ready() is None)),
        ("headrace_uptime_seconds", "Seconds since the broker started", uptime_s),
        ("headrace_topics", "Streams: topics and durable queues", len(broker.streams)),
        ("headrace_partitions", "Partitions of all streams", partitions),
        ("headrace_cursors", "Named cursors", len(broker.cursors)),
        ("headrace_pipelines", "Pipelines that have reported", len(broker.pipelines)),
        ("headrace_sink_writers", "Writers in the sink ledger", len(broker.ledger.lines())),
        ("headrace_log_size_bytes", "Size of all segments", size),
        ("headrace_log_segments", "Segments of all logs", segments),
        ("headrace_log_archived_segments", "Segments in the tier", len(archived)),
        ("headrace_log_archived_bytes", "Size of the segments in the tier", sum(archived)),
        ("headrace_log_pending_bytes", "Bytes waiting to be written and synced", storage.pending_bytes),
        ("headrace_log_failed", "1 after a failed write or sync", float(storage.failure is not None)),
        ("headrace_disk_free_bytes", "Free space on the disk of the data folder", _free_bytes(broker)),
    ):
        yield Gauge(name, text, value=value)
    yield from pressure_metrics(broker.pressure)
    yield from _standbys(broker.standbys)
    yield from _process()
    yield from _of_struct(storage.counters, "headrace_log_", LOG_HELP)
    yield CounterMetricFamily(
        "headrace_log_journal_bytes", "Bytes written to the journal", storage.journal_bytes_written
    )
    yield _histogram("headrace_loop_stall_seconds", "Delays of the event loop", stats.loop_stall_s)
    yield _histogram("headrace_gc_pause_seconds", "Pauses by Python's garbage collection", stats.gc_pause_s)
    yield from _listeners(stats.listeners)
    if stats.certificate_expires_s is not None:
        name, text = (
            "headrace_tls_certificate_expiry_timestamp_seconds",
            "Expiry time of the TLS certificate",
        )
        yield Gauge(name, text, value=stats.certificate_expires_s())
    yield from rabbitmq_and_kafka_names.aggregate(broker)


def _standbys(standbys: Standbys) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    feeds = [follower.feed for follower in standbys]
    states = Gauge("headrace_standbys", "Connected standbys", labels=["state"])
    states.add_metric(["in_step"], standbys.in_step)
    states.add_metric(["copying"], len(feeds) - standbys.in_step)
    yield states
    behind_bytes = max((feed.bytes_behind for feed in feeds), default=0)
    behind_s = max((feed.seconds_behind for feed in feeds), default=0.0)
    waiting = standbys.confirms is not None and standbys.confirms.is_waiting
    yield Gauge(
        "headrace_standby_confirms",
        "Number of standbys that must sync a change before it is confirmed",
        value=standbys.wanted,
    )
    yield Gauge("headrace_standby_waiting", "1 while changes wait for confirmation by standbys", value=float(waiting))
    yield Gauge("headrace_standby_behind_bytes", "Unconfirmed bytes of the slowest standby", value=behind_bytes)
    yield Gauge("headrace_standby_behind_seconds", "Lag of the slowest standby", value=behind_s)
    yield CounterMetricFamily(
        "headrace_standbys_lost", "Standbys that disconnected or were dropped", value=standbys.lost
    )


def _free_bytes(broker: Broker) -> float:
    try:
        return broker.disk.free_bytes(broker.config.data_dir)
    except OSError:
        return float("nan")


def _process() -> "Iterable[Metric]":
    from prometheus_client import ProcessCollector

    return ProcessCollector(registry=None).collect()


def _of_struct(counters: Any, prefix: str, texts: dict[str, str]) -> "Iterator[Metric]":
    """One metric per field, including fields without a description here."""
    from prometheus_client.metrics_core import CounterMetricFamily

    for field in dataclasses.fields(counters):
        value = getattr(counters, field.name)
        text = texts.get(field.name, field.name.replace("_", " "))
        if isinstance(value, int | float):
            yield CounterMetricFamily(prefix + field.name, text, value=value)
        elif hasattr(value, "bounds"):
            name = field.name.removesuffix("_s") + ("_seconds" if field.name.endswith("_s") else "")
            yield _histogram(prefix + name, text, value)


def _histogram(name: str, text: str, histogram: Histogram) -> "Metric":
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
        "headrace_listener_events", "HTTP responses by status, and other events", labels=["listener", "event"]
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
    end = Gauge("headrace_partition_end_offset", "Durable end: the first offset that is not durable yet", labels=labels)
    size = Gauge("headrace_partition_size_bytes", "Size of its segments", labels=labels)
    series = omitted = 0
    streams = broker.streams.list(None)
    yield None
    for number, stream in enumerate(streams):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        for partition in stream.partitions:
            if series == SERIES_MAX:
                omitted += 1
                continue
            series += 1
            values = [stream.vhost, stream.name, str(partition.number)]
            start.add_metric(values, partition.start_offset)
            end.add_metric(values, partition.durable_end)
            size.add_metric(values, partition.size_bytes)
    yield from (start, end, size)
    lag = Gauge("headrace_cursor_lag", "Messages that a cursor has not read yet", labels=["cursor", "topic"])
    cursors = broker.cursors.names()
    for number, name in enumerate(cursors[:SERIES_MAX]):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        lags: dict[str, int] = {}
        for position in broker.cursors.positions(name):
            lags[position.stream.name] = lags.get(position.stream.name, 0) + position.lag
        for topic, value in lags.items():
            lag.add_metric([name, topic], value)
    yield lag
    yield from _pipelines(broker)
    omitted += max(0, len(cursors) - SERIES_MAX)
    yield Gauge("headrace_metrics_left_out", "Partitions and cursors omitted because of the limit", value=omitted)


def _pipelines(broker: Broker) -> "Iterator[Metric]":
    """The numbers in the last report of each pipeline."""
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    up = Gauge("headrace_pipeline_up", "1 while the pipeline is running and reporting", labels=["pipeline"])
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
