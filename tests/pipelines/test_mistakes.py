"""Errors in a pipeline's file are reported with reason and line, not as internal errors. Without a JVM."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import AnalysisException

from headrace.errors import InvalidInput
from headrace.pipelines import Source
from headrace.pipelines.load import load_pipeline
from headrace.pipelines.run import BrokerEndpoint, PipelineFailed, PipelineRunner
from headrace.spark.options import read_options
from tests.spark.world import RunningBroker

FILE = """
from headrace.pipelines import Pipeline, Sink, Source

pipeline = Pipeline("mistaken", sources={"orders": Source("orders")}, sinks={"out": Sink("out")})

@pipeline.flow(to="out")
def copy(orders):
    return orders.filter(TABLE["column"])

TABLE = {}
"""
# How Spark reports an error in a data source.
NO_TOPIC = """[PYTHON_DATA_SOURCE_ERROR] Failed to create Python data source instance: Traceback:
  File "source.py", line 39, in schema
    Planner(chosen, access).topics()
headrace.spark.options.BadOption: option 'topic': topic 'orders' does not exist
 SQLSTATE: 38000"""


def run(broker: RunningBroker, file: Path, session: MagicMock, folder: Path) -> None:
    where = BrokerEndpoint(broker.url, local=False)
    PipelineRunner(load_pipeline(file), session, where, folder, once=True, say=lambda _: None).run()


def test_a_flow_that_cannot_start_fails_with_its_reason(shared_broker: RunningBroker, tmp_path: Path) -> None:
    file = tmp_path / "mistaken.py"
    file.write_text(FILE)
    session = MagicMock()
    with pytest.raises(PipelineFailed, match=r"flow 'copy' .* KeyError: 'column' \(mistaken.py, line 8\)"):
        run(shared_broker, file, session, tmp_path)
    session.readStream.format.return_value.options.return_value.load.side_effect = AnalysisException(NO_TOPIC)
    with pytest.raises(PipelineFailed, match=r"flow 'copy' .* topic 'orders' does not exist"):
        run(shared_broker, file, session, tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import headrace\nfrom nowhere import nothing\n", r"No module named 'nowhere' \(broken.py, line 2\)"),
        ("x = 1\ndef f(:\n", r"SyntaxError: .*line 2"),
        ("x = {}\nx['y']\n", r"KeyError: 'y' \(broken.py, line 2\)"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_refused_with_its_reason(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=reason):
        load_pipeline(file)


def test_a_source_may_start_at_a_timestamp() -> None:
    """Regression: the default start was reported as contradicting the timestamp."""
    for name in ("startingTimestamp", "startingtimestamp"):
        chosen = read_options({"path": "/data"} | Source("orders", options={name: "1000"}).as_options())
        assert (chosen.starting, chosen.starting_ms) == (None, 1000)
    assert read_options({"path": "/data"} | Source("orders").as_options()).starting == "earliest"
    with pytest.raises(InvalidInput, match="cannot be combined with"):
        read_options(
            {"path": "/data"} | Source("orders", start="latest", options={"startingTimestamp": "1000"}).as_options()
        )


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "Connection refused"), Py4JNetworkError("no answer")])
def test_a_lost_jvm_is_reported_as_such(
    shared_broker: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The JVM may be killed for lack of memory. `connection refused` would sound like the broker's."""
    file = tmp_path / "mistaken.py"
    file.write_text(FILE.replace("mistaken", "killed"))

    def follow(_: PipelineRunner) -> None:
        raise error

    monkeypatch.setattr(PipelineRunner, "_start_with_retries", lambda *_: None)
    monkeypatch.setattr(PipelineRunner, "_follow", follow)
    with pytest.raises(PipelineFailed, match="Spark's JVM does not answer any more"):
        run(shared_broker, file, MagicMock(), tmp_path)
    state = shared_broker.ok("GET", "/pipelines/killed")
    assert state["state"] == "failed" and "JVM does not answer" in state["details"]["last_error"]
