"""Metrics of memory and disk pressure, and of throttled publishers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.broker.pressure.pressure import DEPTH, DISK, MEMORY, Pressure

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def pressure_metrics(pressure: Pressure) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily as Counter
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    usage, limits, verdict = pressure.usage, pressure.limits, pressure.verdict
    for name, text, value in (
        ("headrace_memory_used_bytes", "Resident memory of the process", usage.rss_bytes),
        ("headrace_memory_limit_bytes", "Memory limit of the process", limits.memory_bytes),
        (
            "headrace_memory_usage_percent",
            "Resident memory in percent of the limit",
            round(100 * pressure.memory_share, 1),
        ),
        ("headrace_disk_free_limit_bytes", "Free space below which publishers are paused", limits.disk_free_bytes),
        ("headrace_log_pending_limit_bytes", "Pending bytes above which publishers are refused", limits.pending_bytes),
    ):
        yield Gauge(name, text, value=value)
    paused = Gauge("headrace_publishers_paused", "1 while publishers are paused", labels=["reason"])
    paused.add_metric([MEMORY], float(verdict.memory_alarm))
    paused.add_metric([DISK], float(verdict.disk_alarm))
    yield paused
    slowed = Gauge("headrace_publishers_slowed", "Throttling level, from 0 (none) to 5", labels=["reason"])
    for reason in (MEMORY, DEPTH):
        slowed.add_metric([reason], verdict.level if verdict.slowed_by == reason else 0)
    yield slowed
    rate = verdict.rate_bytes_s
    yield Gauge(
        "headrace_publish_rate_limit_bytes", "Bytes per second that publishers may send; +Inf means no limit",
        value=float("inf") if rate is None else rate,
    )  # fmt: skip
    yield Counter("headrace_publishers_paused_seconds", "Time that publishers were paused", value=pressure.paused_s)
    yield Counter("headrace_publishers_delayed", "Times a publisher was delayed", value=pressure.delays)
    events = Counter("headrace_pressure_events", "Alarms raised and throttling started", labels=["event"])
    for event, count in pressure.events.items():
        events.add_metric([event], count)
    yield events
    held = Gauge("headrace_held_bytes", "Reclaimable memory", labels=["holder"])
    shed = Counter("headrace_shed_bytes", "Reclaimed memory", labels=["holder"])
    for holder in pressure.holders:
        held.add_metric([holder.name], holder.held_bytes())
        shed.add_metric([holder.name], pressure.shed_bytes[holder.name])
    yield from (held, shed)
