"""Health, status, metrics and the OpenAPI document are complete, correct and documented."""

import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config import SETTINGS, Config
from headrace.errors import StorageFailed
from headrace.listeners.http.metrics import metrics
from headrace.listeners.http.openapi.document import document
from headrace.listeners.http.server.app import ROUTES
from headrace.listeners.http.server.problems import CODES, CONNECTION_CODES
from tests.listeners.http.live import Live, StartLive, code_of

DOCS = Path(__file__).parents[3] / "docs"


def test_a_healthy_broker_is_ready(live: Live) -> None:
    healthy = {"status": "ok", "live": True, "ready": True}
    assert live.get("/health").json() == healthy
    assert live.get("/health/ready").json() == healthy
    assert live.get("/health/live").json() == {"status": "ok", "live": True}
    assert live.client.head("/health").status_code == 200


def test_a_failed_disk_is_not_ready_but_alive_and_publishing_is_refused_for_good(own: StartLive) -> None:
    server = own()
    server.publish("t", {"value": 1})

    async def fail() -> None:
        server.broker.shard.fail(OSError(5, "Input/output error"))

    server.call(fail())
    answer = server.get("/health")
    assert answer.status_code == 503
    assert "Input/output error" in answer.json()["reason"]
    assert server.get("/health/live").status_code == 200
    refused = server.client.post("/topics/t/messages", json={"value": 2})
    assert (refused.status_code, code_of(refused)) == (503, "storage_failed")
    assert "retry-after" not in refused.headers  # it is unknown what was stored, so clients must not simply retry
    assert server.values("t") == ["1"]
    server.stop()
    assert isinstance(server.stop_error, StorageFailed)


def test_a_full_disk_refuses_with_retry_after_and_recovers(own: StartLive) -> None:
    server = own()
    server.publish("t", {"value": 1})

    def wait_for_health(status: int) -> dict[str, Any]:
        while (answer := server.get("/health")).status_code != status:
            pass
        return dict(answer.json())

    async def free(size: int) -> None:
        server.broker.disk.free_bytes = lambda path: size  # type: ignore[method-assign]

    server.call(free(0))
    assert "full" in wait_for_health(503)["reason"]
    refused = server.client.post("/topics/t/messages", json={"value": 2})
    assert (refused.status_code, code_of(refused)) == (503, "disk_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert server.values("t") == ["1"]
    server.call(free(1 << 40))
    wait_for_health(200)
    assert server.publish("t", {"value": 2}) == [(0, 1)]


def test_internal_errors_reveal_no_details(own: StartLive, caplog: pytest.LogCaptureFixture) -> None:
    server = own()
    server.publish("t", {"value": 1})

    def divide_by_zero(*_: Any, **__: Any) -> NoReturn:
        raise ZeroDivisionError

    async def spoil() -> None:
        server.broker.streams.get("t").partitions[0].log.read_now = divide_by_zero  # type: ignore[method-assign]

    server.call(spoil())
    answer = server.get("/topics/t/messages")
    assert (answer.status_code, code_of(answer)) == (500, "internal_error")
    assert "ZeroDivisionError" not in answer.text
    assert "ZeroDivisionError" in caplog.text


def test_the_status_shows_every_setting_in_force(live: Live) -> None:
    status = live.get("/status").json()
    assert {setting["name"] for setting in status["settings"]} == {setting.name for setting in SETTINGS}
    assert status["listeners"]["http"] == live.listener.addresses
    assert status["ready"] and status["reason"] is None
    assert status["recovery"]["clean"] is True


def test_metrics_are_in_prometheus_text_format(live: Live, topic: str) -> None:
    live.publish(topic, *({"value": i} for i in range(10)))
    families = {family.name: family for family in text_string_to_metric_families(live.get("/metrics").text)}
    written = families["headrace_log_records_written"].samples[0].value
    live.publish(topic, *({"value": i} for i in range(10)))
    after = {family.name: family for family in text_string_to_metric_families(live.get("/metrics").text)}
    assert after["headrace_log_records_written"].samples[0].value == written + 10
    assert after["headrace_log_syncs"].samples[0].value >= 2
    assert families["headrace_ready"].samples[0].value == 1
    assert families["process_resident_memory_bytes"].samples[0].value > 1_000_000
    events = {s.labels["event"]: s.value for s in after["headrace_listener_events"].samples}
    assert events["200"] >= 2


def test_the_number_of_series_does_not_grow_with_the_number_of_topics(
    live: Live, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(live.get("/metrics").text.splitlines())
    for i in range(10):
        live.create(f"{topic}-{i}")
    assert abs(len(live.get("/metrics").text.splitlines()) - before) <= 2  # a status seen for the first time
    monkeypatch.setattr(metrics, "SERIES_MAX", 5)
    detailed = live.get("/metrics/detailed").text
    assert detailed.count("headrace_partition_end_offset{") == 5
    assert re.search(r"^headrace_metrics_left_out [1-9]", detailed, re.M)


def test_every_metric_is_documented(live: Live, topic: str) -> None:
    live.publish(topic, {"value": 1})
    text = (DOCS / "metrics.md").read_text()
    for path in ("/metrics", "/metrics/detailed"):
        for family in text_string_to_metric_families(live.get(path).text):
            if not family.name.startswith("process_"):
                assert f"`{family.name}" in text, family.name


def test_the_openapi_document_has_exactly_the_routes() -> None:
    described = {
        (method.upper(), path)
        for path, item in document(Config())["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert described == {(method, path) for method, path, *_ in ROUTES}


def test_every_route_and_code_is_in_the_docs() -> None:
    text = (DOCS / "http.md").read_text()
    for method, path, *_ in ROUTES:
        assert f"`{method} {path}`" in text, (method, path)
    for code in (*CODES, *CONNECTION_CODES):
        assert f"`{code}`" in text, code
