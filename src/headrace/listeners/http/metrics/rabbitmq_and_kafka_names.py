"""The same numbers under the metric names of RabbitMQ and of Kafka's exporter, so that their dashboards work.

Series per queue, topic and group are limited like the rest of /metrics/detailed.
"""

import resource
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.streams.streams import is_topic_name
from headrace.broker.vhosts.global_parameters import NODE
from headrace.errors import HeadraceError
from headrace.listeners.http.management.definitions import RABBITMQ_VERSION
from headrace.listeners.http.management.overview import memory_bytes
from headrace.record import codec
from headrace.record.layout import LOG_APPEND_TIME
from headrace.version import __version__

if TYPE_CHECKING:
    from prometheus_client.metrics_core import GaugeMetricFamily, Metric

SERIES_MAX = 1_000
OBJECTS_AT_ONCE = 32
HEAD_BYTES = 4096
PROTOCOLS = {"amqp": "amqp091", "kafka": "kafka", "http": "http"}


def aggregate(broker: Broker) -> "Iterator[Metric | None]":
    from prometheus_client.metrics_core import CounterMetricFamily as Counter
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    sample = broker.history.latest()
    queues = [queue for host in broker.vhosts for queue in host.queues.values()]
    clients = broker.clients.all()
    channels = consumers = 0
    redelivered, dead = broker.stats.gone.counts.redeliver, broker.stats.gone.dead_lettered
    for number, client in enumerate(clients):
        channels += client.describe()["channels"]
        if number % OBJECTS_AT_ONCE == 0:
            yield None
    for number, queue in enumerate(queues):
        consumers += len(queue.consumers)
        redelivered += queue.counts.redeliver
        dead += queue.dead_lettered
        if number % OBJECTS_AT_ONCE == 0:
            yield None
    identity = Gauge(
        "rabbitmq_identity_info", "1; name of the node and the cluster", labels=["rabbitmq_node", "rabbitmq_cluster"]
    )
    identity.add_metric([NODE, broker.global_parameters.cluster_name], 1)
    yield identity
    build = Gauge(
        "rabbitmq_build_info",
        "1; versions of RabbitMQ's API and of Headrace",
        labels=["rabbitmq_version", "product_name", "product_version"],
    )
    build.add_metric([RABBITMQ_VERSION, "Headrace", __version__], 1)
    yield build
    for name, text, value in (
        ("rabbitmq_connections", "Connections currently open", len(clients)),
        ("rabbitmq_channels", "Channels currently open", channels),
        ("rabbitmq_consumers", "Consumers", consumers),
        ("rabbitmq_queues", "Queues available", len(queues)),
        ("rabbitmq_queue_messages_ready", "Messages ready to be delivered", sample.ready),
        ("rabbitmq_queue_messages_unacked", "Messages delivered but not acknowledged", sample.unacked),
        ("rabbitmq_queue_messages", "Ready and unacknowledged messages", sample.ready + sample.unacked),
        ("rabbitmq_process_resident_memory_bytes", "Memory used", memory_bytes()),
        ("rabbitmq_disk_space_available_limit_bytes", "Free disk space limit", broker.config.disk_free_limit),
        ("rabbitmq_process_max_fds", "Open files allowed", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        ("kafka_brokers", "Brokers of the cluster", 1),
    ):
        yield Gauge(name, text, value=value)
    try:
        yield Gauge(
            "rabbitmq_disk_space_available_bytes",
            "Free disk space",
            value=broker.disk.free_bytes(broker.config.data_dir),
        )
    except OSError:
        pass
    received = Counter("rabbitmq_global_messages_received", "Messages published", labels=["protocol"])
    delivered = Counter("rabbitmq_global_messages_delivered", "Messages delivered", labels=["protocol"])
    for listener, stats in broker.stats.listeners.items():
        received.add_metric([PROTOCOLS.get(listener, listener)], stats.messages_in)
        delivered.add_metric([PROTOCOLS.get(listener, listener)], stats.messages_out)
    yield received
    yield delivered
    opened = sum(listener.connections_total for listener in broker.stats.listeners.values())
    for name, text, total in (
        ("rabbitmq_connections_opened", "Connections opened", opened),
        ("rabbitmq_global_messages_acknowledged", "Messages acknowledged", sample.acked),
        ("rabbitmq_global_messages_redelivered", "Messages redelivered", redelivered),
        ("rabbitmq_global_messages_dead_lettered", "Messages dead-lettered", dead),
    ):
        yield Counter(name, text, value=total)


def per_object(broker: Broker) -> "Iterator[Metric | None]":
    yield from _queues(broker)
    yield from _topics(broker)
    yield from _groups(broker)


def _queues(broker: Broker) -> "Iterator[Metric | None]":
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    labels = ["vhost", "queue"]
    prefix = "rabbitmq_detailed_queue_"
    ready = Gauge(prefix + "messages_ready", "Messages ready to be delivered", labels=labels)
    unacked = Gauge(prefix + "messages_unacked", "Messages delivered but not acknowledged", labels=labels)
    both = Gauge(prefix + "messages", "Ready and unacknowledged messages", labels=labels)
    consumers = Gauge(prefix + "consumers", "Consumers", labels=labels)
    age = Gauge(
        "headrace_queue_oldest_age_seconds", "Age of the oldest message that is not acknowledged", labels=labels
    )
    deliveries = Gauge(
        "headrace_queue_delivery_count_max", "Highest delivery count of a waiting message", labels=labels
    )
    redelivered = Gauge("headrace_queue_redelivered", "Messages redelivered", labels=labels)
    dead = Gauge("headrace_queue_dead_lettered", "Messages dead-lettered from this queue", labels=labels)
    now_ms = broker.clock.now_ms()
    found = list(islice((q for h in broker.vhosts for q in h.queues.values() if not q.is_stream), SERIES_MAX))
    for number, queue in enumerate(found):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        values = [_text(queue.vhost.name), _text(queue.name)]
        waiting, out = queue.ready, queue.unacked
        ready.add_metric(values, waiting)
        unacked.add_metric(values, out)
        both.add_metric(values, waiting + out)
        consumers.add_metric(values, len(queue.consumers))
        redelivered.add_metric(values, queue.counts.redeliver)
        dead.add_metric(values, queue.dead_lettered)
        deliveries.add_metric(values, queue.most_returns)
        if waiting + out:
            oldest = _oldest_ms(queue)
            if oldest is not None:
                age.add_metric(values, max(0, now_ms - oldest) / 1000)
    yield from (ready, unacked, both, consumers, age, deliveries, redelivered, dead)


def _oldest_ms(queue: Queue) -> int | None:
    stamps = [stamp for view in queue.views if (stamp := _head_ms(view)) is not None]
    return min(stamps, default=None)


def _head_ms(view: View) -> int | None:
    """Timestamp of the first message that is not settled, from the header of its batch."""
    if view.low >= view.partition.stable_end:
        return None
    try:
        data = view.reader.committed(view.partition.read(view.low, HEAD_BYTES)).data
        infos = codec.scan(data, verify_crc=False)
    except HeadraceError:
        return None
    head = next((info for info in infos if info.last_offset >= view.low), None)
    if head is None:
        return None
    # With LogAppendTime or a delete horizon, base_timestamp is not the time of the first message.
    has_first = head.timestamp_type != LOG_APPEND_TIME and head.delete_horizon_ms is None
    return head.base_timestamp if has_first else head.max_timestamp


def _topics(broker: Broker) -> "Iterator[Metric | None]":
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    count = Gauge("kafka_topic_partitions", "Partitions of a topic", labels=["topic"])
    end = Gauge("kafka_topic_partition_current_offset", "End offset of the partition", labels=["topic", "partition"])
    start = Gauge("kafka_topic_partition_oldest_offset", "Start offset of the partition", labels=["topic", "partition"])
    series = 0
    streams = broker.streams.list()
    yield None
    for at, stream in enumerate(streams):
        if at % OBJECTS_AT_ONCE == 0:
            yield None
        if not is_topic_name(stream.name):
            continue
        count.add_metric([stream.name], len(stream.partitions))
        for partition in stream.partitions:
            values = [stream.name, str(partition.number)]
            end.add_metric(values, partition.end_offset)
            start.add_metric(values, partition.start_offset)
        series += len(stream.partitions)
        if series >= SERIES_MAX:
            break
    yield from (count, end, start)


def _groups(broker: Broker) -> "Iterator[Metric | None]":
    from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

    place = ["consumergroup", "topic", "partition"]
    current = Gauge("kafka_consumergroup_current_offset", "Committed offset of a consumer group", labels=place)
    lag = Gauge("kafka_consumergroup_lag", "Lag of a consumer group", labels=place)
    lag_sum = Gauge("kafka_consumergroup_lag_sum", "Lag of a consumer group in a topic", labels=place[:2])
    members = Gauge("kafka_consumergroup_members", "Members of a consumer group", labels=place[:1])
    groups = broker.coordination.groups
    series = 0
    for at, listed in enumerate(groups.listing()):
        if at % OBJECTS_AT_ONCE == 0:
            yield None
        found = groups.find(listed.group_id)
        members.add_metric([_text(listed.group_id)], len(found.members) if found is not None else 0)
        series += _positions(broker, listed.group_id, current, lag, lag_sum)
        if series >= SERIES_MAX:
            break
    yield from (current, lag, lag_sum, members)


def _positions(
    broker: Broker, group: str, current: "GaugeMetricFamily", lag: "GaugeMetricFamily", lag_sum: "GaugeMetricFamily"
) -> int:
    sums: dict[str, int] = {}
    offsets = broker.coordination.groups.offsets.of(group)
    for (topic, number), committed in sorted(offsets.items()):
        stream = broker.streams.find(topic)
        if stream is None or number >= len(stream.partitions):
            continue
        behind = max(0, stream.partitions[number].end_offset - committed.offset)
        values = [_text(group), topic, str(number)]
        current.add_metric(values, committed.offset)
        lag.add_metric(values, behind)
        sums[topic] = sums.get(topic, 0) + behind
    for topic, behind in sums.items():
        lag_sum.add_metric([_text(group), topic], behind)
    return len(offsets) + 1


def _text(name: str) -> str:
    """A name as a label, which must be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
