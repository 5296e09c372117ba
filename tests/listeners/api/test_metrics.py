"""Metrics under the names of RabbitMQ and the Kafka exporter."""

import functools
import json
import re
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import confluent_kafka
from prometheus_client.parser import text_string_to_metric_families

from tests.listeners.amqp.running import patient_connection
from tests.listeners.api.conftest import Served
from tests.listeners.api.test_api import post, put_queue

GRAFANA = Path(__file__).parents[3] / "docs" / "grafana.json"


def values(text: str) -> dict[str, float]:
    found = re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def test_queues_and_topics_have_the_names_of_rabbitmq_and_the_kafka_exporter(live: Served) -> None:
    put_queue(live, "measured")
    post(live, "measured", "x")
    live.publish("measured-topic", {"value": "a"}, {"value": "b"})
    seen = values(live.get("/metrics/detailed").text)
    assert seen['rabbitmq_detailed_queue_messages_ready{queue="measured",vhost="/"}'] == 1
    assert seen['headrace_queue_oldest_age_seconds{queue="measured",vhost="/"}'] >= 0
    assert seen['kafka_topic_partition_current_offset{partition="0",topic="measured-topic"}'] == 2
    broad = values(live.get("/metrics").text)
    assert broad["rabbitmq_queues"] >= 1 and broad["kafka_brokers"] == 1
    assert broad['rabbitmq_global_messages_received_total{protocol="http"}'] >= 3


def test_series_are_unique_for_any_queue_names(live: Served) -> None:
    live.request("PUT", "/api/vhosts/twin")
    for name in ("twin", "a%22b%5Cc%0Ad%7Be%7D"):
        for vhost in ("%2F", "twin"):
            assert live.request("PUT", f"/api/queues/{vhost}/{name}", json={}).status_code == 201
    for path in ("/metrics", "/metrics/detailed"):
        text = live.get(path).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        seen = Counter((s.name, *sorted(s.labels.items())) for s in samples)
        assert [series for series, times in seen.items() if times > 1] == []
        described = Counter(re.findall(r"^# (?:HELP|TYPE) \S+", text, re.M))
        assert [line for line, times in described.items() if times > 1] == []
        if path.endswith("detailed"):
            assert ("rabbitmq_detailed_queue_messages", ("queue", 'a"b\\c\nd{e}'), ("vhost", "twin")) in seen


def counters(live: Served) -> dict[str, float]:
    """Compares current counters: those of a history sample are up to a second old."""

    async def sample() -> None:
        await live.broker.history._sum_queues()
        live.broker.history.take()

    live.call(sample())
    return {name: value for name, value in values(live.get("/metrics").text).items() if "_total" in name}


def test_counters_do_not_fall_when_a_queue_or_vhost_is_deleted(live: Served) -> None:
    live.request("PUT", "/api/vhosts/passing")
    for vhost in ("%2F", "passing"):
        live.request("PUT", f"/api/queues/{vhost}/passing.dead", json={})
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "passing.dead"}
        live.request("PUT", f"/api/queues/{vhost}/passing", json={"arguments": arguments})
        connection = patient_connection(live.amqp_port, virtual_host=unquote(vhost))
        channel = connection.channel()
        channel.basic_qos(prefetch_count=1)
        for _ in range(2):
            channel.basic_publish("", "passing", b"x")
        settle = (channel.basic_nack, channel.basic_ack, functools.partial(channel.basic_reject, requeue=False))
        for done, (method, _, _) in zip(settle, channel.consume("passing"), strict=False):
            done(method.delivery_tag)
        connection.close()
    before = counters(live)
    for name in ("acknowledged", "dead_lettered", "redelivered"):
        assert before[f"rabbitmq_global_messages_{name}_total"] >= 2
    live.request("DELETE", "/api/queues/%2F/passing")
    live.request("DELETE", "/api/vhosts/passing")
    after = counters(live)
    assert {name: (value, after[name]) for name, value in before.items() if after[name] < value} == {}


def test_every_metric_in_the_grafana_dashboard_exists(live: Served) -> None:
    put_queue(live, "grafana")
    post(live, "grafana", "x")
    body = {"topic": "grafana", "partitions": [{"partition": 0, "offset": 0}]}
    live.request("PUT", "/cursors/grafana", json=body)
    text = live.get("/metrics").text + live.get("/metrics/detailed").text
    for panel in json.loads(GRAFANA.read_text())["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"\b(?:headrace|rabbitmq|kafka)_\w+", target["expr"]):
                assert re.search(rf"^(?:# TYPE )?{re.escape(name)}\b", text, re.M), name


def test_the_age_of_the_oldest_message_uses_append_time_where_configured(live: Served) -> None:
    """The batch header still has the client's time, fifty years in the past."""
    live.create("stamped", timestamp_type="append")
    declared = live.request("PUT", "/api/queues/%2F/stamped", json={"durable": True})
    assert declared.status_code in (201, 204), declared.text
    producer = confluent_kafka.Producer({"bootstrap.servers": live.kafka, "log_level": 0})
    producer.produce("stamped", b"x", timestamp=1000)
    assert producer.flush(30) == 0
    seen = values(live.get("/metrics/detailed").text)
    assert seen['rabbitmq_detailed_queue_messages_ready{queue="stamped",vhost="/"}'] == 1
    assert seen['headrace_queue_oldest_age_seconds{queue="stamped",vhost="/"}'] < 1e6
