"""Settings of the Spark session, without starting one."""

import os
from unittest.mock import MagicMock

import pytest

from headrace.pipelines import session

HERE = "127.0.0.1"


@pytest.mark.parametrize(("master", "address"), [(None, HERE), ("local[2]", HERE), ("spark://host:7077", None)])
def test_the_driver_of_a_cluster_can_be_reached_from_its_workers(
    monkeypatch: pytest.MonkeyPatch, master: str | None, address: str | None
) -> None:
    """Workers on other machines connect to the driver at this address."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "")
    monkeypatch.delenv("SPARK_LOCAL_IP")
    monkeypatch.setattr(session, "check_java", lambda: 17)
    monkeypatch.setattr("pyspark.sql.SparkSession", MagicMock())
    session.build("test", master=master)
    assert os.environ.get("SPARK_LOCAL_IP") == address
