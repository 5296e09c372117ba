"""Spark's declarative pipelines with our source and sink: the example from the docs, unchanged."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from headrace.pipelines.java import JavaMissing, check_java
from tests.spark.world import ANY_PORT, QUICK, RunningBroker, run_patiently

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "declarative"


def test_the_declarative_example_runs(broker: RunningBroker, tmp_path: Path) -> None:
    try:
        check_java()
    except JavaMissing as missing:
        pytest.skip(f"Spark: {missing}")
    command = Path(sys.executable).parent / "spark-pipelines"
    if not command.exists():
        pytest.skip("spark-pipelines: pyspark[pipelines] is not installed")
    shutil.copytree(EXAMPLE, tmp_path / "example")
    spec = tmp_path / "example" / "spark-pipeline.yml"
    spec.write_text(spec.read_text().replace("/tmp/headrace-declarative", str(tmp_path / "storage")))
    broker.create("orders")
    orders = [("ann", 12.5), ("bob", 2000), ("cid", 999.9), ("dan", 1000)]
    broker.publish("orders", ({"value": f'{{"customer": "{name}", "amount": {amount}}}'} for name, amount in orders))
    environment = dict(
        os.environ, HEADRACE_URL=broker.url, PYSPARK_DRIVER_PYTHON=sys.executable,
        SPARK_LOCAL_IP="127.0.0.1", PYTHONWARNINGS="ignore", PATH=f"{command.parent}:{os.environ['PATH']}",
        **ANY_PORT,
    )  # fmt: skip
    run = [str(command), "run", "--spec", str(spec), "--conf", "spark.ui.enabled=false", "--conf", QUICK]
    answer = run_patiently(run, env=environment, cwd=tmp_path)
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-3000:]
    assert sorted(m["key"] for m in broker.messages("large-orders")) == ["bob", "dan"]
