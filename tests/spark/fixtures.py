"""Fixtures of tests/spark and tests/pipelines. Without Java these tests are skipped."""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.pipelines.java import JavaMissing, check_java
from tests.spark.world import JAVA_OPTIONS, RunningBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Spark puts its zip of PySpark before the installed one, and Python does not cache bytecode of a zip: each of the
# hundreds of workers would compile PySpark again, for half a second.
WORKER = """#!/bin/sh
IFS=: kept=
for entry in $PYTHONPATH; do
  case "$entry" in */pyspark/python/*|*/pyspark/jars/*) ;; *) kept="$kept:$entry" ;; esac
done
PYTHONPATH="${{kept#:}}" exec "{python}" "$@"
"""


SECONDS_MAX = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longer timeouts: the first test includes the start of the JVM, and a timeout would end the session for all
    others."""
    for item in items:
        if item.nodeid.startswith(("tests/spark/", "tests/pipelines/")) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS_MAX))


@pytest.fixture(scope="session", autouse=True)
def python_of_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    script = tmp_path_factory.mktemp("python") / "python"
    script.write_text(WORKER.format(python=sys.executable))
    script.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        if os.name == "posix":
            patch.setenv("PYSPARK_PYTHON", str(script))
            patch.setenv("PYSPARK_DRIVER_PYTHON", str(script))  # the process that plans sources and sinks
        yield


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
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
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
    """For tests that only add their own topics. Its retention does not run, because tests that compare sizes would
    depend on the speed of the machine."""
    running = RunningBroker(tmp_path_factory.mktemp("broker"), "--retention-interval", "1h").start()
    yield running
    running.close()
