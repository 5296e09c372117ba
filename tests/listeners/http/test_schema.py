"""schemathesis sends requests that the OpenAPI document allows, and many that it does not.

Every check it has runs on every operation, with one exception that is made by hand: valid data may be refused
where the document cannot say what is meant, and only there (MEANING). The stream of events, which does not
end, has a test of its own.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case, GenerationMode, SerializationContext
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from headrace.config import Config
from headrace.listeners.http.openapi.document import document
from tests.listeners.http.live import SECONDS_MAX, Live

load_all_checks()


@schemathesis.serializer("application/x-ndjson")
def ndjson(ctx: SerializationContext, value: Any) -> Any:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else str(value).encode()


EXAMPLES = 20
TOPIC = "known"
SETTINGS: dict[str, Any] = {"partitions_max": 20, "read_wait_ms_max": 10}

# Operations where a request may match the schema and still be invalid, and why.
MEANING = {
    "POST /topics": "how people write a size or a time is prose",
    "PATCH /topics/{topic}": "how people write a size or a time is prose",
    "POST /topics/{topic}/messages": "base64 that is none; NDJSON, a string to the document; parameters of raw ones",
    "GET /topics/{topic}/messages": "offset and timestamp together; no partition where there are several; "
    "offsets that are not there; more than one raw message",
    "GET /topics/{topic}/partitions/{partition}/batches": "offset and timestamp together; offsets that are not there",
    "PUT /cursors/{cursor}": "a partition named twice; offsets that are not there",
    "PUT /staging/{staged}": "bytes that are no batches",
    "PUT /sinks/{writer}/batches/{batch}": "names of staged files; an earlier batch; a part named twice",
    "DELETE /topics/{topic}/partitions/{partition}/records": "offsets that are not there",
    "POST /topics/{topic}/partitions/{partition}/segments/{segment}": "names of staged files",
    "PUT /pipelines/{pipeline}": "numbers that no report can hold",
}
MEANING_STATUSES = {400, 413, 416}


def described() -> dict[str, Any]:
    """The document, with an existing topic among the examples."""
    whole = document(Config(**SETTINGS))
    for path in whole["paths"].values():
        for parameter in path.get("parameters", ()):
            if parameter["name"] == "topic":
                parameter["schema"] = {"anyOf": [{"enum": [TOPIC]}, parameter["schema"]]}
        for parameter in path.get("get", {}).get("parameters", ()):
            if parameter["name"] == "partition":
                parameter["schema"] = {"anyOf": [{"enum": [0, 1]}, parameter["schema"]]}
    return whole


schema = schemathesis.openapi.from_dict(described())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = Live(tmp_path_factory.mktemp("data"), **SETTINGS)
    yield live
    live.stop()


@pytest.fixture
def known(server: Live) -> Live:
    if server.get(f"/topics/{TOPIC}").status_code == 404:
        server.create(TOPIC, partitions=2)
    server.publish(TOPIC, *({"value": str(i), "partition": i % 2} for i in range(4)))
    return server


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@schema.exclude(path_regex="/stream$").parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_operation_responds_as_documented(case: Case[Any], known: Live, session: requests.Session) -> None:
    response = case.call(base_url=known.base, session=session, timeout=SECONDS_MAX)
    case.validate_response(response, excluded_checks=[positive_data_acceptance])
    positive = case.meta is not None and case.meta.generation.mode == GenerationMode.POSITIVE
    if positive and response.status_code in MEANING_STATUSES:
        assert case.operation.label in MEANING, response.text


@schema.include(path_regex="^/topics/.*/stream$").parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_event_stream_responds_as_documented(case: Case[Any], known: Live) -> None:
    """Checks only status and content type: the client disconnects before the events."""
    arguments = case.as_transport_kwargs(base_url=known.base)
    with requests.request(**arguments, stream=True, timeout=SECONDS_MAX) as response:
        documented = document(Config())["paths"]["/topics/{topic}/stream"]["get"]["responses"]
        assert str(response.status_code) in {*documented, "405"}, response.text
        if response.status_code == 200:
            assert response.headers["content-type"].startswith("text/event-stream")
        else:
            assert response.headers["content-type"] == "application/problem+json"


def test_all_checks_of_schemathesis_are_loaded() -> None:
    assert set(CHECKS.get_all_names()) >= {"not_a_server_error", "negative_data_rejection", "use_after_free"}
