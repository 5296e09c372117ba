"""One trace through several listeners, with OpenTelemetry's own instrumentation of the clients."""

from collections.abc import Callable
from typing import Any

import httpx
import pika
import pytest
from confluent_kafka import Consumer, Producer
from opentelemetry.instrumentation.confluent_kafka import ConfluentKafkaInstrumentor
from opentelemetry.instrumentation.pika import PikaInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from tests.interop.kafka.broker import KafkaBroker, present
from tests.interop.kafka.test_across_listeners import from_start
from tests.interop.kafka.test_confluent import SECONDS

Name = Callable[[str], str]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ANOTHER = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-01"
OURS = ["amqp.properties", "amqp.exchange"]
LISTENERS = {"http": True, "amqp": True}


@pytest.fixture
def queue(channel: Any, name: Name) -> str:
    made = name("traced")
    channel.queue_declare(made, durable=True)
    channel.confirm_delivery()
    return made


@pytest.fixture
def provider() -> TracerProvider:
    return TracerProvider()


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def settings(broker: KafkaBroker, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": broker.address, **more}


def publish(channel: Any, queue: str, **headers: Any) -> None:
    properties = pika.BasicProperties(headers=headers, delivery_mode=2, content_type="text/plain")
    channel.basic_publish("", queue, b"body", properties)


def test_a_trace_started_in_amqp_continues_in_kafka(
    broker: KafkaBroker, channel: Any, queue: str, provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    PikaInstrumentor.instrument_channel(channel, tracer_provider=provider)
    channel.basic_publish("", queue, b"body")
    consumer = Consumer(settings(broker, **{"group.id": queue, "auto.offset.reset": "earliest"}))
    traced = ConfluentKafkaInstrumentor().instrument_consumer(consumer, tracer_provider=provider)
    traced.subscribe([queue])
    message = traced.poll(SECONDS)
    assert message is not None and message.error() is None
    traced.close()
    published = next(span for span in spans.get_finished_spans() if span.kind is SpanKind.PRODUCER)
    received = next(span for span in spans.get_finished_spans() if span.links)
    assert received.links[0].context.span_id == published.context.span_id


def test_a_trace_started_in_kafka_continues_in_amqp(
    broker: KafkaBroker, channel: Any, queue: str, provider: TracerProvider, spans: InMemorySpanExporter
) -> None:
    producer = ConfluentKafkaInstrumentor().instrument_producer(Producer(settings(broker)), tracer_provider=provider)
    producer.produce(queue, b"body")
    producer.flush(SECONDS)
    received = []
    tag = channel.basic_consume(queue, lambda *delivery: received.append(delivery), auto_ack=True)
    PikaInstrumentor.instrument_channel(channel, tracer_provider=provider)
    while not received:
        channel.connection.process_data_events(0.1)
    channel.basic_cancel(tag)
    sent, consumed = spans.get_finished_spans()
    assert (sent.kind, consumed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert (
        consumed.context.trace_id == sent.context.trace_id and present(consumed.parent).span_id == sent.context.span_id
    )


def test_a_record_has_copies_of_the_trace_of_its_message_and_amqp_delivers_the_message_as_it_was(
    broker: KafkaBroker, channel: Any, queue: str
) -> None:
    headers = {"first": 1, "traceparent": PARENT, "baggage": "user=7", "tracestate": "", "last": "x"}
    publish(channel, queue, **headers)
    channel.basic_publish("", queue, b"later", pika.BasicProperties(headers=headers, expiration="60000"))
    publish(channel, queue, traceparent=7)
    publish(channel, queue)
    records = from_start(broker, queue, 4)
    for record in records[:2]:  # the second was decided on, not passed through
        assert [name for name, _ in record.headers()] == [*OURS, "traceparent", "baggage", "tracestate"]
        assert [value for _, value in record.headers()][2:] == [PARENT.encode(), b"user=7", b""]
    assert [[name for name, _ in record.headers()] for record in records[2:]] == [OURS, OURS]
    delivered = [channel.basic_get(queue, auto_ack=True)[1].headers for _ in range(4)]
    assert delivered == [headers, headers, {"traceparent": 7}, {}]
    assert list(delivered[0]) == list(headers), "in their order"


def test_the_trace_headers_of_a_kafka_application_take_precedence(
    broker: KafkaBroker, channel: Any, queue: str
) -> None:
    publish(channel, queue, traceparent=PARENT, kept="yes")
    (record,) = from_start(broker, queue, 1)
    further = [(name, ANOTHER.encode() if name == "traceparent" else value) for name, value in record.headers()]
    producer = Producer(settings(broker))
    producer.produce(queue, b"on", headers=further)
    producer.produce(queue, b"on", headers=[*record.headers(), ("tracestate", b"added=1")])
    producer.flush(SECONDS)
    first, second, third = (channel.basic_get(queue, auto_ack=True)[1].headers for _ in range(3))
    assert first == {"traceparent": PARENT, "kept": "yes"}
    assert second == {"traceparent": ANOTHER, "kept": "yes"}
    assert third == {"traceparent": PARENT, "kept": "yes", "tracestate": "added=1"}


def test_a_dead_letter_keeps_its_trace(broker: KafkaBroker, channel: Any, queue: str, name: Name) -> None:
    mortal = name("mortal")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    channel.queue_declare(mortal, durable=True, arguments=arguments)
    publish(channel, mortal, traceparent=PARENT)
    method, _, _ = channel.basic_get(mortal)
    channel.basic_reject(method.delivery_tag, requeue=False)
    (letter,) = from_start(broker, queue, 1)
    assert dict(letter.headers())["traceparent"] == PARENT.encode()


def test_the_only_message_of_an_http_request_continues_its_trace(broker: KafkaBroker, channel: Any, queue: str) -> None:
    def post(body: Any, **more: Any) -> None:
        trace = {"traceparent": PARENT, "tracestate": "a=1", "baggage": "user=7", **more}
        kind = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {**trace, "content-type": "text/plain"} if isinstance(body, bytes) else trace
        url = f"http://127.0.0.1:{broker.http_port}/topics/{queue}/messages"
        httpx.post(url, headers=headers, timeout=SECONDS, **kind).raise_for_status()

    post(b"raw")
    post({"value": "json"})
    post({"value": "json", "headers": {"traceparent": ANOTHER}})
    post(b"raw", **{"headrace-header-traceparent": ANOTHER})
    post([{"value": "one"}, {"value": "two", "headers": {"traceparent": ANOTHER}}])
    every = [("traceparent", PARENT.encode()), ("tracestate", b"a=1"), ("baggage", b"user=7")]
    own = [("traceparent", ANOTHER.encode())]
    records = [record.headers() for record in from_start(broker, queue, 6)]
    assert records == [every, every, own, own, None, own]
    assert channel.basic_get(queue, auto_ack=True)[1].headers["traceparent"] == PARENT
