"""Without PySpark: maintenance runs locally, and what needs Spark is reported in one sentence."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.pipeline import run
from headrace.errors import HeadraceError
from headrace.pipelines import maintenance
from headrace.pipelines.session import build
from tests.spark.world import RunningBroker, numbered

MISSING = r"PySpark is not installed: pip install 'headrace\[spark\]'"


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("pyspark.", "headrace.spark.writer"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)


def test_maintenance_runs_locally_without_pyspark(
    no_spark: None, shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "SPARK_BYTES_MIN", 1)
    shared_broker.create("large", segment_size="64KB")
    for part in range(3):
        shared_broker.publish("large", numbered(200, first=part * 200, size=300))
    job = maintenance.TopicMaintenance(shared_broker.url)
    assert job.recompress("large", "zstd").written
    job.link.close()


def test_commands_that_need_pyspark_report_its_absence(
    no_spark: None, shared_broker: RunningBroker, tmp_path: Path
) -> None:
    with pytest.raises(HeadraceError, match=MISSING):
        build("test")
    job = maintenance.TopicMaintenance(shared_broker.url, on="local")
    shared_broker.create("copied")
    with pytest.raises(HeadraceError, match=MISSING):
        job.replay("copied", "copy")
    job.link.close()
    file = tmp_path / "pipeline.py"
    file.write_text("import pyspark\n")
    with pytest.raises(HeadraceError, match=MISSING):
        CliRunner().invoke(run, [str(file)], catch_exceptions=False)
