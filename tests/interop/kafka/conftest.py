"""One broker for the tests of a module: topics and groups have names of their own."""

import importlib
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.interop.kafka.broker import KafkaBroker
from tests.listeners.amqp.running import patient_connection

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # kafka-python reads its schemas in a way that Python 3.11 deprecates
    importlib.import_module("kafka")


@pytest.fixture(scope="module")
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """The module may define LISTENERS for listeners other than Kafka's."""
    listeners = getattr(request.module, "LISTENERS", {})
    started = KafkaBroker(tmp_path_factory.mktemp("broker"), **listeners).start()
    yield started
    started.stop()
    assert started.errors() == [], started.said()


@pytest.fixture
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """For tests that kill it."""
    started = KafkaBroker(tmp_path_factory.mktemp("broker")).start()
    yield started
    started.close()
    assert started.errors() == [], started.said()


@pytest.fixture
def channel(broker: KafkaBroker) -> Iterator[Any]:
    """Of a broker whose AMQP listener is open."""
    connection = patient_connection(broker.amqp_port)
    yield connection.channel()
    connection.close()


@pytest.fixture
def name() -> Callable[[str], str]:
    """Names that no other test has."""
    return lambda prefix: f"{prefix}-{uuid.uuid4().hex[:8]}"
