"""`headrace topic` and `headrace status`, against a real broker."""

import json

import pytest

from tests.cli.running import Broker


def test_the_life_of_a_topic(broker: Broker) -> None:
    added = json.loads(broker.said("topic", "add", "life", "-p", "2", "-c", "retention_ms=1h", "--json"))
    assert (added["name"], added["partitions"], added["overrides"]) == ("life", 2, {"retention_ms": "1h"})
    broker.said("pub", "life", "-p", "1", "x", "y")
    assert broker.said("topic", "info", "life").splitlines()[1].split("\t")[:4] == ["1", "0", "2", "2"]
    changed = json.loads(broker.said("topic", "set", "life", "retention_ms=", "compression=zstd", "-p", "3", "--json"))
    assert (changed["overrides"], changed["partitions"]) == ({"compression": "zstd"}, 3)
    assert broker.said("topic", "ls", "life") == "life\ttopic\t3\n"
    assert broker.said("topic", "ls", "-l", "life").split("\t")[:4] == ["life", "topic", "3", "2"]
    assert broker.said("topic", "rm", "life", "--yes") == ""
    assert broker.said("topic", "ls", "life") == ""


def test_aliases_of_other_tools_work(broker: Broker) -> None:
    broker.said("topic", "create", "verbs")
    broker.said("produce", "verbs", "x")
    broker.said("publish", "verbs", "y")
    assert broker.said("consume", "verbs", "-e") == broker.said("subscribe", "verbs", "-e") == "x\ny\n"
    assert broker.said("topic", "list", "verbs") == broker.said("topics", "ls", "verbs")
    assert broker.said("topic", "describe", "verbs") == broker.said("topic", "show", "verbs")
    broker.said("topic", "declare", "verbs", "--if-missing")
    broker.said("topic", "delete", "verbs", "-y")


def test_topics_are_chosen_by_pattern(broker: Broker) -> None:
    for name in ("pattern-a", "pattern-b", "other"):
        broker.said("topic", "add", name)
    assert broker.said("topic", "ls", "pattern-*").split() == ["pattern-a", "topic", "1", "pattern-b", "topic", "1"]
    names = [topic["name"] for topic in json.loads(broker.said("topic", "ls", "--json"))["topics"]]
    assert names == sorted(names)
    assert "other" in names


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["topic", "info", "nix"], 4, "topic 'nix' does not exist"),
        (["topic", "rm", "nix", "-y"], 4, "topic 'nix' does not exist"),
        (["topic", "rm", "nix"], 2, "Confirm with --yes"),
        (["topic", "add", "twice"], 5, "twice"),
        (["topic", "add", "a/b"], 2, "is not a topic name"),
        (["topic", "add", "x", "-c", "segment_size=big"], 2, "segment_size (from the request): 'big' is not a size"),
        (["topic", "add", "x", "-c", "nonsense"], 2, "write NAME=VALUE"),
        (["topic", "set", "twice"], 2, "no setting given"),
        (["topic", "set", "twice", "data_dir=/"], 2, "can only be set for the whole broker"),
        (["topic", "infos", "x"], 2, "Did you mean 'info'?"),
    ],
)
def test_an_error_is_one_sentence(broker: Broker, arguments: list[str], code: int, sentence: str) -> None:
    broker.said("topic", "add", "twice", "--if-missing")
    done = broker.run(*arguments)
    said = done.stderr.decode()
    assert done.returncode == code, said
    assert sentence in said
    assert said.count("\n") == 1


def test_status_shows_the_state_of_the_broker(broker: Broker) -> None:
    facts = dict(line.split("\t") for line in broker.said("status").splitlines())
    assert facts["state"] == "ready"
    assert facts["pid"] == str(broker.process.pid)
    assert facts["recovery_clean"] == "true"
    answer = json.loads(broker.said("status", "--json"))
    assert answer["ready"] is True
    assert {s["name"] for s in answer["settings"]} >= {"segment_size", "durability"}
    lines = broker.said("status", "--settings").splitlines()
    assert "journal_files\t2\t3\tfrom the flag --journal-files" in lines


def test_a_range_of_keys_is_printed_in_order(broker: Broker) -> None:
    broker.said("topic", "add", "customers", "-c", "key_index=true")
    for key, value in (("b-1", "one"), ("a-2", "two"), ("a-1", "old"), ("a-1", "new")):
        broker.said("pub", "customers", value, "--key", key)
    assert broker.said("topic", "get", "customers", "--prefix", "a-") == "a-1\tnew\na-2\ttwo\n"
    assert broker.said("topic", "get", "customers", "--from", "a-2", "-n", "1") == "a-2\ttwo\n"
    assert broker.said("topic", "get", "customers", "--to", "a-2") == "a-1\tnew\n"
    assert broker.said("topic", "get", "customers", "a-1") == "new\n"
