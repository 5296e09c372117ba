"""The management commands, against a broker in its own process."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.running import PATIENCE_S, Broker, headrace, serving


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    flags = ("--amqp", "localhost:0", "--kafka", "localhost:0")
    with serving(tmp_path_factory.mktemp("data"), *flags) as running:
        yield running


def post_lines(path: str, lines: str) -> None:
    headers = {"content-type": "application/x-ndjson"}
    httpx.post(path, content=lines, headers=headers, timeout=PATIENCE_S).raise_for_status()


def at_last(broker: Broker, *arguments: str, until: Callable[[str], bool]) -> str:
    """Repeats a command until its output matches, because changes may take effect after the response."""
    deadline = time.monotonic() + PATIENCE_S
    while not until(said := broker.said(*arguments)):
        assert time.monotonic() < deadline, said
    return said


def test_the_life_of_a_queue(broker: Broker) -> None:
    broker.said("queue", "add", "cli-q", "-a", "x-max-length=100")
    assert broker.said("queue", "ls", "cli-q", "-n", "9" * 30).split("\t")[:3] == ["cli-q", "classic", "0"]
    broker.said("exchange", "pub", "amq.default", "cli-q", "hello there")
    assert broker.said("queue", "peek", "cli-q").strip().endswith("hello there")
    facts = dict(line.split("\t") for line in broker.said("queue", "info", "cli-q").splitlines())
    assert (facts["ready"], facts["argument_x-max-length"]) == ("1", "100")
    assert broker.run("queue", "purge", "cli-q").returncode == 2, "stdin is not a terminal"
    broker.said("queue", "purge", "cli-q", "--yes")
    assert json.loads(broker.said("queue", "info", "cli-q", "--json"))["messages"] == 0
    broker.said("queue", "rm", "cli-q", "--yes")
    gone = broker.run("queue", "info", "cli-q")
    assert gone.returncode == 4 and b"cli-q" in gone.stderr


def test_peek_searches_all_of_a_long_log(broker: Broker) -> None:
    """The broker scans 20,000 messages per request and returns where to continue."""
    for first in (0, 10_000, 20_000):
        hay = (f"needle {n}" if n in (7, 24_999) else "hay" for n in range(first, first + 10_000))
        lines = "".join(json.dumps({"value": value}) + "\n" for value in hay)
        path = f"{broker.url}/topics/haystack/messages"
        post_lines(path, lines)
    peek = ("queue", "peek", "haystack", "--contains", "needle")
    assert [line.split("\t")[0] for line in broker.said(*peek).splitlines()] == ["7", "24999"]
    found = json.loads(broker.said(*peek, "--json"))
    assert [message["offset"] for message in found["messages"]] == [7, 24_999]
    assert (found["from"], found["next"], found["scanned"]) == (0, 30_000, 30_000)
    assert broker.said(*peek, "-n", "1").split("\t")[0] == "7"


def test_exchanges_and_bindings_route_messages(broker: Broker) -> None:
    broker.said("exchange", "add", "cli-ex", "-t", "topic")
    broker.said("queue", "add", "cli-bound")
    broker.said("binding", "add", "cli-ex", "cli-bound", "a.#")
    assert "cli-ex\tqueue\tcli-bound\ta.#" in broker.said("binding", "ls")
    assert broker.run("exchange", "pub", "cli-ex", "a.b", "x").returncode == 0
    assert broker.run("exchange", "pub", "cli-ex", "b", "x").returncode == 1
    broker.said("exchange", "pub", "", "cli-bound", "the default exchange has no name")
    broker.said("binding", "rm", "cli-ex", "cli-bound", "a.#")
    assert broker.run("binding", "rm", "cli-ex", "cli-bound", "a.#").returncode == 4
    broker.said("exchange", "rm", "cli-ex", "--yes")
    assert "cli-ex" not in broker.said("exchange", "ls")


def test_a_policy_is_set_and_removed_with_both_spellings(broker: Broker) -> None:
    broker.said("queue", "add", "cli-ruled")
    broker.said("policy", "set", "cli-p", "^cli-ruled$", '{"max-length": 3}')
    assert '{"max-length":3}' in broker.said("policy", "ls")
    assert "cli-ruled\tcli-p\n" in broker.said("list_queues", "name", "policy")
    assert broker.run("policy", "set", "cli-p", ".*", '{"max-lenght": 3}').returncode == 2
    broker.said("clear_policy", "cli-p", "--yes")
    assert broker.said("policies", "list") == ""


def test_a_virtual_host_is_added_and_removed_with_both_spellings(broker: Broker) -> None:
    broker.said("vhost", "add", "cli-host")
    broker.said("add_vhost", "cli-host")  # it already exists
    assert "cli-host\t0\t0\n" in broker.said("list_vhosts")
    broker.said("queue", "add", "inside", "-p", "cli-host")
    assert broker.said("list_queues", "-p", "cli-host", "name", "consumers") == "inside\t0\n"
    assert broker.said("list_queues", "-V", "cli-host") == "inside\t0\n"
    assert broker.run("list_queues", "-p", "cli-host", "name", "nonsense").returncode == 2
    assert broker.said("vhost", "limit", "cli-host") == ""
    assert broker.said("vhost", "limit", "cli-host", "--max-queues", "1") == "max-queues\t1\n"
    assert broker.run("queue", "add", "more", "-p", "cli-host").returncode == 2
    both = json.loads(broker.said("vhost", "limit", "cli-host", "--max-connections", "9", "--json"))
    assert both == {"name": "cli-host", "limits": {"max-queues": 1, "max-connections": 9}}
    assert broker.said("vhost", "limit", "cli-host", "--max-queues", "-1") == "max-connections\t9\n"
    broker.said("set_permissions", "-p", "cli-host", "guest", "^in", "", "")
    assert broker.said("list_permissions", "-p", "cli-host") == "guest\tcli-host\t\t^in\t\t\n"
    assert broker.run("vhost", "rm", "cli-host").returncode == 2, "stdin is not a terminal"
    broker.said("delete_vhost", "cli-host", "--yes")
    assert broker.run("queue", "ls", "-p", "cli-host").returncode == 4


def test_dead_letters_are_listed_shown_and_replayed(broker: Broker) -> None:
    broker.said("queue", "add", "cli-dead")
    broker.said("queue", "add", "cli-again")
    arguments = ("-a", "x-dead-letter-exchange=", "-a", "x-dead-letter-routing-key=cli-dead", "-a", "x-max-length=1")
    broker.said("queue", "add", "cli-mortal", *arguments)
    for number in range(4):
        broker.said("exchange", "pub", "amq.default", "cli-mortal", f"order {number}")
    at_last(broker, "dlq", "ls", until=lambda said: said.split("\t")[:2] == ["cli-dead", "3"])
    assert "maxlen\tcli-mortal\t1\torder 0" in broker.said("dlq", "peek", "cli-dead")
    assert "2 to cli-again" in broker.said("dlq", "replay", "cli-dead", "--to", "cli-again", "-n", "2", "--dry-run")
    assert "2 moved" in broker.said("dlq", "replay", "cli-dead", "--to", "cli-again", "-n", "2", "--yes")
    broker.said("dlq", "purge", "cli-dead", "--yes")
    assert broker.said("dlq", "peek", "cli-dead") == ""
    assert json.loads(broker.said("dlq", "replay", "cli-dead", "--yes", "--json"))["matched"] == 0


def test_peek_searches_all_dead_letters(broker: Broker) -> None:
    """The broker scans 20,000 messages per request and returns where to continue."""
    broker.said("queue", "add", "cli-graveyard", "-a", "x-max-priority=1")
    for partition, last in ((1, 30_000), (0, 10_000)):
        for first in range(0, last, 10_000):
            hay = ("needle" if n == last - 1 else "hay" for n in range(first, first + 10_000))
            lines = "".join(json.dumps({"value": value, "partition": partition}) + "\n" for value in hay)
            path = f"{broker.url}/topics/cli-graveyard/messages"
            post_lines(path, lines)
    peek = ("dlq", "peek", "cli-graveyard", "--contains", "needle")
    assert [line.split("\t")[0] for line in broker.said(*peek).splitlines()] == ["29999", "9999"]
    found = json.loads(broker.said(*peek, "--json"))
    assert ([message["partition"] for message in found["messages"]], found["next"]) == ([1, 0], None)
    assert broker.said(*peek, "-n", "1").split("\t")[0] == "29999"
    nothing = ("dlq", "peek", "cli-graveyard", "--contains", "thimble")
    assert broker.said(*nothing) == ""


def test_a_reset_is_a_dry_run_without_execute(broker: Broker) -> None:
    for number in range(3):
        broker.said("pub", "cli-topic", str(number))
    body = b'{"topic": "cli-topic", "partitions": [{"partition": 0, "offset": 3}]}'
    headers = {"content-type": "application/json"}
    httpx.put(f"{broker.url}/cursors/cli-job", content=body, headers=headers, timeout=PATIENCE_S).raise_for_status()
    assert broker.said("group", "ls").split("\t")[0] == "cli-job"
    assert broker.said("group", "reset", "cli-job", "-t", "cli-topic", "--to", "-2") == "0\t3\t1\t2\t0\n"
    assert broker.said("group", "info", "cli-job") == "cli-topic\t0\t3\t3\t0\n"
    broker.said("group", "reset", "cli-job", "-t", "cli-topic", "--to", "1", "--execute")
    assert broker.said("group", "info", "cli-job") == "cli-topic\t0\t1\t3\t2\n"
    assert broker.run("group", "reset", "cli-job", "-t", "cli-topic", "--to", "noon").returncode == 2
    broker.said("group", "rm", "cli-job", "--yes")
    assert broker.run("group", "info", "cli-job").returncode == 4


def test_definitions_are_exported_and_imported(broker: Broker, tmp_path: Path) -> None:
    broker.said("queue", "add", "cli-defined")
    file = tmp_path / "definitions.json"
    broker.said("definitions", "export", str(file))
    broker.said("queue", "rm", "cli-defined", "--yes")
    broker.said("definitions", "import", str(file))
    assert "cli-defined" in broker.said("queue", "ls")
    file.write_text("no JSON")
    assert broker.run("definitions", "import", str(file)).returncode == 2


def test_bench_prints_its_results_and_cleans_up(broker: Broker) -> None:
    result = json.loads(broker.said("bench", "-n", "500", "-s", "100", "--json"))
    assert result["publish_per_second"] > 0 and result["consume_per_second"] > 0
    assert "headrace-bench" not in broker.said("queue", "ls")


def test_top_prints_the_streams_once_in_a_pipe(broker: Broker) -> None:
    broker.said("queue", "add", "cli-top")
    assert any(line.startswith("cli-top\tqueue\t0") for line in broker.said("top", "-n", "100").splitlines())
    assert "rates" in json.loads(broker.said("top", "--json"))["overview"]


def test_connections_are_listed(broker: Broker) -> None:
    at_last(broker, "connection", "ls", until=lambda said: said == "")  # the last connection may still be closing
    assert broker.run("connection", "rm", "nobody", "--yes").returncode == 4


def test_the_doctor_reports_a_port_in_use_briefly(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = headrace("doctor", "--json", "--data-dir", str(tmp_path / "data"), HEADRACE_HTTP=f"127.0.0.1:{port}")
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["port of http"]["found"] == f"{port}: address already in use"


def test_the_doctor_lists_its_findings(tmp_path: Path) -> None:
    done = headrace("doctor", "--json", "--data-dir", str(tmp_path / "data"))
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["Python"]["state"] == checks["compiled kernels"]["state"] == "ok"
    assert checks["fdatasync, median"]["found"].endswith(" ms")
    assert {"Java", "C compiler", "open files", "disk space", "port of amqp"} <= checks.keys()
    assert not (tmp_path / "data").exists(), "looking makes nothing"
