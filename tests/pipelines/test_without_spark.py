"""Where PySpark is not installed: upkeep works here, and what cannot is said in a sentence."""

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


def test_a_large_topic_is_looked_after_here_if_nobody_asked_for_spark(
    no_spark: None, shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "SPARK_BYTES_MIN", 1)
    shared_broker.create("large", segment_size="64KB")
    for part in range(3):
        shared_broker.publish("large", numbered(200, first=part * 200, size=300))
    job = maintenance.Upkeep(shared_broker.url)
    assert job.recompress("large", "zstd").written
    job.link.close()


def test_what_needs_spark_says_so(no_spark: None, shared_broker: RunningBroker, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match=MISSING):
        build("test")
    job = maintenance.Upkeep(shared_broker.url, on="local")
    shared_broker.create("copied")
    with pytest.raises(HeadraceError, match=MISSING):
        job.replay("copied", "copy")
    job.link.close()
    file = tmp_path / "pipeline.py"
    file.write_text("import pyspark\n")
    with pytest.raises(HeadraceError, match=MISSING):
        CliRunner().invoke(run, [str(file)], catch_exceptions=False)
