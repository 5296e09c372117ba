"""Fixtures of tests/spark and tests/pipelines. Without Java the tests are skipped, and say so by name."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.pipelines.java import JavaMissing, check_java
from tests.spark.world import RunningBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    try:
        check_java()
    except JavaMissing as missing:
        warnings.warn(f"no test of Spark runs here: {missing}", RuntimeWarning, stacklevel=1)
        pytest.skip(f"Spark: {missing}")
    from headrace.pipelines.session import build

    folder = tmp_path_factory.mktemp("spark")
    session = build(
        "tests",
        cores=2,
        conf={
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
            # The session is short: the second compiler would cost more than it gains.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": "2",
        },
    )
    yield session
    session.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    running = RunningBroker(tmp_path).start()
    yield running
    running.close()


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """For tests that only add topics of their own."""
    running = RunningBroker(tmp_path_factory.mktemp("broker")).start()
    yield running
    running.close()
